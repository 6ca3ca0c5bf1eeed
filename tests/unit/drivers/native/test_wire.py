"""Promises of the control socket:
1. Frames arrive whole however the stream is cut, and descriptors come with their own frame.
2. A full socket loses nothing: frames go out later, in order, with descriptors that the caller has closed meanwhile.
3. When the helper goes away, whoever waits is told, and descriptors nobody waits for are closed.
4. The numbers on both sides are the same.
"""

from __future__ import annotations

import array
import asyncio
import os
import re
import socket
import struct
from pathlib import Path

import pytest

from sandlot.drivers.native import plan, wire
from sandlot.drivers.native.wire import Answer, Channel, Frame, Key, pack
from sandlot.errors import HostFault

INIT = Path(__file__).parents[4] / "init"


def pair() -> tuple[Channel, socket.socket, list[Answer]]:
    ours, theirs = socket.socketpair()
    exits: list[Answer] = []
    return Channel(ours, exits.append), theirs, exits


def send(sock: socket.socket, data: bytes, *fds: int) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def numbers_in(header: str, kind: str) -> dict[str, int]:
    text = (INIT / header).read_text()
    return {name: int(value) for name, value in re.findall(rf"{kind}_(\w+) = (\d+)", text)}


def test_both_sides_have_the_same_numbers() -> None:
    assert numbers_in("wire.h", "FRAME") == {item.name: item.value for item in Frame}
    assert numbers_in("wire.h", "FIELD") == {item.name: item.value for item in Key}
    assert numbers_in("box.h", "STEP") == {item.name: item.value for item in plan.Do}
    assert f"FRAME_MAX ({wire.FRAME_MAX >> 20}u << 20)" in (INIT / "wire.h").read_text()


async def test_frames_arrive_whole_however_the_stream_is_cut() -> None:
    channel, theirs, exits = pair()
    first = pack(Frame.EXITED, 7, [(Key.STATUS, 3), (Key.CPU_US, 1 << 40)])
    second = pack(Frame.EXITED, 8, [(Key.ERRNO, 2), (Key.WORDS, "exec")])
    for byte in first + second:
        theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        while len(exits) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert [(e.id, e.number(Key.STATUS), e.number(Key.ERRNO), e.words()) for e in exits] == [
        (7, 3, None, ""),
        (8, None, 2, "exec"),
    ]
    assert exits[0].number(Key.CPU_US) == 1 << 40
    channel.close()
    theirs.close()


async def test_descriptors_come_with_their_own_frame() -> None:
    channel, theirs, _ = pair()
    asked = [channel.ask_soon() for _ in range(3)]
    files = [os.open(os.devnull, os.O_RDONLY), os.open("/", os.O_RDONLY)]
    send(theirs, pack(Frame.DONE, asked[0][0], [(Key.ERRNO, 0)]))
    send(theirs, pack(Frame.DONE, asked[1][0], [(Key.ERRNO, 0)]), files[0])
    send(theirs, pack(Frame.DONE, asked[2][0], [(Key.ERRNO, 0)]), files[1])
    answers = [await answer for _, answer in asked]
    assert [len(answer.fds) for answer in answers] == [0, 1, 1]
    for answer, file in zip(answers[1:], files, strict=True):
        assert os.path.sameopenfile(answer.fds[0], file)
        os.close(answer.fds[0])
        os.close(file)
    channel.close()
    theirs.close()


async def test_a_full_socket_loses_nothing() -> None:
    channel, theirs, _ = pair()
    read, write = os.pipe()
    for number in range(200):
        channel.send(Frame.SPAWN, number, [(Key.ARG, "x" * 5000)], [write])
    os.close(write)
    await asyncio.sleep(0)

    def receive() -> list[int]:
        got: list[int] = []
        buffer = b""
        theirs.settimeout(5)
        while len(got) < 200:
            data, fds, _, _ = socket.recv_fds(theirs, 65536, 64)
            buffer += data
            for fd in fds:
                os.write(fd, b".")
                os.close(fd)
            while len(buffer) >= 12:
                _, number, length = struct.unpack("=III", buffer[:12])
                if len(buffer) < 12 + length:
                    break
                buffer = buffer[12 + length :]
                got.append(number)
        return got

    assert await asyncio.to_thread(receive) == list(range(200))
    assert os.read(read, 1000) == b"." * 200
    channel.close()
    os.close(read)
    theirs.close()


async def test_whoever_waits_is_told_when_the_helper_goes_away() -> None:
    channel, theirs, _ = pair()
    asking = asyncio.create_task(channel.ask(Frame.LISTEN, [(Key.PORT, 80)]))
    starting = asyncio.create_task(channel.started())
    await asyncio.sleep(0)
    theirs.close()
    for task in (asking, starting):
        with pytest.raises(HostFault, match="went away"):
            await task
    with pytest.raises(HostFault, match="gone"):
        channel.send(Frame.KILL, 1, [])


async def test_a_descriptor_that_nobody_waits_for_is_closed() -> None:
    channel, theirs, _ = pair()
    read, write = os.pipe()
    asking = asyncio.create_task(channel.ask(Frame.OPEN, [(Key.PATH, "/")]))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    send(theirs, pack(Frame.DONE, 1, [(Key.ERRNO, 0)]), write)
    os.close(write)
    assert await asyncio.to_thread(os.read, read, 1) == b""  # the end of the pipe: no copy is left
    os.close(read)
    channel.close()
    theirs.close()


def test_a_nul_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        pack(Frame.SPAWN, 1, [(Key.ARG, "a\0b")])

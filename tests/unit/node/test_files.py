"""Promises of files in a box, over the fake driver, the native one, and that one behind HTTP:

1. Any bytes come back as they were written, whole or a part; parents are made; a file is replaced whole, with the mode
   asked for.
2. What is no regular file is refused, and never hangs the node: directories, devices, pipes, sockets.
3. A missing file is NotFound; a file over the cap is refused, not held in memory.
4. A full disk of the box is the box's, not the host's: InvalidRequest, and the node goes on.
5. A tar is unpacked as it comes, as the box's own doing, with its modes, links and owner; what is no tar, what leads
   out of its directory and what is no file is refused by name; cut off or given up, nothing goes on and nothing leaks.
6. A write is seen whole or not at all, whoever reads, writes as well, gives up or runs out of disk; what is added comes
   behind what is there.
7. What is there is told as it is: sorted, bounded, with names that are no text, links as links; a pattern and a text
   find what they name and nothing else; a bad one is told.
8. Directories are made, things moved, removed and given other modes and owners; what cannot be says why, and is as it
   was. Nothing that is mounted goes with what it is mounted in.
9. What happens is told as it happens, and that some of it was not; who goes away leaves nobody behind.
10. A tree that comes out goes in again as it was.
11. Looking does not keep a sandbox alive, changing does. All of it works while nothing runs in it.
"""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import socket
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from sandlot import asgi
from sandlot.api import MOST_READ, FileEvent, Limits, NodeAPI, Run, SandboxSpec, Volume
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, SandlotError, Unsupported
from sandlot.node import keyed
from sandlot.node.node import MOST_WATCHES, Node, local_node
from sandlot.server.app import create_app
from tests.support.native import PYTHON


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


@pytest.fixture
async def native(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node:
        yield node


@pytest.fixture
async def http(native: Node) -> AsyncIterator[HttpNode]:
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    served = await asgi.serve(listener, create_app(native))
    remote = HttpNode(url)
    yield remote
    await remote.close()
    served.close()


@pytest.fixture(params=["fake", "native", "http"])
def node(request: pytest.FixtureRequest) -> NodeAPI:
    node: NodeAPI = request.getfixturevalue(request.param)
    return node


@pytest.fixture(params=["native", "http"])
def real(request: pytest.FixtureRequest) -> NodeAPI:
    """Where there is a kernel."""
    node: NodeAPI = request.getfixturevalue(request.param)
    return node


async def test_bytes_come_back_as_written(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    for data in (b"", b"\0\xff\n", os.urandom(3 << 20)):
        await node.write_file(box, "/root/deep/er/file", data)
        assert await node.read_file(box, "/root/deep/er/file") == data
    assert (await node.run(box, Run(argv=("cat", "/root/deep/er/file"), output_cap=4 << 20))).out.data == data


async def test_a_file_is_replaced_whole(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.write_file(box, "/tmp/f", b"a long first version")
    await node.write_file(box, "/tmp/f", b"short")
    assert await node.read_file(box, "/tmp/f") == b"short"


async def test_a_missing_file_is_not_found(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    with pytest.raises(NotFound, match="there is no file /root/missing"):
        await node.read_file(box, "/root/missing")
    with pytest.raises(InvalidRequest, match="is a directory"):
        await node.read_file(box, "/tmp")
    for path in ("relative", "", "/nul\0"):
        with pytest.raises(InvalidRequest, match="is not an absolute path"):
            await node.write_file(box, path, b"")
    with pytest.raises(InvalidRequest, match="mode"):
        await node.write_file(box, "/tmp/f", b"", mode=0o4755)


async def test_numbers_that_the_kernel_does_not_take_are_refused(native: Node) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    box = (await native.create(SandboxSpec())).id
    await native.write_file(box, "/root/f", b"some")
    assert await native.read_file(box, "/root/f", 1 << 62) == b""
    for offset in (-1, 1 << 63):
        with pytest.raises(InvalidRequest, match="no part of a file"):
            await native.read_file(box, "/root/f", offset)
    for user in (-1, 65_536, 1 << 63):
        with pytest.raises(InvalidRequest, match="is not the number of a user"):
            await native.upload(box, "/root", nothing(), user)


async def test_a_file_over_the_cap_is_refused(fake: Node) -> None:
    assert isinstance(fake.driver, FakeDriver)
    box = (await fake.create(SandboxSpec())).id
    fd = await fake.driver.boxes[box].open("/root/big", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, MOST_READ + 1)
    os.close(fd)
    with pytest.raises(InvalidRequest, match="/root/big is larger than 64 MiB"):
        await fake.read_file(box, "/root/big")


async def sh(node: NodeAPI, box: str, text: str) -> str:
    result = await node.run(box, Run(argv=("sh", "-c", text)))
    assert result.exit_code == 0, result
    return result.stdout


async def test_the_mode_is_the_one_asked_for(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    await native.write_file(box, "/root/tool", b"#!/bin/sh\necho works\n", mode=0o755)
    assert await sh(native, box, "/root/tool") == "works\n"
    await native.write_file(box, "/root/tool", b"", mode=0o600)
    assert await sh(native, box, "stat -c %a:%u /root/tool") == "600:0\n"


async def test_what_is_no_regular_file_never_hangs(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    await sh(native, box, "mkfifo /root/pipe; ln -s /dev/zero /root/zero; ln -s /root/loop /root/loop")
    async with asyncio.timeout(10):
        for path in ("/root/pipe", "/root/zero", "/dev/tty", "/root/loop"):
            for call in (native.read_file(box, path), native.write_file(box, path, b"x")):
                with pytest.raises((InvalidRequest, NotFound)):
                    await call


async def test_a_file_of_proc_is_read_though_it_says_it_is_empty(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    assert (await native.read_file(box, "/proc/version")).startswith(b"Linux version")


async def test_a_full_disk_of_the_box_is_the_box_s(native: Node) -> None:
    box = (await native.create(SandboxSpec(limits=Limits(disk=4 << 20)))).id
    with pytest.raises(InvalidRequest, match="the sandbox's disk is full") as full:
        await native.write_file(box, "/root/big", b"x" * (8 << 20))
    assert "disk" in (full.value.hint or "")
    assert await sh(native, box, "ls -A /root | grep -v pyenv; true") == ""
    await native.write_file(box, "/root/small", b"fits")


async def has_users(node: NodeAPI, box: str) -> bool:
    """Whether there is another than root inside."""
    try:
        return (await node.run(box, Run(argv=("true",), user=1000, cwd="/"))).ok
    except Unsupported:
        return False


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = kind, 0o640, 1_000_000_000
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def tar(*members: tarfile.TarInfo | tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as writer:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                writer.addfile(each)
            else:
                writer.addfile(member(each[0], size=len(each[1])), io.BytesIO(each[1]))
    return packed.getvalue()


async def bits(data: bytes, size: int = 700) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_a_tar_is_unpacked_over_what_is_there(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.upload(box, "/root/new", bits(tar(member("d", tarfile.DIRTYPE), ("d/f", b"one"), ("g", b"two"))))
    await node.upload(box, "/root/new", bits(tar(("d/f", b"three"))))
    result = await node.run(box, Run(argv=("cat", "/root/new/d/f", "/root/new/g")))
    assert result.stdout == "threetwo"
    with pytest.raises(InvalidRequest, match="is not an absolute path"):
        await node.upload(box, "relative", bits(tar()))
    with pytest.raises(InvalidRequest, match="is not a whole tar"):
        await node.upload(box, "/root/new", bits(b"no tar" * 300))
    with pytest.raises(InvalidRequest, match="leads out of /root/new"):
        await node.upload(box, "/root/new", bits(tar(("../f", b""))))


async def test_a_source_that_fails_is_told_as_it_is(node: NodeAPI) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield tar(("f", bytes(5000)))[:1000]
        raise ZeroDivisionError

    box = (await node.create(SandboxSpec())).id
    with pytest.raises(ZeroDivisionError):
        await node.upload(box, "/root", failing())
    assert (await node.run(box, Run(argv=("true",)))).ok


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_modes_links_and_long_names_are_as_in_the_tar(native: Node, form: int) -> None:
    box = (await native.create(SandboxSpec())).id
    long = "/".join(["long" * 20] * (2 if form == tarfile.USTAR_FORMAT else 4))
    entries = [
        member("./d/", tarfile.DIRTYPE, mode=0o1751),
        ("./d/f", b"#!/bin/sh\necho ran\n"),
        member("d/link", tarfile.SYMTYPE, linkname="../" + "x" * 90),
        member("d/hard", tarfile.LNKTYPE, linkname="./d/f"),
        (long, b"long"),
        member("set", mode=0o4755),
    ]
    await native.upload(box, "/root/t", bits(tar(*entries, form=form)))
    await native.upload(box, "/root/t", bits(tar(*entries, form=form)))  # the same again changes nothing
    assert await sh(native, box, "cd /root/t; stat -c '%n %a %h %u %Y' d d/f d/hard set | sort; readlink d/link") == (
        f"{'d 1751 2 0'} {await sh(native, box, 'stat -c %Y /root/t/d')}"
        "d/f 640 2 0 1000000000\nd/hard 640 2 0 1000000000\nset 4755 1 0 1000000000\n../" + "x" * 90 + "\n"
    )
    assert await sh(native, box, f"cat /root/t/{long}") == "long"


async def test_a_tar_is_written_nowhere_else(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    link = member("way", tarfile.SYMTYPE, linkname="/etc")
    for entries, error, said in (
        ((link, ("way/f", b"x")), Conflict, "there is a directory at /root/t/way"),
        ((member("dev", tarfile.CHRTYPE),), InvalidRequest, "/root/t/dev of the tar is neither"),
        ((member("pipe", tarfile.FIFOTYPE),), InvalidRequest, "/root/t/pipe of the tar is neither"),
        ((member("h", tarfile.LNKTYPE, linkname="../../etc/passwd"),), InvalidRequest, "leads out"),
        ((("a/../../f", b"x"),), InvalidRequest, "leads out"),
    ):
        with pytest.raises(error, match=said):
            await native.upload(box, "/root/t", bits(tar(*entries)))
    await native.upload(box, "/root/t", bits(tar(("/etc/f", b"below"))))
    await sh(native, box, "ln -s /etc/f /root/t/old; ln -s /var/tmp /root/t/over")
    await native.upload(box, "/root/t", bits(tar(("old", b"new"), ("over/f", b"followed"))))
    assert await sh(native, box, "cat /root/t/etc/f /root/t/old /var/tmp/f; test ! -e /etc/f") == "belownewfollowed"


async def test_what_cannot_be_unpacked_is_said_with_its_path(native: Node) -> None:
    box = (await native.create(SandboxSpec(limits=Limits(disk=4 << 20)))).id
    await native.write_file(box, "/root/file", b"")
    for path, entry, error, said in (
        ("/root", ("big", bytes(8 << 20)), InvalidRequest, "could not write /root/big: the sandbox's disk is full"),
        ("/usr", ("f", b""), InvalidRequest, "could not write /usr/f: read-only"),
        ("/root", ("file/f", b""), Conflict, "a file where a directory is to be, on the way to /root/file/f"),
        ("/root/file", ("f", b""), Conflict, "a file where a directory is to be, on the way to /root/file"),
        ("/", ("root", b""), Conflict, "there is a directory at /root"),
    ):
        with pytest.raises(error, match=said):
            await native.upload(box, path, bits(tar(entry), 1 << 20))
    whole = tar(("f", b"x" * 600), member("g", tarfile.DIRTYPE))
    for length in (0, 100, 512, 600, 1024, 1536, 2048):  # a tar says itself where it ends
        with pytest.raises(InvalidRequest, match="is not a whole tar"):
            await native.upload(box, "/root/t", bits(whole[:length]))


async def test_what_is_written_is_the_box_s_own(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    data = os.urandom(30 << 20)
    for writing in (
        native.upload(box, "/root", bits(tar(("f", data)), 1 << 20)),
        native.write_file(box, "/root/g", data),
        native.write_file(box, "/root/h", bits(data, 1 << 20)),
    ):
        before = await native.stats(box)
        await writing
        after = await native.stats(box)
        assert after.disk - before.disk >= 30 << 20
        if after.memory is not None:  # not the node's
            assert after.memory - (before.memory or 0) > 25 << 20
    if await has_users(native, box):
        await native.upload(box, "/srv/his", bits(tar(("f", b""))), 1000)
        assert await sh(native, box, "stat -c %u:%g /srv/his /srv/his/f /srv") == "1000:1000\n1000:1000\n0:0\n"


async def test_an_upload_that_is_given_up_stops_and_leaks_nothing(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id

    async def endless() -> AsyncIterator[bytes]:
        yield member("f", size=1 << 40).tobuf()
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)

    await native.upload(box, "/root", bits(tar()))
    before = set(os.listdir("/proc/self/fd"))
    for number in range(10):
        uploading = asyncio.ensure_future(native.upload(box, "/root", endless()))
        await asyncio.sleep(number * 0.003)
        uploading.cancel()
        await asyncio.wait((uploading,))
        assert uploading.cancelled()
    async with asyncio.timeout(10):
        while (await native.run(box, Run(argv=("pgrep", "-c", "sandlot-init")))).stdout != "1\n":  # PID 1 alone
            pass
    assert set(os.listdir("/proc/self/fd")) <= before


async def test_a_part_of_a_file_is_read(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    data = os.urandom(3 << 20)
    await node.write_file(box, "/root/f", data)
    for offset, length in (
        (0, 5),
        (1 << 20, 2 << 20),
        (len(data) - 3, None),
        (len(data), 7),
        (len(data) + 9, None),
        (4, 0),
    ):
        end = None if length is None else offset + length
        assert await node.read_file(box, "/root/f", offset, length) == data[offset:end]
    for offset, length in ((-1, None), (0, -1)):
        with pytest.raises(InvalidRequest, match="no part of a file"):
            await node.read_file(box, "/root/f", offset, length)
    async with node.open_file(box, "/root/f") as file:
        assert file.size == len(data)
        assert b"".join([chunk async for chunk in file.chunks()]) == data
        assert b"".join([chunk async for chunk in file.chunks(7, 2 << 20)]) == data[7 : 7 + (2 << 20)]
    with pytest.raises(NotFound):
        async with node.open_file(box, "/root/g"):
            pass
    with pytest.raises(InvalidRequest, match="is a directory"):
        async with node.open_file(box, "/root"):
            pass


async def test_an_open_file_is_the_same_whatever_takes_its_place(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    data = os.urandom(3 << 20)
    await native.write_file(box, "/root/f", data)
    async with native.open_file(box, "/root/f") as file:
        assert file.etag == (await native.stat_file(box, "/root/f")).etag
        await native.write_file(box, "/root/f", b"another")
        assert b"".join([chunk async for chunk in file.chunks()]) == data
        assert file.etag != (await native.stat_file(box, "/root/f")).etag
    await native.write_file(box, "/root/f", data)
    async with native.open_file(box, "/root/f") as file:
        await sh(native, box, "truncate -s 1000 /root/f")
        with pytest.raises(Conflict, match="became shorter"):
            assert [chunk async for chunk in file.chunks(2000)] == []


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def test_what_comes_in_pieces_is_one_file(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    data = [os.urandom(size) for size in (1, 3 << 20, 70_000)]
    await node.write_file(box, "/root/new/f", pieces(*data, b""))
    assert await node.read_file(box, "/root/new/f") == b"".join(data)
    await node.write_file(box, "/root/new/f", pieces())
    assert await node.read_file(box, "/root/new/f") == b""
    await node.write_file(box, "/root/new/f", pieces(b"one", b" two"), append=True)
    await node.write_file(box, "/root/new/f", b" three", append=True)
    await node.write_file(box, "/root/new/g", b"made", 0o600, append=True)
    assert await node.read_file(box, "/root/new/f") == b"one two three"
    assert [file.mode for file in await node.list_files(box, "/root/new")] == [0o644, 0o600]


async def test_a_write_that_breaks_off_changes_nothing(node: NodeAPI) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (2 << 20)
        raise ZeroDivisionError

    box = (await node.create(SandboxSpec())).id
    await node.write_file(box, "/root/f", b"as it was")
    with pytest.raises(ZeroDivisionError):
        await node.write_file(box, "/root/f", broken())
    with pytest.raises(ZeroDivisionError):
        await node.write_file(box, "/root/g", broken())
    async with asyncio.timeout(10):  # over HTTP the server hears of it a little later
        while [file.path for file in await node.list_files(box, "/root") if file.kind == "file"] != ["/root/f"]:
            pass
    assert await node.read_file(box, "/root/f") == b"as it was"


async def test_a_write_without_room_changes_nothing(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec(limits=Limits(disk=8 << 20)))).id
    await real.write_file(box, "/root/f", b"as it was")
    for data in (bytes(12 << 20), pieces(*[bytes(1 << 20)] * 12)):
        with pytest.raises(InvalidRequest, match="the sandbox's disk is full"):
            await real.write_file(box, "/root/f", data)
    assert await real.read_file(box, "/root/f") == b"as it was"
    assert "sandlot" not in await sh(real, box, "ls -a /root")
    await real.write_file(box, "/root/g", bytes(6 << 20))


READER = """
import os, time
seen = set()
print("ready", flush=True)
while not os.path.exists("/root/stop"):
    with open("/root/f", "rb") as file: data = file.read()
    seen.add((len(data), data[:1], len(set(data))))
print(sorted(seen))
"""


async def test_a_reader_sees_the_old_file_or_the_new_one(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    versions = [bytes([65 + number]) * (100_000 + number) for number in range(4)]
    await native.write_file(box, "/root/f", versions[0])
    await native.write_file(box, "/root/read.py", READER.encode())
    reading = await native.launch(box, Run(argv=("sh", "-c", f"exec {PYTHON} /root/read.py"), timeout=60))
    async with asyncio.timeout(20), aclosing(native.follow(box, reading.id)) as chunks:
        await anext(chunks)
    writers = [native.write_file(box, "/root/f", versions[number % 4]) for number in range(40)]
    await asyncio.gather(*writers)
    assert await native.read_file(box, "/root/f") in versions
    await native.write_file(box, "/root/stop", b"")
    seen = eval((await native.wait(box, reading.id)).stdout.splitlines()[1])
    assert set(seen) <= {(len(each), each[:1], 1) for each in versions}, seen


async def test_a_file_that_is_replaced_keeps_its_owner_and_its_links(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    await sh(real, box, "mkdir d; echo old > d/f; ln -s d/f link; ln -s d/new dangling; ln d/f hard")
    await real.write_file(box, "/root/link", b"new")
    await real.write_file(box, "/root/dangling", b"made")
    assert await sh(real, box, "cat d/f d/new hard; readlink link dangling") == "newmadeold\nd/f\nd/new\n"
    if await has_users(real, box):
        await real.change_file(box, "/root/d/f", 0o600, 1000, 1000)
        await real.write_file(box, "/root/d/f", b"newer")
        assert await sh(real, box, "stat -c %u:%g:%a d/f") == "1000:1000:644\n"
    assert await sh(real, box, "ls -A /root/d") == "f\nnew\n"


async def test_a_file_that_is_a_volume_is_written_where_it_is(native: Node, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("of the host")
    (tmp_path / "one").chmod(0o666)
    volume = Volume(source=str(tmp_path / "one"), target="/mnt/file", read_only=False)
    box = (await native.create(SandboxSpec(volumes=(volume,)))).id
    await native.write_file(box, "/mnt/file", b"of the box", 0o666)
    assert (tmp_path / "one").read_bytes() == b"of the box"
    with pytest.raises(Conflict, match="mounted"):
        await native.remove_file(box, "/mnt/file")


NAME = "caf\udce9 \u00fc\n*"  # bytes that are no UTF-8, a line's end, a sign of patterns


async def test_names_may_be_any_bytes(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    path = f"/root/{NAME}/{NAME}"
    await node.write_file(box, path, b"text\n")
    assert await node.read_file(box, path) == b"text\n"
    assert [file.path for file in await node.list_files(box, f"/root/{NAME}")] == [path]
    assert (await node.stat_file(box, path)).path == path
    found = await node.glob_files(box, f"/root/{NAME.replace('*', '[*]')}/caf?*")
    assert [file.path for file in found.files] == [path]
    assert [hit.path for hit in (await node.find_text(box, "text", f"/root/{NAME}")).hits] == [path]
    await node.move_file(box, path, f"/root/{NAME}2")
    await node.remove_file(box, f"/root/{NAME}", recursive=True)
    with pytest.raises(NotFound):
        await node.read_file(box, path)
    assert await node.read_file(box, f"/root/{NAME}2") == b"text\n"


async def test_what_is_there_is_told(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    began = time.time()
    await node.make_directory(box, "/root/t/d", 0o1770)
    await node.write_file(box, "/root/t/f", b"12345", 0o640)
    directory, file = await node.list_files(box, "/root/t/")
    assert (directory.path, directory.kind, directory.mode) == ("/root/t/d", "directory", 0o1770)
    assert (file.path, file.kind, file.mode, file.size, file.user) == ("/root/t/f", "file", 0o640, 5, 0)
    assert began - 5 < file.modified_at < time.time() + 5
    assert file == await node.stat_file(box, "/root/t/f")
    await node.write_file(box, "/root/t/f", b"54321", 0o640)
    assert (await node.stat_file(box, "/root/t/f")).etag != file.etag
    assert (await node.stat_file(box, "/")).kind == "directory"
    assert await node.list_files(box, "/root/t/d") == []
    with pytest.raises(InvalidRequest, match="is a file, not a directory"):
        await node.list_files(box, "/root/t/f")
    for path in ("/root/none", "/root/t/f/none", "/root/none/none"):
        with pytest.raises(NotFound, match="there is no file"):
            await node.stat_file(box, path)
    for call in (
        node.stat_file(box, "t"),
        node.list_files(box, ""),
        node.glob_files(box, "*.py"),
        node.find_text(box, "x", "y"),
    ):
        with pytest.raises(InvalidRequest, match="is not an absolute path"):
            await call


async def test_links_are_told_and_not_followed(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    await sh(
        real,
        box,
        "mkdir t; cd t; ln -s /etc e; ln -s f l; echo text > f; ln -s l2 l2; mkfifo p; ln -s /proc/self/fd/3 k",
    )
    told = {posixpath.basename(file.path): (file.kind, file.target) for file in await real.list_files(box, "/root/t")}
    assert told == {
        "e": ("link", "/etc"),
        "f": ("file", None),
        "k": ("link", "/proc/self/fd/3"),
        "l": ("link", "f"),
        "l2": ("link", "l2"),
        "p": ("pipe", None),
    }
    assert (await real.stat_file(box, "/root/t/l", follow=True)).kind == "file"
    for path in ("/root/t/l2", "/root/t/k"):
        with pytest.raises(InvalidRequest, match="through too many links"):
            await real.stat_file(box, path, follow=True)
    assert {file.path for file in (await real.glob_files(box, "/root/t/**")).files} == {
        "/root/t",
        *(f"/root/t/{name}" for name in told),
    }
    assert [file.path for file in (await real.glob_files(box, "/root/t/e/pass*")).files] == ["/root/t/e/passwd"]
    assert [hit.path for hit in (await real.find_text(box, "text", "/root/t")).hits] == ["/root/t/f"]
    assert not [file for file in (await real.glob_files(box, "/**/status")).files if file.path.startswith("/proc")]
    assert (await real.glob_files(box, "/proc/self/statu?")).files


async def test_patterns_name_what_they_say(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    for name in ("a.py", "b/c.py", "b/d/e.py", "b/d/f.txt", ".hidden.py", "b-c"):
        await node.write_file(box, f"/root/t/{name}", b"")
    for pattern, names in {
        "*.py": [".hidden.py", "a.py"],
        "**/*.py": [".hidden.py", "a.py", "b/c.py", "b/d/e.py"],
        "b/**": ["b", "b/c.py", "b/d", "b/d/e.py", "b/d/f.txt"],
        "*": [".hidden.py", "a.py", "b", "b-c"],
        "b/?.py": ["b/c.py"],
        "b/[!c].py": [],
        "none/**": [],
        "a.py": ["a.py"],
        "b/": ["b"],
    }.items():
        found = await node.glob_files(box, f"/root/t/{pattern}")
        assert [file.path.removeprefix("/root/t/") for file in found.files] == names, pattern
        assert not found.more
    found = await node.glob_files(box, "/root/t/**/*.py", limit=2)
    assert [file.path for file in found.files] == ["/root/t/.hidden.py", "/root/t/a.py"]
    assert found.more
    for limit in (0, 100_001):
        with pytest.raises(InvalidRequest, match="limit"):
            await node.glob_files(box, "/root/*", limit)


async def test_text_is_found_in_lines(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.write_file(box, "/root/t/a.py", "def one():\n    return 'für Größe'\n".encode())
    await node.write_file(box, "/root/t/b.txt", b"one.two\n" + b"x" * 5000 + b"one" + b"y" * 5000 + b"\nlast one")
    await node.write_file(box, "/root/t/c.bin", b"one\n\0\n")
    found = await node.find_text(box, "one", "/root/t")
    assert [(hit.path, hit.line, hit.column) for hit in found.hits] == [
        ("/root/t/a.py", 1, 5),
        ("/root/t/b.txt", 1, 1),
        ("/root/t/b.txt", 2, 5001),
        ("/root/t/b.txt", 3, 6),
    ]
    assert found.hits[3].text == "last one"
    assert [hit.line for hit in (await node.find_text(box, "ONE.", "/root/t", ignore_case=True)).hits] == [1]
    found = await node.find_text(box, "f.r [A-Z]r", "/root/t", names="**/*.py", regex=True)
    assert [(hit.line, hit.text) for hit in found.hits] == [(2, "    return 'für Größe'")]
    found = await node.find_text(box, "one", "/root/t", limit=2)
    assert (len(found.hits), found.more) == (2, True)
    assert (await node.find_text(box, "one", "/root/t/b.txt", limit=3)).more is False
    assert (await node.find_text(box, "(", "/root/t/a.py")).hits[0].line == 1
    with pytest.raises(InvalidRequest, match="not an extended regular expression"):
        await node.find_text(box, "(", "/root/t", regex=True)
    with pytest.raises(NotFound):
        await node.find_text(box, "x", "/root/none")
    for text in ("", "a\nb", "a\0b"):
        with pytest.raises(InvalidRequest, match="part of a line"):
            await node.find_text(box, text)


async def test_a_long_file_is_looked_through_to_its_end(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    lines = [b"%d %s" % (number, b"x" * (number % 300)) for number in range(40_000)]
    lines[20_000] = b"y" * (3 << 20) + b"needle"  # in the middle of what is looked at together
    lines[39_999] += b" needle"
    await real.write_file(box, "/root/f", b"\n".join(lines))
    found = await real.find_text(box, "needle", "/root/f")
    assert [hit.line for hit in found.hits] == [20_001, 40_000]
    assert all("needle" in hit.text and len(hit.text) <= 1000 for hit in found.hits)
    found = await real.find_text(box, "need(le)$", "/root/f", regex=True)
    assert [hit.line for hit in found.hits] == [20_001, 40_000]


async def test_directories_are_made_and_things_moved(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.make_directory(box, "/root/a/b/c")
    await node.make_directory(box, "/root/a/b/c/")
    await node.write_file(box, "/root/a/f", b"f")
    for work, error, said in (
        (node.make_directory(box, "/root/a/b", parents=False), Conflict, "there is something at /root/a/b"),
        (node.make_directory(box, "/root/a/f"), Conflict, "there is something at /root/a/f already"),
        (node.make_directory(box, "/root/a/f/g"), Conflict, "a file where a directory is to be"),
        (node.make_directory(box, "/root/x/y", parents=False), NotFound, "there is no directory /root/x"),
        (node.write_file(box, "/root/a/f/g", b""), Conflict, "a file where a directory is to be"),
        (node.write_file(box, "/root/a/b", b""), InvalidRequest, "/root/a/b is a directory"),
        (node.write_file(box, "/root/a/b/", b""), InvalidRequest, "is the path of a directory"),
        (node.move_file(box, "/root/none", "/root/g"), NotFound, "there is no file /root/none"),
        (node.move_file(box, "/root/a/f", "/root/x/f"), NotFound, "there is no directory /root/x"),
        (node.move_file(box, "/root/a/f", "/root/a/b"), Conflict, "there is something at /root/a/b already"),
        (node.move_file(box, "/root/a/f", "/root/a/b", True), Conflict, "cannot take the place of /root/a/b"),
        (node.move_file(box, "/root/a", "/root/a/b/d"), InvalidRequest, "that is in it"),
        (node.remove_file(box, "/root/none"), NotFound, "there is no file /root/none"),
        (node.remove_file(box, "/root/a"), Conflict, "/root/a is not empty"),
        (node.remove_file(box, "/"), InvalidRequest, "/ cannot be removed"),
        (node.change_file(box, "/root/none", 0o600), NotFound, "there is no file /root/none"),
        (node.change_file(box, "/root/a", 0o10000), InvalidRequest, "mode"),
        (node.change_file(box, "/root/a", user=70_000), InvalidRequest, "user"),
    ):
        with pytest.raises(error, match=said):
            await work
    await node.move_file(box, "/root/a/f", "/root/g")
    await node.write_file(box, "/root/h", b"h")
    await node.move_file(box, "/root/h", "/root/g", replace=True)
    assert await node.read_file(box, "/root/g") == b"h"
    await node.move_file(box, "/root/a", "/tmp/a")
    assert [file.path for file in (await node.glob_files(box, "/tmp/a/**")).files] == [
        "/tmp/a",
        "/tmp/a/b",
        "/tmp/a/b/c",
    ]
    await node.change_file(box, "/root/g", 0o4750)
    assert (await node.stat_file(box, "/root/g")).mode == 0o4750
    await node.remove_file(box, "/root/g")
    await node.remove_file(box, "/tmp/a", recursive=True)
    assert (await node.glob_files(box, "/tmp/a/**")).files == ()


async def test_what_is_moved_to_another_file_system_is_what_it_was(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    make = "mkdir -m 1751 d; cd d; echo text > f; chmod 4640 f; ln f h; ln -s f l; mkfifo p; touch -d @1000000000 f"
    look = "cd d; stat -c '%n %a %h %F' f h l p .; readlink l; stat -c %Y f; cat h"
    await sh(real, box, make)
    before = await sh(real, box, look)
    await real.move_file(box, "/root/d", "/dev/shm/d")
    assert await sh(real, box, f"cd /dev/shm; {look}") == before
    await real.move_file(box, "/dev/shm/d", "/root/e")
    assert await sh(real, box, f"mv e d; {look}") == before
    assert await sh(real, box, "ls -A /dev/shm /root | grep sandlot; true") == ""
    box = (await real.create(SandboxSpec(limits=Limits(disk=16 << 20)))).id
    await sh(real, box, "mkdir d; head -c 4m /dev/zero > d/f; head -c 9m /dev/zero > /dev/shm/x")
    with pytest.raises(InvalidRequest, match="the sandbox's disk is full"):
        await real.move_file(box, "/root/d", "/dev/shm/d")
    assert await sh(real, box, "ls -A /dev/shm; ls d") == "x\nf\n"


async def test_nothing_that_is_mounted_is_removed_or_written(native: Node, tmp_path: Path) -> None:
    for name in ("rw", "ro"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").write_text("of the host")
    (tmp_path / "rw").chmod(0o777)
    volumes = tuple(
        Volume(source=str(tmp_path / name), target=f"/root/v/{name}", read_only=name == "ro") for name in ("rw", "ro")
    )
    box = (await native.create(SandboxSpec(volumes=volumes))).id
    await native.write_file(box, "/root/v/f", b"")
    for path in ("/root/v", "/root/v/rw", "/root/v/ro", "/root", "/proc", "/dev"):
        with pytest.raises(SandlotError):
            await native.remove_file(box, path, recursive=True)
    with pytest.raises(SandlotError):
        await native.move_file(box, "/root/v/rw", "/root/w")
    for work in (
        native.write_file(box, "/root/v/ro/kept", b"x"),
        native.write_file(box, "/root/v/ro/new", b"x"),
        native.write_file(box, "/root/v/ro/kept", b"x", append=True),
        native.make_directory(box, "/root/v/ro/d"),
        native.remove_file(box, "/root/v/ro/kept"),
        native.change_file(box, "/root/v/ro/kept", 0o777),
    ):
        with pytest.raises(InvalidRequest, match="read-only"):
            await work
    await native.write_file(box, "/root/v/rw/new", b"written")
    await native.remove_file(box, "/root/v/rw/new")
    assert {path.read_text() for path in tmp_path.glob("r?/*")} == {"of the host"}
    assert len(list(tmp_path.glob("r?/*"))) == 2


async def test_what_cannot_be_named_is_told_so(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    for path in ("/root/" + "x" * 256, "/x" * 2048, "/root/" + "y" * 5000):
        for work in (
            real.read_file(box, path),
            real.write_file(box, path, b""),
            real.stat_file(box, path),
            real.make_directory(box, path),
            real.remove_file(box, path),
            real.move_file(box, "/etc/passwd", path),
        ):
            with pytest.raises(InvalidRequest, match="too long"):
                await work
    for path in ("", "relative", "/nul\0", "/lone\ud800"):
        for work in (real.stat_file(box, path), real.remove_file(box, path), real.move_file(box, "/etc/passwd", path)):
            with pytest.raises(InvalidRequest, match=r"is not an absolute path|is not text"):
                await work
    await sh(real, box, "ln -s f /root/l; mkdir d; cd d; ln -s .. up; echo x > f")
    assert (await real.stat_file(box, "/root/d/up/../root/d/./f")).size == 2
    for path in ("/root/d/.", "/root/d/..", "/root/d/up/.."):
        with pytest.raises(InvalidRequest):
            await real.remove_file(box, path, recursive=True)


async def test_a_tree_that_is_too_deep_is_refused_and_can_be_removed(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    deep = "import os; os.chdir('/root')\nfor _ in range(600): os.mkdir('d'); os.chdir('d')"
    await real.run(box, Run(argv=(PYTHON, "-I", "-S", "-c", deep)))
    for work in (
        real.glob_files(box, "/root/d/**"),
        real.remove_file(box, "/root/d", recursive=True),
        anext(real.download(box, "/root/d")),
    ):
        with pytest.raises(InvalidRequest, match="too many links or directories"):
            await work
    await real.remove_file(box, "/root" + "/d" * 300, recursive=True)
    await real.remove_file(box, "/root/d", recursive=True)
    assert (await real.glob_files(box, "/root/d")).files == ()


class Seen(list[FileEvent]):
    """What was told so far."""

    def __init__(self) -> None:
        self.more = asyncio.Event()


async def watched(node: NodeAPI, box: str, path: str, seen: Seen, recursive: bool = False) -> None:
    async with aclosing(node.watch_files(box, path, recursive)) as events:
        async for event in events:
            seen.append(event)
            seen.more.set()


async def until(seen: Seen, *wanted: FileEvent) -> None:
    async with asyncio.timeout(20):
        while not set(wanted) <= set(seen):
            seen.more.clear()
            await seen.more.wait()


def event(kind: str, path: str, directory: bool = False) -> FileEvent:
    return FileEvent.model_validate({"kind": kind, "path": path, "directory": directory})


async def test_what_happens_is_told_as_it_happens(node: NodeAPI) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.make_directory(box, "/root/w/d")
    seen = Seen()
    deep = Seen()
    watching = [
        asyncio.ensure_future(watched(node, box, "/root/w", seen)),
        asyncio.ensure_future(watched(node, box, "/root/w", deep, True)),
    ]
    for events in (seen, deep):
        await until(events, event("watching", "/root/w", True))
    await node.write_file(box, "/root/w/f", b"1")
    await node.write_file(box, "/root/w/f", b"2", append=True)
    await node.write_file(box, "/root/w/d/g", b"")
    await node.move_file(box, "/root/w/d", "/root/w/e")
    await node.remove_file(box, "/root/w/f")
    last = event("deleted", "/root/w/f")
    shallow = {
        event("created", "/root/w/f"),
        event("changed", "/root/w/f"),
        event("deleted", "/root/w/d", True),
        event("created", "/root/w/e", True),
        last,
    }
    await until(seen, *shallow)
    await until(deep, *shallow, event("created", "/root/w/d/g"))
    assert {each.kind for each in seen} <= {"watching", "created", "changed", "deleted", "attributes"}
    assert not [each for each in seen if "sandlot" in each.path or each.path.startswith("/root/w/d/")]
    await node.remove_file(box, "/root/w", recursive=True)
    async with asyncio.timeout(20):
        await asyncio.gather(*watching)
    assert seen[-1] == deep[-1] == event("deleted", "/root/w", True)
    with pytest.raises(NotFound):
        await watched(node, box, "/root/w", Seen())


async def test_what_is_made_in_new_directories_is_told(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    seen = Seen()
    watching = asyncio.ensure_future(watched(real, box, "/root", seen, True))
    await until(seen, event("watching", "/root", True))
    await sh(real, box, "mkdir -p /root/a/b/c; echo x > /root/a/b/c/f; mv /root/a/b /root/z; mkdir /root/z/n")
    await until(seen, *(event("created", f"/root/z{path}", True) for path in ("", "/c", "/n")))
    await sh(
        real,
        box,
        "echo y > /root/z/n/g; echo y >> /root/z/c/f; ln -s /etc /root/z/l; mv /root/z /tmp/z; echo x > /tmp/z/out",
    )
    await until(
        seen, event("changed", "/root/z/c/f"), event("created", "/root/z/n/g"), event("deleted", "/root/z", True)
    )
    await asyncio.sleep(0.2)
    assert not [each for each in seen if each.path.endswith("out")]
    watching.cancel()
    await asyncio.wait((watching,))


async def test_a_file_is_watched_through_whatever_replaces_it(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    await real.write_file(box, "/root/f", b"")
    seen = Seen()
    watching = asyncio.ensure_future(watched(real, box, "/root/f", seen))
    await until(seen, event("watching", "/root/f"))
    await real.write_file(box, "/root/other", b"")
    await real.write_file(box, "/root/f", b"new")
    await until(seen, event("created", "/root/f"))
    await sh(real, box, "echo more >> /root/f; rm /root/f")
    await until(seen, event("changed", "/root/f"), event("deleted", "/root/f"))
    assert {each.path for each in seen} == {"/root/f"}
    watching.cancel()
    await asyncio.wait((watching,))


async def test_who_does_not_listen_is_told_what_was_lost(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    async with asyncio.timeout(50), aclosing(native.watch_files(box, "/root")) as events:
        assert (await anext(events)).kind == "watching"
        await native.write_file(box, "/root/storm.py", STORM.encode())
        await sh(native, box, f"{PYTHON} /root/storm.py")
        kinds = []
        while "lost" not in kinds:
            kinds.append((await anext(events)).kind)
    assert len(kinds) < 100_000


STORM = """
import os
for number in range(20_000):
    os.close(os.open(f"/root/{number % 100}", os.O_CREAT | os.O_WRONLY))
    os.unlink(f"/root/{number % 100}")
"""


async def test_who_stops_listening_leaves_nobody_behind(real: NodeAPI, native: Node) -> None:
    box = (await real.create(SandboxSpec())).id
    await real.list_files(box, "/")
    before = set(os.listdir("/proc/self/fd"))
    for number in range(10):
        watching = asyncio.ensure_future(watched(real, box, "/root", Seen(), True))
        await asyncio.sleep(number * 0.005)
        watching.cancel()
        await asyncio.wait((watching,))
    async with aclosing(real.download(box, "/usr/lib")) as chunks:
        await anext(chunks)
    assert (await real.glob_files(box, "/usr/**", limit=3)).more
    async with asyncio.timeout(20):
        while (await real.run(box, Run(argv=("pgrep", "-c", "sandlot-init")))).stdout != "1\n":  # PID 1 alone
            pass
        while set(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110  (the loop closes pipes a little later)
            await asyncio.sleep(0)
    assert native._live[box].watches == 0


async def test_a_sandbox_is_not_watched_without_end(fake: Node) -> None:
    box = (await fake.create(SandboxSpec())).id
    watches = [fake.watch_files(box, "/root") for _ in range(MOST_WATCHES)]
    for each in watches:
        await anext(each)
    with pytest.raises(Conflict, match=f"is watched {MOST_WATCHES} times already"):
        await anext(fake.watch_files(box, "/root"))
    for each in watches:
        await each.aclose()
    async with aclosing(fake.watch_files(box, "/root")) as events:
        await anext(events)


async def test_those_who_only_look_leave_watches_for_others(fake: Node) -> None:
    box = (await fake.create(SandboxSpec())).id
    token = keyed.ONLY_LOOKS.set(True)
    watches = [fake.watch_files(box, "/root") for _ in range(MOST_WATCHES // 2)]
    for each in watches:
        await anext(each)
    with pytest.raises(Conflict, match="times already"):
        await anext(fake.watch_files(box, "/root"))
    keyed.ONLY_LOOKS.reset(token)
    async with aclosing(fake.watch_files(box, "/root")) as events:
        await anext(events)
    for each in watches:
        await each.aclose()


@pytest.mark.parametrize("end", ["destroy", "reset"])
async def test_a_watch_ends_with_its_sandbox(native: Node, end: str) -> None:
    box = (await native.create(SandboxSpec())).id
    seen = Seen()
    watching = asyncio.ensure_future(watched(native, box, "/root", seen))
    await until(seen, event("watching", "/root", True))
    await (native.destroy(box) if end == "destroy" else native.reset(box))
    with pytest.raises(SandboxEnded if end == "destroy" else Conflict):
        async with asyncio.timeout(20):
            await watching


async def test_a_tree_that_comes_out_goes_in_again_as_it_was(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    long = "/".join(["long" * 20] * 4)
    make = (
        "mkdir -m 1751 t; cd t; mkdir d; echo text > f; chmod 4640 f; ln f d/h; ln -s ../../x l; mkfifo p;"
        f" touch -d @1 f; mkdir -p {long}; : > {long}/e; head -c 300k /dev/urandom > r;"
        " printf x > \"$(printf 'n\\351')\""
    )
    await sh(real, box, make)
    users = await has_users(real, box)
    if users:
        await sh(real, box, "chown 1000:1001 t/f")
    look = (
        "cd {}; find . ! -type p | sort | while read -r n; do stat -c '%n %a %s %h %F' \"$n\"; done;"
        " cksum r f d/h; readlink l; stat -c %Y f"
    )
    tar_ = b"".join([chunk async for chunk in real.download(box, "/root/t")])
    with tarfile.open(fileobj=io.BytesIO(tar_)) as tar:
        members = {member.name: member for member in tar}
    assert "p" not in members
    assert (members["f"].linkname, members["f"].type) == ("d/h", tarfile.LNKTYPE)
    assert members["d/h"].uid == (1000 if users else 0)
    await real.make_directory(box, "/root/u", 0o1751)
    await real.upload(box, "/root/u", bits(tar_, 70_000))
    before, after = [await sh(real, box, look.format(top)) for top in ("t", "u")]
    assert after.splitlines()[1:] == before.splitlines()[1:]  # of the directory itself the size
    alone = b"".join([chunk async for chunk in real.download(box, "/root/t/f")])
    with tarfile.open(fileobj=io.BytesIO(alone)) as tar:
        assert [(member.name, tar.extractfile(member).read()) for member in tar] == [("f", b"text\n")]  # type: ignore[union-attr]
    with pytest.raises(NotFound):
        await anext(real.download(box, "/root/none"))


async def test_looking_does_not_keep_it_alive_and_changing_does(fake: Node) -> None:
    box = (await fake.create(SandboxSpec(idle_timeout=30))).id
    live = fake._live[box]
    await fake.write_file(box, "/root/f", b"text")
    for look in (
        fake.read_file(box, "/root/f"),
        fake.stat_file(box, "/root/f"),
        fake.list_files(box, "/root"),
        fake.glob_files(box, "/root/*"),
        fake.find_text(box, "text", "/root"),
        anext(fake.download(box, "/root")),
        anext(fake.watch_files(box, "/root")),
    ):
        before = live.last_used
        await look
        assert (live.last_used, live.busy) == (before, 0)
    for change in (
        fake.write_file(box, "/root/f", b"x", append=True),
        fake.make_directory(box, "/root/d"),
        fake.move_file(box, "/root/f", "/root/d/f"),
        fake.change_file(box, "/root/d/f", 0o600),
        fake.remove_file(box, "/root/d", recursive=True),
    ):
        before = live.last_used
        await change
        assert live.last_used > before


async def test_all_of_it_works_while_nothing_runs(real: NodeAPI) -> None:
    box = (await real.create(SandboxSpec())).id
    await real.pause(box)
    await real.write_file(box, "/root/d/f", b"text")
    await real.write_file(box, "/root/d/f", pieces(b"te", b"xt"))
    assert await real.read_file(box, "/root/d/f") == b"text"
    assert len((await real.find_text(box, "text", "/root/d")).hits) == 1
    await real.move_file(box, "/root/d/f", "/root/d/g")
    assert [file.path for file in await real.list_files(box, "/root/d")] == ["/root/d/g"]
    assert b"text" in b"".join([chunk async for chunk in real.download(box, "/root/d")])
    await real.remove_file(box, "/root/d", recursive=True)
    await real.resume(box)


FULL = """
import os, time
try:
    while os.fork(): pass
except OSError:
    print("full", flush=True)
time.sleep(60)
"""


async def test_a_box_without_room_for_a_process_says_so(native: Node) -> None:
    if "pids limit" in {promise.name for promise in await native.capabilities() if promise.state != "kept"}:
        pytest.skip("this host does not limit processes")
    box = (await native.create(SandboxSpec(limits=Limits(pids=8)))).id
    command = await native.launch(box, Run(argv=(PYTHON, "-I", "-S", "-c", FULL), timeout=60))
    async with asyncio.timeout(20), aclosing(native.follow(box, command.id)) as chunks:
        await anext(chunks)
    with pytest.raises(InvalidRequest, match="limit of processes"):
        await native.stat_file(box, "/root")
    await native.signal(box, command.id, 9)
    async with asyncio.timeout(20):
        while True:  # the killed need a moment to die
            with suppress(InvalidRequest):
                await native.stat_file(box, "/root")
                break

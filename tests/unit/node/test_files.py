"""Promises of files in a box, over the fake driver and, for what takes a kernel, the native one:

1. Any bytes come back as they were written; parents are made; a file is replaced whole, with the mode asked for.
2. What is no regular file is refused, and never hangs the node: directories, devices, pipes, sockets.
3. A missing file is NotFound; a file over the cap is refused, not held in memory.
4. A full disk of the box is the box's, not the host's: InvalidRequest, and the node goes on.
5. A tar is unpacked as it comes, as the box's own doing, with its modes, links and owner; what is no tar, what leads
   out of its directory and what is no file is refused by name; cut off or given up, nothing goes on and nothing leaks.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot.api import Limits, Run, SandboxSpec
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Conflict, InvalidRequest, NotFound
from sandlot.node import files
from sandlot.node.node import Node, local_node


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


@pytest.fixture(params=["fake", "native"])
def node(request: pytest.FixtureRequest) -> Node:
    node: Node = request.getfixturevalue(request.param)
    return node


async def test_bytes_come_back_as_written(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    for data in (b"", b"\0\xff\n", os.urandom(3 << 20)):
        await node.write_file(box, "/root/deep/er/file", data)
        assert await node.read_file(box, "/root/deep/er/file") == data
    assert (await node.run(box, Run(argv=("cat", "/root/deep/er/file"), output_cap=4 << 20))).out.data == data


async def test_a_file_is_replaced_whole(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.write_file(box, "/tmp/f", b"a long first version")
    await node.write_file(box, "/tmp/f", b"short")
    assert await node.read_file(box, "/tmp/f") == b"short"


async def test_a_missing_file_is_not_found(node: Node) -> None:
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


async def test_a_file_over_the_cap_is_refused(fake: Node) -> None:
    assert isinstance(fake.driver, FakeDriver)
    box = (await fake.create(SandboxSpec())).id
    fd = await fake.driver.boxes[box].open("/root/big", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, files.MOST_BYTES + 1)
    os.close(fd)
    with pytest.raises(InvalidRequest, match="/root/big is larger than 64 MiB"):
        await fake.read_file(box, "/root/big")


async def sh(node: Node, box: str, text: str) -> str:
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
    await sh(native, box, "rm /root/big")
    await native.write_file(box, "/root/small", b"fits")


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


async def test_a_tar_is_unpacked_over_what_is_there(node: Node) -> None:
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


async def test_a_source_that_fails_is_told_as_it_is(node: Node) -> None:
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


async def test_what_is_unpacked_is_the_box_s_own(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    before = await native.stats(box)
    await native.upload(box, "/root", bits(tar(("f", os.urandom(30 << 20))), 1 << 20))
    after = await native.stats(box)
    assert after.disk - before.disk >= 30 << 20
    if after.memory is not None:  # not the node's
        assert after.memory - (before.memory or 0) > 25 << 20
    if (await native.capabilities())[2].state == "kept":
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

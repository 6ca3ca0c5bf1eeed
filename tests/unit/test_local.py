"""Promises of files of this host that go into a sandbox and come out of one:

1. A file and a tree arrive as they were, with modes and links, of any size; how far they are is told to the byte.
2. What cannot be sent is named before anything is.
3. What comes out is written below the directory that was named and nowhere else, whatever its tar says, and whatever
   links an earlier one has left there, in it or in its place; half a tar is an error, and a file is there whole or not
   at all.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.drivers.fake import FakeDriver
from sandlot.errors import BadImage, Conflict, HostFault, InvalidRequest, NotFound
from sandlot.local import receive_file, receive_tree, send, streamed
from sandlot.node.node import Node, local_node
from sandlot.sandbox import Sandbox


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with Node(FakeDriver(), tmp_path / "state") as node, await Sandbox.create(node=node) as box:
        yield box


@pytest.fixture
async def native(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Sandbox]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path / "state") as node, await Sandbox.create(node=node) as box:
        yield box


def tree(top: Path) -> dict[str, tuple[int, bytes | str]]:
    """What is below a directory: modes, contents, where links lead."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(top.rglob("*")):
        mode = path.lstat().st_mode & 0o7777
        what: bytes | str = "directory"
        if path.is_symlink():
            mode, what = 0, str(path.readlink())
        elif path.is_file():
            what = path.read_bytes()
        found[str(path.relative_to(top))] = (mode, what)
    return found


async def test_a_tree_goes_in_and_comes_out(native: Sandbox, tmp_path: Path) -> None:
    top = tmp_path / "here"
    (top / "d/empty").mkdir(parents=True)
    (top / "d/f").write_bytes(os.urandom(300_000))
    (top / "d/run").write_bytes(b"#!/bin/sh\necho ran\n")
    (top / "d/run").chmod(0o750)
    (top / os.fsdecode(b"caf\xe9")).write_bytes(b"")
    (top / "out").symlink_to("/etc/passwd")
    (top / "d/up").symlink_to("../d")
    told: list[tuple[int, int | None]] = []
    await native.upload(top, "/root/t", progress=lambda *each: told.append(each))
    assert told[-1][0] == told[-1][1]
    assert (await native.run("/root/t/d/run; readlink /root/t/out")).stdout == "ran\n/etc/passwd\n"
    await native.download("/root/t", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(top)
    await native.run("echo more > /root/t/d/f; rm /root/t/out; echo now a file > /root/t/out")
    await native.download("/root/t", tmp_path / "back")
    assert (tmp_path / "back/d/f").read_text() == "more\n"
    assert (tmp_path / "back/out").read_text() == "now a file\n"
    assert not (tmp_path / "back/out").is_symlink()


async def test_a_file_goes_in_and_comes_out(fake: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(3 << 20))
    (tmp_path / "f").chmod(0o750)
    (tmp_path / "into").mkdir()
    told: list[tuple[int, int | None]] = []
    await fake.upload(tmp_path / "f", "/root/new/g", progress=lambda *each: told.append(each))
    await fake.upload(str(tmp_path / "f"), "/root/new/")
    assert [(file.path, file.mode) for file in await fake.list_files("/root/new")] == [
        ("/root/new/f", 0o750),
        ("/root/new/g", 0o750),
    ]
    await fake.download("/root/new/g", tmp_path / "back", progress=lambda *each: told.append(each))
    await fake.download("/root/new/g", tmp_path / "into")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "into/g").read_bytes() == (tmp_path / "f").read_bytes()
    assert told[-1] == (3 << 20, 3 << 20)
    assert told.count((3 << 20, 3 << 20)) == 2


async def test_what_cannot_be_sent_is_named(fake: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"there is no .*/none"):
        await fake.upload(tmp_path / "none", "/root/f")
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "d/pipe")
    for path in ("d", "d/pipe"):
        with pytest.raises(InvalidRequest, match="neither a file"):
            await fake.upload(tmp_path / path, "/root/f")
    assert await fake.list_files("/root") == []
    with pytest.raises(NotFound):
        await fake.download("/root/none", tmp_path / "x")
    with pytest.raises(HostFault, match="could not write"):
        await fake.write_file("/root/f", "x")
        await fake.download("/root/f", tmp_path / "no/such/place")


def member(name: str, kind: bytes, data: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o644
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


async def bits(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 300):
        yield data[at : at + 300]


async def test_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("kept")
    link = member("way", tarfile.SYMTYPE, linkname=str(outside))
    file = member("way/f", tarfile.REGTYPE, b"caught")
    for data in (
        packed(link, file),
        packed(link, member("way", tarfile.DIRTYPE, mode=0o777), file),
        packed(member("way/f", tarfile.LNKTYPE, linkname="../outside/f"), member("way/f", tarfile.REGTYPE, b"caught")),
        packed(member("../outside/f", tarfile.REGTYPE, b"caught")),
        packed(member(f"{outside}/f", tarfile.REGTYPE, b"caught")),
        packed(member("a/../../outside/f", tarfile.REGTYPE, b"caught")),
        packed(member("", tarfile.REGTYPE, b"caught")),
        packed(member("way", tarfile.SYMTYPE, linkname=str(outside)), member("x", tarfile.LNKTYPE, linkname="way/f")),
    ):
        for _ in range(2):  # over what the first has left
            try:
                await receive_tree(bits(data), top)
            except (BadImage, HostFault):
                continue
    assert (outside / "f").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "top"]
    assert [path.name for path in outside.iterdir()] == ["f"]


async def test_nothing_is_written_where_a_link_leads_that_an_earlier_download_has_left(
    fake: Sandbox, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    await fake.write_file("/srv/t/authorized_keys", "theirs")
    for left in (tmp_path / "t", tmp_path / "f"):
        left.symlink_to(home)
    with pytest.raises(Conflict, match="t is a link"):
        await fake.download("/srv/t", tmp_path / "t")
    with pytest.raises(Conflict, match="f is a link"):
        await fake.download("/srv/t/authorized_keys", tmp_path / "f")
    assert list(home.iterdir()) == []
    (tmp_path / "way").symlink_to(home)  # one that is on the way to what was named is the caller's own
    await fake.download("/srv/t", tmp_path / "way/t")
    assert (home / "t/authorized_keys").read_text() == "theirs"


async def test_a_tree_may_be_as_deep_as_a_path_is_long(fake: Sandbox, tmp_path: Path) -> None:
    top = tmp_path / "deep"
    subprocess.run(["mkdir", "-p", top / ("d/" * 1400)], check=True)  # Python's is recursive
    (top / ("d/" * 1400) / "f").write_text("at the end")
    sent = await asyncio.to_thread(send, top)
    await receive_tree(streamed(sent.chunks), tmp_path / "back")
    assert (tmp_path / "back" / ("d/" * 1400) / "f").read_text() == "at the end"
    subprocess.run(["rm", "-r", top, tmp_path / "back"], check=True)  # pytest's is, too


@pytest.mark.parametrize("mtime", ["inf", "nan"])
async def test_a_time_that_is_none_is_an_error(tmp_path: Path, mtime: str) -> None:
    info, data = member("f", tarfile.REGTYPE, b"x", pax_headers={"mtime": mtime})
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(BadImage, match="no whole tar"):
        await receive_tree(bits(file.getvalue()), tmp_path / "top")


async def test_set_id_bits_and_devices_do_not_come_out(tmp_path: Path) -> None:
    data = packed(
        member("set", tarfile.REGTYPE, b"x", mode=0o6755),
        member("device", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("d", tarfile.DIRTYPE, mode=0o1555),
        member("d/f", tarfile.REGTYPE, b"in a directory that may not be written"),
    )
    await receive_tree(bits(data), tmp_path / "top")
    assert {name: mode for name, (mode, _) in tree(tmp_path / "top").items()} == {
        "set": 0o755,
        "d": 0o555,
        "d/f": 0o644,
    }
    (tmp_path / "top/d").chmod(0o755)


async def test_half_of_it_is_an_error(tmp_path: Path) -> None:
    async def broken(data: bytes) -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        raise ZeroDivisionError

    with pytest.raises(BadImage, match="is no whole tar"):
        await receive_tree(bits(packed(member("f", tarfile.REGTYPE, b"x" * 5000))[:2000]), tmp_path / "top")
    with pytest.raises(ZeroDivisionError):
        await receive_tree(broken(packed(member("f", tarfile.REGTYPE, b"x" * 5000))), tmp_path / "top")
    (tmp_path / "file").write_text("as it was")
    with pytest.raises(ZeroDivisionError):
        await receive_file(broken(b"new data"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "top"]

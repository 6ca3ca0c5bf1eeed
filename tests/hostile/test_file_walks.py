"""Attack: swap a directory for a link, with nothing in between, while the node goes through it: lists it, looks for
patterns and texts in it, copies it out, removes it. And lead the node by a link of /proc into what its helper has open.

Must hold: nothing of the host is told, read or removed, nor anything of the sandbox that the removed directory only
leads to; no descriptor of the helper's is read or written. The controls are the same swapping program against one who
walks by path, on the host, and the same link against a process that follows it.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import SandboxSpec, Volume
from sandlot.drivers.base import Keeping
from sandlot.drivers.native.driver import NativeDriver
from sandlot.errors import SandlotError
from sandlot.node import files, looks
from sandlot.node.ledger import NodeDirectory
from tests.support.hostile import Arena

PROMISE = "files"

SECRET = "of the host"
SECONDS = 30.0
# argv: the directory to work in, then where its `top/way` shall lead. Goes on until `stop` is there.
SWAP = """
import ctypes, os, sys
here, *targets = sys.argv[1:]
libc = ctypes.CDLL(None)
for number, target in enumerate(targets):
    os.symlink(target, f"{here}/link{number}")
def fill():
    os.makedirs(f"{here}/top/way/deep", exist_ok=True)
    for path in ("way/file", "way/deep/file"):
        with open(f"{here}/top/{path}", "w") as file: file.write("inside")
fill()
print("ready", flush=True)
while not os.path.exists(f"{here}/stop"):
    for number in range(len(targets)):
        for _ in range(2):  # RENAME_EXCHANGE: a directory becomes a link, and is one again
            libc.renameat2(-100, f"{here}/top/way".encode(), -100, f"{here}/link{number}".encode(), 2)
    if not os.path.isdir(f"{here}/top/way"):
        try: fill()
        except OSError: pass
"""


def ways_to(path: Path) -> list[str]:
    return [f"{prefix}{path}" for prefix in ("", "/proc/self/root", "/proc/1/root", "/../..", "/proc/thread-self/root")]


async def test_what_is_swapped_is_never_gone_through(arena: Arena, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (secret / "deep").mkdir(parents=True)
    for path in (secret / "file", secret / "deep/file"):
        path.write_text(SECRET)
    for folder in (secret, secret / "deep", tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o777)
    box = await arena.box()
    await box.write_file("/root/precious/file", "precious")
    swapper = asyncio.create_task(arena.python(SWAP, "/tmp", "/root/precious", *ways_to(secret), box=box))
    told: set[str] = set()
    done = dict.fromkeys(("list", "glob", "find", "download", "remove"), 0)
    try:
        async with asyncio.timeout(SECONDS):
            while not (await box.run("test -d /tmp/top")).ok:
                assert not swapper.done()
        for _ in range(60):
            with suppress(SandlotError):
                told |= {file.path for file in await box.list_files("/tmp/top/way/deep")}
                done["list"] += 1
            with suppress(SandlotError):
                told |= {file.path for file in (await box.glob_files("/tmp/top/*/**")).files}
                done["glob"] += 1
            with suppress(SandlotError):
                found = await box.find_text("i", "/tmp/top")
                assert {hit.text for hit in found.hits} <= {"inside"}
                done["find"] += 1
            with suppress(SandlotError):
                data = b"".join([chunk async for chunk in arena.node.download(box.id, "/tmp/top")])
                with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                    held = {tar.extractfile(member).read() for member in tar if member.isreg()}  # type: ignore[union-attr]
                assert held <= {b"inside", b""}, held
                done["download"] += 1
            with suppress(SandlotError):
                await box.remove_file("/tmp/top", recursive=True)
                done["remove"] += 1
    finally:
        await box.write_file("/tmp/stop", b"")
    assert (await swapper).ok
    assert all(done.values()), done
    assert {os.path.relpath(path, "/tmp/top") for path in told} <= {"way", "way/file", "way/deep", "way/deep/file"}
    assert await box.read_file("/root/precious/file") == b"precious"
    assert [path.read_text() for path in (secret / "file", secret / "deep/file")] == [SECRET, SECRET]


@pytest.mark.control
async def test_control_who_walks_by_path_is_led_out(arena: Arena, tmp_path: Path) -> None:
    """The same program on a directory that both see, and the naive way to remove what is in it."""
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    for folder in (secret, shared):
        folder.mkdir()
        folder.chmod(0o777)
    box = await arena.box(volumes=(Volume(source=str(shared), target=str(shared), read_only=False),))
    swapper = asyncio.create_task(arena.python(SWAP, str(shared), str(secret), box=box))
    (secret / "file").write_text(SECRET)
    (secret / "file").chmod(0o666)
    way = shared / "top" / "way"
    async with asyncio.timeout(SECONDS):
        while (secret / "file").exists():
            await asyncio.sleep(0)
            if way.is_dir() and not way.is_symlink():
                with suppress(OSError):
                    for name in os.listdir(way):
                        (way / name).unlink()
    (shared / "stop").touch()
    assert (await swapper).ok


async def test_no_descriptor_of_the_helper_is_reached_by_a_link(tmp_path: Path) -> None:
    directory = NodeDirectory.claim(tmp_path)
    driver = NativeDriver(directory.path)
    box = await driver.create("sb-led", SandboxSpec(), frozenset(), Keeping(grace=60.0))
    try:
        record = directory.path / "boxes" / "sb-led"
        before = record.read_bytes()
        names = [*map(str, range(64)), "exe", "cwd", "root"]
        await files.make_directory(box, "/root/d", 0o755, True)
        for name in names:
            await links(box, name)
        for name in names:
            path = f"/root/{name}"
            for work in (
                files.write(box, path, b"lifetime\\n", 0o644, False),
                files.write(box, path, b"lifetime\\n", 0o644, True),
                files.write(box, f"{path}/caught", b"x", 0o644, False),
                files.read(box, path),
                looks.list_files(box, path),
                looks.stat_file(box, path, True),
                looks.find_text(box, "a", path, names="**", regex=False, ignore_case=False, limit=10),
                files.change(box, path, 0o777, None, None),
                files.make_directory(box, f"{path}/caught", 0o755, False),
                files.move(box, "/root/d", f"{path}/caught", False),
            ):
                with pytest.raises(SandlotError):
                    await work
        assert record.read_bytes() == before
        assert (await looks.stat_file(box, "/root/d", False)).kind == "directory"
    finally:
        await box.destroy()
        await driver.close()
        directory.remove()


async def links(box: files.Box, name: str) -> None:
    """A link in the box, as a tar brings it: it is the box's own, whoever asked for it."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, f"/proc/self/fd/{name}" if name.isdigit() else f"/proc/self/{name}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(info)
    read, write = os.pipe2(os.O_CLOEXEC)
    os.write(write, packed.getvalue())
    os.close(write)
    try:
        await box.unpack("/root", read)
    finally:
        os.close(read)


@pytest.mark.control
async def test_control_who_follows_such_a_link_writes_what_it_has_open(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("")
    held = os.open(tmp_path / "record", os.O_RDWR | os.O_CLOEXEC)
    (tmp_path / "link").symlink_to(f"/proc/self/fd/{held}")
    (tmp_path / "link").write_text("lifetime\n")
    assert (tmp_path / "record").read_text() == "lifetime\n"
    os.close(held)

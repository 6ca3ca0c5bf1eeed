"""Attack: swap a path while the node uses it, in tight loops: symlinks by rename, whole directories by RENAME_EXCHANGE,
links of /proc (`/proc/self/root`, `/proc/1/root`, `/proc/self/cwd`), hard links.

Must hold: what the node reads is never a file of the host, what it writes never lands there. The control is the same
swapping program against a node that would open the path itself, on the host.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import Volume
from sandlot.errors import SandlotError
from tests.support.hostile import Arena

PROMISE = "files"

SECRET = b"of the host"
SECONDS = 20.0
# argv: the directory to work in, then where its `way` shall lead. Goes on until `stop` is there.
SWAP = """
import ctypes, os, sys
here, *targets = sys.argv[1:]
libc = ctypes.CDLL(None)
os.makedirs(f"{here}/real", exist_ok=True)
os.makedirs(f"{here}/other", exist_ok=True)
open(f"{here}/real/file", "w").write("inside")
os.symlink(f"{here}/real", f"{here}/way")
print("ready", flush=True)
while not os.path.exists(f"{here}/stop"):
    for target in (f"{here}/real", *targets):
        os.symlink(target, f"{here}/new")
        os.rename(f"{here}/new", f"{here}/way")
        # RENAME_EXCHANGE: a directory becomes a link and back, with nothing in between
        libc.renameat2(-100, f"{here}/way".encode(), -100, f"{here}/real".encode(), 2)
        libc.renameat2(-100, f"{here}/way".encode(), -100, f"{here}/real".encode(), 2)
        try:
            os.link(f"{here}/way", f"{here}/hard")
            os.unlink(f"{here}/hard")
        except OSError: pass
"""


def ways_to(path: Path) -> list[str]:
    prefixes = ("", "/proc/self/root", "/proc/1/root", "/proc/self/cwd", "/proc/thread-self/root/..", "/../../..")
    return [f"{prefix}{path}" for prefix in (*prefixes, "/proc/self/fd/3/..", "/dev/fd/../root")]


async def swapping(arena: Arena, tmp_path: Path, tries: int) -> tuple[list[bytes], int]:
    """What the node read, and how often it wrote, while a box swapped: so often, or for half a program's time."""
    (tmp_path / "file").write_bytes(SECRET)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(folder.stat().st_mode | 0o777)
    box = await arena.box()
    swapper = asyncio.create_task(arena.python(SWAP, "/tmp", *ways_to(tmp_path), box=box))
    read, written = [], 0
    try:
        async with asyncio.timeout(SECONDS):
            while not (await box.run("test -L /tmp/way")).ok:
                assert not swapper.done()
        until = time.monotonic() + SECONDS / 2
        for _ in range(tries):
            if time.monotonic() > until:
                break
            with suppress(SandlotError):
                read.append(await box.read_file("/tmp/way/file"))
            with suppress(SandlotError):
                await box.write_file("/tmp/way/escaped", b"caught")
                written += 1
    finally:
        await box.write_file("/tmp/stop", b"")
    assert (await swapper).ok
    return read, written


async def test_what_is_swapped_stays_inside(arena: Arena, tmp_path: Path) -> None:
    read, written = await swapping(arena, tmp_path, 400)
    assert set(read) == {b"inside"}
    assert written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "state"]
    for folder in ("/tmp", "/etc", "/"):
        assert not Path(folder, "escaped").exists()


@pytest.mark.control
async def test_control_a_node_that_opens_on_the_host_is_led_out(arena: Arena, tmp_path: Path) -> None:
    """The same program on a directory that both see, and the naive way to read from it."""
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    for folder in (secret, shared):
        folder.mkdir()
        folder.chmod(0o777)
    (secret / "file").write_bytes(SECRET)
    box = await arena.box(volumes=(Volume(source=str(shared), target=str(shared), read_only=False),))
    swapper = asyncio.create_task(arena.python(SWAP, str(shared), str(secret), box=box))
    found = b""
    async with asyncio.timeout(SECONDS):
        while found != SECRET:
            await asyncio.sleep(0)
            path = shared / "way" / "file"
            with suppress(OSError):
                if path.is_file():
                    found = path.read_bytes()
    (shared / "stop").touch()
    assert (await swapper).ok

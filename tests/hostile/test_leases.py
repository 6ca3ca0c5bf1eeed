"""Attack: take leases on files of the host's /usr, and of a read-only volume, for which it is enough to own the file
inside and have it open for reading: whoever opens or runs it then waits, on the host, in the node, in another box.

Must hold: no profile gives a lease; the files can be opened by anybody meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandlot.api import Volume
from sandlot.drivers.native import seccomp
from tests.support.calls import CALL, answers
from tests.support.hostile import PYTHON, Arena, leases

PROMISE = "system call filter"

# Seldom run. `hold` says what became of a lease for writing on each, by both ways to ask for one.
SHARED = Path("/usr/bin/tsort")
LEASE = (
    CALL
    + """
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    say(f"lease_{path}", call("fcntl", fd, 1024, 1))
    say(f"high_{path}", call("fcntl", fd, 1 << 32 | 1024, 1))
    say(f"delegation_{path}", call("fcntl", fd, 1040, b"\\0" * 16))
    say(f"flags_{path}", call("fcntl", fd, 1, 0))
sys.stdin.readline()
"""
)


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    file = tmp_path / "shown" / "file"
    file.parent.mkdir()
    file.write_text("text")
    return Volume(source=str(file.parent), target="/data")


async def test_no_profile_gives_a_lease(arena: Arena, volume: Volume) -> None:
    for words in ({}, {"profile": "strict"}, {"profile": "debug"}, {"nested": True}, {"setuid": True}):
        said = answers((await arena.python(LEASE, str(SHARED), "/data/file", volumes=(volume,), **words)).stdout)
        assert {answer for word, answer in said.items() if not word.startswith("flags")} == {"EPERM"}, words
        assert {answer for word, answer in said.items() if word.startswith("flags")} == {"ok"}, words
        assert len(said) == 8


def waits(path: Path) -> bool:
    """Whether whoever opens the file would have to wait for somebody inside."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except BlockingIOError:
        return True
    return False


async def held_up(arena: Arena, volume: Volume, outside: Path, inside: str, without: object = None) -> bool:
    """Whether a box that tries to take a lease on a file holds up the host, which opens it."""
    box = await arena.box(volumes=(volume,), without=without)
    program = f"{CALL}import signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); fd = os.open(sys.argv[1], 0)\n"
    program += 'call("fcntl", fd, 1024, 1); open("/tmp/tried", "w").close(); time.sleep(60)'
    holding = asyncio.create_task(box.run([PYTHON, "-I", "-S", "-c", program, inside], timeout=60))
    try:
        assert (await box.run("until test -e /tmp/tried; do sleep 0.01; done", timeout=20)).ok
        return waits(outside)
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


async def test_nobody_outside_waits(arena: Arena, volume: Volume) -> None:
    assert not await held_up(arena, volume, SHARED, str(SHARED))
    assert not await held_up(arena, volume, Path(volume.source, "file"), "/data/file")


@pytest.mark.control
@pytest.mark.skipif(not seccomp.program(), reason="there is no filter here")
async def test_control_with_leases_allowed_the_host_waits(arena: Arena, volume: Volume) -> None:
    assert await held_up(arena, volume, Path(volume.source, "file"), "/data/file", leases)
    if os.geteuid() == 0 and arena.keeps("file owners"):  # else nobody inside owns the host's files
        assert await held_up(arena, volume, SHARED, str(SHARED), leases)

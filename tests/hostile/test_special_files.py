"""Attack: let the node wait for ever, or fill its memory, by what a path leads to: a pipe nobody writes to, endless
devices, loops, sockets, leased files, the node's own links in /proc, files of a terabyte and files that grow; let it
write to the kernel with its own rights, by a link where something is uploaded.

Must hold: each is answered soon, by an error or by at most 64 MiB, and nothing is written to /proc or /sys. The
controls read and write a plain file beside them, and write to /proc from outside.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandlot.errors import InvalidRequest, SandlotError
from tests.support.calls import CALL
from tests.support.hostile import Arena, leases, seen_from_outside

PROMISE = "files"

SECONDS = 20.0  # of patience with all of them together, on a slow machine

MAKE = (
    CALL
    + """
import socket
os.chdir("/tmp")
os.mkfifo("fifo")
os.symlink("/dev/zero", "zero")
os.symlink("/dev/full", "full")
os.symlink("loop", "loop")
os.symlink("/proc/self/fd/3", "control")
os.symlink("/proc/self/fd/0", "input")
os.symlink("/proc/1/fd/3", "first")
os.symlink("/proc/kmsg", "kmsg")
os.symlink("/dev/ptmx", "terminal")
socket.socket(socket.AF_UNIX).bind("socket")
os.truncate(os.open("huge", os.O_CREAT | os.O_WRONLY), 1 << 40)
"""
)
NAMES = ("fifo", "zero", "full", "loop", "control", "input", "first", "kmsg", "terminal", "socket")


async def test_special_files_are_refused_at_once(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.python(MAKE, box=box)).ok
    async with asyncio.timeout(SECONDS):
        for path in (*(f"/tmp/{name}" for name in NAMES if name != "kmsg"), "/tmp", "/tmp/huge", "/tmp/loop/x"):
            with pytest.raises(SandlotError):
                await box.read_file(path)
        for path in (
            *(f"/tmp/{name}" for name in NAMES),
            "/tmp",
            "/proc/1/mem",
            "/proc/self/exe",
            "/proc/sys/kernel/hostname",
        ):
            with pytest.raises(SandlotError):
                await box.write_file(path, b"x")
    assert (await box.run("echo lives")).stdout == "lives\n"


# Puts a link where the owner is about to upload something, to a file in which the kernel asks who writes.
SCORE = """
import os
os.symlink(f"/proc/{os.getpid()}/" + sys.argv[1], "/root/report")
hold(open("/proc/self/oom_score_adj").read().strip())
"""


async def test_nothing_is_written_to_the_kernels_files_with_the_nodes_rights(arena: Arena) -> None:
    for name in (
        "oom_score_adj",
        "comm",
        "timerslack_ns",
        "setgroups",
        "clear_refs",
        "coredump_filter",
        "attr/current",
    ):
        box = await arena.box()
        async with arena.holding("import sys" + SCORE, name, box=box):
            with pytest.raises(InvalidRequest, match=r"the kernel's own|no file|denied"):
                await box.write_file("/root/report", b"321")
            assert "321" not in (await box.run("cat /proc/[0-9]*/oom_score_adj")).stdout.split()
    with pytest.raises(InvalidRequest):
        await box.write_file("/sys/kernel/notes", b"321")


@pytest.mark.control
async def test_control_from_outside_the_node_may_write_there(arena: Arena) -> None:
    box = await arena.box()
    async with arena.holding("import sys" + SCORE, "oom_score_adj", f"score_{box.id}", box=box):
        (pid,) = seen_from_outside(f"score_{box.id}")
        Path(f"/proc/{pid}/oom_score_adj").write_text("321")
        assert "321" in (await box.run("cat /proc/[0-9]*/oom_score_adj")).stdout.split()


# A lease makes whoever opens the file wait until it is given back. (The filter forbids them: test_leases.py.)
LEASE = """
import fcntl, os, signal, time
fd = os.open("/tmp/leased", os.O_CREAT | os.O_RDWR)
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("ready", flush=True)
while not os.path.exists("/tmp/stop"): time.sleep(0.01)
"""


async def test_a_leased_file_does_not_hold_up_the_node(arena: Arena) -> None:
    box = await arena.box(without=leases)
    holding = asyncio.create_task(arena.python(LEASE, box=box))
    async with asyncio.timeout(SECONDS):
        while not (await box.run("grep -q LEASE /proc/locks")).ok:
            pass
        with pytest.raises(SandlotError):
            await box.read_file("/tmp/leased")
    await box.write_file("/tmp/stop", b"")
    assert (await holding).ok


GROW = """
import os
with open("/tmp/growing", "wb") as file:
    while not os.path.exists("/tmp/stop"):
        file.write(b"x" * 65536)
        if file.tell() > 30 << 20: file.seek(0); file.truncate()
"""


async def test_a_file_that_grows_and_shrinks_ends_all_the_same(arena: Arena) -> None:
    box = await arena.box()
    growing = asyncio.create_task(arena.python(GROW, box=box))
    async with asyncio.timeout(SECONDS):
        while not (await box.run("test -s /tmp/growing")).ok:
            pass
        for _ in range(5):
            assert len(await box.read_file("/tmp/growing")) <= 64 << 20
    await box.write_file("/tmp/stop", b"")
    assert (await growing).ok


@pytest.mark.control
async def test_control_a_plain_file_beside_them_is_read_and_written(arena: Arena) -> None:
    box = await arena.box()
    assert (await arena.python(MAKE, box=box)).ok
    await box.write_file("/tmp/plain", b"text")
    assert await box.read_file("/tmp/plain") == b"text"

"""Attack: take memory that belongs to no process, so that it is not counted or outlives whoever took it: files in
/dev/shm, anonymous files, System V segments.

Must hold: files in /dev/shm count as the box's disk; the rest counts as its memory, and ends at its limit; nothing of
it outlives the box.
"""

from __future__ import annotations

import pytest

from sandlot.api import Limits
from tests.support.hostile import Arena

PROMISE = "disk limit"

FILL = "head -c 200M /dev/zero > /dev/shm/big; wc -c < /dev/shm/big"
ANONYMOUS_FILES = """
import os
taken, block = 0, b"x" * (1 << 20)
for _ in range(30):
    fd = os.memfd_create("none")
    for _ in range(10): taken += os.write(fd, block)
print(taken >> 20)
"""
SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
taken = 0
for _ in range(30):
    at = libc.shmat(libc.shmget(0, 10 << 20, 0o1600), None, 0)
    ctypes.memset(at, 1, 10 << 20)
    taken += 10
    libc.shmdt(ctypes.c_void_p(at))
print(taken)
"""


async def test_shared_memory_counts_as_disk(arena: Arena) -> None:
    box = await arena.box()
    result = await arena.sh(FILL, box=box)
    assert "No space" in result.stderr
    assert int(result.stdout) <= arena.limits.disk
    assert (await box.stats()).disk <= arena.limits.disk
    assert (await box.run("rm /dev/shm/big; echo lives > /dev/shm/small; cat /dev/shm/small")).stdout == "lives\n"


@pytest.mark.control
async def test_control_a_larger_disk_takes_it(arena: Arena) -> None:
    assert int((await arena.sh(FILL, limits=Limits(disk="500M"))).stdout) == 200 << 20


@pytest.mark.promise("memory limit")
async def test_memory_without_a_name_counts_as_memory(arena: Arena) -> None:
    neighbour = await arena.box()
    for program in (ANONYMOUS_FILES, SEGMENTS):
        assert (await arena.python(program)).oom, program
        assert (await neighbour.run("echo lives")).stdout == "lives\n", program


@pytest.mark.control
@pytest.mark.promise("memory limit")
async def test_control_with_more_memory_it_is_given(arena: Arena) -> None:
    for program in (ANONYMOUS_FILES, SEGMENTS):
        assert (await arena.python(program, limits=Limits(memory="1G"))).stdout == "300\n", program

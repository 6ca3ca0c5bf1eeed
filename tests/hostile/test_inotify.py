"""Attack: use up inotify instances and watches, of which the host gives each user so many.

Must hold: both end at the box's own limit; while it holds all of its own a neighbour has as many, and the node's user
too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile import Arena, unlimited_inotify

PROMISE = "kernel objects"

TAKE = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
count = 0
while count < 1000 and libc.inotify_init() >= 0: count += 1
hold(count, errno.errorcode.get(ctypes.get_errno()))
"""
# Watches are counted once for each pair of instance and file: 100 × 700.
WATCHES = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
names = [f"/tmp/{n}".encode() for n in range(700)]
for name in names: open(name, "w").close()
count, error = 0, None
for _ in range(100):
    instance = libc.inotify_init()
    for name in names:
        if error is None and libc.inotify_add_watch(instance, name, 2) < 0: error = errno.errorcode[ctypes.get_errno()]
        count += error is None
hold(count, error)
"""
HOST_WATCHES = int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())


async def test_instances_end_and_a_neighbour_has_as_many_meanwhile(arena: Arena) -> None:
    async with arena.holding(TAKE, box=await arena.box()) as first:
        count, error = first.split()
        assert (error, 0 < int(count) <= 128) == ("EMFILE", True)
        async with arena.holding(TAKE, box=await arena.box()) as second:
            assert second == first


@pytest.mark.control
async def test_control_in_one_box_a_second_finds_none_left(arena: Arena) -> None:
    box = await arena.box()
    async with arena.holding(TAKE, box=box):
        again = await arena.python("def hold(*words): print(*words)\n" + TAKE, box=box)
        assert again.stdout == "0 EMFILE\n"


async def test_watches_end_and_a_neighbour_has_its_own_meanwhile(arena: Arena) -> None:
    async with arena.holding(WATCHES, box=await arena.box()) as first:
        count, error = first.split()
        assert (error, int(count)) == ("ENOSPC", min(65_536, HOST_WATCHES))
        few = "def hold(*words): print(*words)\n" + WATCHES.replace("range(100)", "range(2)")
        assert (await arena.python(few)).stdout == "1400 None\n"


@pytest.mark.control
async def test_control_without_the_boxes_limit_only_the_hosts_remains(arena: Arena) -> None:
    async with arena.holding(WATCHES, box=await arena.box(without=unlimited_inotify)) as said:
        assert int(said.split()[0]) == min(70_000, HOST_WATCHES)

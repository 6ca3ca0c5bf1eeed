"""Attack: guess what another box drew at random, from what oneself drew at the same moment: both come from one program
that was forked a moment ago, as boxes do.

Must hold: no two boxes, and no two processes of a box, draw the same bytes, uuids or addresses, nor the same stack
canary and pointers that the kernel hands to a new program.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.hostile import PYTHON, Arena

PROMISE = "processes"

DRAW = """
import os, uuid
print(open("/dev/urandom", "rb", buffering=0).read(16).hex())
print(open("/dev/random", "rb", buffering=0).read(16).hex())
print(os.getrandom(16).hex())
print(open("/proc/sys/kernel/random/uuid").read().strip())
print(uuid.uuid4().hex)
print(open("/proc/self/auxv", "rb").read().hex())  # holds 16 random bytes' address, which is random too
print(next(line for line in open("/proc/self/maps") if "[stack]" in line).split()[0])
"""
LINES = 7


async def drawn(arena: Arena, boxes: int, processes: int) -> list[tuple[str, ...]]:
    made = [await arena.box() for _ in range(boxes)]
    results = await asyncio.gather(*(arena.python(DRAW, box=box) for box in made for _ in range(processes)))
    return [tuple(result.stdout.split()) for result in results]


async def test_boxes_that_draw_at_the_same_moment_draw_different_things(arena: Arena) -> None:
    found = await drawn(arena, boxes=4, processes=2)
    assert all(len(each) == LINES for each in found)
    for column in zip(*found, strict=True):
        assert len(set(column)) == len(found), column


@pytest.mark.control
async def test_control_a_generator_with_a_shared_seed_is_found_out(arena: Arena) -> None:
    """The same comparison, of what is the same in all boxes: a seed that a program brings along."""
    boxes = [await arena.box() for _ in range(2)]
    seeded = "import random; print(random.Random(7).randbytes(16).hex())"
    results = await asyncio.gather(*(box.run([PYTHON, "-I", "-c", seeded]) for box in boxes))
    assert len({result.stdout for result in results}) == 1

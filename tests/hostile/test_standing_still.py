"""Attack: go on while the box is paused, or while a snapshot of it is made: by processes that wake one another with
SIGCONT, that multiply all the time and do each piece of work in a new one.

Must hold: nothing is written while the box is paused, and a snapshot is of one moment: of two files that are written
one after the other it never has one that is ahead of the other. Afterwards everything goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sandlot.drivers.native.box import NativeBox
from sandlot.sandbox import Sandbox
from tests.support.hostile import PYTHON, Arena

PROMISE = "standing still"

# Four that wake all others without end; and one after the other, each a child of the one before, that count.
COUNT = """
import os, signal
for _ in range(4):
    if os.fork() == 0:
        while True:
            try: os.kill(-1, signal.SIGCONT)
            except ProcessLookupError: pass
os.makedirs("/srv/count", exist_ok=True)
first = os.open("/srv/count/1", os.O_CREAT | os.O_RDWR)
for number in range(400):  # which lie between the two, and take a while to copy
    with open(f"/srv/count/between-{number}", "wb") as file: file.write(b"x" * 50_000)
last = os.open("/srv/count/9", os.O_CREAT | os.O_RDWR)
at = 0
while True:
    for _ in range(50):
        at += 1
        for file in (first, last): os.pwrite(file, b"%020d" % at, 0)
    if child := os.fork(): os._exit(0)
"""


@asynccontextmanager
async def counting(arena: Arena) -> AsyncIterator[Sandbox]:
    box = await arena.box()
    running = asyncio.create_task(box.run([PYTHON, "-I", "-S", "-c", COUNT], timeout=60))
    try:
        assert (await box.run("until test -s /srv/count/9; do sleep 0.01; done", timeout=20)).ok
        yield box
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def counts(box: Sandbox) -> tuple[int, int]:
    one, nine = [await box.read_file(f"/srv/count/{name}") for name in "19"]
    return int(one), int(nine)


async def goes_on_while_paused(arena: Arena) -> bool:
    async with counting(arena) as box:
        await arena.node.pause(box.id)
        before = await counts(box)
        await asyncio.sleep(0.3)
        after = await counts(box)
        await arena.node.resume(box.id)
        async with asyncio.timeout(20):
            while await counts(box) <= after:  # noqa: ASYNC110  (the box tells nobody)
                await asyncio.sleep(0.01)
        return before != after


async def apart_in_a_snapshot(arena: Arena) -> int:
    """How far one file is ahead of the other, at most, in some snapshots of a box that counts in both."""
    async with counting(arena) as box:
        most = 0
        for attempt in range(3):
            await arena.node.snapshot(box.id, f"moment-{attempt}")
            copy = await arena.box(image=f"moment-{attempt}")
            one, nine = await counts(copy)
            most = max(most, abs(one - nine))
        return most


async def test_nothing_goes_on_while_a_box_is_paused(arena: Arena) -> None:
    assert not await goes_on_while_paused(arena)


async def test_a_snapshot_is_of_one_moment(arena: Arena) -> None:
    assert await apart_in_a_snapshot(arena) <= 1


@pytest.fixture
def never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def goes_on(*_: object) -> None:
        pass

    monkeypatch.setattr(NativeBox, "_stop", goes_on)


@pytest.mark.control
@pytest.mark.usefixtures("never_stopped")
async def test_control_without_being_stopped_it_goes_on(arena: Arena) -> None:
    assert await goes_on_while_paused(arena)


@pytest.mark.control
@pytest.mark.usefixtures("never_stopped")
async def test_control_without_being_stopped_a_snapshot_is_of_many_moments(arena: Arena) -> None:
    assert await apart_in_a_snapshot(arena) > 1

"""Attack: live longer than the sandbox may: ignore signals, leave daemons, fork on while it ends, stop the first
process, whose clock it is.

Must hold: it ends when its lifetime is over, as `lifetime`, with everything in it; kept by the node and, should that
hang, by the box's first process itself.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from sandlot.api import Ending, SandboxSpec
from sandlot.drivers.base import Spawn
from sandlot.errors import SandboxEnded
from tests.support.hostile import PYTHON, Arena, no_deadline, seen_from_outside

PROMISE = "clean end"

DODGE = """
import os, signal, sys
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGKILL):
    try: os.kill(1, number)
    except OSError: pass
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        while True:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
while True: signal.pause()
"""


async def dodge(arena: Arena, lifetime: float, **spec: Any) -> None:
    box = await arena.box(lifetime=lifetime, **spec)
    mark = f"dodger_{box.id}"
    async with asyncio.timeout(60):
        with pytest.raises(SandboxEnded):
            await box.run([PYTHON, "-I", "-S", "-c", DODGE, mark], timeout=None)
    assert (await box.info()).ending is Ending.LIFETIME
    assert not seen_from_outside(mark)


async def test_a_lifetime_cannot_be_dodged(arena: Arena) -> None:
    await dodge(arena, 0.7)


@pytest.mark.control
async def test_control_without_one_it_runs_on_until_it_is_ended(arena: Arena) -> None:
    box = await arena.box(lifetime=None)
    mark = f"dodger_{box.id}"
    running = asyncio.create_task(box.run([PYTHON, "-I", "-S", "-c", DODGE, mark], timeout=None))
    done, _ = await asyncio.wait((running,), timeout=0.9)
    assert not done
    assert (await box.info()).state == "running"
    await box.close()
    with pytest.raises(SandboxEnded):
        await running
    assert not seen_from_outside(mark)


@pytest.mark.control
async def test_control_without_the_first_processs_clock_the_nodes_remains(arena: Arena) -> None:
    await dodge(arena, 0.7, without=no_deadline)


@pytest.mark.control
async def test_control_without_the_nodes_clock_the_first_processs_remains(arena: Arena) -> None:
    box = await arena.driver.create("sb-clock", SandboxSpec(lifetime=0.7))
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        program = (PYTHON, "-I", "-S", "-c", DODGE, "dodger_clock")
        process = await box.spawn(Spawn(program, {}, "/"), null, null, null)
        async with asyncio.timeout(60):
            assert (await box.death).ending is Ending.LIFETIME
        await process.release()
        assert not seen_from_outside("dodger_clock")
    finally:
        os.close(null)
        await box.destroy()

"""Attack: survive the kill at a timeout by the shape of the tree: deep, wide, stopped, in other sessions, of other
users, adopted, or blocked in a read that nobody answers.

Must hold: at a timeout nothing of the tree is left, what the command had written comes back, and the box goes on.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.hostile import PYTHON, Arena, alive_inside, gone_inside, into_timeout

PROMISE = "command trees"

_WAIT = """
import os, signal, sys
for number in (1, 2, 3, 13, 14, 15): signal.signal(number, signal.SIG_IGN)
def stay():
    os.write(1, b".")
    while True: signal.pause()
"""
SHAPES = {
    "deep": "for _ in range(60):\n    if os.fork(): stay()\nstay()",
    "wide": "for _ in range(60):\n    if os.fork() == 0: stay()\nstay()",
    "stopped": "for _ in range(20):\n    if os.fork() == 0:\n        os.write(1, b'.')\n"
    "        os.kill(os.getpid(), signal.SIGSTOP)\nstay()",
    "sessions": "for _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n        stay()\nstay()",
    "adopted": "for _ in range(20):\n    if os.fork() == 0:\n        if os.fork(): os._exit(0)\n        stay()\nstay()",
    "reading": "read, _ = os.pipe()\nfor _ in range(20):\n    if os.fork() == 0:\n        os.write(1, b'.')\n"
    "        os.read(read, 1)\nstay()",
    "users": "for user in range(1000, 1020):\n    if os.fork() == 0:\n        os.setuid(user)\n        stay()\nstay()",
}


def shapes(arena: Arena) -> list[str]:
    return [shape for shape in SHAPES if arena.users or shape != "users"]


async def test_at_a_timeout_nothing_of_the_tree_is_left(arena: Arena) -> None:
    async def attack(shape: str) -> None:
        box = await arena.box()
        result = await into_timeout(box, [PYTHON, "-I", "-S", "-c", _WAIT + SHAPES[shape], "arbor"])
        assert result.timed_out, shape
        assert result.stdout.startswith("."), shape  # the tree was there, and what it wrote has come back
        assert await gone_inside(box, "arbor"), shape
        assert (await box.run("echo lives")).stdout == "lives\n", shape

    await asyncio.gather(*map(attack, shapes(arena)))


@pytest.mark.control
async def test_control_without_a_timeout_the_tree_stands(arena: Arena) -> None:
    for shape in shapes(arena):
        box = await arena.box()
        # The same program, but the command that started it is over: nothing kills its tree.
        await box.write_file("/root/program", _WAIT + SHAPES[shape])
        start = f"mkfifo said; {PYTHON} -I -S program arbor > said 2>&1 & head -c 20 said"
        assert (await box.run(start)).stdout == "." * 20, shape
        assert await alive_inside(box, "arbor") >= 20, shape
        await box.close()

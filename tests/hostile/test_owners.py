"""Attack: be somebody outside: root of the host by being root inside, or the same as in a neighbour's box, and have
what belongs to them.

Must hold: root inside is nobody outside and nobody in another box, whoever it becomes inside; the host's files have
inside the owners that they have outside. The control shows who the same program is where it is started outside.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from sandlot.sandbox import Sandbox
from tests.support.hostile import PYTHON, Arena, seen_from_outside

PROMISE = "user ids"

OWNED = ("/usr", "/usr/bin", "/usr/bin/su", "/usr/bin/env", "/usr/bin/passwd")
BECOME = (
    "import os, sys; os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(*[int(sys.argv[1])] * 3); hold(os.getuid())"
)


def ids(pid: int) -> set[int]:
    """Who a process is, seen from outside."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {int(number) for words in re.findall(r"^[UG]id:(.*)$", text, re.M) for number in words.split()}


async def outside(arena: Arena, box: Sandbox, user: int) -> set[int]:
    mark = f"somebody_{user}_{box.id}"
    async with arena.holding(BECOME, str(user), mark, box=box) as said:
        assert said == str(user)
        (pid,) = seen_from_outside(mark)
        found = ids(pid)
    await box.run("rm /root/held")
    return found


async def test_nobody_inside_is_anybody_outside(arena: Arena) -> None:
    taken: set[int] = set()
    for _ in range(2):
        box = await arena.box()
        for user in (0, 1000, 65_534):
            (found,) = await outside(arena, box, user)
            assert found >= 65_536  # no user or service of a host
            assert found not in taken
            taken.add(found)


@pytest.mark.control
def test_control_outside_the_same_program_is_who_it_says() -> None:
    program = "import os; print(os.getpid(), flush=True); input()"
    with subprocess.Popen([PYTHON, "-c", program], stdin=-1, stdout=-1, text=True) as started:
        assert started.stdout is not None
        assert ids(int(started.stdout.readline())) == {os.geteuid(), os.getegid()}
        started.communicate("\n")


async def owners(arena: Arena) -> list[tuple[int, int]]:
    said = (await arena.sh(f"stat -c '%u %g' {' '.join(OWNED)}")).stdout
    return [(int(user), int(group)) for user, group in (line.split() for line in said.splitlines())]


@pytest.mark.promise("file owners")
async def test_the_hosts_files_belong_to_the_same_inside(arena: Arena) -> None:
    assert await owners(arena) == [(os.stat(path).st_uid, os.stat(path).st_gid) for path in OWNED]


@pytest.mark.promise("file owners", anyway=True)
async def test_where_they_do_not_it_is_said(arena: Arena) -> None:
    same = await owners(arena) == [(os.stat(path).st_uid, os.stat(path).st_gid) for path in OWNED]
    assert arena.keeps("file owners") is same
    assert any(loss.startswith("file owners: ") for loss in (await arena.box()).losses) is not same

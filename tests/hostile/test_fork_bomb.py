"""Attack: make processes until there are no more, for this box or for the host: by forking, by threads, by a shell
that multiplies, by changing to another user whenever one has used up its share.

Must hold: it ends at the box's own limit, with an error; the box goes on when the bomb is over, a neighbour all the
time.
"""

from __future__ import annotations

import asyncio

import pytest

from sandlot.api import Limits
from tests.support.hostile import Arena, into_timeout

PROMISE = "pids limit"

FORKS = """
import os, signal
made = 0
try:
    while made < 300:
        if os.fork() == 0:
            signal.pause()
        made += 1
except OSError as error:
    print(error.errno, end=" ")
print(made, flush=True)
os.kill(-1, signal.SIGKILL)
"""
THREADS = """
import _thread, os, signal
_thread.stack_size(1 << 16)
made = 0
try:
    while made < 300:
        _thread.start_new_thread(signal.pause, ())
        made += 1
except RuntimeError:
    print(11, end=" ")
print(made, flush=True)
os._exit(0)
"""
# Each user forks on its own: a limit that is counted by user is no limit on the box.
BY_USERS = """
import os, signal
total = 0
def fork():
    try: return os.fork()
    except OSError: return -1
for user in range(1000, 1006):
    read, write = os.pipe()
    child = fork()
    if child == 0:
        os.setuid(user)
        made = 0
        while made < 80 and (child := fork()) > 0: made += 1
        if child: os.write(write, b"%d" % made)
        os.close(write)
        signal.pause()
    os.close(write)
    total += int(os.read(read, 10) or 0)
print(total, flush=True)
os.kill(-1, signal.SIGKILL)
"""
# It says something once a fork has failed. The first shell waits for what never comes: it is there at the timeout.
SHELL = "exec 2>&1; mkfifo $$; bomb() { bomb | bomb & }; bomb; read word < $$"


async def test_it_ends_at_the_boxes_limit(arena: Arena) -> None:
    box = await arena.box()
    for bomb in (FORKS, THREADS):
        error, made = (await arena.python(bomb, box=box)).stdout.split()
        assert error == "11", bomb
        assert int(made) < arena.limits.pids, bomb


@pytest.mark.control
async def test_control_with_a_higher_limit_the_same_bomb_goes_on(arena: Arena) -> None:
    box = await arena.box(limits=Limits(pids=1000))
    for bomb in (FORKS, THREADS):
        assert (await arena.python(bomb, box=box)).stdout.split() == ["300"], bomb


async def test_the_limit_is_the_boxes_whatever_user_forks(arena: Arena) -> None:
    if not arena.users:
        pytest.skip("there is no other user inside")
    assert int((await arena.python(BY_USERS)).stdout) < arena.limits.pids


@pytest.mark.control
async def test_control_with_a_higher_limit_other_users_fork_on(arena: Arena) -> None:
    if not arena.users:
        pytest.skip("there is no other user inside")
    assert int((await arena.python(BY_USERS, limits=Limits(pids=2000))).stdout) == 480


async def test_a_shell_that_multiplies_dies_with_its_command_and_a_neighbour_never_notices(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    bombing = asyncio.create_task(into_timeout(box, SHELL))
    for _ in range(3):
        assert (await neighbour.run("echo $(echo $(echo lives))")).stdout == "lives\n"
    result = await bombing
    assert result.timed_out
    assert "fork" in result.stdout.lower()
    assert (await box.run("echo $(echo lives)")).stdout == "lives\n"

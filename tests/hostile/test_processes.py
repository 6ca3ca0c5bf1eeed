"""Attack: use up the host's processes, escape the death of a command or of the box, signal what is not one's own.

Must hold: a fork bomb ends at the box's limit; a daemon that forks twice, changes session and ignores every signal dies
with its box, and with its command at a timeout; signals reach the box's own processes only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from sandlot.api import Limits
from tests.support.hostile import LIMITS, Arena

BOMB = """
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


async def test_a_fork_bomb_ends_at_the_boxes_limit(arena: Arena) -> None:
    result = await arena.python(BOMB)
    error, made = result.stdout.split()
    assert error == "11"
    assert int(made) < LIMITS.pids


@pytest.mark.control
async def test_control_with_a_higher_limit_the_same_bomb_goes_on(arena: Arena) -> None:
    result = await arena.python(BOMB, limits=Limits(pids=1000))
    assert result.stdout.split() == ["300"]


DAEMON = """
import os, signal, sys, time
if os.fork(): sys.exit()
os.setsid()
if os.fork(): sys.exit()
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
open("/root/daemon", "w").write(str(os.getpid()))
for fd in range(3): os.close(fd)
while True: time.sleep(60)
"""


async def test_a_daemon_dies_with_its_box(arena: Arena) -> None:
    box = await arena.box()
    await arena.python(DAEMON, box=box)
    assert (await box.run("while [ ! -s daemon ]; do :; done; kill -TERM $(cat daemon); kill -0 $(cat daemon)")).ok
    processes = subprocess.run(["pgrep", "-f", "/root/daemon"], capture_output=True, text=True, check=False)
    outside = processes.stdout.split()
    assert outside  # seen from the host, it is there
    await box.close()
    assert not [pid for pid in outside if os.path.exists(f"/proc/{pid}")]


async def test_a_daemon_dies_with_its_command_at_a_timeout(arena: Arena) -> None:
    box = await arena.box()
    wait = f"{DAEMON.replace('sys.exit()', 'time.sleep(600)', 1)}"
    result = await box.run([sys.base_prefix + "/bin/python3", "-I", "-S", "-c", wait], timeout=0.5)
    assert result.timed_out
    left = await box.run("sleep 0.05; pid=$(cat daemon) && kill -0 $pid")
    assert not left.ok


@pytest.mark.control
async def test_control_killing_only_its_group_leaves_the_daemon_alive(arena: Arena) -> None:
    box = await arena.box()
    await arena.python(DAEMON, box=box)  # the command is over, and nobody killed its tree
    assert (await box.run("while [ ! -s daemon ]; do :; done; kill -0 $(cat daemon)")).ok


KILL_EVERYBODY = """
import os
for pid in range(2, 33000):
    try:
        if pid != os.getpid(): os.kill(pid, 9)
    except OSError: pass
"""


async def test_signals_reach_only_the_boxes_own_processes(arena: Arena) -> None:
    box = await arena.box()
    neighbour = await arena.box()
    sleeping = asyncio.create_task(neighbour.run("sleep 1; echo lived"))
    assert (await arena.python(KILL_EVERYBODY, box=box)).ok
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV):
        await box.run(f"kill -{number.value} 1")
    assert (await box.run(f"kill -{signal.SIGKILL.value} -1; echo alive")).signal in (None, signal.SIGKILL)
    assert (await box.run("echo alive")).stdout == "alive\n"
    assert (await sleeping).stdout == "lived\n"


async def test_a_lifetime_cannot_be_dodged(arena: Arena) -> None:
    box = await arena.box(lifetime=0.6)
    dodging = asyncio.create_task(box.run("trap '' TERM HUP INT; while :; do :; done", timeout=20))
    async with asyncio.timeout(10):
        await asyncio.gather(dodging, return_exceptions=True)
    assert (await box.info()).ending == "lifetime"

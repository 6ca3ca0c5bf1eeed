"""Attack: signal what is not one's own: the box's first process, everybody, the host's pids, a neighbour; fill the
queue of signals of the first process; ignore what should end a command.

Must hold: signals reach the box's own processes only; its first process takes no notice of any; a command that ignores
SIGTERM ends all the same.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from tests.support.hostile import PYTHON, Arena, into_timeout

PROMISE = "processes"

KILL_EVERYBODY = """
import os
most = int(open("/proc/sys/kernel/pid_max").read())
for pid in range(2, min(most, 70_000)):
    try:
        if pid != os.getpid(): os.kill(pid, 9)
    except OSError: pass
"""
# By number, and by a descriptor of the process, which needs no number later.
AT_PIDS = """
import os, signal, sys
for pid in map(int, sys.argv[1:]):
    def by_descriptor(number, sent): signal.pidfd_send_signal(os.pidfd_open(number), sent)
    for way in (os.kill, os.killpg, by_descriptor):
        try: way(pid, 9)
        except OSError as error: print(type(error).__name__, end=" ")
        else: print("sent", end=" ")
"""
QUEUE = """
import ctypes, errno
class Value(ctypes.Union): _fields_ = [("number", ctypes.c_int), ("pointer", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
libc.sigqueue.argtypes = (ctypes.c_int, ctypes.c_int, Value)
sent = 0
while sent < 1_000_000 and libc.sigqueue(1, 34 + sent % 30, Value()) == 0: sent += 1
print(sent > 0)
"""


async def test_everybody_is_only_those_inside(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    await neighbour.run("mkfifo go")
    waiting = asyncio.create_task(neighbour.run("cat go"))
    assert (await arena.python(KILL_EVERYBODY, box=box)).ok
    assert (await box.run("kill -9 -1; echo alive")).signal in (None, signal.SIGKILL)
    assert (await box.run("echo alive")).stdout == "alive\n"
    assert (await neighbour.run("echo lived > go")).ok
    assert (await waiting).stdout == "lived\n"


@pytest.mark.control
async def test_control_in_its_own_box_the_same_program_kills(arena: Arena) -> None:
    box = await arena.box()
    await box.run("mkfifo go")
    waiting = asyncio.create_task(box.run("echo > began; cat go"))
    assert (await box.run("until [ -s began ]; do sleep 0.01; done", timeout=30)).ok
    assert (await arena.python(KILL_EVERYBODY, box=box)).ok
    assert (await waiting).signal == signal.SIGKILL


async def test_the_first_process_takes_no_notice_of_signals(arena: Arena) -> None:
    box = await arena.box()
    program = "import os\nfor number in range(1, 65):\n    if number not in (32, 33): os.kill(1, number)"
    for _ in range(3):
        assert (await arena.python(program, box=box)).ok
    assert (await arena.python(QUEUE, box=box)).stdout == "True\n"  # until its queue is full
    for _ in range(3):  # it still learns of the ends of commands
        assert (await box.run("true & sleep 0; echo alive")).stdout == "alive\n"


@pytest.mark.control
async def test_control_another_process_ends_at_the_first_of_them(arena: Arena) -> None:
    result = await arena.sh("cat /dev/zero > /dev/null & kill -1 $!; wait $!; echo $?")
    assert result.stdout == f"{128 + signal.SIGHUP}\n"


async def test_the_hosts_numbers_mean_nothing_inside(arena: Arena) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as outside:
        pids = [str(pid) for pid in (outside.pid, os.getpid(), os.getppid()) if pid > 50]  # lower ones exist inside too
        result = await arena.python(AT_PIDS, *pids)
        assert set(result.stdout.split()) == {"ProcessLookupError"}
        assert outside.poll() is None
        assert outside.stdin is not None
        outside.stdin.close()


@pytest.mark.control
def test_control_outside_the_same_program_reaches_it() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as outside:
        words = [PYTHON, "-I", "-S", "-c", AT_PIDS, str(outside.pid)]
        assert "sent" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert outside.wait(30) == -signal.SIGKILL


async def test_a_command_that_ignores_signals_ends_at_its_timeout(arena: Arena) -> None:
    box = await arena.box()
    result = await into_timeout(box, "trap '' TERM HUP INT QUIT USR1; echo ready; while :; do :; done")
    assert (result.timed_out, result.signal) == (True, signal.SIGKILL)
    assert (await box.run("trap '' TERM; kill $$; echo alive")).stdout == "alive\n"  # it does ignore them

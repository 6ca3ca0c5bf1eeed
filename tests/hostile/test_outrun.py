"""Attack: outrun the kill at a timeout: fork and exit faster than a process table can be read, so that a pid is gone
before a signal reaches it; or kill one's own first process when it is stopped, so that the rest leave its tree.

Must hold: at a timeout nothing of the tree is left, and the box goes on. (Where there is no cgroup to kill, what
cannot be caught is ended by ending everything in the box but its first process.)
"""

from __future__ import annotations

import pytest

from tests.support.hostile import PYTHON, Arena, alive_inside, gone_inside, into_timeout

PROMISE = "command trees"

RUNNERS = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead take no room
for _ in range(12):
    if os.fork() == 0:
        while True:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
os.write(1, b"ready ")
signal.pause()
"""
# The watchers are the last that a walk comes to.
PATRICIDES = """
import os, signal
first = os.getpid()
for _ in range(70):
    if os.fork() == 0: signal.pause()
for _ in range(6):
    if os.fork() == 0:
        stat = os.open(f"/proc/{first}/stat", os.O_RDONLY)
        try:
            while os.pread(stat, 400, 0).rsplit(b")", 1)[1].split()[0] != b"T": pass
            os.kill(first, signal.SIGKILL)
        except OSError: pass
        signal.pause()
os.write(1, b"ready ")
signal.pause()
"""

# They are gone before they can be listed, but each takes a pid. `read` is the shell's own: it takes none.
COUNT = """
busy() { n=0; while [ $n -lt 30000 ]; do n=$((n+1)); done; }
made() { read -r _ _ _ _ a < /proc/loadavg; busy; read -r _ _ _ _ b < /proc/loadavg; [ $a -lt $b ]; }
"""


async def test_what_forks_faster_than_it_can_be_seen_is_killed(arena: Arena) -> None:
    box = await arena.box()
    result = await into_timeout(box, [PYTHON, "-I", "-S", "-c", RUNNERS, "hare"])
    assert (result.timed_out, result.stdout) == (True, "ready ")
    assert (await box.run(f"{COUNT} while made; do :; done", timeout=20)).ok


@pytest.mark.control
async def test_control_when_only_the_first_process_is_killed_they_run_on(arena: Arena) -> None:
    box = await arena.box()
    start = f"{PYTHON} -I -S -c '{RUNNERS}' hare > said & until [ -s said ]; do :; done"
    assert (await box.run(f"touch said; {start}; kill -9 $!; wait $!; echo $?")).stdout == "137\n"
    assert (await box.run(f"{COUNT} made")).ok


async def test_what_kills_its_own_first_process_is_killed(arena: Arena) -> None:
    box = await arena.box()
    for _ in range(4):  # a race, which they may lose
        result = await into_timeout(box, [PYTHON, "-I", "-S", "-c", PATRICIDES, "orphan"])
        assert (result.timed_out, result.stdout) == (True, "ready ")
        assert await gone_inside(box, "orphan")


@pytest.mark.control
async def test_control_when_the_first_process_is_only_stopped_the_others_kill_it_and_live(arena: Arena) -> None:
    box = await arena.box()
    start = f"{PYTHON} -I -S -c '{PATRICIDES}' orphan > said & until [ -s said ]; do :; done"
    assert (await box.run(f"touch said; {start}; kill -STOP $!; wait $!; echo $?")).stdout == "137\n"
    assert await alive_inside(box, "orphan") > 70

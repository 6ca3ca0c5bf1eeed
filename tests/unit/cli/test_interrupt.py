"""Promises of how Ctrl-C and SIGTERM end a command:

1. The first signal cancels the work once; later ones, of either kind, change nothing until the teardown is done. So it
   is on both event loops, and what the loop itself tears down as it closes is waited for too.
2. The exit status is 130 for Ctrl-C and 143 for SIGTERM; a signal that comes too late to cancel changes nothing.
3. Before there is anything to tear down, in the middle of the imports too, a signal ends the program quietly.
4. `sandlot run` and `sandlot doctor` leave nothing, however often they are told: no process, no directory, no cgroup.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.cli import interrupt

COMMAND = [sys.executable, "-c", "from sandlot.cli.main import main; main()"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SANDLOT_")}

SLOW_TEARDOWN = """
import asyncio, sys
from sandlot.cli import interrupt
async def at_the_loop_s_end():
    try:
        yield
    finally:
        await asyncio.sleep(0.3)
        print("loop closed", flush=True)
async def work():
    keeper = at_the_loop_s_end()
    await anext(keeper)
    try:
        print("begun", flush=True)
        await asyncio.sleep(60)
    finally:
        print("cancelled", flush=True)
        await asyncio.sleep(0.3)
        print("torn down", flush=True)
try:
    interrupt.run(work(), interrupt.fast_loop() if sys.argv[1] == "fast" else None)
except interrupt.Interrupted as told:
    sys.exit(told.code)
"""


@pytest.mark.parametrize("loop", ["plain", "fast"])
@pytest.mark.parametrize(("first", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_later_signals_do_not_cut_a_teardown_short(loop: str, first: int, status: int) -> None:
    command = [sys.executable, "-c", SLOW_TEARDOWN, loop]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        running.send_signal(first)
        assert running.stdout.readline() == "cancelled\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            running.send_signal(number)
        assert running.stdout.readline() == "torn down\n"
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (status, "loop closed\n", "")


def test_a_signal_that_comes_too_late_changes_nothing() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGTERM)  # and nothing is awaited after it
        return "done"

    assert interrupt.run(work()) == "done"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("module", ["typer", "pydantic", "asyncio"])
def test_a_signal_during_the_imports_is_quiet(module: str, number: int, status: int) -> None:
    program = f"""
import os, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Interrupting())
from sandlot.cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program, "doctor"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.fixture
def native(native_reason: str | None) -> Iterator[None]:
    if native_reason:
        pytest.skip(native_reason)
    yield


def told_again_and_again(command: list[str], state: Path, first: int, ready: str) -> int:
    """Run `command` until `ready` (glob in its node's directory, or a process's words) is there, then send `first`, and
    both signals again until it ends. Gives the exit status."""
    name, *words = command
    running = subprocess.Popen(
        [*COMMAND, name, "--state-dir", str(state), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=CLEAN,
    )
    end = time.monotonic() + 20
    while not (list(state.glob(ready)) if "*" in ready else processes(ready)):
        assert time.monotonic() < end and running.poll() is None, running.communicate()
        time.sleep(0.005)
    names = {path.name for path in state.glob("node-*")}
    running.send_signal(first)
    while running.poll() is None:
        assert time.monotonic() < end + 20
        time.sleep(0.003)
        for number in (signal.SIGINT, signal.SIGTERM):
            running.send_signal(number)
    out, err = running.communicate(timeout=20)
    assert (out, err) == ("", "")
    assert list(state.iterdir()) == []
    assert [path for name in names for path in Path("/sys/fs/cgroup").rglob(f"*{name}*")] == []
    return running.returncode


def processes(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode() == words:
                found.append(path.parent.name)
        except OSError:
            continue  # it ended while we looked
    return found


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("first", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_leaves_nothing_however_often_it_is_told(tmp_path: Path, first: int, status: int) -> None:
    command = ["run", "--", "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do sleep 6071 & done; sleep 6072"]
    assert told_again_and_again(command, tmp_path, first, "sleep 6072") == status
    assert processes("sleep 6071") == processes("sleep 6072") == []


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("first", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_doctor_leaves_nothing_however_often_it_is_told(tmp_path: Path, first: int, status: int) -> None:
    assert told_again_and_again(["doctor"], tmp_path, first, "node-*") == status

"""Promises:
1. Methods of an object in another process are called as if it were here: many at once, values and errors both ways.
2. A call that is cancelled here is cancelled there.
3. When the child dies, pending and later calls raise TrainingFault naming it; close() leaves no process.
4. When the parent dies, the child ends.
5. A call that hangs ends at a deadline that says which part; an answer that cannot be sent is an error, not a hang.
6. What the folder that it is started in holds is not imported.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import Conflict, DeadlineExceeded, HostFault, TrainingFault
from sandlot.rl.process import Child

PART = """
import asyncio, os, time
from sandlot.errors import Conflict

class Part:
    def __init__(self, start):
        self.value, self.cancelled = start, 0
    def add(self, n, times=1):
        self.value += n * times
        return self.value
    async def wait(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return seconds
    def taken(self):
        raise Conflict("it is taken", "take another")
    def broken(self):
        return {}["key"]
    def full(self):
        open("/nowhere/at/all", "w")
    def out_of_space(self):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    def environment(self):
        return {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")}
    def count(self):
        return self.cancelled
    def unsendable(self):
        return lambda: None
    async def quit(self):
        raise SystemExit("no licence")
    def hang(self):
        time.sleep(60)
    def pid(self):
        return os.getpid()

def double(n, *, plus=0):
    return 2 * n + plus
"""


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[Child]:
    (tmp_path / "part.py").write_text(PART)
    started = await Child.start("part", tmp_path / "part.log")
    yield started
    await started.close()


async def make(child: Child, tmp_path: Path) -> Any:
    return await child.make(f"{tmp_path}/part.py:Part", 10)


async def test_methods_are_called_as_if_it_were_here(child: Child, tmp_path: Path) -> None:
    part = await make(child, tmp_path)
    assert await part.add(2, times=3) == 16
    assert await child.function(f"{tmp_path}/part.py:double", 4, plus=1) == 9
    slow = asyncio.ensure_future(part.wait(0.2))
    assert await part.add(1) == 17  # not behind the slow one
    assert not slow.done()
    assert await slow == 0.2
    assert await part.environment() == {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}


async def test_errors_come_back_as_what_they_were(child: Child, tmp_path: Path) -> None:
    part = await make(child, tmp_path)
    with pytest.raises(Conflict, match="it is taken") as caught:
        await part.taken()
    assert caught.value.hint == "take another"
    with pytest.raises(TrainingFault, match="broken: KeyError: 'key'"):
        await part.broken()
    with pytest.raises(HostFault, match="No such file or directory"):
        await part.full()
    with pytest.raises(HostFault, match="No space left on device"):
        await part.out_of_space()
    assert "KeyError" in (tmp_path / "part.log").read_text()


async def test_a_cancelled_call_is_cancelled_there(child: Child, tmp_path: Path) -> None:
    part = await make(child, tmp_path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await part.wait(60)
    assert await part.wait(0.01) == 0.01  # behind the cancellation, on the same channel
    assert await part.count() == 1


async def test_a_dead_child_is_named(child: Child, tmp_path: Path) -> None:
    part = await make(child, tmp_path)
    pid, waiting = await part.pid(), asyncio.ensure_future(part.wait(60))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    for call in (waiting, part.add(1)):
        with pytest.raises(TrainingFault, match="the part process died: killed by SIGKILL"):
            await call
    await child.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_a_hanging_call_names_the_part(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(PART)
    child = await Child.start("part", tmp_path / "part.log", patience=3)
    part = await make(child, tmp_path)
    with pytest.raises(DeadlineExceeded, match=r"`hang` in the part process did not finish within 3 s"):
        await part.hang()
    await child.close()  # although its thread still hangs


async def test_an_answer_that_cannot_be_sent_is_an_error(child: Child, tmp_path: Path) -> None:
    part = await make(child, tmp_path)
    with pytest.raises(TrainingFault, match=r"unsendable: .*pickle"):
        await asyncio.wait_for(part.unsendable(), 10)
    assert await part.add(1) == 11


async def test_a_child_that_breaks_tells_status_and_traceback(child: Child, tmp_path: Path) -> None:
    part = await make(child, tmp_path)
    with pytest.raises(TrainingFault, match="it ended with status 1"):
        await part.quit()
    assert "SystemExit: no licence" in (tmp_path / "part.log").read_text()


async def test_a_module_in_the_folder_it_is_started_in_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part.py").write_text(PART)
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    child = await Child.start("part", tmp_path / "part.log")
    assert await (await make(child, tmp_path)).add(1) == 11
    await child.close()


async def test_close_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(PART)
    child = await Child.start("part", tmp_path / "part.log")
    part = await make(child, tmp_path)
    pid = await part.pid()
    await child.close()
    await child.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(TrainingFault, match="was closed"):
        await part.add(1)


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text(PART)
    code = f"""
import asyncio, os, pathlib
from sandlot.rl.process import Child
async def main():
    child = await Child.start("part", pathlib.Path("{tmp_path}/part.log"))
    part = await child.make("{tmp_path}/part.py:Part", 1)
    print(await part.pid(), flush=True)
    await part.wait(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    import select

    assert select.select([watch], [], [], 10)[0], "the child outlives its parent"
    os.close(watch)

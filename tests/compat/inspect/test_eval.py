"""Promises of `inspect eval` with `sandbox="sandlot"`, found by its entry point, on a server and in its own process:

1. A task runs from end to end: files, a setup script, tools, two sandboxes, scorers. Afterwards no sandbox is left.
2. The tools that Inspect brings into a sandbox work there.
3. After an error in a sample, after ^C, and after the eval was killed, no sandbox and no process of one is left.
4. `--no-sandbox-cleanup` leaves sandboxes on a server, and `inspect sandbox cleanup sandlot` ends them.
5. The guide's task runs as it is written there, with its config file.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from inspect_ai.log import EvalLog, read_eval_log

from tests.compat.inspect.places import processes, running

HERE = Path(__file__).parent
GUIDE = HERE.parents[2] / "docs/guides/inspect.md"
PROGRAM = Path(sys.executable).with_name("inspect")


def until(what: str, true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """An argument of `sleep` that no other process of this host has."""
    mark = str(10**12 + secrets.randbelow(10**12))
    monkeypatch.setenv("MARK", mark)
    return mark


@pytest.fixture(autouse=True)
def nothing_else(place: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BREAKS", "IDLE"):
        monkeypatch.delenv(name, raising=False)
    assert place is None or running(place) == []


def evaluating(folder: Path, task: str, *words: str) -> subprocess.Popen[str]:
    """`inspect eval`, in a process group of its own as a terminal would have it."""
    argv = (PROGRAM, "eval", task, "--log-dir", folder / "logs", "--display", "plain", "--no-fail-on-error", *words)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv,
        cwd=HERE,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def log_of(process: subprocess.Popen[str], folder: Path) -> EvalLog:
    said, _ = process.communicate(timeout=240)
    logs = list((folder / "logs").glob("*"))
    assert len(logs) == 1, said
    return read_eval_log(str(logs[0]))


def scores(log: EvalLog) -> dict[str, object]:
    assert log.status == "success" and log.samples, log.error
    (sample,) = log.samples
    assert sample.error is None, sample.error
    return {name: score.value for name, score in (sample.scores or {}).items()}


def test_a_task_runs_from_end_to_end(place: str | None, tmp_path: Path) -> None:
    log = log_of(evaluating(tmp_path, "tasks.py@product"), tmp_path)
    assert scores(log) == {"includes": "C", "wrote": "C"}
    assert log.eval.sandbox is not None and log.eval.sandbox.type == "sandlot"
    assert log.samples and "Permission denied" in next(m.text for m in log.samples[0].messages if m.role == "tool")
    assert place is None or running(place) == []


def test_tools_that_inspect_brings_work(place: str | None, tmp_path: Path) -> None:
    log = log_of(evaluating(tmp_path, "tasks.py@injected"), tmp_path)
    assert scores(log) == {"includes": "C", "wrote_seven": "C"}
    assert place is None or running(place) == []


def test_after_an_error_nothing_is_left(
    place: str | None, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKS", "1")
    log = log_of(evaluating(tmp_path, "tasks.py@stuck"), tmp_path)
    assert log.samples and log.samples[0].error and "a solver that breaks" in log.samples[0].error.message
    assert processes(mark) == []
    assert place is None or running(place) == []


def test_after_an_interrupt_nothing_is_left(place: str | None, tmp_path: Path, mark: str) -> None:
    process = evaluating(tmp_path, "tasks.py@stuck")
    until("its commands run", lambda: len(processes(mark)) == 3)
    assert place is None or len(running(place)) == 1
    os.killpg(process.pid, signal.SIGINT)
    assert log_of(process, tmp_path).status == "cancelled"
    assert processes(mark) == []
    assert place is None or running(place) == []


def test_after_the_eval_was_killed_nothing_stays(
    place: str | None, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDLE", "2")
    process = evaluating(tmp_path, "tasks.py@stuck")
    until("its commands run", lambda: len(processes(mark)) == 3)
    process.kill()
    process.wait()
    until("they have ended", lambda: processes(mark) == [])
    assert place is None or running(place) == []


@pytest.mark.parametrize("place", ["server"], indirect=True)
def test_what_is_kept_is_ended_by_cleanup(place: str, tmp_path: Path) -> None:
    process = evaluating(tmp_path, "tasks.py@product", "--no-sandbox-cleanup")
    said, _ = process.communicate(timeout=240)
    kept = running(place)
    assert len(kept) == 2 and "inspect sandbox cleanup sandlot" in said
    for words in (kept[:1], []):
        subprocess.run([PROGRAM, "sandbox", "cleanup", "sandlot", *words], check=True, timeout=120)
        assert running(place) == (kept[1:] if words else [])


def test_the_guide_says_what_works(place: str | None, tmp_path: Path) -> None:
    blocks = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", GUIDE.read_text(), re.M | re.S))
    assert {"task.py", "sandlot.toml"} <= blocks.keys()
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    # The model is a script here; everything else is the guide's.
    program = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(tmp_path)!r}]\n"
        "from inspect_ai import eval\nfrom tasks import scripted\nimport task\n"
        "calls = [('bash', {'command': 'id -un; pwd; echo $(($(tr \" \" \"*\" <numbers.txt)))'})]\n"
        "eval(task.product(), model=scripted(*calls), log_dir='logs', display='plain')\n"
    )
    (tmp_path / "run.py").write_text(program)
    subprocess.run([sys.executable, "run.py"], cwd=tmp_path, check=True, timeout=240)
    (log,) = (read_eval_log(str(each)) for each in (tmp_path / "logs").iterdir())
    assert scores(log) == {"includes": "C"}
    assert log.samples and log.samples[0].output.completion.split() == ["nobody", "/work", "42"]

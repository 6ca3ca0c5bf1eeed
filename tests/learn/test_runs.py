"""Promises:
1. A recipe that cannot be is one message with a hint and status 2, and no run folder is made.
2. Ctrl-C ends a run with status 130 and SIGTERM with 143, however often they are sent: no process of it is left, and
   the very command that is printed takes it to its end.
3. A folder that holds a run is not overwritten; another recipe does not go on in it.
4. A run that was killed with SIGKILL goes on too, and tells each step and each episode once.
5. A run that cannot begin leaves nothing in the way of the next try.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FIND = Path(__file__).parents[2] / "recipes" / "find"
RECIPE = f"""
folder = "{FIND}"
checkpoint_seconds = 0
env = {{ name = "task.py:Find" }}
model = {{ build = "model.py:build", options = {{ hidden = 32, layers = 1 }} }}
rollout = {{ max_running = 4, max_tokens = 4 }}
evaluation = {{ tasks = 2 }}

[[phase]]
name = "rl"
algorithm = "grpo"
steps = 16
groups = 1
group_size = 2
"""


def sandlot(*words: str | Path) -> subprocess.Popen[str]:
    code = "from sandlot.cli.main import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def done(*words: str | Path) -> tuple[int, str, str]:
    process = sandlot(*words)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count('"step"') if file.exists() else 0


def end_at_step(process: subprocess.Popen[str], run: Path, step: int, number: int) -> set[Path]:
    """Send the signal once so many steps are done. Returns what it had started by then."""
    end = time.monotonic() + 60
    while steps(run) < step:
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.05)
    left = children(process)
    process.send_signal(number)
    return left


def children(process: subprocess.Popen[str]) -> set[Path]:
    """What it has started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process.pid:
                found.add(folder)
        except OSError:
            continue  # it ended while we looked
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE)
    return file


def test_a_recipe_that_cannot_be_is_one_message(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, out, err = done("train", recipe, f"run_dir={run}", "phase.rl.algorithm=gpro")
    assert (status, out) == (2, "")
    assert err == "error: unknown algorithm `gpro`\n\nhint: did you mean `grpo`? there is grpo, sft\n"
    status, _, err = done("train", tmp_path / "smal.toml")
    assert status == 2 and "there is no file" in err and "small.toml" in err
    assert not run.exists()


def test_a_run_that_cannot_begin_is_not_in_the_way(recipe: Path, tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(f"no native boxes here: {native_reason}")
    run = tmp_path / "run"
    status, _, err = done("train", recipe, f"run_dir={run}", "sandbox.image=nope")
    assert status == 1 and "nope" in err and "hint:" in err
    assert not run.exists()
    status, _, err = done("train", recipe, "run_dir=/dev/null/x")
    assert status == 1 and err.startswith("error: could not write /dev/null/x: Not a directory\n\nhint: ")
    status, _, err = done("train", recipe, f"run_dir={run}", "model.options.widht=3")
    assert status == 1 and "widht" in err
    assert not (run / "recipe.toml").exists() and not (run / "run.json").exists()
    status, _, err = done("train", recipe, f"run_dir={run}", "phase.rl.steps=1", "model.options.hidden=64")
    assert status == 0, err
    assert json.loads((run / "model" / "config.json").read_text())["hidden_size"] == 64


def test_ctrl_c_and_kill_leave_a_run_that_goes_on(recipe: Path, tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(f"no native boxes here: {native_reason}")
    run = tmp_path / "run"
    first = sandlot("train", recipe, f"run_dir={run}", "rollout.max_tokens=5")
    left = end_at_step(first, run, 2, signal.SIGINT)
    assert left
    for _ in range(3):
        time.sleep(0.05)
        first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=30)
    assert first.returncode == 130
    assert not [process for process in left if process.exists()]
    assert "interrupted; all boxes have ended" in err
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    (told,) = re.findall(r"`sandlot (.*)`", err)
    command = shlex.split(told)

    status, _, err = done("train", recipe, f"run_dir={run}")
    assert status == 1 and "already holds a run" in err
    status, _, err = done("train", recipe, f"run_dir={run}", "seed=7", "rollout.max_tokens=5", "--resume")
    assert status == 2 and "another recipe: seed differ" in err

    reached = steps(run)
    second = sandlot(*command)
    left = end_at_step(second, run, reached + 2, signal.SIGTERM)
    second.communicate(timeout=30)
    assert second.returncode == 143
    assert left and not [process for process in left if process.exists()]

    reached = steps(run)
    third = sandlot(*command)
    end_at_step(third, run, reached + 2, signal.SIGKILL)
    third.communicate(timeout=30)
    assert third.returncode == -signal.SIGKILL

    status, out, err = done(*command, "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["status"] == "done" and result["drift"] == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(1, 17))
    assert result["marks"][0][1] == "start" and result["marks"][-1][1] == "rl"
    written = [file.read_text().count("\n") for file in (run / "episodes").iterdir()]
    assert sum(written) == result["episodes"] == sum(result["endings"].values())

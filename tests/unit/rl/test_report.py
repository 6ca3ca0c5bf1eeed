"""Promises:
1. Each number of a step's line is reduced as its table says, and starts anew with the next step.
2. Every episode is counted once by its ending and written once.
3. run.json holds what `sandlot show` promises; the curve is drawn.
4. Counts go on after a resume, and what a killed run did after its checkpoint is not told twice: no line, no episode.
5. A full disk is a HostFault that names the file; run.json is written if it can be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import HostFault
from sandlot.rl.report import Counts, Report
from sandlot.rl.types import Episode, EpisodeEnding, Task

TASK = Task("t", 0, {})
FACTS = {"evaluations": ["start", "warm", "rl"], "seed": 3}


def episode(number: int, ending: EpisodeEnding, reward: float | None) -> Episode:
    transcript = {"episode": f"e{number}", "drift": 0, "messages": [{"role": "user", "content": "find w7 é"}]}
    return Episode(f"e{number}", TASK, number, ending, reward, seconds=2.0, transcript=transcript)


def run(folder: Path, counts: Counts | None = None) -> Report:
    report = Report(folder, "test", None, counts)
    report.stage("rl", 2, "steps")
    report.episode(episode(0, EpisodeEnding.OK, 1.0))
    report.episode(episode(1, EpisodeEnding.OK, 0.0))
    report.episode(episode(2, EpisodeEnding.CANCELLED_STALE, None))
    report.observe(loss=1.0, staleness_max=1.0, lr=0.1, unheard_of=7.0)
    report.observe(loss=3.0, staleness_max=0.0, lr=0.2)
    return report


def test_numbers_are_reduced_as_the_table_says(tmp_path: Path) -> None:
    report = run(tmp_path)
    line = report.step("rl", 1, 1)
    assert (line["loss"], line["staleness_max"], line["lr"]) == (2.0, 1.0, 0.2)
    assert (line["success"], line["episodes"], line["episode_seconds"]) == (0.5, 3.0, 2.0)
    assert "unheard_of" not in line
    assert "loss" not in report.step("rl", 2, 2)
    report.finish("failed", dict(FACTS))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in lines] == [1, 2]
    assert lines[0] == line


def test_every_episode_is_counted_and_written_once(tmp_path: Path) -> None:
    report = run(tmp_path)
    summary = report.finish("failed", dict(FACTS))
    assert summary["episodes"] == 3 == sum(summary["endings"].values())
    assert summary["endings"] == {"ok": 2, "failed": 0, "timed_out": 0, "cancelled_stale": 1, "cancelled_surplus": 0}
    written = [json.loads(text) for text in (tmp_path / "episodes" / "rl.jsonl").read_text().splitlines()]
    assert [entry["episode"] for entry in written] == ["e0", "e1", "e2"]


def test_run_json_holds_what_show_promises(tmp_path: Path) -> None:
    report = run(tmp_path)
    report.evaluated("start", 0.1, 10)
    report.evaluated("rl", 0.9, 10)
    report.step("rl", 1, 1)
    report.finish("done", dict(FACTS))
    summary = json.loads((tmp_path / "run.json").read_text())
    assert {"success_start", "success_warm", "success_rl", "seconds", "episodes", "endings", "drift"} <= set(summary)
    assert (summary["success_start"], summary["success_warm"], summary["success_rl"]) == (0.1, None, 0.9)
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_demonstrations_are_not_in_the_curve(tmp_path: Path) -> None:
    report = Report(tmp_path, "test")
    report.stage("warm_demonstrations", 1, "episodes")
    report.episode(episode(0, EpisodeEnding.OK, 1.0))
    report.stage("warm", 1, "steps")
    assert "success" not in report.step("warm", 1, 1)
    assert report.finish("done", dict(FACTS))["curve"] == []


def test_a_full_disk_is_named_and_run_json_written(tmp_path: Path, full_disk: Any) -> None:
    report = run(tmp_path)
    big = episode(4, EpisodeEnding.OK, 1.0)
    big.transcript["messages"] = ["x" * 4000]
    report.episode(big)
    with full_disk(2000), pytest.raises(HostFault, match=r"could not write .*/episodes/rl\.jsonl: File too large"):
        report.finish("failed", dict(FACTS))
    assert json.loads((tmp_path / "run.json").read_text())["episodes"] == 4


def test_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    first = run(tmp_path)
    first.evaluated("start", 0.1, 10)
    first.step("rl", 1, 1)
    state = json.loads(json.dumps(first.state()))
    first.episode(episode(3, EpisodeEnding.OK, 1.0))  # lost, as is the next line: the checkpoint was before
    first.step("rl", 2, 2)
    first.finish("interrupted", dict(FACTS))
    second = run(tmp_path, Counts(**state))
    second.step("rl", 2, 2)
    summary = second.finish("done", dict(FACTS))
    assert summary["episodes"] == 6
    assert summary["success_start"] == 0.1
    assert len(summary["curve"]) == 2
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 1, 2]
    written = [json.loads(text)["episode"] for text in (tmp_path / "episodes" / "rl.jsonl").read_text().splitlines()]
    assert written == ["e0", "e1", "e2"] * 2
    assert summary["seconds"] == pytest.approx(second.seconds, abs=1)

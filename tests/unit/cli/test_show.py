"""Promises:
1. `sandlot show` prints a run's table and curve, and with --json the very object of run.json.
2. A folder without a run, and a run that has not ended, are said as what they are, with what to do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sandlot.cli.main import main
from sandlot.cli.show import curve

RESULT = {
    "status": "done",
    "success_start": 0.0,
    "success_warm": 0.35,
    "success_rl": 0.96,
    "seconds": 131.4,
    "episodes": 20,
    "endings": {"ok": 19, "failed": 0, "cancelled_surplus": 1},
    "drift": 0,
    "run_dir": "runs/demo-1",
    "curve": [[10, 0.4], [20, 0.9]],
    "marks": [],
}


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_show_prints_the_table_and_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(RESULT))
    assert call("show", str(tmp_path)) == 0
    out = capsys.readouterr().out
    for line in ("after warm        0.350", "after rl          0.960", "2 min 11 s", "20: 19 ok, 1 cancelled_surplus"):
        assert line in out
    assert "training success, 2 steps" in out
    assert call("show", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == RESULT


def test_what_is_no_finished_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", str(tmp_path)) == 1
    assert "there is no run in" in capsys.readouterr().err
    (tmp_path / "recipe.toml").write_text("")
    assert call("show", str(tmp_path)) == 1
    err = capsys.readouterr().err
    assert "has not ended" in err and "--resume`" in err


def test_the_curve_rises_with_the_values() -> None:
    rows = curve([0.0, 0.5, 1.0]).splitlines()
    assert rows[0] == " 1.0 │  █"
    assert rows[4] == " 0.5 │ ██"
    assert rows[7] == " 0.0 │ ██"

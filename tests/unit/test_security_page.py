"""Promises of SECURITY.md: each promise of the native driver has a row with tests that exist; each attack is named."""

from __future__ import annotations

import re
from pathlib import Path

from sandlot.drivers.native.promises import Facts, promises

TOP = Path(__file__).parents[2]
PAGE = (TOP / "SECURITY.md").read_text()


def test_every_promise_has_a_row_with_tests_that_exist() -> None:
    rows = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}
    for line in promises(Facts(ids="own")):
        held_by = rows[line.name].split("|")[3]
        named = re.findall(r"`([^`]+)`", held_by)
        assert named, line.name
        for name in named:
            places = [TOP / name, TOP / "tests/hostile" / name, TOP / "tests/unit/drivers/native" / name]
            assert any(path.exists() for path in places), f"{name} of the promise {line.name!r} does not exist"


def test_every_attack_is_named() -> None:
    for path in (TOP / "tests/hostile").glob("test_*.py"):
        assert f"`{path.name}`" in PAGE, f"SECURITY.md names no promise that {path.name} holds"

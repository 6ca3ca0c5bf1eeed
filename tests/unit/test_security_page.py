"""Promises of SECURITY.md: each promise of the native driver has a row with tests that exist and that try this promise;
each attack is named in the row of the promise that it tries; the page of what holds where has a row for each."""

from __future__ import annotations

import re
from pathlib import Path

from sandlot.drivers.native.promises import Facts, promises

TOP = Path(__file__).parents[2]
PAGE = (TOP / "SECURITY.md").read_text()
HOSTILE = TOP / "tests/hostile"
ROWS = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| ")}


def named_in(row: str) -> list[str]:
    return re.findall(r"`([^`]+)`", row.split("|")[3])


def tried_by(attack: Path) -> set[str]:
    """The promises that a file of attacks says it tries."""
    return set(re.findall(r'(?:^PROMISE = |mark\.promise\()"([^"]+)"', attack.read_text(), re.M))


def test_every_promise_has_a_row_with_tests_that_exist() -> None:
    for line in promises(Facts(ids="own")):
        assert named_in(ROWS[line.name]), line.name
        for name in named_in(ROWS[line.name]):
            places = [TOP / name, HOSTILE / name, TOP / "tests/unit/drivers/native" / name]
            assert any(path.exists() for path in places), f"{name} of the promise {line.name!r} does not exist"


def test_an_attack_that_is_named_tries_that_promise() -> None:
    for promise, row in ROWS.items():
        for name in named_in(row):
            if (HOSTILE / name).is_file():
                assert promise in tried_by(HOSTILE / name), f"{name} does not try {promise!r}"


def test_every_attack_is_named_where_its_promise_is() -> None:
    for path in HOSTILE.glob("test_*.py"):
        for promise in tried_by(path):
            assert path.name in named_in(ROWS[promise]), f"SECURITY.md does not say that {path.name} tries {promise!r}"


def test_every_promise_has_a_row_in_the_page_of_what_holds_where() -> None:
    page = (TOP / "docs/concepts/what-holds-where.md").read_text()
    for line in promises(Facts(ids="own")):
        assert f"| {line.name} " in page, line.name

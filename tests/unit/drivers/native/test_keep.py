"""Promises of a box's record:

1. What its first process said at the end is known, whatever was being written when the node was killed.
2. Of lines that a node wrote the last whole one counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.drivers.native import keep
from sandlot.drivers.native.keep import Record

FACTS: dict[str, Any] = dict.fromkeys(keep._FACTS) | {"id": "box", "note": 'ends in "lifetime', "losses": ["a loss"]}


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    record = Record.make(tmp_path / "boxes", "box")
    record.write(FACTS | {"losses": None}, starting=True)
    yield record
    record.passed()


@pytest.mark.parametrize("word", ["lifetime", "orphaned"])
@pytest.mark.parametrize("after", ["the second line", "half of it", "all but its end", "one that is kept elsewhere"])
def test_the_last_word_is_known_whatever_was_being_written(record: Record, word: str, after: str) -> None:
    size = os.path.getsize(record.path)
    record.write(FACTS, starting=after != "one that is kept elsewhere")
    if after == "half of it":
        text = Path(record.path).read_bytes()
        os.truncate(record.path, text.index(b"lifetime", size) + len(b"lifetime"))
        assert record.last_word() == ""  # the node's, not the first process's
    elif after == "all but its end":
        os.truncate(record.path, os.path.getsize(record.path) - 1)
    assert record.last_word() == ""
    with Path(record.path).open("a") as file:
        file.write(f"{word}\n")
    assert record.last_word() == word
    whole = after in ("the second line", "one that is kept elsewhere")
    assert record.facts() == FACTS | ({} if whole else {"losses": None})


def test_there_is_no_last_word_of_a_record_that_is_gone(record: Record) -> None:
    record.remove()
    assert record.last_word() == ""
    assert record.facts() is None

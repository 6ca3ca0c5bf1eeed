"""Promises:
1. What is accepted and under way never exceeds the batches up to `max_staleness + 1` beyond the current version.
2. Synchronous training is the same rule with `max_staleness` 0.
3. What is older than `max_staleness` versions is too old, and nothing else is.
"""

from __future__ import annotations

import pytest

from sandlot.rl.rollout import room


@pytest.mark.parametrize(
    ("version", "accepted", "underway", "max_staleness", "free"),
    [
        (0, 0, 0, 0, 4),  # the first batch
        (0, 3, 1, 0, 0),  # it is under way
        (0, 4, 0, 0, 0),  # it is being trained on: nothing may start
        (1, 4, 0, 0, 4),  # the next version is there
        (0, 0, 0, 1, 8),  # one batch ahead
        (0, 4, 0, 1, 4),  # one is being trained on, one more may be made
        (0, 4, 4, 1, 0),
        (3, 14, 1, 0, 1),  # something was dropped: its place is free
        (0, 0, 0, 0.5, 6),  # half a batch ahead
        (0, 9, 0, 1, 0),  # more than allowed, after a resume with another setting: nothing, never less
    ],
)
def test_groups_that_may_start(version: int, accepted: int, underway: int, max_staleness: float, free: int) -> None:
    assert room.groups(version, accepted, underway, batch=4, max_staleness=max_staleness) == free


@pytest.mark.parametrize(("running", "free"), [(0, 3), (2, 1), (3, 0), (5, 0)])
def test_members_that_may_run(running: int, free: int) -> None:
    assert room.episodes(running, max_running=3) == free


@pytest.mark.parametrize(("age", "max_staleness", "old"), [(5, 0, False), (4, 0, True), (4, 1, False), (3, 1, True)])
def test_what_is_too_old_at_version_five(age: int, max_staleness: float, old: bool) -> None:
    assert room.too_old(age, 5, max_staleness) is old

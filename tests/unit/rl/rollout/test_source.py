"""Promises:
1. The order is the seed's; a cursor restores it exactly.
2. With a count every task comes once a round, in a new order each round; without, tasks never repeat.
3. Seeds of tasks are so far apart that no two members share one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from sandlot.rl.rollout.source import MOST_MEMBERS, Source


def test_a_restored_cursor_gives_the_very_same_tasks(find: Any) -> None:
    for count in (None, 7):
        first, second = Source(find, "train", 3, count), Source(find, "train", 3, count)
        first.take(10)
        second.restore(first.state())
        assert first.take(10) == second.take(10)
        assert Source(find, "train", 4, count).take(20) != Source(find, "train", 3, count).take(20)


def test_each_round_has_every_task_once_in_an_order_of_its_own(find: Any) -> None:
    source = Source(find, "heldout", 0, 20)
    rounds = [[task.data["index"] for task in source.take(20)] for _ in range(3)]
    assert all(sorted(order) == list(range(20)) for order in rounds)
    assert rounds[0] != rounds[1] != rounds[2]


def test_without_a_count_no_task_comes_twice(find: Any) -> None:
    tasks = Source(find, "train", 1).take(500) + Source(find, "train", 2).take(500)
    assert len({task.id for task in tasks}) == 1000
    assert all(task.id == find.task("train", task.data["index"]).id for task in tasks[:5])


def test_members_never_share_a_seed(find: Any) -> None:
    seeds = sorted(task.seed for task in Source(find, "train", 0).take(2000))
    assert min(b - a for a, b in pairwise(seeds)) >= MOST_MEMBERS

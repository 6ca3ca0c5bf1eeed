"""Promises:
1. Every sampled token is learned from exactly once, whatever the size of a pack; the first of a sequence never.
2. Totals are of all samples, those that are left out of the packs included.
3. What was packed comes back to its sample, in order.
4. Minibatches keep groups whole, use each once, and depend on the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sandlot.rl.train.pack import minibatches, pack, totals, unpack
from sandlot.rl.types import Sample

Make = Callable[..., list[Sample]]


def sample(tokens: list[int], mask: list[int]) -> Sample:
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return Sample(
        np.array(tokens), np.array(mask, dtype=bool), zeros, zeros.astype(np.int64), {"advantages": zeros + 2}
    )


def test_the_example_of_the_docstring() -> None:
    (one,) = pack([sample([5, 9, 3, 7, 2], [0, 0, 0, 1, 1]), sample([4, 8], [0, 1])], 100)
    assert one.tokens.tolist() == [5, 9, 3, 7, 2, 4, 8]
    assert one.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert one.sequences.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert one.predictors.tolist() == [2, 3, 5]
    assert one.labels.tolist() == [7, 2, 8]
    assert one.streams["advantages"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("size", [1, 7, 24, 60, 10_000])
def test_every_sampled_token_is_learned_once(samples: Make, size: int) -> None:
    given = samples(40)
    packs = pack(given, size)
    assert sorted(i for one in packs for i in one.members) == list(range(40))
    assert all(len(one.tokens) <= size or len(one.members) == 1 for one in packs)
    expected = [(i, t) for i, s in enumerate(given) for t in np.flatnonzero(s.mask) if t > 0]
    assert sum(len(one.labels) for one in packs) == len(expected) == totals(given).tokens
    learned = sorted(int(label) for one in packs for label in one.labels)
    assert learned == sorted(int(given[i].tokens[t]) for i, t in expected)


def test_a_first_token_is_never_learned() -> None:
    (one,) = pack([sample([5, 6], [1, 1])], 10)
    assert one.labels.tolist() == [6]


def test_samples_left_out_still_count(samples: Make) -> None:
    given = samples(10)
    packs = pack(given, 50, only=[1, 3])
    assert sorted(i for one in packs for i in one.members) == [1, 3]
    assert totals(given).samples == 10


def test_what_was_packed_comes_back(samples: Make) -> None:
    given = samples(25)
    packs = pack(given, 40, only=range(20))
    values = [one.labels.astype(np.float32) for one in packs]
    for index, (found, original) in enumerate(zip(unpack(packs, values, given), given, strict=True)):
        mask = original.mask.copy()
        mask[0] = False
        assert found.tolist() == (np.where(mask, original.tokens, 0).tolist() if index < 20 else [0] * len(mask))


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_minibatches_keep_groups_whole(count: int) -> None:
    groups = [(0, 3), (3, 4), (4, 8), (8, 9)]
    parts = minibatches(groups, count, seed=1)
    assert len(parts) == min(count, 4)
    assert sorted(i for part in parts for i in part) == list(range(9))
    for start, end in groups:
        assert sum(start in part for part in parts) == 1
        assert all(set(range(start, end)) <= set(part) for part in parts if start in part)
    assert parts == minibatches(groups, count, seed=1)

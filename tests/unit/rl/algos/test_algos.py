"""Promises:
1. GRPO: an advantage is the distance from the group's mean in standard deviations; equals get 0; one alone is dropped.
   An attempt of several samples weighs as much as one of one.
2. GRPO asks for old log-probabilities only where the policy may have moved.
3. SFT learns from all demonstrations, or from those that earned enough.
4. Every algorithm in the table can be made from its own Config, and names a surrogate that exists.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sandlot.config import locate
from sandlot.rl.algos import ALGORITHMS
from sandlot.rl.algos.base import with_annotations
from sandlot.rl.algos.grpo import Grpo
from sandlot.rl.algos.sft import Sft
from sandlot.rl.types import Batch, Episode, EpisodeEnding, Group, Sample, Task

Make = Callable[..., list[Sample]]
TASK = Task("t", 0, {})


def group(rewards: list[float], samples: list[Sample]) -> Group:
    made = [Episode(str(i), TASK, i, EpisodeEnding.OK, r, [samples[i]]) for i, r in enumerate(rewards)]
    return Group(TASK, made)


def advantages(algorithm: Grpo, groups: list[list[Sample]]) -> list[float]:
    flat = [sample for members in groups for sample in members]
    ends = np.cumsum([len(members) for members in groups]).tolist()
    batch = Batch(flat, list(zip([0, *ends], ends, strict=False)), 0)
    found = algorithm.advantages(batch)
    for sample in found:
        stream = sample.streams["advantages"]
        assert len(set(stream[sample.mask].tolist())) == 1
        assert not stream[~sample.mask].any()
    return [float(sample.streams["advantages"][sample.mask][0]) for sample in found]


def test_grpo_compares_within_the_group(samples: Make) -> None:
    algorithm, made = Grpo(Grpo.Config(), off_policy=False), samples(8)
    one = algorithm.score(group([1, 0, 0, 0], made[:4]))
    two = algorithm.score(group([1, 1, 1, 1], made[4:]))
    found = advantages(algorithm, [one, two])
    assert found[:4] == pytest.approx([3**0.5, *([-(3**-0.5)] * 3)], abs=1e-4)
    assert found[4:] == [0, 0, 0, 0]
    plain = Grpo(Grpo.Config(normalise=False), off_policy=False)
    assert advantages(plain, [one]) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_an_attempt_of_several_samples_weighs_as_much_as_one_of_one(samples: Make) -> None:
    algorithm, made = Grpo(Grpo.Config(), off_policy=False), samples(5)
    forked = Episode("0", TASK, 0, EpisodeEnding.OK, 1.0, made[:4])
    plain = Episode("1", TASK, 1, EpisodeEnding.OK, 0.0, made[4:])
    found = advantages(algorithm, [algorithm.score(Group(TASK, [forked, plain]))])
    assert found == pytest.approx([0.25] * 4 + [-1.0], abs=1e-4)


def test_grpo_drops_one_alone(samples: Make) -> None:
    assert Grpo(Grpo.Config(), off_policy=False).score(group([1.0], samples(1))) == []


def test_grpo_asks_for_old_only_off_policy() -> None:
    assert Grpo(Grpo.Config(), off_policy=True).needs == {"old"}
    assert not Grpo(Grpo.Config(), off_policy=False).needs


def test_sft_learns_from_what_earned_enough(samples: Make) -> None:
    given = group([1.0, 0.0, 0.5], samples(3))
    assert len(Sft(Sft.Config(), off_policy=False).score(given)) == 3
    assert len(Sft(Sft.Config(min_reward=0.5), off_policy=False).score(given)) == 2


def test_annotations_join_the_streams(samples: Make) -> None:
    made = samples(2, score=lambda *_: 1.0)
    batch = with_annotations(Batch(made, [(0, 2)], 0), [{"old": s.logprobs} for s in made])
    assert all(set(sample.streams) == {"score", "old"} for sample in batch.samples)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_in_the_table_fits(name: str) -> None:
    from sandlot.rl.train.loss import SURROGATES

    kind = locate(ALGORITHMS[name])
    made = kind(kind.Config(), off_policy=True)
    assert made.name == name
    assert made.surrogate in SURROGATES
    assert kind.__module__ and locate(f"{kind.__module__}:__doc__")

"""Promises:
1. A batch holds whole groups, and none of them is older than `max_staleness` at the moment it is cut.
2. Every group leaves once: used, dropped or swept; whoever admits is told when places are free.
3. Whoever waits for a batch is woken by the group that completes it, by a fault, or by its patience.
4. Finished and unused groups survive a checkpoint.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from sandlot.errors import DeadlineExceeded, TrainingFault
from sandlot.rl.rollout.sink import Sink
from sandlot.rl.types import Episode, EpisodeEnding, Group, Sample, Task


def group(name: str, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    task = Task(name, 0, {})
    episodes = []
    for member, reward in enumerate(rewards):
        sample = Sample(
            np.array([1, 2]), np.array([False, True]), np.zeros(2, np.float32), np.array([-1, version + member])
        )
        episodes.append(Episode(f"{name}.{member}", task, member, EpisodeEnding.OK, reward, [sample]))
    return Group(task, episodes)


def all_samples(one: Group) -> list[Sample]:
    return [sample for episode in one.episodes for sample in episode.samples]


def informative(one: Group) -> list[Sample]:
    return all_samples(one) if len({episode.reward for episode in one.episodes}) > 1 else []


async def test_a_batch_is_whole_groups_the_oldest_first() -> None:
    sink = Sink(all_samples, batch_groups=2, max_staleness=5)
    for name, version in (("a", 2), ("b", 0), ("c", 1)):
        sink.add(group(name, version))
    sink.advance(3)
    batch = await sink.batch()
    assert [int(sample.versions[1]) for sample in batch.samples] == [0, 1, 1, 2]
    assert batch.groups == [(0, 2), (2, 4)]
    assert batch.version == 3
    assert batch.metrics["staleness_max"] == 3
    assert (batch.metrics["staleness_2"], batch.metrics["staleness_3"]) == (1, 1)
    assert (sink.pending, sink.held) == (1, 3)


async def test_what_is_too_old_when_the_batch_is_cut_is_swept() -> None:
    sink = Sink(all_samples, batch_groups=1, max_staleness=1)
    told = []
    sink.on_vacated(lambda: told.append(sink.held))
    sink.add(group("old", 0))  # its second member was sampled by version 1: the oldest token counts
    sink.add(group("new", 1))
    sink.advance(2)
    batch = await sink.batch()
    assert batch.metrics["staleness_max"] == 1
    assert sink.counts == {"accepted": 2, "dropped": 0, "swept": 1, "used": 1}
    assert told == [1]


async def test_a_group_without_anything_to_learn_is_dropped_but_its_reward_is_reported() -> None:
    sink = Sink(informative, batch_groups=1, max_staleness=0)
    assert not sink.add(group("same", 0, (1.0, 1.0)))
    assert sink.add(group("good", 0, (0.0, 1.0)))
    batch = await sink.batch()
    assert batch.metrics["reward"] == 0.75
    assert batch.metrics["dropped"] == 1
    assert sink.held == 1


async def test_a_waiting_batch_comes_with_the_group_that_completes_it() -> None:
    sink = Sink(all_samples, batch_groups=2, max_staleness=0)
    waiting = asyncio.ensure_future(sink.batch())
    for name in ("a", "b"):
        await asyncio.sleep(0)
        assert not waiting.done()
        sink.add(group(name, 0))
    assert len((await waiting).samples) == 4


async def test_a_fault_reaches_who_waits_and_who_comes_later() -> None:
    sink = Sink(all_samples, batch_groups=1, max_staleness=0)
    waiting = asyncio.ensure_future(sink.batch())
    await asyncio.sleep(0)
    sink.fail(TrainingFault("no box can be made"))
    for again in (waiting, sink.batch()):
        with pytest.raises(TrainingFault, match="no box"):
            await again


async def test_patience_ends_with_a_sentence() -> None:
    sink = Sink(all_samples, batch_groups=2, max_staleness=0, patience=0.02)
    sink.add(group("a", 0))
    with pytest.raises(DeadlineExceeded, match="1 of 2 wait"):
        await sink.batch()


async def test_finished_and_unused_groups_survive_a_checkpoint() -> None:
    sink = Sink(all_samples, batch_groups=2, max_staleness=0)
    sink.add(group("a", 0))
    again = Sink(all_samples, batch_groups=2, max_staleness=0)
    again.restore(sink.state())
    assert again.held == 1
    again.add(group("b", 0))
    assert len((await again.batch()).groups) == 2

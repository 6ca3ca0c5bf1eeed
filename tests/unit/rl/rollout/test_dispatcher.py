"""Promises:
1. Every admitted episode comes out exactly once, as one of five endings; the counts add up at every step.
2. `max_staleness` 0 is synchronous: nothing runs between a batch and the next version. 1 runs one batch ahead, and
   nothing older than that is ever in a batch.
3. A failure is tried once more; a member that failed or timed out is left out; a group of fewer than two is not used.
4. A group that a new version made too old is cancelled; the end of a run cancels what runs, as surplus.
5. Groups that taught nothing are replaced, so a batch always comes.
6. Failures in a row, a scorer's or a reporter's error stop the run with a reason, and nothing hangs.
7. After a checkpoint the tasks that were under way come first, then the source's next ones.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from sandlot.errors import TrainingFault
from sandlot.rl.rollout.dispatcher import FAILURES_IN_A_ROW, Dispatcher, rollout_all
from sandlot.rl.rollout.sink import Sink
from sandlot.rl.rollout.source import Source
from sandlot.rl.types import Episode, EpisodeEnding, Group, Sample, Task

OK, FAILED, TIMED_OUT = EpisodeEnding.OK, EpisodeEnding.FAILED, EpisodeEnding.TIMED_OUT


def samples(group: Group) -> list[Sample]:
    return [sample for episode in group.episodes for sample in episode.samples]


class Play:
    """Episodes without boxes: they take as long, and end, as told."""

    def __init__(self) -> None:
        self.version = 0
        self.begun: list[tuple[str, int]] = []
        self.cancelled = 0
        self.how: Callable[[Task, int], Awaitable[EpisodeEnding]] = self.at_once

    async def at_once(self, task: Task, member: int) -> EpisodeEnding:
        await asyncio.sleep(0)
        return OK

    async def run(self, task: Task, member: int) -> Episode:
        self.begun.append((task.id, member))
        version = self.version
        try:
            ending = await self.how(task, member)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        sample = Sample(np.array([1, 2]), np.array([False, True]), np.zeros(2, np.float32), np.array([-1, version]))
        kept = [sample] if ending is OK else []
        reward = float(member % 2) if ending is OK else None
        return Episode(f"{task.id}.{member}", task, member, ending, reward, kept, detail="as told")


class Run:
    """Dispatcher and sink, as a training loop holds them."""

    def __init__(self, find: Any, play: Play, *, max_staleness: float = 0, size: int = 4, batch: int = 2, **more: Any):
        self.play = play
        self.out: list[Episode] = []
        self.source = Source(find, "train", 0)
        score = more.pop("score", samples)
        self.sink = Sink(score, batch_groups=batch, max_staleness=max_staleness, patience=10)
        self.dispatcher = Dispatcher(
            self.source,
            play.run,
            self.sink,
            **{
                "group_size": size,
                "batch_groups": batch,
                "max_running": 64,
                "max_staleness": max_staleness,
                "on_episode": self.out.append,
                **more,
            },
        )

    async def __aenter__(self) -> Run:
        self.dispatcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dispatcher.stop()
        counts = self.dispatcher.counts
        assert self.dispatcher.running == 0
        assert self.dispatcher.admitted == sum(counts.values()) == len(self.out) == len(self.play.begun)
        assert Counter(episode.ending for episode in self.out) == {k: v for k, v in counts.items() if v}
        cancelled = counts[EpisodeEnding.CANCELLED_STALE] + counts[EpisodeEnding.CANCELLED_SURPLUS]
        assert self.play.cancelled == cancelled

    def advance(self, version: int) -> None:
        self.play.version = version
        self.dispatcher.advance(version)
        self.sink.advance(version)


async def test_synchronous_training_runs_nothing_between_a_batch_and_the_next_version(find: Any) -> None:
    async with Run(find, Play()) as run:
        for version in range(4):
            batch = await run.sink.batch()
            assert (batch.version, batch.metrics["staleness_max"]) == (version, 0)
            assert len(batch.samples) == 8
            for _ in range(5):
                await asyncio.sleep(0)
            assert run.dispatcher.running == 0
            assert run.dispatcher.admitted == 8 * (version + 1)
            run.advance(version + 1)


async def test_one_batch_ahead_is_made_while_another_is_trained_on(find: Any) -> None:
    async with Run(find, Play(), max_staleness=1) as run:
        await run.sink.batch()
        for _ in range(5):
            await asyncio.sleep(0)
        assert run.dispatcher.admitted == 16
        assert run.sink.pending == 2  # ready before the step is done
        run.advance(1)
        assert (await run.sink.batch()).metrics["staleness_max"] == 1


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_counts_add_up_and_nothing_too_old_is_used(
    find: Any, max_staleness: int, seed: int
) -> None:
    chance = random.Random(seed)
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        for _ in range(chance.choice((0, 1, 2, 30))):
            await asyncio.sleep(0)
        return chance.choices((OK, FAILED, TIMED_OUT), (20, 1, 1))[0]

    play.how = how
    async with Run(find, play, max_staleness=max_staleness, max_running=10) as run:
        for version in range(12):
            batch = await run.sink.batch()
            assert batch.metrics["staleness_max"] <= max_staleness
            for _ in range(chance.randrange(40)):
                await asyncio.sleep(0)
            assert run.dispatcher.running <= 10
            run.advance(version + 1)


async def test_a_failure_is_tried_once_more(find: Any) -> None:
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        return FAILED if member == 1 and play.begun.count((task.id, 1)) == 1 else OK

    play.how = how
    async with Run(find, play) as run:
        assert len((await run.sink.batch()).samples) == 8
        assert run.dispatcher.counts[FAILED] == 2


@pytest.mark.parametrize("ending", [FAILED, TIMED_OUT])
async def test_a_member_that_did_not_come_through_is_left_out(find: Any, ending: EpisodeEnding) -> None:
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        return ending if member == 1 else OK

    play.how = how
    async with Run(find, play) as run:
        batch = await run.sink.batch()
        assert [stop - start for start, stop in batch.groups] == [3, 3]
        assert run.dispatcher.counts[ending] == (4 if ending is FAILED else 2)


async def test_a_group_of_one_is_not_compared_and_is_replaced(find: Any) -> None:
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        return TIMED_OUT if member and task.id == play.begun[0][0] else OK

    play.how = how
    async with Run(find, play) as run:
        assert len((await run.sink.batch()).samples) == 8
        assert run.dispatcher.groups["short"] == 1


async def test_groups_that_taught_nothing_are_replaced(find: Any) -> None:
    dropped = [5]

    def score(group: Group) -> list[Sample]:
        dropped[0] -= 1
        return [] if dropped[0] >= 0 else samples(group)

    async with Run(find, Play(), score=score) as run:
        assert len((await run.sink.batch()).groups) == 2
        assert run.sink.counts["dropped"] == 5
        assert run.dispatcher.groups["handed_on"] == 7


async def test_groups_swept_at_the_cut_are_replaced(find: Any) -> None:
    async with Run(find, Play(), max_staleness=1) as run:
        await run.sink.batch()
        for _ in range(5):
            await asyncio.sleep(0)
        run.advance(3)  # two versions at once: the two groups that wait are too old
        assert (await run.sink.batch()).metrics["staleness_max"] == 0
        assert run.sink.counts["swept"] == 2


async def test_a_group_that_became_too_old_is_cancelled(find: Any) -> None:
    play = Play()
    never = asyncio.Event()
    slow: list[str] = []

    async def how(task: Task, member: int) -> EpisodeEnding:
        slow.append(task.id) if not slow else None
        if task.id == slow[0] and member == 3:
            await never.wait()
        return OK

    play.how = how
    async with Run(find, play, max_staleness=1) as run:
        await run.sink.batch()
        run.advance(1)
        await asyncio.sleep(0)
        assert run.dispatcher.counts[EpisodeEnding.CANCELLED_STALE] == 0  # one version old is allowed
        await run.sink.batch()
        run.advance(2)
        await run.sink.batch()
        assert run.dispatcher.counts[EpisodeEnding.CANCELLED_STALE] == 1
        assert run.dispatcher.groups["stale"] == 1
        assert run.dispatcher.counts[EpisodeEnding.CANCELLED_SURPLUS] == 0


async def test_the_end_of_a_run_cancels_what_runs_as_surplus(find: Any) -> None:
    play = Play()
    never = asyncio.Event()

    async def how(task: Task, member: int) -> EpisodeEnding:
        if member:
            await never.wait()
        return OK

    play.how = how
    async with Run(find, play) as run:
        await asyncio.sleep(0)
        await asyncio.gather(run.dispatcher.stop(), run.dispatcher.stop())
        assert run.dispatcher.counts[EpisodeEnding.CANCELLED_SURPLUS] == 6
        assert run.dispatcher.groups["surplus"] == 2
        assert run.sink.held == 0


async def test_a_run_that_is_stopped_at_once_has_begun_each_episode_it_admitted(find: Any) -> None:
    async with Run(find, Play()) as run:
        pass
    assert run.dispatcher.admitted == 8


async def test_failures_in_a_row_stop_the_run_with_a_reason(find: Any) -> None:
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        await asyncio.sleep(0)
        return FAILED

    play.how = how
    async with Run(find, play, max_running=2) as run:
        with pytest.raises(TrainingFault, match="failed one after another; the last: as told"):
            await run.sink.batch()
        assert run.dispatcher.counts[FAILED] >= FAILURES_IN_A_ROW


async def test_an_episode_that_raises_is_a_failure_with_its_reason(find: Any) -> None:
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        raise ValueError("a broken runner")

    play.how = how
    async with Run(find, play) as run:
        with pytest.raises(TrainingFault, match="ValueError: a broken runner"):
            await run.sink.batch()


@pytest.mark.parametrize("broken", ["score", "on_episode"])
async def test_a_scorer_or_reporter_that_raises_stops_the_run(find: Any, broken: str) -> None:
    def bad(_: object) -> list[Sample]:
        raise ZeroDivisionError("no members")

    play = Play()
    run = Run(find, play, **{broken: bad})
    run.dispatcher.start()
    with pytest.raises(ZeroDivisionError):
        await run.sink.batch()
    await run.dispatcher.stop()
    assert run.dispatcher.admitted == sum(run.dispatcher.counts.values()) == len(play.begun)


async def test_a_restored_run_takes_up_what_was_under_way_and_then_the_next(find: Any) -> None:
    play = Play()
    never = asyncio.Event()

    async def how(task: Task, member: int) -> EpisodeEnding:
        if task.id.endswith("0"):
            await never.wait()
        return OK

    play.how = how
    async with Run(find, play) as run:
        for _ in range(3):
            await asyncio.sleep(0)
        state = run.dispatcher.state()
        assert run.sink.held == 1
    later = Run(find, Play())
    later.dispatcher.restore(state)
    async with later:
        await later.sink.batch()
    begun = list(dict.fromkeys(task for task, _ in later.play.begun))
    assert begun == ["train-0", "train-2"]


async def test_rollout_all_gives_one_episode_a_task_in_their_order(find: Any) -> None:
    play = Play()
    seen: list[Episode] = []
    most = 0

    async def how(task: Task, member: int) -> EpisodeEnding:
        nonlocal most
        most = max(most, len(play.begun) - len(seen))
        await asyncio.sleep(0.001 * (hash(task.id) % 3))
        return FAILED if task.id.endswith("3") else OK

    play.how = how
    tasks = Source(find, "heldout", 0, 30).take(30)
    episodes = await rollout_all(tasks, play.run, 4, seen.append)
    assert [episode.task for episode in episodes] == tasks
    assert most <= 4
    assert sorted(episode.id for episode in seen) == sorted(episode.id for episode in episodes)
    assert sum(episode.ending is FAILED for episode in episodes) == 3


async def test_rollout_all_ends_what_runs_when_it_is_cancelled(find: Any) -> None:
    play = Play()
    seen: list[Episode] = []

    async def how(task: Task, member: int) -> EpisodeEnding:
        await asyncio.Event().wait()
        return OK

    play.how = how
    everything = asyncio.ensure_future(rollout_all(Source(find, "heldout", 0, 9).take(9), play.run, 3, seen.append))
    await asyncio.sleep(0.01)
    everything.cancel()
    with pytest.raises(asyncio.CancelledError):
        await everything
    assert [episode.ending for episode in seen] == [EpisodeEnding.CANCELLED_SURPLUS] * 3
    assert play.cancelled == 3


async def test_rollout_all_stops_when_everything_fails(find: Any) -> None:
    play = Play()

    async def how(task: Task, member: int) -> EpisodeEnding:
        return FAILED

    play.how = how
    with pytest.raises(TrainingFault, match="one after another"):
        await rollout_all(Source(find, "heldout", 0, 100).take(100), play.run, 3)
    assert len(play.begun) < 30

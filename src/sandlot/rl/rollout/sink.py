"""Whole groups in, batches out: the guarantee that nothing too old is learned from.

Owns the groups that are finished and not yet used. Each group that comes in leaves in exactly one way: in a batch, or
*dropped* (the algorithm learns nothing from it), or *swept* (too old at the moment a batch was cut). The sweep at the
cut is the guarantee; whoever admits or cancels early only saves work.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sandlot.aio import deadline
from sandlot.rl.rollout import room
from sandlot.rl.types import Batch, Group, PolicyVersion, Sample


@dataclass(frozen=True, slots=True)
class Scored:
    """A group and what the algorithm would learn from it."""

    group: Group
    samples: list[Sample]


class Sink:
    """`score` turns a group into samples, none if there is nothing to learn. `patience`: how many seconds may pass in
    `batch` without a group coming in, before it is an error."""

    def __init__(
        self,
        score: Callable[[Group], list[Sample]],
        *,
        batch_groups: int,
        max_staleness: float,
        version: PolicyVersion = 0,
        patience: float = 600.0,
    ) -> None:
        self._score = score
        self._batch_groups = batch_groups
        self._max_staleness = max_staleness
        self._version = version
        self._patience = patience
        self._pending: list[Scored] = []
        self._rewards: list[float] = []
        self._fault: Exception | None = None
        self._arrived = asyncio.Event()
        self._vacated: Callable[[], None] = lambda: None
        self.counts: Counter[str] = Counter(accepted=0, dropped=0, swept=0, used=0)

    @property
    def held(self) -> int:
        """Groups that were accepted and are not swept, used ones included: what an admission rule must count."""
        return self.counts["used"] + len(self._pending)

    @property
    def pending(self) -> int:
        """Groups that wait for their batch."""
        return len(self._pending)

    def on_vacated(self, call: Callable[[], None]) -> None:
        """Who is told that groups were swept, so that others may take their places."""
        self._vacated = call

    def add(self, group: Group) -> bool:
        """Take a finished group. False: the algorithm learns nothing from it."""
        self._rewards += [episode.reward or 0.0 for episode in group.episodes]
        samples = self._score(group)
        if samples:
            self._pending.append(Scored(group, samples))
        self.counts["accepted" if samples else "dropped"] += 1
        self._arrived.set()
        return bool(samples)

    def fail(self, error: Exception) -> None:
        """Nothing more will come: whoever waits for a batch, now or later, gets `error`."""
        self._fault = error
        self._arrived.set()

    def advance(self, version: PolicyVersion) -> None:
        """The policy is `version` now."""
        self._version = version

    async def batch(self) -> Batch:
        """The next batch: `batch_groups` groups, the oldest first, none of them older than `max_staleness` versions.
        Raises what `fail` was given, DeadlineExceeded when nothing comes in for too long. One caller at a time."""
        while True:
            self._sweep()
            if len(self._pending) >= self._batch_groups:
                return self._cut()
            if self._fault is not None:
                raise self._fault
            self._arrived.clear()
            missing = f"a finished group ({len(self._pending)} of {self._batch_groups} wait for the next batch)"
            async with deadline(self._patience, missing, "look at the newest episodes for what holds them up"):
                await self._arrived.wait()

    def state(self) -> list[Scored]:
        """The finished and unused groups, for a checkpoint."""
        return list(self._pending)

    def restore(self, state: list[Scored]) -> None:
        """Put them back; call it before anything is added."""
        self._pending = list(state)
        self.counts["accepted"] += len(state)

    def _sweep(self) -> None:
        fresh = [one for one in self._pending if not room.too_old(one.group.age, self._version, self._max_staleness)]
        swept = len(self._pending) - len(fresh)
        if swept:
            self._pending = fresh
            self.counts["swept"] += swept
            self._vacated()

    def _cut(self) -> Batch:
        self._pending.sort(key=lambda one: one.group.age)  # stable: of one age, the first to finish is the first used
        chosen, self._pending = self._pending[: self._batch_groups], self._pending[self._batch_groups :]
        self.counts["used"] += len(chosen)
        samples: list[Sample] = []
        groups: list[tuple[int, int]] = []
        for one in chosen:
            groups.append((len(samples), len(samples) + len(one.samples)))
            samples += one.samples
        staleness = [self._version - one.group.age for one in chosen]
        metrics = {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": float(max(staleness)),
            **{f"staleness_{age}": float(count) for age, count in sorted(Counter(staleness).items())},
            # Of every group since the last cut, those that were dropped included: a batch's own would flatter.
            "reward": sum(self._rewards) / len(self._rewards) if self._rewards else 0.0,
            "dropped": float(self.counts["dropped"]),
            "swept": float(self.counts["swept"]),
        }
        self._rewards = []
        return Batch(samples, groups, self._version, metrics)

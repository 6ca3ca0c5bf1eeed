"""Where a phase's batches come from: the policy's own attempts, or demonstrations.

A feed is opened, asked for one batch after the other and told each new version. It knows no trainer. What it needs to
go on after a kill is its `state` (JSON) and `unused` (finished episodes that no batch has used).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sandlot.rl.rollout.dispatcher import Dispatcher
from sandlot.rl.rollout.sink import Sink
from sandlot.rl.types import Batch, PolicyVersion, Sample


class Feed(Protocol):
    steps: int  # batches in the phase
    live: bool  # whether the policy itself is sampled, so that it must be published after each step

    async def batch(self) -> Batch: ...
    def advance(self, version: PolicyVersion) -> None: ...
    def state(self) -> Any: ...
    def unused(self) -> Any: ...
    async def close(self) -> None: ...


class Rollouts:
    """The policy's own attempts, as dispatcher and sink hand them on."""

    live = True

    def __init__(self, dispatcher: Dispatcher, sink: Sink, steps: int, saved: tuple[Any, Any] | None) -> None:
        self.steps = steps
        self.dispatcher = dispatcher
        self.sink = sink
        if saved is not None:
            state, unused = saved
            dispatcher.restore(state)
            sink.restore(unused)
        dispatcher.start()

    async def batch(self) -> Batch:
        return await self.sink.batch()

    def advance(self, version: PolicyVersion) -> None:
        self.sink.advance(version)
        self.dispatcher.advance(version)

    def state(self) -> Any:
        return self.dispatcher.state()

    def unused(self) -> Any:
        return self.sink.state()

    async def close(self) -> None:
        await self.dispatcher.stop()


class Demonstrations:
    """Samples that are there already, in an order that the seed shuffles anew each epoch. The last few of an epoch that
    do not fill a batch are left out of it: another few each time."""

    live = False

    def __init__(
        self, samples: list[Sample], epochs: int, batch: int, seed: int, saved: tuple[Any, Any] | None
    ) -> None:
        self._samples = samples
        self._batch = min(batch, len(samples))
        self._seed = seed
        self._per_epoch = len(samples) // self._batch
        self.steps = epochs * self._per_epoch
        self._next = 0 if saved is None else int(saved[0]["next"])
        self._order: tuple[int, list[int]] = (-1, [])

    async def batch(self) -> Batch:
        epoch, place = divmod(self._next, self._per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._samples)).tolist())
        self._next += 1
        chosen = self._order[1][place * self._batch : (place + 1) * self._batch]
        return Batch([self._samples[i] for i in chosen], [(i, i + 1) for i in range(len(chosen))], version=0)

    def advance(self, version: PolicyVersion) -> None:
        """Demonstrations do not grow old."""

    def state(self) -> Any:
        return {"next": self._next}

    def unused(self) -> Any:
        return self._samples

    async def close(self) -> None:
        """Nothing runs."""

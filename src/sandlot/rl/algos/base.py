"""What an algorithm is: how a group's rewards become per-token streams, and which surrogate loss reads them.

An algorithm is arithmetic on small numpy arrays. It never imports torch, never sees a box, a message or the optimizer,
and never divides by a count: the trainer divides by the counts of the whole batch.

The loop calls, in this order:

    score(group)  → trainer.annotate(needs) → advantages(batch) → trainer.step(…, surrogate, loss options)
    rewards           "old", "ref", …            "advantages"       train/loss.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from sandlot.rl.types import Batch, FloatArray, Group, Sample


class Algorithm(Protocol):
    """Built from its class's own `Config`, once per phase. `off_policy` tells it whether the policy may have moved
    between sampling and a gradient: more than one minibatch a batch, or a staleness above 0."""

    name: ClassVar[str]
    learns_from: ClassVar[Literal["rollouts", "demonstrations"]]
    least_group: ClassVar[int]  # fewer attempts at a task teach it nothing
    surrogate: str  # a name in train/loss.py's table
    needs: frozenset[str]  # streams that the trainer must add before `advantages`: "old"
    loss: dict[str, float]  # options of the surrogate

    def __init__(self, config: Any, *, off_policy: bool) -> None: ...

    def score(self, group: Group) -> list[Sample]:
        """The group's samples, each with a "score" stream. An empty list drops the group."""
        ...

    def advantages(self, batch: Batch) -> list[Sample]:
        """The batch's samples with whatever streams the surrogate reads, in the same order."""
        ...


def with_stream(sample: Sample, name: str, value: float | FloatArray) -> Sample:
    """The sample with one more stream; a number is spread over its sampled tokens and is 0 elsewhere."""
    if not isinstance(value, np.ndarray):
        value = np.where(sample.mask, np.float32(value), np.float32(0.0)).astype(np.float32)
    return replace(sample, streams={**sample.streams, name: value})


def with_annotations(batch: Batch, streams: Sequence[dict[str, FloatArray]]) -> Batch:
    """The batch with what `trainer.annotate` gave for each of its samples."""
    samples = [replace(s, streams={**s.streams, **more}) for s, more in zip(batch.samples, streams, strict=True)]
    return replace(batch, samples=samples)

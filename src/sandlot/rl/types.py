"""What flows through training, declared before what runs: Task → Episode → Group → Sample → Batch.

Open this file first. A *task* is a question; an *episode* is one attempt at it; a *group* is the attempts at one task
that are compared with each other; a *sample* is a token sequence to learn from (an episode gives one per path of its
token graph); a *batch* is what one optimizer step sees.

    Task("find-17") ─┬─ Episode 0  reward 1.0 ─ Sample(tokens=[…], mask=[…])
                     ├─ Episode 1  reward 0.0 ─ Sample
                     └─ …                        ⇒ Group ⇒ (advantages) ⇒ Batch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

PolicyVersion = int  # 0 is the policy that a phase starts from; each optimizer step that is published adds one


class EpisodeEnding(StrEnum):
    """How an episode came out: exactly one of these, once. Their counts add up to the admitted."""

    OK = "ok"  # it ran to its end and was graded, whatever the reward
    FAILED = "failed"  # the sandbox, the agent's start, the gateway or the grader broke
    TIMED_OUT = "timed_out"  # it outlived the deadline of an episode
    CANCELLED_STALE = "cancelled_stale"  # its policy had become too old before it could be used
    CANCELLED_SURPLUS = "cancelled_surplus"  # not needed any more: enough others finished, or the run ended


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `id` is stable between runs; `data` is the environment's own and never enters a box by itself."""

    id: str
    seed: int
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A token sequence to learn from. All arrays have length T = len(tokens) and are aligned to `tokens`.

    Example, a prompt of 3 and an answer of 2:
        tokens    [5, 9, 3, 7, 2]      ids, exactly those the engine read and sampled
        mask      [0, 0, 0, 1, 1]      True where the policy sampled the token: what is learned from
        logprobs  [0, 0, 0, -.4, -.1]  the engine's, at sampling; 0 where mask is False
        versions  [-1, -1, -1, 4, 4]   policy version that sampled it; -1 where mask is False
    `streams` holds further per-token arrays of the same length: "advantages", "old" (the trainer's own log-probs
    before the update), "ref", "values", …
    """

    tokens: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    streams: dict[str, FloatArray] = field(default_factory=dict)

    @property
    def oldest(self) -> PolicyVersion:
        """The oldest policy version among its sampled tokens; 0 if it has none."""
        return int(self.versions[self.mask].min()) if self.mask.any() else 0


@dataclass(slots=True)
class Episode:
    """One attempt at a task, as it came out of the dispatcher."""

    id: str
    task: Task
    member: int  # which attempt within its group; its sampling seed is task.seed + member
    ending: EpisodeEnding
    reward: float | None = None  # None unless ending is ok
    samples: list[Sample] = field(default_factory=list)
    detail: str | None = None  # a sentence about an ending other than ok
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # the environment's own numbers
    transcript: dict[str, Any] = field(default_factory=dict)  # dialogue, commands, outputs: for people


@dataclass(slots=True)
class Group:
    """All attempts at one task that came out `ok`. `age` is the policy version of its oldest member."""

    task: Task
    episodes: list[Episode]

    @property
    def age(self) -> PolicyVersion:
        return min((s.oldest for e in self.episodes for s in e.samples), default=0)


@dataclass(slots=True)
class Batch:
    """What one training step sees. `groups[i]` is the index range of group i in `samples`: members stay together."""

    samples: list[Sample]
    groups: list[tuple[int, int]]
    version: PolicyVersion  # of the policy that is about to be updated
    metrics: dict[str, float] = field(default_factory=dict)

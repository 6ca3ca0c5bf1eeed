"""GRPO: an attempt is as good as it is better than the other attempts at the same task.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024
(arXiv:2402.03300), with two choices of Yu et al., "DAPO", 2025 (arXiv:2503.14476): every token of a batch has the same
weight (but for attempts of several samples), and the upper clip is a setting of its own. There is no KL term.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sandlot import config
from sandlot.rl.algos.base import with_stream
from sandlot.rl.types import Batch, Group, Sample


class Grpo:
    """Advantage = (reward - mean of its group) / (standard deviation of its group), the same for each token.

    A group in which all rewards are equal teaches nothing: its advantages are 0. It still counts in the batch, so that
    batches stay equally large as the policy gets better. The samples of one attempt (its agent forked its dialogue, or
    began a new one) share its weight: asking more often is not worth more.
    """

    name: ClassVar[str] = "grpo"
    learns_from: ClassVar[Literal["rollouts", "demonstrations"]] = "rollouts"
    least_group: ClassVar[int] = 2

    class Config(config.Config):
        clip_low: float = Field(default=0.2, gt=0, lt=1)
        """How far a token's probability may fall below the old one before its gradient stops."""
        clip_high: float = Field(default=0.2, gt=0)
        """How far it may rise above it."""
        importance_cap: float = Field(default=2.0, ge=1)
        """Upper bound of the weight that corrects for the engine's probabilities not being the trainer's."""
        normalise: bool = True
        """Divide by the group's standard deviation."""

    def __init__(self, config: Config, *, off_policy: bool) -> None:
        self.config = config
        self.surrogate = "clip"
        # On-policy with a single gradient a batch, the old probabilities are the current ones: nothing to compute.
        self.needs = frozenset({"old"} if off_policy else ())
        self.loss = {
            "clip_low": config.clip_low,
            "clip_high": config.clip_high,
            "importance_cap": config.importance_cap,
        }

    def score(self, group: Group) -> list[Sample]:
        if len(group.episodes) < self.least_group:
            return []  # nothing to compare with
        return [
            with_stream(with_stream(sample, "score", float(episode.reward or 0.0)), "share", 1 / len(episode.samples))
            for episode in group.episodes
            for sample in episode.samples
        ]

    def advantages(self, batch: Batch) -> list[Sample]:
        found: list[Sample] = []
        for start, end in batch.groups:
            members = batch.samples[start:end]
            scores, shares = (
                np.array([s.streams[name][s.mask].max(initial=-np.inf) for s in members], dtype=np.float64)
                for name in ("score", "share")
            )
            spread = scores - np.average(scores, weights=shares)
            if self.config.normalise:
                # 1e-6 keeps a group of equals at 0 and changes nothing else: rewards differ by far more
                spread = spread / (np.average(spread**2, weights=shares) ** 0.5 + 1e-6)
            found += [with_stream(s, "advantages", float(a)) for s, a in zip(members, spread * shares, strict=True)]
        return found

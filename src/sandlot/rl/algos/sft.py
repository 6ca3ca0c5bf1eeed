"""SFT: make the demonstrated answers likely.

Maximum likelihood on the tokens that the demonstrator chose, as in Ouyang et al., "Training language models to follow
instructions with human feedback", 2022 (arXiv:2203.02155), first step. Good and bad demonstrations count alike:
whoever wants only good ones sets `min_reward`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from sandlot import config
from sandlot.rl.algos.base import with_stream
from sandlot.rl.types import Batch, Group, Sample


class Sft:
    """Cross-entropy on the sampled tokens of demonstrations."""

    name: ClassVar[str] = "sft"
    learns_from: ClassVar[Literal["rollouts", "demonstrations"]] = "demonstrations"
    least_group: ClassVar[int] = 1

    class Config(config.Config):
        min_reward: float | None = None
        """Leave out demonstrations that earned less; None: learn from all of them."""

    def __init__(self, config: Config, *, off_policy: bool) -> None:
        self.config = config
        self.surrogate = "cross_entropy"
        self.needs: frozenset[str] = frozenset()
        self.loss: dict[str, float] = {}

    def score(self, group: Group) -> list[Sample]:
        least = self.config.min_reward
        return [
            with_stream(sample, "score", float(episode.reward or 0.0))
            for episode in group.episodes
            if least is None or (episode.reward or 0.0) >= least
            for sample in episode.samples
        ]

    def advantages(self, batch: Batch) -> list[Sample]:
        return batch.samples

"""GRPO that is told the rewards of a group in another order: the control of a learning test. Nothing can be learned."""

from __future__ import annotations

import random
from typing import ClassVar

from sandlot.rl.algos.grpo import Grpo
from sandlot.rl.types import Group, Sample


class Shuffled(Grpo):
    name: ClassVar[str] = "shuffled"

    def score(self, group: Group) -> list[Sample]:
        rewards = [episode.reward for episode in group.episodes]
        random.Random(group.task.id).shuffle(rewards)
        for episode, reward in zip(group.episodes, rewards, strict=True):
            episode.reward = reward
        return super().score(group)

"""GRPO that is told rewards which say nothing about who earned them: the control of a learning test."""

from __future__ import annotations

import random
from typing import ClassVar

from sandlot.rl.algos.grpo import Grpo
from sandlot.rl.types import Group, Sample


class Shuffled(Grpo):
    """As many attempts are praised as succeeded, in equal shares among those that did and those that did not, so that
    in each group praise says nothing about success. What remains is a random walk of the policy, which a short run
    does not average out: it mostly falls, and may rise a little."""

    name: ClassVar[str] = "shuffled"

    def score(self, group: Group) -> list[Sample]:
        chance = random.Random(group.task.id)
        won = [episode for episode in group.episodes if episode.reward]
        lost = [episode for episode in group.episodes if not episode.reward]
        share = len(won) * len(won) / len(group.episodes)
        kept = int(share) + (chance.random() < share % 1)
        praised = {e.id for e in [*chance.sample(won, kept), *chance.sample(lost, len(won) - kept)]}
        for episode in group.episodes:
            episode.reward = float(episode.id in praised)
        return super().score(group)

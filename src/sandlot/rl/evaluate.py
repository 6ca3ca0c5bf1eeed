"""What a policy is worth: its success on held-out tasks, through the path that training takes, without learning."""

from __future__ import annotations

from collections.abc import Callable

from sandlot.rl.rollout.dispatcher import RunEpisode, rollout_all
from sandlot.rl.types import Episode, Task


async def success(
    tasks: list[Task], run_episode: RunEpisode, max_running: int, on_episode: Callable[[Episode], None]
) -> float:
    """Mean reward over all tasks, one attempt each. An episode without a reward, whatever became of it, counts as 0."""
    episodes = await rollout_all(tasks, run_episode, max_running, on_episode)
    return sum(episode.reward or 0.0 for episode in episodes) / len(episodes)

"""Which task comes next.

Owns a cursor and an order. The order depends on the seed alone and a cursor is all its state, so a run that is taken up
again goes on with the very tasks it would have had.
"""

from __future__ import annotations

import hashlib
import random

from sandlot.envs.boxed import BoxedEnv
from sandlot.rl.types import Task

MOST_MEMBERS = 1 << 16  # a member's seed is its task's + its number: tasks' seeds are this far apart


class Source:
    """Tasks of one split. With `count`, its first `count` tasks in an order that the seed shuffles, anew in each round;
    without, ever new ones, a stretch of the split that is the seed's own."""

    def __init__(self, env: BoxedEnv, split: str, seed: int, count: int | None = None) -> None:
        self._env = env
        self._split = split
        self._seed = seed
        self._count = count
        self._cursor = 0
        self._round: tuple[int, list[int]] = (-1, [])

    def next(self) -> Task:
        """The next task. `task.data` holds the split and index by which the environment finds it again."""
        cursor = self._cursor
        self._cursor += 1
        index = self._index(cursor)
        text = f"{self._seed}/{self._split}/{cursor}"
        digest = hashlib.blake2b(text.encode(), digest_size=5).digest()
        seed = int.from_bytes(digest, "big") * MOST_MEMBERS
        return Task(self._env.task(self._split, index).id, seed, {"split": self._split, "index": index})

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        return [self.next() for _ in range(count)]

    def state(self) -> dict[str, int]:
        """What `restore` needs to go on from here."""
        return {"cursor": self._cursor}

    def restore(self, state: dict[str, int]) -> None:
        self._cursor = state["cursor"]

    def _index(self, cursor: int) -> int:
        if self._count is None:
            return (self._seed % 1000) * 1_000_000 + cursor  # a run of a million tasks stays on its own stretch
        turn, place = divmod(cursor, self._count)
        if self._round[0] != turn:
            order = list(range(self._count))
            random.Random(f"{self._seed}/{self._split}/{turn}").shuffle(order)
            self._round = (turn, order)
        return self._round[1][place]

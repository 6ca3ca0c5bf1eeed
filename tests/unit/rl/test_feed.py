"""Promises:
1. Demonstrations: each is learned from once an epoch, in an order that the seed decides.
2. A feed that goes on from its state gives the batches that it would have given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sandlot.rl.feed import Demonstrations
from sandlot.rl.types import Sample

Make = Callable[..., list[Sample]]


async def take(feed: Demonstrations, count: int) -> list[list[int]]:
    return [[id(sample) for sample in (await feed.batch()).samples] for _ in range(count)]


async def test_each_is_learned_from_once_an_epoch(samples: Make) -> None:
    made = samples(11)
    feed = Demonstrations(made, epochs=3, batch=4, seed=1, saved=None)
    assert feed.steps == 6
    batches = await take(feed, feed.steps)
    for epoch in range(3):
        seen = Counter(i for batch in batches[2 * epoch : 2 * epoch + 2] for i in batch)
        assert len(seen) == 8 and set(seen.values()) == {1}
    assert len({tuple(batch) for batch in batches}) == 6
    assert batches == await take(Demonstrations(made, 3, 4, 1, None), 6)
    assert batches != await take(Demonstrations(made, 3, 4, 2, None), 6)


async def test_it_goes_on_from_its_state(samples: Make) -> None:
    made = samples(8)
    feed = Demonstrations(made, 5, 2, 3, None)
    await take(feed, 7)
    saved = (feed.state(), feed.unused())
    assert await take(Demonstrations(saved[1], 5, 2, 3, saved), 9) == await take(feed, 9)


async def test_fewer_than_a_batch_are_one_batch(samples: Make) -> None:
    feed = Demonstrations(samples(3), 2, 16, 0, None)
    assert feed.steps == 2
    assert len((await feed.batch()).samples) == 3

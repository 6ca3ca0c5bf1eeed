"""Samples into micro-batches: sequences laid end to end without padding, with the counts to divide by. Pure.

Promises: every sampled token is learned from exactly once, whatever the packing; `Totals` are of the whole set given
(an optimizer step), not of a pack, so dividing by them makes the gradient independent of packing, micro-batch size and
ranks. Samples that cannot move the weights may be left out of the packs, and are still counted.

A pack of two samples, [5 9 3 7 2] with 2 sampled tokens and [4 8] with 1:

    tokens     5  9  3  7  2  4  8
    positions  0  1  2  3  4  0  1      where each sequence starts again
    sequences  0  0  0  0  0  1  1      who may look at whom: only its own, only backwards
    predictors       2  3     5         index of the token before each sampled one: its logits give the sampled one's
    labels           7  2     8
    streams          ·  ·     ·         "advantages", "old", "logprobs", one value per label
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sandlot.rl.types import FloatArray, IntArray, Sample


@dataclass(frozen=True, slots=True)
class Totals:
    """What a gradient is divided by: the sampled tokens and the samples of one optimizer step, over all packs."""

    tokens: int
    samples: int


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch. `members` are the indices, in the list that was packed, of the samples it holds, in order."""

    tokens: IntArray  # [N]
    positions: IntArray  # [N]
    sequences: IntArray  # [N]
    predictors: IntArray  # [M]
    labels: IntArray  # [M]
    streams: dict[str, FloatArray]  # each [M]
    members: tuple[int, ...]


def totals(samples: Sequence[Sample]) -> Totals:
    return Totals(tokens=sum(int(learned(s).sum()) for s in samples), samples=len(samples))


def learned(sample: Sample) -> np.ndarray:
    """Which tokens are learned from. The first token has nothing before it that could predict it."""
    mask = sample.mask.copy()
    mask[:1] = False
    return mask


def pack(samples: Sequence[Sample], max_tokens: int, only: Sequence[int] | None = None) -> list[Pack]:
    """Fill packs of at most `max_tokens`, longest sample first, each into the first pack with room.

    A sample longer than `max_tokens` gets a pack of its own. `only`: indices to pack, all if None.
    """
    order = sorted(range(len(samples)) if only is None else only, key=lambda i: (-len(samples[i].tokens), i))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = len(samples[index].tokens)
        for which, free in enumerate(room):
            if length <= free:
                bins[which].append(index)
                room[which] -= length
                break
        else:
            bins.append([index])
            room.append(max_tokens - length)
    return [_pack(samples, members) for members in bins]


def _pack(samples: Sequence[Sample], members: list[int]) -> Pack:
    chosen = [samples[i] for i in members]
    lengths = [len(s.tokens) for s in chosen]
    tokens = np.concatenate([s.tokens for s in chosen])
    mask = np.concatenate([learned(s) for s in chosen])
    targets = np.flatnonzero(mask)
    # A stream is packed when all members have it; a mixture would silently train some on zeros.
    names = set.intersection(*(set(s.streams) for s in chosen))
    streams = {name: np.concatenate([s.streams[name] for s in chosen])[targets] for name in sorted(names)}
    streams["logprobs"] = np.concatenate([s.logprobs for s in chosen])[targets]
    return Pack(
        tokens=tokens.astype(np.int64),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int64),
        sequences=np.repeat(np.arange(len(chosen)), lengths).astype(np.int64),
        predictors=(targets - 1).astype(np.int64),
        labels=tokens[targets].astype(np.int64),
        streams={name: values.astype(np.float32) for name, values in streams.items()},
        members=tuple(members),
    )


def unpack(packs: Sequence[Pack], values: Sequence[FloatArray], samples: Sequence[Sample]) -> Iterator[FloatArray]:
    """The other way: one value per label of each pack, back into one array per sample, 0 where nothing is learned.

    Yields in the order of `samples`; a sample that is in no pack gives zeros.
    """
    found: dict[int, FloatArray] = {}
    for one, given in zip(packs, values, strict=True):
        flat = np.zeros(len(one.tokens), dtype=np.float32)
        flat[one.predictors + 1] = given
        ends = np.cumsum([len(samples[i].tokens) for i in one.members])
        found |= dict(zip(one.members, np.split(flat, ends[:-1]), strict=True))
    for index, sample in enumerate(samples):
        yield found.get(index, np.zeros(len(sample.tokens), dtype=np.float32))


def minibatches(groups: Sequence[tuple[int, int]], count: int, seed: int) -> list[list[int]]:
    """Sample indices in `count` parts of nearly equal numbers of groups, in a seeded order; groups stay whole."""
    order = np.random.default_rng(seed).permutation(len(groups))
    parts = [part for part in np.array_split(order, count) if len(part)]
    return [[i for g in part for i in range(*groups[g])] for part in parts]

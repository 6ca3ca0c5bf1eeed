"""A table of surrogates: per-token losses over packed streams. It knows no algorithm.

Each takes `Terms` and returns one loss per learned token, not reduced: the trainer sums and divides by the counts of
the whole optimizer step. Log-probabilities with a gradient are `new`; all else is data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """What a surrogate may read, each [M], one per learned token."""

    new: Tensor  # the trainer's log-probabilities now, with gradient
    engine: Tensor  # the engine's, at sampling
    old: Tensor  # the trainer's before the update of this batch; `new` without gradient where nothing else is known
    advantages: Tensor | None
    options: dict[str, float]

    @property
    def advantage(self) -> Tensor:
        if self.advantages is None:
            raise ValueError("this surrogate reads the stream `advantages`, which the algorithm did not make")
        return self.advantages

    @property
    def importance(self) -> Tensor:
        """Old over engine, truncated: corrects for a sampler that is not quite, or no longer, the trained policy."""
        return (self.old - self.engine).exp().clamp(max=self.options.get("importance_cap", 2.0))


def reinforce(terms: Terms) -> Tensor:
    """-w · A · log p (Williams, 1992), w the truncated importance weight."""
    return -terms.importance * terms.advantage * terms.new


def clip(terms: Terms) -> Tensor:
    """-w · min(r·A, clip(r, 1 - low, 1 + high)·A), r = p/p_old (Schulman et al., 2017, arXiv:1707.06347)."""
    ratio = (terms.new - terms.old).exp()
    clipped = ratio.clamp(1 - terms.options["clip_low"], 1 + terms.options["clip_high"])
    return -terms.importance * torch.minimum(ratio * terms.advantage, clipped * terms.advantage)


def cross_entropy(terms: Terms) -> Tensor:
    """-log p of what was demonstrated."""
    return -terms.new


SURROGATES: dict[str, Callable[[Terms], Tensor]] = {
    "reinforce": reinforce,
    "clip": clip,
    "cross_entropy": cross_entropy,
}

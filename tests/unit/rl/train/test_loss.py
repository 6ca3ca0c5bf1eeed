"""Promises:
1. Each surrogate is its formula, and its gradient stops where the formula says.
2. The importance weight is truncated, and is data.
"""

from __future__ import annotations

import pytest
import torch

from sandlot.rl.train.loss import SURROGATES, Terms

OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "importance_cap": 2.0}


def terms(new: float, old: float, engine: float, advantage: float) -> Terms:
    tensor = torch.tensor
    return Terms(tensor([new], requires_grad=True), tensor([engine]), tensor([old]), tensor([advantage]), OPTIONS)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [
        (1.0, 1.0, -1.0, True),
        (1.5, 1.0, -1.3, False),  # has risen enough
        (1.5, -1.0, 1.5, True),  # rose where it should fall: no clip
        (0.5, -1.0, 0.8, False),
        (0.5, 1.0, -0.5, True),
    ],
)
def test_clip_stops_where_it_went_far_enough(ratio: float, advantage: float, loss: float, moves: bool) -> None:
    old = -1.0
    given = terms(old + float(torch.tensor(ratio).log()), old, old, advantage)
    found = SURROGATES["clip"](given)
    assert found.item() == pytest.approx(loss, abs=1e-5)
    found.sum().backward()
    assert given.new.grad is not None
    assert bool(given.new.grad.abs().item() > 0) is moves


def test_importance_is_truncated_and_has_no_gradient() -> None:
    given = terms(-1.0, -1.0, -4.0, 1.0)  # the engine thought it far less likely
    assert given.importance.item() == 2.0
    SURROGATES["reinforce"](given).sum().backward()
    assert given.new.grad is not None
    assert given.new.grad.item() == -2.0  # d(-w A log p) / d log p


def test_cross_entropy_reads_no_advantage() -> None:
    given = Terms(torch.tensor([-2.0]), torch.tensor([0.0]), torch.tensor([0.0]), None, {})
    assert SURROGATES["cross_entropy"](given).item() == 2.0
    with pytest.raises(ValueError, match="advantages"):
        SURROGATES["reinforce"](given)

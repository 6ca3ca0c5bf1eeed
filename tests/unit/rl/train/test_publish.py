"""Promises:
1. After a publication the engine samples from the trainer's very weights, and says the new version.
2. Control: one tensor that was damaged between trainer and engine stops the run; so does an engine that keeps its
   version, and weights that are not numbers.
3. The probe goes through every word of a small vocabulary. The last two files are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandlot.errors import TrainingFault
from sandlot.rl.engines.local import LocalEngine
from sandlot.rl.train.backend import Settings
from sandlot.rl.train.publish import Publisher, probe
from sandlot.rl.train.single import SingleTrainer


class Awaitable:
    """A trainer of this process, its plain methods as awaitables."""

    def __init__(self, trainer: SingleTrainer) -> None:
        self.trainer = trainer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            return await asyncio.to_thread(getattr(self.trainer, name), *args)

        return call


class Damaging(LocalEngine):
    """Takes weights of which one tensor was damaged on the way."""

    damage: Callable[[dict[str, torch.Tensor]], None] = staticmethod(lambda weights: None)

    async def update(self, path: str, version: int) -> None:
        weights = load_file(path)
        self.damage(weights)
        save_file(weights, path)
        await super().update(path, version)


class Stubborn(LocalEngine):
    """Takes weights and goes on saying the old version."""

    async def version(self) -> int:
        return 0


@pytest.fixture
async def engines(tiny: Path) -> AsyncIterator[Callable[[type[LocalEngine]], LocalEngine]]:
    made: list[LocalEngine] = []

    def make(kind: type[LocalEngine]) -> LocalEngine:
        made.append(kind(str(tiny), kind.Config()))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


def publisher(engine: LocalEngine, folder: Path, model: Path) -> Publisher:
    return Publisher(Awaitable(SingleTrainer(str(model), Settings())), engine, folder, 42)  # type: ignore[arg-type]


async def test_the_engine_samples_from_the_trainers_weights(engines: Any, tmp_path: Path, another: Path) -> None:
    engine = engines(LocalEngine)
    one = publisher(engine, tmp_path, another)
    with pytest.raises(TrainingFault, match="are not the trainer's"):
        await one.check(0)  # different weights under the same version
    for version in (1, 2, 3):
        assert await one.publish(version) < 1e-5
        assert await engine.version() == version
    assert sorted(file.name for file in tmp_path.iterdir()) == ["2.safetensors", "3.safetensors"]


def some_value(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.self_attn.v_proj.weight"].mul_(1.05)


def one_word(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][41] += 0.05


def no_number(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"][0] = torch.nan


@pytest.mark.parametrize("damage", [some_value, one_word, no_number])
async def test_a_damaged_tensor_stops_the_run(damage: Any, engines: Any, tmp_path: Path, tiny: Path) -> None:
    engine = engines(Damaging)
    engine.damage = damage
    with pytest.raises(TrainingFault, match=r"weights of version 1 are not the trainer's"):
        await publisher(engine, tmp_path, tiny).publish(1)


async def test_an_engine_that_keeps_its_version_stops_the_run(engines: Any, tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(TrainingFault, match="version 1 was published, and the engine reports version 0"):
        await publisher(engines(Stubborn), tmp_path, tiny).publish(1)


def test_the_probe_goes_through_a_small_vocabulary() -> None:
    assert {token for sequence in probe(42) for token in sequence} == set(range(42))
    assert {token for sequence in probe(130) for token in sequence} == set(range(130))
    assert sum(map(len, probe(150_000))) < 600
    assert all(len(sequence) >= 2 for size in (1, 2, 65, 66, 129) for sequence in probe(size))

"""Weights from trainer to engine, checked every time.

Promises: when `publish` returns, the engine reports the new version and gives a fixed probe the log-probabilities that
the trainer gives it; else TrainingFault says which of the two is wrong, and the run must stop. Weights travel as one
safetensors file; the last two are kept. Without the check, an engine that drops or mangles a tensor (FACTS.md has one)
trains on for hours on another policy's samples.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from sandlot.errors import TrainingFault
from sandlot.gateway.engine import Engine
from sandlot.rl.train.backend import Trainer

TOLERANCE = 1e-3  # in fp32 engine and trainer differ by about 1e-5; one changed tensor moves the probe by far more
KEPT = 2  # the file that an engine may still be reading, and the one before it
PROBE_TOKENS = 512
PROBE_LENGTH = 64


def probe(vocabulary: int) -> list[list[int]]:
    """Fixed sequences through the vocabulary: all of a small one, so that no row of its embedding goes unseen."""
    ids = random.Random(0).sample(range(vocabulary), min(vocabulary, PROBE_TOKENS))
    ids += ids[: max(0, 2 - len(ids))]
    return [ids[i : i + PROBE_LENGTH + 1] for i in range(0, len(ids) - 1, PROBE_LENGTH)]


class Publisher:
    """Publishes one trainer's weights to one engine, through files in `folder`."""

    def __init__(self, trainer: Trainer, engine: Engine, folder: Path, vocabulary: int) -> None:
        self._trainer = trainer
        self._engine = engine
        self._folder = folder
        self._probe = probe(vocabulary)
        self._files: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.safetensors"):
            old.unlink()  # of a run that was killed

    async def publish(self, version: int) -> float:
        """Make the engine sample from the trainer's weights as `version`. The largest difference on the probe."""
        file = self._folder / f"{version}.safetensors"
        await self._trainer.export(str(file))
        if file in self._files:
            self._files.remove(file)
        self._files.append(file)
        await self._engine.update(str(file), version)
        for old in self._files[:-KEPT]:
            old.unlink(missing_ok=True)
        del self._files[:-KEPT]
        return await self.check(version)

    async def check(self, version: int) -> float:
        """Raise TrainingFault unless the engine is at `version` and has the trainer's weights."""
        reported = await self._engine.version()
        if reported != version:
            raise TrainingFault(
                f"version {version} was published, and the engine reports version {reported}",
                "the engine did not take the update: see its log in the run folder",
            )
        engine, trainer = await asyncio.gather(self._engine.logprobs(self._probe), self._trainer.logprobs(self._probe))
        gap = 0.0
        for mine, theirs in zip(engine, trainer, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                gap = (
                    max(gap, abs(a - b)) if a == a and b == b else float("inf")
                )  # a number that is none equals nothing
        if gap > TOLERANCE:
            raise TrainingFault(
                f"the engine's weights of version {version} are not the trainer's: "
                f"the log-probabilities of the probe differ by {gap:.3g}, more than {TOLERANCE:g}",
                "the weights were damaged on their way: go on from the last checkpoint with `--resume`",
            )
        return gap

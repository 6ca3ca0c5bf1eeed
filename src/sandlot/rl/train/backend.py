"""What a trainer backend must do: hold the policy, and turn a batch into a better policy.

A backend lives in a process of its own, so the loop sees these methods as awaitables; one is running at a time. It
knows nothing of engines, boxes or algorithms: an algorithm reaches it as streams and the name of a surrogate.
To add a backend: a module beside `single.py`, a line in BACKENDS, and the test that its result equals `single`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import Field

from sandlot.config import Config
from sandlot.rl.types import Batch, FloatArray, Sample

BACKENDS: dict[str, str] = {"single": "sandlot.rl.train.single:SingleTrainer"}


class Settings(Config):
    """What every backend takes."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32 on a CPU: bfloat16 is about 70 times slower there."""
    micro_batch_tokens: int = Field(default=512, ge=1)
    """Tokens in one forward and backward pass. Changes speed and memory, never the result."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""


class Optimization(Config):
    """How a phase moves the weights: AdamW with warm-up and linear decay."""

    lr: float = Field(default=5e-4, gt=0)
    """Learning rate after warm-up."""
    warmup: int = Field(default=3, ge=0)
    """Batches over which the learning rate rises from 0."""
    decay_to: float = Field(default=0.0, ge=0, le=1)
    """Fraction of `lr` that is left at the last batch; the way there is a straight line."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps for each batch. Groups stay whole."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest norm of a gradient; a longer one is scaled down."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's."""
    beta2: float = Field(default=0.95, gt=0, lt=1)
    """AdamW's memory of squared gradients; 0.95 forgets fast enough for runs of a hundred steps."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a phase minimises, and how."""

    surrogate: str
    loss: dict[str, float]
    optimization: Optimization
    steps: int  # batches in this phase: where the learning rate's line ends


@dataclass(slots=True)
class StepResult:
    """How an optimizer step went: means over its learned tokens, see `report.METRICS`."""

    metrics: dict[str, float] = field(default_factory=dict)


class Trainer(Protocol):
    """The policy and its optimizer, as the loop sees it. A backend is made from
    (model folder, Settings, seed), which orders its minibatches."""

    async def begin(self, objective: Objective, folder: str | None = None) -> None:
        """Start a phase: a fresh optimizer and schedule, the weights as they are. With a `folder` written by `save`,
        go on in that phase: optimizer, schedule and RNG are taken from it; its weights are those it was made from."""
        ...

    async def annotate(self, samples: list[Sample], needs: frozenset[str]) -> list[dict[str, FloatArray]]:
        """For each sample the asked streams, aligned to its tokens: "old" is the policy's log-probabilities now."""
        ...

    async def step(self, batch: Batch) -> StepResult:
        """Learn from a batch. Raises TrainingFault when a loss is not a number: the weights are then as the batch's
        minibatches before that one left them, and the last checkpoint is what to go on from."""
        ...

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """As `Engine.logprobs`, from the weights being trained."""
        ...

    async def export(self, path: str) -> None:
        """Write the weights as one safetensors file: all of it is there, or nothing."""
        ...

    async def save(self, folder: str) -> None:
        """Write a folder that `transformers` loads, and beside it what `begin` needs to go on."""
        ...

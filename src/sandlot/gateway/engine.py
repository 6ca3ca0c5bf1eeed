"""What an engine must do to answer a gateway: token ids in, sampled token ids and their log-probabilities out.

An engine knows nothing of episodes, messages' meaning or training. Implementations: `rl/engines/local.py` (small models
on CPU), `rl/engines/scripted.py` (a program that answers); others are thin over their library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ChatMessage = dict[str, Any]  # OpenAI's shape: {"role": "user", "content": "…"}, tool calls included


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. `seed` makes a row's choices independent of what else is in the batch."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One call. `prompt` is what a model continues; `messages` is the same for an engine that reads text."""

    prompt: list[int]
    messages: list[ChatMessage]
    sampling: Sampling
    episode: str = ""  # for the engine's log only


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled. `tokens` ends with the end-of-turn token unless `finish` is "length".

    Example: tokens [7, 12, 2], logprobs [-0.1, -1.3, -0.02], versions [4, 4, 5]: weights changed before the last one.
    `logprobs` are of the distribution that was sampled from, temperature and top_p included.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]


@dataclass(slots=True)
class EngineStats:
    """Counters since start, for progress and room."""

    calls: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0


class Engine(Protocol):
    """Answers questions, many at once."""

    async def generate(self, question: Question) -> Generation:
        """Raises TrainingFault when the engine is broken. Cancelling the call stops its generation."""
        ...

    async def version(self) -> int:
        """The policy version that it samples from now. 0 before the first update."""
        ...

    async def update(self, path: str, version: int) -> None:
        """Take the weights in the safetensors file `path` as `version`: pause between two tokens, swap, go on.
        Generation in flight continues under the new weights, its later tokens carrying the new version."""
        ...

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """For each sequence the log-probability of token i given those before it, from i = 1 (so one shorter), at
        temperature 1. The probe by which publication is checked."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Refusal(Exception):
    """The gateway's own no to a request, worded by the dialect: budget spent, context too long, bad request."""

    status: int
    kind: str  # "invalid_request_error", "context_length_exceeded", …
    message: str
    details: dict[str, Any] = field(default_factory=dict)

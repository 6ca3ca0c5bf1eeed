"""An engine whose policy is a program: it reads the messages and says a text.

Owns which program answers which episode, and a log of what it read and said. Used to collect demonstrations through
the very path that training takes, and as the policy of tests. It samples nothing: every log-probability is 0.
"""

from __future__ import annotations

from collections.abc import Callable

from sandlot.errors import TrainingFault
from sandlot.gateway.engine import ChatMessage, EngineStats, Generation, Question
from sandlot.gateway.render import Tokenizer

Script = Callable[[list[ChatMessage]], str]


class ScriptedEngine:
    """`script` answers every episode that `assign` gave no script of its own. With `keep_log`, what each call read and
    said is kept until `take_log`."""

    def __init__(self, tokenizer: Tokenizer, script: Script | None = None, *, keep_log: bool = False) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._scripts: dict[str, Script] = {}
        self._version = 0
        self._stats = EngineStats()
        self._log: list[tuple[str, list[int], list[int]]] | None = [] if keep_log else None

    def assign(self, episode: str, script: Script | None) -> None:
        """Who answers this episode from now; None: nobody in particular."""
        if script is None:
            self._scripts.pop(episode, None)
        else:
            self._scripts[episode] = script

    async def generate(self, question: Question) -> Generation:
        script = self._scripts.get(question.episode, self._script)
        if script is None:
            raise TrainingFault(f"no script answers episode {question.episode!r}")
        tokens = [*self._tokenizer.encode(script(question.messages)), self._tokenizer.end_of_turn]
        kept = tokens[: question.sampling.max_tokens]
        self._stats.calls += 1
        self._stats.sampled_tokens += len(kept)
        self._stats.prompt_tokens += len(question.prompt)
        if self._log is not None:
            self._log.append((question.episode, list(question.prompt), list(kept)))
        versions = [self._version] * len(kept)
        return Generation(kept, [0.0] * len(kept), versions, "stop" if len(kept) == len(tokens) else "length")

    async def take_log(self) -> list[tuple[str, list[int], list[int]]]:
        """(episode, tokens read, tokens said) of each call since the last time; empty if no log is kept."""
        taken = self._log or []
        if self._log is not None:
            self._log = []
        return taken

    async def version(self) -> int:
        return self._version

    async def update(self, path: str, version: int) -> None:
        """A program has no weights: it only says the new version from now on."""
        self._version = version

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]

    async def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        self._scripts.clear()

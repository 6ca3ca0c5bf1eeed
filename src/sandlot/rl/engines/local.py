"""The engine for small models on CPU: a transformers causal model with continuous batching, a row a question.

Promises: a row joins and leaves at any token, and what it samples depends on its own seed, never on what else is in
the batch; a log-probability is of the distribution that was sampled from; each token carries the version of the
weights that produced it; weights change between two tokens. One step of the model runs in a worker thread, so the
event loop stays free for new questions, cancellations and updates.

    _serve, the one task:   waits for work (an event), then repeats: update? → leave cancelled → join new → one token
    generate, a task a call: adds a row, waits for its future; cancelled, it marks the row
    update:                  leaves the new weights for _serve, waits until they are in

It never renders text or sees an episode's meaning. torch is imported when an engine is made, so that a recipe can be
checked without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import numpy as np
from pydantic import Field

from sandlot import config
from sandlot.errors import InvalidRequest, SandlotError, TrainingFault, Unsupported
from sandlot.gateway.engine import EngineStats, Generation, Question

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

LogEntry = tuple[str, list[int], list[int]]  # episode, prompt ids, sampled ids


@dataclass(slots=True, eq=False)
class Row:
    """A question being answered."""

    question: Question
    answer: asyncio.Future[Generation]
    dice: np.random.Generator
    limit: int  # tokens that may be sampled
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Update:
    """New weights that wait to be taken."""

    path: str
    version: int
    done: asyncio.Future[None]


class LocalEngine:
    """See `gateway.engine.Engine`. Lives in the event loop it was made in."""

    class Config(config.Config):
        dtype: Literal["float32", "bfloat16"] = "float32"
        """float32 on a CPU: bfloat16 is about 70 times slower there."""
        max_rows: int = Field(default=64, ge=1)
        """Questions answered at once; more wait their turn."""
        threads: int = Field(default=1, ge=1)
        """CPU threads of torch. A second one slows generation down."""
        keep_log: bool = False
        """Keep prompt and sampled ids of each answer until `take_log`, to compare with what is trained on."""

    def __init__(self, model: str, config: Config) -> None:
        self.config = config
        self._decoder = Decoder(model, config)
        self._version = 0
        self._stats = EngineStats()
        self._log: list[LogEntry] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._work = asyncio.Event()
        self._waiting: list[Row] = []
        self._updates: list[Update] = []
        self._open: set[Row] = set()  # every row whose question is not answered
        self._server = asyncio.ensure_future(self._serve())

    async def generate(self, question: Question) -> Generation:
        sampling = question.sampling
        if sampling.stop:
            raise InvalidRequest("the local engine ends an answer at the end-of-turn token only, not at stop strings")
        limit = min(sampling.max_tokens, self._decoder.context - len(question.prompt))
        if not question.prompt or limit < 1:
            raise InvalidRequest(
                f"a prompt of {len(question.prompt)} tokens leaves no room in a context of {self._decoder.context}"
            )
        self._check_alive()
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        row = Row(question, future, np.random.default_rng(sampling.seed), limit)
        self._open.add(row)
        self._waiting.append(row)
        self._work.set()
        try:
            return await row.answer
        finally:
            self._open.discard(row)

    async def version(self) -> int:
        return self._version

    async def update(self, path: str, version: int) -> None:
        self._check_alive()
        update = Update(path, version, asyncio.get_running_loop().create_future())
        self._updates.append(update)
        self._work.set()
        await update.done

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return await self._run(self._decoder.score, sequences)

    async def stats(self) -> EngineStats:
        self._stats.running = len(self._open)
        return self._stats

    async def take_log(self) -> list[LogEntry]:
        """What was answered since the last call, for engines started with `keep_log`."""
        taken, self._log = self._log, []
        return taken

    async def close(self) -> None:
        self._server.cancel()
        await asyncio.wait([self._server])
        self._fail(TrainingFault("the local engine was closed"))
        self._worker.shutdown()

    # --- the one task ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                if not (self._decoder.rows or self._waiting or self._updates):
                    self._work.clear()
                    await self._work.wait()
                while self._updates:
                    await self._take(self._updates[0])
                    del self._updates[0]  # not before: whatever breaks meanwhile, `_fail` answers who waits for it
                self._waiting = [row for row in self._waiting if row in self._open]
                if any(row not in self._open for row in self._decoder.rows):  # cancelled by their callers
                    await self._run(self._decoder.keep, [row for row in self._decoder.rows if row in self._open])
                room = self.config.max_rows - len(self._decoder.rows)
                joining, self._waiting = self._waiting[:room], self._waiting[room:]
                if joining:
                    await self._run(self._decoder.join, joining, self._version)
                    await self._answer(joining)
                if self._decoder.rows:
                    await self._run(self._decoder.advance, self._version)
                    await self._answer(self._decoder.rows)
        except Exception as error:
            self._fail(TrainingFault(f"the local engine broke: {type(error).__name__}: {error}"))
            raise

    async def _take(self, update: Update) -> None:
        try:
            await self._run(self._decoder.load, update.path)
        except SandlotError as error:
            if not update.done.done():
                update.done.set_exception(error)
            return
        self._version = update.version
        if not update.done.done():
            update.done.set_result(None)

    async def _answer(self, rows: list[Row]) -> None:
        """Answer the rows that are complete, and drop them."""
        complete = [row for row in rows if row.tokens[-1] in self._decoder.ends or len(row.tokens) >= row.limit]
        for row in complete:
            self._open.discard(row)
            self._stats.calls += 1
            self._stats.prompt_tokens += len(row.question.prompt)
            self._stats.sampled_tokens += len(row.tokens)
            if self.config.keep_log:
                self._log.append((row.question.episode, row.question.prompt, row.tokens))
            if not row.answer.done():
                finish: Literal["stop", "length"] = "stop" if row.tokens[-1] in self._decoder.ends else "length"
                row.answer.set_result(Generation(row.tokens, row.logprobs, row.versions, finish))
        if complete:
            await self._run(self._decoder.keep, [row for row in self._decoder.rows if row in self._open])

    async def _run(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One piece of torch work, in the one thread that touches the model."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, partial(step, *args, **kwargs))

    def _check_alive(self) -> None:
        if self._server.done():
            raise TrainingFault("the local engine does not answer any more: it broke earlier or was closed")

    def _fail(self, fault: TrainingFault) -> None:
        for row in self._open:
            if not row.answer.done():
                row.answer.set_exception(fault)
        for update in self._updates:
            if not update.done.done():
                update.done.set_exception(fault)


class Decoder:
    """The model and the rows that it is answering; plain functions, called by one thread at a time.

    Rows are right-aligned: the last column holds every row's newest token, what lies left of a row's first token is
    not seen, positions are explicit. Two rows, of 3 and 5 tokens so far:

        cache    ·  ·  5  9  3      keys and values, each [rows, heads, columns, head size] a layer
                 4  8  6  1  7
        seen     0  0  1  1  1      [rows, columns]
                 1  1  1  1  1
    """

    def __init__(self, model: str, config: LocalEngine.Config) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, config.dtype), attn_implementation="sdpa"
        )
        self._model.train(False)
        settings = self._model.config
        if set(getattr(settings, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            raise Unsupported(
                f"the local engine serves full attention only, {model} has {sorted(set(settings.layer_types))}",
                "use another engine for it",
            )
        ends = self._model.generation_config.eos_token_id
        ends = settings.eos_token_id if ends is None else ends
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        self.context = int(settings.max_position_embeddings)
        self.rows: list[Row] = []
        self._cache: Any = None  # a transformers DynamicCache while there are rows
        self._seen: Tensor = torch.zeros(0, 0, dtype=torch.bool)

    def load(self, path: str) -> None:
        """Take the weights of a safetensors file. Raises TrainingFault when they do not fit the model."""
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
            with torch.no_grad():
                self._model.load_state_dict(weights)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise TrainingFault(f"the weights in {path} cannot be taken: {error}") from None

    def join(self, rows: list[Row], version: int) -> None:
        """Read the prompts of new rows, sample the first token of each, and put them beside the others."""
        import torch
        from transformers import DynamicCache

        width = max(len(row.question.prompt) for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        seen = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            prompt = row.question.prompt
            tokens[i, width - len(prompt) :] = torch.tensor(prompt)
            seen[i, width - len(prompt) :] = True
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        # What is not seen may look at itself: a softmax over nothing is not a number.
        mask = (seen[:, None, :] & torch.ones(width, width, dtype=torch.bool).tril()) | torch.eye(
            width, dtype=torch.bool
        )
        with torch.inference_mode():
            cache = DynamicCache()
            logits = self._forward(tokens, positions, mask[:, None], cache)
            if self._cache is None:
                self._cache, self._seen = cache, seen
            else:
                self._merge(self._cache, cache, seen)
            self.rows = [*self.rows, *rows]
            self._sample(rows, logits, version)

    def advance(self, version: int) -> None:
        """Sample one token for every row."""
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([[row.tokens[-1]] for row in self.rows])
            positions = torch.tensor([[len(row.question.prompt) + len(row.tokens) - 1] for row in self.rows])
            self._seen = torch.nn.functional.pad(self._seen, (0, 1), value=True)
            logits = self._forward(tokens, positions, self._seen[:, None, None, :], self._cache)
            self._sample(self.rows, logits, version)

    def keep(self, rows: list[Row]) -> None:
        """Drop all rows but these, and the columns that none of them needs."""
        import torch

        if not rows:
            self.rows, self._cache = [], None
            return
        kept = set(rows)
        index = torch.tensor([i for i, row in enumerate(self.rows) if row in kept])
        self.rows = [self.rows[i] for i in index]
        seen = self._seen[index]
        first = int(seen.any(0).int().argmax())
        self._seen = seen[:, first:]
        with torch.inference_mode():
            for layer in self._cache.layers:
                layer.keys = layer.keys[index, :, first:]
                layer.values = layer.values[index, :, first:]

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See `Engine.logprobs`."""
        import torch

        width = max(len(s) for s in sequences)
        tokens = torch.tensor(
            [s + [0] * (width - len(s)) for s in sequences]
        )  # padded on the right: nothing looks there
        with torch.inference_mode():
            logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            found = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        return [values[: len(s) - 1] for s, values in zip(sequences, found.tolist(), strict=True)]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits of the last column, [rows, vocabulary]; the cache grows."""
        found = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = found.logits[:, -1].double()
        return logits

    def _merge(self, old: Any, new: Any, seen: Tensor) -> None:
        import torch

        pad = torch.nn.functional.pad
        width = max(self._seen.shape[1], seen.shape[1])
        left_old, left_new = width - self._seen.shape[1], width - seen.shape[1]
        self._seen = torch.cat([pad(self._seen, (left_old, 0)), pad(seen, (left_new, 0))])
        for mine, theirs in zip(old.layers, new.layers, strict=True):
            mine.keys = torch.cat([pad(mine.keys, (0, 0, left_old, 0)), pad(theirs.keys, (0, 0, left_new, 0))])
            mine.values = torch.cat([pad(mine.values, (0, 0, left_old, 0)), pad(theirs.values, (0, 0, left_new, 0))])

    def _sample(self, rows: list[Row], logits: Tensor, version: int) -> None:
        """One token a row by inverse CDF of a uniform number from the row's own seed."""
        import torch

        if not torch.isfinite(logits).all():
            raise TrainingFault(f"the model's logits are not numbers under version {version}")
        settings = [row.question.sampling for row in rows]
        greedy = [s.temperature == 0 for s in settings]
        heat = torch.tensor([[1.0 if g else s.temperature] for s, g in zip(settings, greedy, strict=True)])
        logs = torch.log_softmax(logits / heat, -1)
        if any(s.top_p < 1 for s in settings):
            most, order = logs.sort(-1, descending=True)
            before = most.exp().cumsum(-1) - most.exp()  # the mass of likelier tokens
            outside = before >= torch.tensor([[s.top_p] for s in settings])
            outside[:, 0] = False
            logs = logs.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
            logs = torch.log_softmax(logs, -1)
        mass = logs.exp().cumsum(-1)
        dice = torch.tensor([[row.dice.random()] for row in rows], dtype=mass.dtype)
        # A draw of exactly a token's upper bound belongs to the next; rounding may leave the last bound under 1.
        chosen = torch.searchsorted(mass, dice * mass[:, -1:], right=True).clamp(max=logs.shape[-1] - 1)
        picked = logs.gather(-1, chosen)[:, 0].tolist()
        for i, row in enumerate(rows):
            row.tokens.append(int(logits[i].argmax()) if greedy[i] else int(chosen[i, 0]))
            row.logprobs.append(0.0 if greedy[i] else picked[i])
            row.versions.append(version)

"""The model gateway: an agent's HTTP request becomes a question to an engine, and every token is recorded.

Owns sessions, one per episode: budgets, the rule for repeated requests, cancellation, and the order request → dialect →
render → engine → trace → reply. It promises that what is recorded is what the engine read and sampled, once per
answer that a client could see. It never opens a socket (a session's `handler` is an ASGI application that a node serves
on a listener inside the box), never keeps a clock for the agent, and knows nothing of rewards or training.

A request that repeats one which is being answered, or whose answer was not delivered, or which says that it is a retry,
gets that very answer. A client that goes away while its answer is being sampled stops the sampling.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from sandlot.aio import deadline
from sandlot.api import Message, Scope
from sandlot.errors import Conflict, DeadlineExceeded, InvalidRequest, SandlotError, TrainingFault, Unsupported
from sandlot.gateway import chat
from sandlot.gateway.engine import Engine, Generation, Question, Refusal, Sampling
from sandlot.gateway.render import Renderer
from sandlot.gateway.trace import Prompt, Trace

BODY_BYTES = 64 << 20  # agents send whole repositories. Of one session's requests together: a box fills no memory here
BODIES = 64  # requests of one session that are being read at once; each costs its connection's buffers too
BODY_SECONDS = 60.0  # from the first to the last byte of a request
GENERATE_SECONDS = 600.0  # the patience of OpenAI's own clients
UNREAD = {"unread": True}  # the rest of the body comes yet: the connection must go with the refusal

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Ask:
    """One question that a client put, whoever waits for its answer."""

    answering: asyncio.Task[chat.ChatAnswer]
    waiting: int = 0
    delivered: bool = False


class Gateway:
    """Opens sessions on one engine. `counts` and `outcomes` are the gateway's own count of what went through it; nobody
    tells it how an episode came out. Each closed session is in `outcomes` once:

        answered    its last question was answered       cut       its last question was still being answered, or its
        silent      it never asked anything                        client had gone
                                                         failed    the answer to one of its questions broke here
    """

    def __init__(self, engine: Engine, renderer: Renderer, model: str = "policy", context: int | None = None) -> None:
        """`context`: tokens that the engine can hold, prompt and answer together; None: no limit."""
        self.engine = engine
        self.renderer = renderer
        self.model = model
        self.context = context
        self.counts = {"opened": 0, "closed": 0, "calls": 0}
        self.outcomes: Counter[str] = Counter()
        self.sessions: dict[str, Session] = {}

    def open(
        self, episode: str, sampling: Sampling, max_calls: int | None = None, max_tokens: int | None = None
    ) -> Session:
        """A session for one episode. `sampling` rules: a client may lower `max_tokens` and name stops, not more.
        `max_calls` and `max_tokens` (sampled, in all) bound the episode; None: they do not. Raises Conflict."""
        if episode in self.sessions:
            raise Conflict(f"episode {episode} is already open")
        session = self.sessions[episode] = Session(self, episode, sampling, max_calls, max_tokens)
        self.counts["opened"] += 1
        return session


class Session:
    """One episode's endpoint and its record. `fault` is what broke inside, if anything did: the agent saw a 500."""

    def __init__(
        self, gateway: Gateway, episode: str, sampling: Sampling, max_calls: int | None, max_tokens: int | None
    ) -> None:
        self.episode = episode
        self.trace = Trace(gateway.renderer)
        self.fault: SandlotError | None = None
        self._gateway = gateway
        self._sampling = sampling
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._tokens = 0
        self._cut = False  # the last question's sampling was cancelled
        self._bodies = self._body_bytes = 0  # of requests that are being read
        self._asks: dict[bytes, Ask] = {}
        self._running: set[asyncio.Task[chat.ChatAnswer]] = set()
        self._numbers = itertools.count()
        self._created = int(time.time())
        self._closed = False

    async def close(self) -> None:
        """No further calls; what is being sampled is cancelled. Idempotent."""
        if not self._closed:
            self._closed = True
            del self._gateway.sessions[self.episode]
            self._gateway.counts["closed"] += 1
            self._gateway.outcomes[self._outcome()] += 1
            self._asks.clear()
        if running := tuple(self._running):
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _outcome(self) -> str:
        if self.fault is not None:
            return "failed"
        if self._running or self._cut:
            return "cut"
        return "answered" if self.trace.calls else "silent"

    async def handler(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: chat completions, models, health; with and without /v1."""
        if scope["type"] != "http":
            raise Unsupported(f"the model gateway speaks http, not {scope['type']}")
        method, path = scope["method"], scope["path"].removeprefix("/v1").rstrip("/") or "/"
        try:
            if path == "/chat/completions" and method == "POST":
                await self._chat(scope, receive, send)
            elif path in ("/", "/health") and method in ("GET", "HEAD"):
                await _reply(send, 200, b'{"status":"ok"}')
            elif path == "/models" and method == "GET":
                await _reply(send, 200, json.dumps(chat.models(self._gateway.model, self._created)).encode())
            elif path.startswith("/models/") and method == "GET":
                name = path.removeprefix("/models/")
                await _reply(send, 200, json.dumps(chat.model(name, self._created)).encode())
            else:
                raise Refusal(404, chat.INVALID, f"there is no {method} {scope['path']} here")
        except Refusal as no:
            retry = [] if no.details.get("retry") else [(b"x-should-retry", b"false")]
            # The rest of a body that was refused unread would be taken for the next request.
            await _reply(
                send,
                no.status,
                chat.refusal(no),
                [*retry, *([(b"connection", b"close")] * bool(no.details.get("unread")))],
            )

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        request, digest = await self._request(headers, receive)
        key = headers.get(b"idempotency-key") or digest
        again = b"idempotency-key" in headers or headers.get(b"x-stainless-retry-count", b"0") != b"0"
        ask = self._asks.get(key)
        if ask is None or (ask.delivered and not again) or _failed(ask.answering):
            ask = self._asks[key] = Ask(self._start(request))
        answer = await self._answer(ask, receive)
        if answer is None:
            return  # the client has gone
        kind = b"text/event-stream" if request.stream else b"application/json"
        text = chat.stream(answer, request) if request.stream else chat.completion(answer, request)
        await _reply(send, 200, text, [(b"x-request-id", answer.id.encode())], kind)
        ask.delivered = True

    async def _request(self, headers: dict[bytes, bytes], receive: Receive) -> tuple[chat.ChatRequest, bytes]:
        """What the client wants, and the digest of its words. Raises Refusal when they make no sense, are too large or
        too slow, or when this session's other requests leave no room for them."""
        too_large = Refusal(413, chat.INVALID, f"the request body is larger than {BODY_BYTES >> 20} MiB", UNREAD)
        busy = "too many requests of this episode are being read; send fewer or smaller ones at once"
        no_room = Refusal(429, "rate_limit_error", busy, {"code": "rate_limit_exceeded", "retry": True, **UNREAD})
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > BODY_BYTES:
            raise too_large
        if self._bodies >= BODIES:
            raise no_room
        parts: list[bytes] = []
        size = 0
        self._bodies += 1
        try:
            async with deadline(BODY_SECONDS, "the request body"):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, chat.INVALID, "the client went away in the middle of its request")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._body_bytes += len(parts[-1])
                    if size > BODY_BYTES:
                        raise too_large
                    if self._body_bytes > BODY_BYTES:
                        raise no_room
                    more = message.get("more_body", False)
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            return chat.parse(body), hashlib.sha256(body).digest()
        except DeadlineExceeded as error:
            raise Refusal(408, chat.INVALID, error.message, {"retry": True, **UNREAD}) from error
        finally:
            self._bodies -= 1
            self._body_bytes -= size

    async def _answer(self, ask: Ask, receive: Receive) -> chat.ChatAnswer | None:
        """The answer; None when the client went away before it could be told. Whoever waits last and goes, ends it."""
        gone = asyncio.ensure_future(_disconnected(receive))
        ask.waiting += 1
        try:
            await asyncio.wait((ask.answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return None
            if ask.answering.cancelled():
                raise _ended(self.episode)
            return ask.answering.result()
        finally:
            ask.waiting -= 1
            gone.cancel()
            if not ask.waiting:
                ask.answering.cancel()  # nothing happens to one that is done

    def _start(self, request: chat.ChatRequest) -> asyncio.Task[chat.ChatAnswer]:
        """Begin to sample. Raises Refusal when the episode may not ask that any more."""
        if self._closed:
            raise _ended(self.episode)
        if self._max_calls is not None and len(self.trace.calls) + len(self._running) >= self._max_calls:
            raise _spent(f"this episode's {self._max_calls} calls are used up")
        prompt = self.trace.prompt(request.messages)
        ids = prompt.ids()
        limits = [self._sampling.max_tokens]
        if request.max_tokens is not None:
            limits.append(request.max_tokens)
        if self._max_tokens is not None:
            limits.append(self._max_tokens - self._tokens)
            if limits[-1] < 1:
                raise _spent(f"this episode's {self._max_tokens} tokens are used up")
        if (context := self._gateway.context) is not None:
            limits.append(context - len(ids))
            if limits[-1] < 1:
                overflow = f"This model's maximum context length is {context} tokens; the messages are {len(ids)}"
                raise Refusal(400, chat.INVALID, overflow, {"code": "context_length_exceeded"})
        seed = None if self._sampling.seed is None else _seed(self._sampling.seed, ids, len(prompt.answers))
        sampling = replace(self._sampling, max_tokens=min(limits), stop=self._sampling.stop + request.stop, seed=seed)
        question = Question(ids, request.messages, sampling, self.episode)
        task = asyncio.ensure_future(self._sample(prompt, question, request))
        self._running.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[chat.ChatAnswer]) -> None:
        self._running.discard(task)
        self._cut = task.cancelled()
        if not task.cancelled():
            task.exception()  # seen, even if the client that was to be told of it has gone

    async def _sample(self, prompt: Prompt, question: Question, request: chat.ChatRequest) -> chat.ChatAnswer:
        """The top of a question's task. What breaks here is ours, not the agent's: it becomes the session's fault."""
        try:
            async with deadline(GENERATE_SECONDS, f"the engine's answer in episode {self.episode}"):
                generation = await self._gateway.engine.generate(question)
            _check(generation)
            return self._record(prompt, question, generation, request)
        except InvalidRequest as error:  # the client wishes what this engine cannot do
            raise Refusal(400, chat.INVALID, error.message) from error
        except Exception as error:
            what = f"the model's answer failed: {type(error).__name__}: {error}"
            fault = error if isinstance(error, SandlotError) else TrainingFault(what)
            self.fault = self.fault or fault
            raise Refusal(500, "server_error", fault.message, {"code": fault.code}) from error

    def _record(
        self, prompt: Prompt, question: Question, generation: Generation, request: chat.ChatRequest
    ) -> chat.ChatAnswer:
        renderer = self._gateway.renderer
        text = renderer.text(generation.tokens)
        for stop in question.sampling.stop:
            text = text.partition(stop)[0]  # OpenAI's answers leave the stop out; the tokens keep it
        self.trace.commit(prompt, generation, text)
        self._tokens += len(generation.tokens)
        self._gateway.counts["calls"] += 1
        return chat.ChatAnswer(
            id=f"chatcmpl-{self.episode}-{next(self._numbers)}",
            created=int(time.time()),
            model=request.model or self._gateway.model,
            text=text,
            finish=generation.finish,
            prompt_tokens=len(question.prompt),
            pieces=renderer.pieces(generation.tokens) if request.logprobs else [],
            logprobs=generation.logprobs,
        )


def _check(generation: Generation) -> None:
    sizes = {len(generation.tokens), len(generation.logprobs), len(generation.versions)}
    if len(sizes) != 1 or not generation.tokens:
        raise TrainingFault("the engine's tokens, log-probabilities and versions do not match, or there are none")


def _seed(session: int, prompt: list[int], nth: int) -> int:
    """The seed of the nth answer to one prompt: it depends on no other call, so that calls that run side by side, or
    start again after a disconnect, are sampled alike every time."""
    digest = hashlib.blake2b(array("q", [session, nth, *prompt]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: every generator takes it


def _failed(task: asyncio.Task[chat.ChatAnswer]) -> bool:
    """Whether no answer can come of it: it failed, or it is being cancelled."""
    return task.cancelling() > 0 or (task.done() and (task.cancelled() or task.exception() is not None))


def _spent(what: str) -> Refusal:
    return Refusal(429, "insufficient_quota", what, {"code": "budget_exhausted"})


def _ended(episode: str) -> Refusal:
    return Refusal(410, chat.INVALID, f"episode {episode} has ended", {"code": "episode_ended"})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    kind: bytes = b"application/json",
) -> None:
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-type", kind), length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})

"""Promises:
1. Any OpenAI client over real HTTP: completions, streams, models, health, errors; with and without /v1.
2. What is recorded is what the engine read and sampled: one record per answer.
3. A repeated request that is being answered, or was not delivered, or says it is a retry, gets the same answer; a
   deliberate repetition gets a new one.
4. A client that goes away stops the sampling; a closed session answers nothing more and cancels what runs.
5. Budgets and context overflow are refused with codes that clients do not retry; a body that is too large is a 413, and
   bodies that are too large together, or too many at once, are a 429 that clients do retry.
6. Each call of an episode has a seed of its own, the same in every run of that episode.
7. A broken engine is the session's fault and the client's 500, never a hang.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest

from sandlot.api import AsgiApp
from sandlot.errors import Conflict, InvalidRequest, TrainingFault
from sandlot.gateway import server
from sandlot.gateway.engine import Generation, Question, Sampling
from sandlot.gateway.render import FileTokenizer, Renderer
from sandlot.gateway.server import Gateway, Session
from sandlot.rl.engines.scripted import ScriptedEngine

Serve = Callable[[AsgiApp], Awaitable[str]]
ASK = [{"role": "user", "content": "find w7"}]


class HeldEngine(ScriptedEngine):
    """A scripted engine that answers when it is let go, and keeps the questions."""

    def __init__(self, tokenizer: FileTokenizer, texts: list[str]) -> None:
        super().__init__(tokenizer, lambda messages: texts.pop(0), keep_log=True)
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.began = asyncio.Event()
        self.stopped = asyncio.Event()
        self.questions: list[Question] = []

    async def generate(self, question: Question) -> Generation:
        self.questions.append(question)
        self.began.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return await super().generate(question)


class Desk:
    """One session that is served over HTTP, with its engine and a client."""

    def __init__(self, session: Session, gateway: Gateway, engine: HeldEngine, client: httpx2.AsyncClient) -> None:
        self.session, self.gateway, self.engine, self.client = session, gateway, engine, client

    async def ask(self, messages: Any = None, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
        body = {"model": "any", "messages": messages or ASK, **more}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture
async def desk(tokenizer: FileTokenizer, serve: Serve) -> AsyncIterator[Callable[..., Awaitable[Desk]]]:
    """Opens a desk whose engine says the given texts one after another."""
    desks = []

    async def opened(*texts: str, context: int | None = None, seed: int = 5, **budget: int) -> Desk:
        engine = HeldEngine(tokenizer, list(texts))
        gateway = Gateway(engine, Renderer(tokenizer), context=context)
        session = gateway.open("e1", Sampling(max_tokens=16, seed=seed), **budget)
        client = httpx2.AsyncClient(base_url=await serve(session.handler), timeout=20)
        desks.append(Desk(session, gateway, engine, client))
        return desks[-1]

    yield opened
    for one in desks:
        await one.client.aclose()
        await one.session.close()


Open = Callable[..., Awaitable[Desk]]


async def test_a_dialogue_is_answered_and_recorded(desk: Open) -> None:
    here = await desk("grep w7 *", "submit f3")
    first = (await here.ask()).json()
    assert first["choices"][0]["message"]["content"] == "grep w7 *"
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"]["completion_tokens"] == 4
    told = [*ASK, first["choices"][0]["message"], {"role": "user", "content": "f3:w7\n"}]
    second = await here.ask(told, logprobs=True)
    assert second.json()["choices"][0]["message"]["content"] == "submit f3"
    assert [one["logprob"] for one in second.json()["choices"][0]["logprobs"]["content"]] == [0.0] * 3
    assert second.headers["x-request-id"] == second.json()["id"]
    (path,) = here.session.trace.paths()
    log = await here.engine.take_log()
    assert path.tokens == log[-1][1] + log[-1][2]
    assert (here.session.trace.drift, here.gateway.counts["calls"]) == (0, 2)


async def test_a_stream_ends_with_done(desk: Open) -> None:
    here = await desk("ls")
    answer = await here.ask(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"content":"ls"' in answer.text


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_paths_are_served_with_and_without_v1(desk: Open, prefix: str) -> None:
    here = await desk("ls")
    assert (await here.client.post(f"{prefix}/chat/completions", json={"messages": ASK})).status_code == 200
    assert (await here.client.get(f"{prefix}/models")).json()["data"][0]["id"] == "policy"
    assert (await here.client.get(f"{prefix}/models/policy")).json()["id"] == "policy"
    assert (await here.client.get(f"{prefix}/health")).status_code == 200
    missing = await here.client.get(f"{prefix}/embeddings")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_a_retry_while_the_first_is_being_answered_gets_the_same_answer(desk: Open) -> None:
    here = await desk("ls", "cat f1")
    here.engine.let_go.clear()
    first = asyncio.ensure_future(here.ask())
    await here.engine.began.wait()
    second = asyncio.ensure_future(here.ask(headers={"x-stainless-retry-count": "1"}))
    third = asyncio.ensure_future(here.ask())  # clients that do not say that they retry
    await asyncio.sleep(0.05)
    here.engine.let_go.set()
    answers = [answer.json()["id"] for answer in await asyncio.gather(first, second, third)]
    assert answers == [answers[0]] * 3
    assert len(here.engine.questions) == len(here.session.trace.calls) == 1


async def test_a_retry_of_a_delivered_answer_replays_it_and_a_deliberate_repetition_does_not(desk: Open) -> None:
    here = await desk("ls", "cat f1", "cat f2")
    first = await here.ask()
    retried = await here.ask(headers={"x-stainless-retry-count": "1"})
    assert retried.json()["id"] == first.json()["id"]
    again = await here.ask()
    assert again.json()["choices"][0]["message"]["content"] == "cat f1"
    keyed = [await here.ask(headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert keyed[0].json()["id"] == keyed[1].json()["id"]
    assert len(here.session.trace.calls) == 3


async def test_an_answer_that_could_not_be_delivered_is_replayed(desk: Open) -> None:
    here = await desk("ls", "cat f1")
    body = json.dumps({"messages": ASK}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def broken(message: Any) -> None:
        raise ConnectionResetError

    async def working(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ConnectionResetError):
        await here.session.handler(scope, receive, broken)
    incoming.append({"type": "http.request", "body": body, "more_body": False})
    await here.session.handler(scope, receive, working)
    assert json.loads(sent[1]["body"])["choices"][0]["message"]["content"] == "ls"
    assert len(here.session.trace.calls) == 1


async def test_a_client_that_goes_away_stops_the_sampling(desk: Open) -> None:
    here = await desk("ls")
    here.engine.let_go.clear()
    asking = asyncio.ensure_future(here.ask())
    await here.engine.began.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(here.engine.stopped.wait(), 5)
    here.engine.let_go.set()
    retried = await here.ask(headers={"x-stainless-retry-count": "1"})
    assert retried.json()["choices"][0]["message"]["content"] == "ls"
    seeds = [question.sampling.seed for question in here.engine.questions]
    assert seeds[0] == seeds[1]  # sampled as it would have been
    assert len(here.session.trace.calls) == 1


async def test_a_closed_session_answers_nothing_more_and_cancels_what_runs(desk: Open) -> None:
    here = await desk("ls", "ls")
    here.engine.let_go.clear()
    asking = asyncio.ensure_future(here.ask())
    await here.engine.began.wait()
    await here.session.close()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "episode_ended")
    assert here.engine.stopped.is_set()
    assert (await here.ask()).status_code == 410
    await here.session.close()
    assert here.gateway.counts == {"opened": 1, "closed": 1, "calls": 0}
    assert here.gateway.outcomes == {"cut": 1}
    assert here.gateway.sessions == {}


async def test_an_episode_is_open_once(desk: Open) -> None:
    here = await desk()
    with pytest.raises(Conflict):
        here.gateway.open("e1", Sampling())


async def test_the_budget_of_calls_is_refused_and_not_retried(desk: Open) -> None:
    here = await desk("ls", "ls", max_calls=1)
    assert (await here.ask()).status_code == 200
    no = await here.ask()
    assert (no.status_code, no.json()["error"]["code"]) == (429, "budget_exhausted")
    assert no.headers["x-should-retry"] == "false"
    assert here.session.fault is None


async def test_the_budget_of_tokens_cuts_and_then_refuses(desk: Open) -> None:
    here = await desk("grep w7 *", "ls", max_tokens=2)
    cut = (await here.ask()).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("grep w7", "length")
    assert (await here.ask()).json()["error"]["code"] == "budget_exhausted"


async def test_a_client_may_lower_the_length_of_an_answer_but_not_raise_it(desk: Open) -> None:
    here = await desk("grep w7 *", "ls")
    assert (await here.ask(max_tokens=1)).json()["usage"]["completion_tokens"] == 1
    await here.ask(max_tokens=1000)
    assert [question.sampling.max_tokens for question in here.engine.questions] == [1, 16]


async def test_a_dialogue_longer_than_the_context_is_refused_as_openai_does(desk: Open) -> None:
    here = await desk("ls", context=6)
    no = await here.ask([{"role": "user", "content": "find w7 w8 w9 w10"}])
    assert (no.status_code, no.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 6 tokens" in no.json()["error"]["message"]
    assert (await here.ask()).json()["usage"]["completion_tokens"] == 1  # what is left


async def test_what_follows_a_stop_text_is_left_out(desk: Open) -> None:
    here = await desk("cat f1 f2")
    assert (await here.ask(stop="f1")).json()["choices"][0]["message"]["content"] == "cat "


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(desk: Open) -> None:
    here = await desk("ls")
    url = here.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    size = server.BODY_BYTES + 1
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].endswith("64 MiB")
    writer.close()


async def test_bodies_that_are_too_large_together_are_refused_for_now(desk: Open) -> None:
    here = await desk()
    here.engine.assign("e1", lambda messages: "ls")
    url = here.client.base_url
    size = server.BODY_BYTES
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    _, large = await asyncio.open_connection(url.host, url.port)
    large.write(head + b" " * (size - 1))
    await large.drain()
    answer = await refused(here)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "x-should-retry" not in answer.headers
    large.close()
    await answered(here)


async def test_too_many_bodies_at_once_are_refused_for_now(desk: Open) -> None:
    here = await desk()
    here.engine.assign("e1", lambda messages: "ls")
    url = here.client.base_url
    slow = [await asyncio.open_connection(url.host, url.port) for _ in range(server.BODIES)]
    for _, writer in slow:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    answer = await refused(here)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    for _, writer in slow:
        writer.close()
    await answered(here)


async def refused(here: Desk) -> httpx2.Response:
    """The first answer that is not one: the server reads what it was sent when it comes to it."""
    async with asyncio.timeout(20):
        while (answer := await here.ask()).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return answer


async def answered(here: Desk) -> None:
    """Return once it answers again: it sees when it comes to it that clients have gone."""
    async with asyncio.timeout(20):
        while (await here.ask()).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_bad_request_is_a_400_with_a_reason(desk: Open) -> None:
    here = await desk("ls")
    no = await here.client.post("/v1/chat/completions", content=b"{")
    assert (no.status_code, no.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (await here.ask(n=2)).status_code == 400


async def test_each_call_has_a_seed_of_its_own_and_the_same_in_every_run(desk: Open, serve: Serve) -> None:
    async def seeds(seed: int) -> list[int | None]:
        here = await desk("ls", "ls", "cat f1", seed=seed)
        for messages in (ASK, ASK, [*ASK, {"role": "assistant", "content": "ls"}, {"role": "user", "content": "f0"}]):
            await here.ask(messages)
        return [question.sampling.seed for question in here.engine.questions]

    first, second, other = await seeds(5), await seeds(5), await seeds(6)
    assert first == second
    assert len({*first, *other}) == 6


async def test_a_broken_engine_is_the_sessions_fault_and_the_clients_500(desk: Open) -> None:
    here = await desk()

    def broken(messages: Any) -> str:
        raise TrainingFault("the engine's process died")

    here.engine.assign("e1", broken)
    answer = await here.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the engine's process died")
    assert answer.headers["x-should-retry"] == "false"
    assert isinstance(here.session.fault, TrainingFault)


async def test_an_engine_that_breaks_in_its_own_words_is_a_fault_all_the_same(desk: Open) -> None:
    here = await desk()  # its list of texts is empty
    answer = await here.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "training")
    assert str(here.session.fault) == "the model's answer failed: IndexError: pop from empty list"


async def test_a_wish_that_the_engine_cannot_grant_is_the_clients_400(desk: Open) -> None:
    here = await desk()

    def refuse(messages: Any) -> str:
        raise InvalidRequest("this engine knows no stop texts")

    here.engine.assign("e1", refuse)
    answer = await here.ask(stop="x")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "this engine knows no stop texts")
    assert here.session.fault is None


async def test_text_that_is_not_unicode_is_read_as_far_as_it_is(desk: Open) -> None:
    here = await desk("ls")
    body = b'{"messages": [{"role": "user", "content": "find \\ud800 w7"}]}'
    assert (await here.client.post("/v1/chat/completions", content=body)).status_code == 200


async def test_many_calls_at_once_do_not_mix(desk: Open, tokenizer: FileTokenizer) -> None:
    here = await desk()
    here.engine.assign("e1", lambda messages: f"cat {messages[-1]['content'].split()[-1]}")
    asks = [here.ask([{"role": "user", "content": f"find w{i}"}]) for i in range(20)]
    answers = [answer.json()["choices"][0]["message"]["content"] for answer in await asyncio.gather(*asks)]
    assert answers == [f"cat w{i}" for i in range(20)]
    assert len(here.session.trace.paths()) == 20

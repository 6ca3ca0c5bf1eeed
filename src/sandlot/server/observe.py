"""The outermost layer of the application: what becomes of each request is told, and nothing of what it says.

It gives every request an id, which the answer carries and the log names; counts, times and traces it by its route; and
answers for what nobody expected. It knows which requests are at work, so that who stops the server can wait for them,
and lets no more in from then on. It decides nothing about who may ask for what: that is the guard, below it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect

from sandlot.api import AsgiApp, Message, Scope
from sandlot.errors import SandlotError, Unreachable
from sandlot.server.keys import ANYBODY, Caller
from sandlot.server.logs import LOGGER
from sandlot.server.metrics import Metrics
from sandlot.server.spans import Spans

_ID = re.compile(rb"[A-Za-z0-9._-]{1,100}")
_SANDBOX = re.compile(r"sb-[0-9a-z]{1,60}")
# What only looks: a server that stops does not wait for it, for some of it looks for hours.
LOOKS = ("GET", "HEAD", "OPTIONS")
# What an answer begins with: the other two are of a WebSocket.
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class Work:
    """The requests of a server that are being carried out."""

    def __init__(self) -> None:
        self.draining = False
        self._running = 0
        self._done = asyncio.Event()

    def begin(self) -> None:
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            self._done.set()

    async def drain(self, seconds: float) -> None:
        """Let no more in, and wait for those that run, at most so long."""
        self.draining = True
        self._done.clear()
        if self._running and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._done.wait()
            except TimeoutError:
                LOGGER.warning("requests are cut short", extra={"fields": {"running": self._running}})


def request_id(scope: Scope) -> str | None:
    """Of the request that is being answered."""
    found: str | None = scope.get("state", {}).get("request")
    return found


def with_id(error: SandlotError, scope: Scope) -> dict[str, dict[str, str | None]]:
    """An error's words, with the id that the log has."""
    wire = error.to_wire()
    return {"error": {**wire["error"], "request_id": request_id(scope)}}


class Observe:
    """Around everything else."""

    def __init__(self, app: AsgiApp, work: Work, metrics: Metrics, spans: Spans | None) -> None:
        self._app = app
        self._work = work
        self._metrics = metrics
        self._spans = spans

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given.decode() if _ID.fullmatch(given) else secrets.token_hex(8)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request"] = name
        span = None if self._spans is None else self._spans.begin(headers)
        status = received = sent = 0
        began = time.perf_counter()
        socket = scope["type"] == "websocket"
        method = "GET" if socket else scope["method"]  # as which a WebSocket begins; it ends with the status 101
        works = socket or method not in LOOKS

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += _size(message)
            return message

        async def noted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] in _STARTS:
                status = message.get("status", 101)
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            else:
                sent += _size(message)
            await send(message)

        self._metrics.begin()
        if works:
            self._work.begin()
        try:
            if works and self._work.draining:
                await refuse(Unreachable("this server is about to stop", "ask again: another may come"), scope, noted)
            else:
                await self._app(scope, counted, noted)
        except ClientDisconnect:
            status = status or state.get("status", 499)
        except Exception as error:  # the top: nobody expected it, so it is recorded, and its kind is told
            LOGGER.error("a request failed in the server", exc_info=error, extra={"fields": {"request": name}})
            state["error"] = type(error).__name__
            if not status:  # else the answer breaks off, and its reader sees that it does
                said = f"the server failed at {method} {scope['path']}: {type(error).__name__}"
                await refuse(SandlotError(said, f"its log has the reason, at {name}"), scope, noted)
        finally:
            if works:
                self._work.end()
            seconds = time.perf_counter() - began
            caller: Caller = state.get("caller", ANYBODY)
            route, answered = getattr(scope.get("route"), "path", "none"), status or state.get("status", 499)
            told = {
                "request": name,
                "method": method,
                "route": route,
                "status": answered,
                "ms": round(seconds * 1000, 3),
                "received": received,
                "sent": sent,
                "sandbox": _sandbox_id(scope),
                "key": caller.key,
                "tenant": caller.tenant,
                "error": state.get("error"),
            }
            self._metrics.request(method, route, answered, seconds, received, sent)
            if LOGGER.isEnabledFor(logging.INFO):
                LOGGER.info("request", extra={"fields": told})
            if span is not None and self._spans is not None:
                self._spans.end(span, told)


def _sandbox_id(scope: Scope) -> str | None:
    """The one that a request is about, if what it names looks like one: anybody can ask for anything else."""
    found = scope.get("path_params", {}).get("sandbox_id", "")
    return found if _SANDBOX.fullmatch(found) else None


def _size(message: Message) -> int:
    """Of what is sent with it, either way."""
    return len(message.get("body") or message.get("bytes") or message.get("text") or "")


async def refuse(
    error: SandlotError,
    scope: Scope,
    send: Callable[[Message], Awaitable[None]],
    headers: dict[str, str] | None = None,
) -> None:
    """Answer with an error, and end the connection: what else comes on it is not read."""
    scope.setdefault("state", {}).setdefault("error", error.code)
    body = json.dumps(with_id(error, scope)).encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **(headers or {}),
    }
    start = [(name.encode(), value.encode()) for name, value in fields.items()]
    kind = "websocket.http" if scope["type"] == "websocket" else "http"
    await send({"type": f"{kind}.response.start", "status": error.status, "headers": start})
    await send({"type": f"{kind}.response.body", "body": body})

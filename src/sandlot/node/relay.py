"""A listener inside the box to a URL outside: an ASGI application that relays each request to an Upstream.

It promises to stream both ways with bounded memory, to add the upstream's headers where the box cannot see them, to
drop the upstream call when the box hangs up, that nothing the box sends changes the host it goes to, and that over a
transport for strangers no address is asked which is neither public nor named. It never retries and never reads a body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandlot.api import Message, Scope, Upstream
from sandlot.drivers import public
from sandlot.drivers.oci import hosts
from sandlot.errors import DeadlineExceeded, Forbidden, InvalidRequest, SandlotError, Unreachable

if TYPE_CHECKING:
    import httpcore2
    import httpx2

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Headers of one connection, not of the message (RFC 9110 §7.6.1), and those that the relay sets itself.
_OF_THE_HOP = frozenset(
    {
        b"connection",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

# Seconds: to reach the upstream, and between two bytes. A model may think for minutes before its first.
_TIMEOUT = {"connect": 10.0, "pool": 10.0, "read": 900.0, "write": 60.0}


# What a tenant's routes may lead to although it is not public, `HOST[:PORT]`; None: they may lead to anybody. To be
# asked at each connection, for it changes when a server gets its first key.
Reachable = Callable[[], Sequence[str] | None]


def anybody() -> Sequence[str] | None:
    """Of a node whose boxes are all its user's own."""
    return None


def new_transport(reachable: Reachable = anybody) -> httpx2.AsyncHTTPTransport:
    """The connections that the relays of one node share. Below a client on purpose: that one would carry cookies from
    one box to another, follow redirects and add headers of its own."""
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30.0)
    transport = httpx2.AsyncHTTPTransport(trust_env=False, limits=limits)
    # Here, where a connection is made: an address in the place of the URL's host would let two names share connections.
    pool: Any = transport._pool
    pool._network_backend = _Checked(pool._network_backend, reachable)
    return transport


async def address_of(host: str, port: int, reachable: Reachable) -> str:
    """What is connected to. Raises Forbidden, Unreachable (no such host)."""
    named = reachable()
    name, _ = hosts.split(host)
    if named is None or not {(name, None), (name, port)}.isdisjoint(map(hosts.split, named)):
        return host

    def refusal(address: str) -> Forbidden:
        return Forbidden(
            f"this server routes to no host that is not public, and {host} is at {address}",
            f"who runs it can allow it: `sandlot serve --allow-route {f'[{host}]' if ':' in host else host}:{port}`",
        )

    return await public.address_of(host, refusal)


class _Checked:
    """How a transport connects: to an address that was looked at."""

    def __init__(self, backend: httpcore2.AsyncNetworkBackend, reachable: Reachable) -> None:
        self._backend = backend
        self._reachable = reachable

    async def connect_tcp(self, host: str, port: int, *words: Any, **more: Any) -> httpcore2.AsyncNetworkStream:
        return await self._backend.connect_tcp(await address_of(host, port, self._reachable), port, *words, **more)


class Relay:
    """One upstream as an application. The transport stays its owner's."""

    def __init__(
        self, upstream: Upstream, transport: httpx2.AsyncHTTPTransport, reachable: Reachable = anybody
    ) -> None:
        """Raises InvalidRequest."""
        import httpx2

        try:
            self._base = httpx2.URL(upstream.url)
        except httpx2.InvalidURL as error:
            raise InvalidRequest(f"url: {upstream.url!r} is not a URL: {error}") from None
        if not self._base.host or (self._base.port or 0) > 65_535:
            raise InvalidRequest(f"url: {upstream.url!r} names no place", "write it as `http://127.0.0.1:8000`")
        self._prefix = self._base.raw_path.partition(b"?")[0].rstrip(b"/")
        self._added = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in upstream.headers.items()
        ]
        self._dropped = _OF_THE_HOP | {name for name, _ in self._added}
        self._transport = transport
        self._reachable = reachable

    async def check(self) -> None:
        """Raises Forbidden, as every connection would. A host that is not there yet may come."""
        with suppress(Unreachable, DeadlineExceeded):
            port = self._base.port or (443 if self._base.scheme == "https" else 80)
            await address_of(self._base.host, port, self._reachable)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not {"..", "."}.isdisjoint(scope["path"].split("/")):
            await _answer(
                send, 400, "invalid", "a path must not hold `.` or `..`: they would lead out of the upstream's"
            )
            return
        asked = asyncio.Event()  # the whole request has been read: from here on only a hang-up can come
        relaying = asyncio.ensure_future(self._relay(scope, receive, send, asked))
        hung_up = asyncio.ensure_future(_hang_up(receive, asked))
        try:
            await asyncio.wait((relaying, hung_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
            if not relaying.done():
                relaying.cancel()
            await asyncio.wait((relaying, hung_up))
        if not relaying.cancelled():
            relaying.result()

    async def _relay(self, scope: Scope, receive: Receive, send: Send, asked: asyncio.Event) -> None:
        import httpx2

        path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        # Only the path is taken from the box; `http://host` + `@elsewhere/` is why the parts are not joined as text.
        url = self._base.copy_with(raw_path=self._prefix + path + (b"?" + query if query else b""))
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in self._dropped] + self._added
        sends_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        if not sends_body:
            asked.set()
        request = httpx2.Request(
            scope["method"],
            url,
            headers=headers,
            content=_body(receive, asked) if sends_body else None,
            extensions={"timeout": _TIMEOUT},
        )
        started = False
        try:
            response = await self._transport.handle_async_request(request)
            response.request = request
            try:
                kept = [(n.lower(), v) for n, v in response.headers.raw if n.lower() not in _OF_THE_HOP]
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                started = True
                async for chunk in response.aiter_raw():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await response.aclose()
        except SandlotError as error:  # of a connection that was not made
            await _answer(
                send, error.status, error.code, f"{error.message}; {error.hint}" if error.hint else error.message
            )
        except httpx2.HTTPError as error:
            if started:
                raise  # the server then breaks the connection, which is the truth
            await _answer(send, 502, "unreachable", f"{self._base.host} did not answer: {type(error).__name__}")


async def _answer(send: Send, status: int, code: str, message: str) -> None:
    body = json.dumps({"error": {"code": code, "type": code, "message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive, asked: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            # The request must not look complete to the upstream: breaking off is the only way to say so.
            raise asyncio.CancelledError
        if chunk := message.get("body"):
            yield chunk
        if not message.get("more_body"):
            asked.set()
            return


async def _hang_up(receive: Receive, asked: asyncio.Event) -> None:
    """Returns when the box has closed its connection."""
    await asked.wait()
    while (await receive())["type"] != "http.disconnect":
        pass

"""An ASGI application on a listening socket: how boxes, clients and `sandlot serve` answer HTTP.

It owns the connections of one listener. It promises that `close` leaves neither listener nor connection, and that
nothing wakes up while nothing happens: uvicorn lends its HTTP protocol class only, not its server, whose main loop
ticks ten times a second. It never reads a signal, a log setting or the environment.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from sandlot.api import MOST_FRAME_BYTES, AsgiApp
from sandlot.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    import ssl

    from uvicorn import Config
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

# Longer than any client here keeps an idle connection, so that it is always the client who lets go: a server that
# closes first can cross with a request on its way.
KEEP_ALIVE_SECONDS = 75

# Connections at a time of one listener, and of all listeners in one box: the next one is cut off. Each costs the node a
# descriptor, whether or not anything is said on it, and a box must not make its node hold more.
MOST_CONNECTIONS = 1024
BOX_CONNECTIONS = 256

# Connections that may wait, and that are accepted in one go before anybody can cut them off: from boxes fewer.
_BACKLOG, _BOX_BACKLOG = 1024, 128

# Of a request's line and headers, and for them to arrive. Real ones have a few KB and come at once.
MOST_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0

# For TLS to begin, which takes a few packets; and of a request's body, without a byte while somebody waits for one.
HANDSHAKE_SECONDS = 10.0
BODY_SECONDS = 60.0
# In so many looks: a body that is silent in all of them has been for so long.
_LOOKS = 4


class Room:
    """How many connections there may be at a time, of one listener or of several together, and `within` what else."""

    def __init__(self, most: int, within: Room | None = None) -> None:
        self._left = most
        self._within = within

    def take(self) -> bool:
        """Whether there was room for one more; then it is taken."""
        if self._left <= 0 or not (self._within is None or self._within.take()):
            return False
        self._left -= 1
        return True

    def leave(self) -> None:
        self._left += 1
        if self._within is not None:
            self._within.leave()


class _Listening(Protocol):
    def close(self) -> None: ...


class _Door:
    """A listener whose connections begin with TLS. They take room before it: asyncio's own server tells of those only
    that have come through it, and of any number that say nothing it holds each with its TLS."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext, room: Room, protocol: Callable[[], Any]) -> None:
        self._listener = listener
        self._tls = tls
        self._room = room
        self._protocol = protocol
        self.greeting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._accepting.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except ConnectionAbortedError:
                    continue
                except OSError:  # this process, or the host, has no descriptors left
                    await asyncio.sleep(1)
                    continue
                if self._room.take():
                    task = asyncio.create_task(self._greet(connection))
                    self.greeting.add(task)
                    task.add_done_callback(self.greeting.discard)
                else:
                    connection.close()
                await asyncio.sleep(0)  # else who connects fast enough is all that this process sees
        finally:
            self._listener.close()

    async def _greet(self, connection: socket.socket) -> None:
        protocol = self._protocol()
        protocol.has_room = True
        try:
            with suppress(OSError):  # whoever it was has gone, or speaks no TLS
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
                )
        finally:
            if not protocol.is_let_in:
                protocol.has_room = False
                self._room.leave()


class Served:
    """A listener that is being answered."""

    def __init__(self, server: _Listening, state: ServerState, greeting: set[asyncio.Task[None]]) -> None:
        self._server = server
        self._state = state
        self._greeting = greeting

    def close(self) -> None:
        """Stop listening and drop every connection now; an application that reads on gets `http.disconnect`."""
        self._server.close()
        for task in self._greeting:
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def stop(self) -> None:
        """Take no more connections; those that there are go on until their answer is given."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def drain(self, seconds: float) -> None:
        """Stop listening, let the answers that are being given finish for at most `seconds`, then close."""
        self.stop()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=seconds)
        self.close()


async def serve(
    listener: socket.socket,
    app: AsgiApp,
    head_seconds: float = HEAD_SECONDS,
    room: Room | None = None,
    tls: ssl.SSLContext | None = None,
    websockets: bool = False,
    body_seconds: float = BODY_SECONDS,
) -> Served:
    """Answer what comes in on `listener`, which now belongs to the result, as long as there is `room` (None: for
    MOST_CONNECTIONS); over `tls`, if it is given. An application that has no `websockets` is asked for none. Raises
    Unsupported without uvicorn."""
    from uvicorn.server import ServerState

    http = _protocol(head_seconds, body_seconds)
    free = room or Room(MOST_CONNECTIONS)
    config = copy.copy(_config())
    config.loaded_app = app
    if websockets:
        config.ws_protocol_class = functools.partial(_sockets(), free)  # type: ignore[assignment]
    state = ServerState()

    def protocol() -> HttpToolsProtocol:
        return http(free, config=config, server_state=state, app_state={})

    # Connections inherit it. asyncio sets it only on sockets that name their protocol, and `socket.create_server` makes
    # them without. An answer's head and body are two writes: the second would wait 40 ms for the first's receipt.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    backlog = _BOX_BACKLOG if room else _BACKLOG
    if tls is not None:
        listener.setblocking(False)
        listener.listen(backlog)
        door = _Door(listener, tls, free, protocol)
        return Served(door, state, door.greeting)
    server = await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=backlog)
    return Served(server, state, set())


def require() -> None:
    """Raises Unsupported where uvicorn is missing: to be asked before something is started that would need it."""
    _config()


@functools.cache
def _protocol(head_seconds: float, body_seconds: float) -> Callable[..., HttpToolsProtocol]:
    """uvicorn's protocol, with bounds on connections, on a request's head in bytes and in time, and on the silence in
    its body: whoever connects may be a program in a box that wants this process to hold more and more.
    (`limit_concurrency` counts requests, of which each connection has one, and those that were answered a moment
    ago.)"""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        _head_bytes: int | None = 0  # None while no head is being read
        _head_timer: asyncio.TimerHandle | None = None
        _in_body = False
        _body_timer: asyncio.TimerHandle | None = None
        _body_bytes = _body_bytes_then = _silent_looks = 0
        has_room = False  # before it is let in
        is_let_in = False

        def __init__(self, room: Room, **words: Any) -> None:
            super().__init__(**words)
            self._room = room

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.is_let_in = self.has_room or self._room.take()
            if not self.is_let_in:
                transport.abort()
                return
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(head_seconds, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self.is_let_in:
                return
            self._room.leave()
            self._stop_timer()
            self._in_body = False
            self._look_at_body()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_bytes is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MOST_HEAD_BYTES:
                    self.transport.abort()
            elif self._in_body:
                self._body_bytes += len(data)
                if self._body_timer is None:
                    self._look_at_body()
            elif self._head_timer is None and getattr(self.cycle, "response_complete", False):
                self._wait_for_more()  # it was an empty line, which is no head

        def _wait_for_more(self) -> None:
            if self.timeout_keep_alive_task is None and not self.transport.is_closing():
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes = 0
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(head_seconds, self.transport.abort)

        def on_headers_complete(self) -> None:
            self._head_bytes = None
            self._stop_timer()
            super().on_headers_complete()

            self._in_body = True

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_body = False

        def _look_at_body(self) -> None:
            """Now and then, while one comes: a timer for each piece of it would cost more than the piece."""
            if self._body_timer is not None:
                self._body_timer.cancel()
                self._body_timer = None
            if not self._in_body:
                return
            # Nobody waits for it who has it held up, or has not asked for it yet.
            waits = not (self.flow.read_paused or self.cycle.waiting_for_100_continue)
            silent = waits and self._body_bytes == self._body_bytes_then
            self._silent_looks = self._silent_looks + 1 if silent else 0
            self._body_bytes_then = self._body_bytes
            if self._silent_looks >= _LOOKS:
                self._cut_short()
            else:
                self._body_timer = self.loop.call_later(body_seconds / _LOOKS, self._look_at_body)

        def _cut_short(self) -> None:
            """Tell the caller, as an application would, and the application that its caller has gone."""
            told: dict[str, Any] = self.cycle.scope["state"]
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            error = InvalidRequest(f"nothing came of the request's body for {body_seconds:g} s", "send it again")
            told["status"], told["error"] = 408, error.code
            wire = error.to_wire()
            body = json.dumps({"error": {**wire["error"], "request_id": told.get("request")}}).encode()
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
                + f"x-request-id: {told.get('request', '-')}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            self.transport.close()

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Bounded


@functools.cache
def _sockets() -> Callable[..., asyncio.Protocol]:
    """uvicorn's protocol of a WebSocket, which takes the place of the other one on its connection, and in its room."""
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class Socket(WebSocketsSansIOProtocol):
        def __init__(self, room: Room, **words: Any) -> None:
            super().__init__(**words)
            self._room = room

        async def send(self, message: Any) -> None:
            await super().send(message)
            self.handshake_complete |= self.close_sent  # else it logs each refusal as a failure

        def connection_lost(self, exc: Exception | None) -> None:
            self._room.leave()
            super().connection_lost(exc)

    return Socket


@functools.cache
def _config() -> Config:
    try:
        from uvicorn import Config
    except ImportError:
        raise Unsupported("serving HTTP needs uvicorn, which is missing", "`pip install 'sandlot[serve]'`") from None
    config = Config(
        _nothing,
        interface="asgi3",
        lifespan="off",
        ws="none",
        ws_max_size=MOST_FRAME_BYTES,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    config.load()
    return config


async def _nothing(scope: object, receive: object, send: object) -> None:
    """The application of the shared configuration, which is never served itself."""

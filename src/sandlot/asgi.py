"""An ASGI application on a listening socket: how boxes, clients and `sandlot serve` answer HTTP.

It owns the connections of one listener. It promises that `close` leaves neither listener nor connection, and that
nothing wakes up while nothing happens: uvicorn lends its HTTP protocol class only, not its server, whose main loop
ticks ten times a second. It never reads a signal, a log setting or the environment.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sandlot.api import AsgiApp
from sandlot.errors import Unsupported

if TYPE_CHECKING:
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


class Served:
    """A listener that is being answered."""

    def __init__(self, server: asyncio.Server, state: ServerState) -> None:
        self._server = server
        self._state = state

    def close(self) -> None:
        """Stop listening and drop every connection now; an application that reads on gets `http.disconnect`."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def drain(self, seconds: float) -> None:
        """Stop listening, let the answers that are being given finish for at most `seconds`, then close."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=seconds)
        self.close()


async def serve(
    listener: socket.socket, app: AsgiApp, head_seconds: float = HEAD_SECONDS, room: Room | None = None
) -> Served:
    """Answer what comes in on `listener`, which now belongs to the result, as long as there is `room` (None: for
    MOST_CONNECTIONS). Raises Unsupported without uvicorn."""
    from uvicorn.server import ServerState

    http = _protocol(head_seconds)
    free = room or Room(MOST_CONNECTIONS)
    config = copy.copy(_config())
    config.loaded_app = app
    state = ServerState()

    def protocol() -> asyncio.Protocol:
        return http(free, config=config, server_state=state, app_state={})

    # Connections inherit it. asyncio sets it only on sockets that name their protocol, and `socket.create_server` makes
    # them without. An answer's head and body are two writes: the second would wait 40 ms for the first's receipt.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = await asyncio.get_running_loop().create_server(
        protocol, sock=listener, backlog=_BOX_BACKLOG if room else _BACKLOG
    )
    return Served(server, state)


def require() -> None:
    """Raises Unsupported where uvicorn is missing: to be asked before something is started that would need it."""
    _config()


@functools.cache
def _protocol(head_seconds: float) -> Callable[..., HttpToolsProtocol]:
    """uvicorn's protocol, with bounds on connections, and on a request's head in bytes and in time: whoever connects
    may be a program in a box that wants this process to hold more and more. (`limit_concurrency` counts requests, of
    which each connection has one, and those that were answered a moment ago.)"""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Bounded(HttpToolsProtocol):
        _head_bytes: int | None = 0  # None while no head is being read
        _head_timer: asyncio.TimerHandle | None = None
        _let_in = False

        def __init__(self, room: Room, **words: Any) -> None:
            super().__init__(**words)
            self._room = room

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._let_in = self._room.take()
            if not self._let_in:
                transport.abort()
                return
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(head_seconds, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._let_in:
                return
            self._room.leave()
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_bytes is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MOST_HEAD_BYTES:
                    self.transport.abort()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes = 0
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(head_seconds, self.transport.abort)

        def on_headers_complete(self) -> None:
            self._head_bytes = None
            self._stop_timer()
            super().on_headers_complete()

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Bounded


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
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    config.load()
    return config


async def _nothing(scope: object, receive: object, send: object) -> None:
    """The application of the shared configuration, which is never served itself."""

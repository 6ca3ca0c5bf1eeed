"""Frames to and from one sandlot-init: the mirror of init/wire.h, and the socket they travel on.

Owns the node's end of a control socket. Promises that each request is answered once or fails with HostFault when the
helper is gone; never waits by itself (callers put deadlines) and never blocks the event loop.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

from sandlot.aio import alone, shared
from sandlot.errors import HostFault


class Frame(IntEnum):
    PLAN = 1
    MAPPED = 2
    SPAWN = 3
    KILL = 4
    LISTEN = 5
    CONNECT = 6
    OPEN = 7
    RELEASE = 8
    SIGNAL = 9
    COPY = 10
    LIST = 11
    CLAIM = 12
    DISK = 13
    UNPACK = 14
    FILES = 15
    HOLD = 16
    PID = 100
    READY = 101
    DONE = 102
    EXITED = 103
    FAILED = 104
    HELD = 105


class Key(IntEnum):
    HOST_ID = 1
    JOIN = 2
    STEP = 3
    RLIMIT = 4
    CAPS = 5
    SETUID = 6
    SECCOMP = 7
    LIFETIME = 8
    KEEP = 9
    ARG = 10
    ENV = 11
    CWD = 12
    USER = 13
    RUN = 14
    PORT = 15
    PATH = 16
    FLAGS = 17
    MODE = 18
    PARENTS = 19
    LISTENER = 20
    RECORD = 21
    GRACE = 22
    HOLD = 23
    NOTE = 24
    NETWORK = 25
    TTY = 26
    ERRNO = 30
    WORDS = 31
    STATUS = 32
    SIGNAL = 33
    CPU_US = 34
    PID = 35
    BYTES = 36
    FILES = 37
    OPERATION = 38
    TO = 39
    GROUP = 40
    PATTERN = 41
    TEXT = 42


class Operation(IntEnum):
    """Of FILES."""

    LOOK = 1
    STORE = 2
    MAKE = 3
    MOVE = 4
    REMOVE = 5
    CHANGE = 6
    WATCH = 7


class Flag(IntFlag):
    """Of FILES."""

    FOLLOW = 1
    CONTENTS = 2
    REGEX = 4
    ANY_CASE = 8
    APPEND = 16
    REPLACE = 32
    DEEP = 64


_HEADER = struct.Struct("=III")
_FIELD = struct.Struct("=HHI")
_WIDE = frozenset({Key.CAPS, Key.LIFETIME, Key.GRACE, Key.CPU_US, Key.BYTES})
_TEXT = frozenset({Key.WORDS, Key.NOTE})
KILL_ONLY_ITSELF = 1  # init/wire.h
FRAME_MAX = 16 << 20  # init/wire.h: FRAME_MAX

Value = int | str | bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A frame from the helper. The receiver owns `fds`."""

    kind: int
    id: int
    fields: dict[int, Value]
    fds: list[int] = field(default_factory=list)

    def number(self, key: Key) -> int | None:
        value = self.fields.get(key)
        return value if isinstance(value, int) else None

    def words(self) -> str:
        return str(self.fields.get(Key.WORDS, ""))


def pack(kind: Frame, request_id: int, fields: Sequence[tuple[Key, Value]]) -> bytes:
    """One frame as bytes. Strings get their closing NUL; a string that holds one is a ValueError."""
    parts = [b""]
    for key, value in fields:
        if isinstance(value, int):
            payload = struct.pack("=Q" if key in _WIDE else "=I", value)
        elif isinstance(value, str):
            payload = os.fsencode(value) + b"\0"
            if payload.index(0) != len(payload) - 1:
                raise ValueError(f"{value!r} holds a NUL byte")
        else:
            payload = value
        parts.append(_FIELD.pack(key, 0, len(payload)))
        parts.append(payload)
    body = b"".join(parts)
    return _HEADER.pack(kind, request_id, len(body)) + body


def _unpack(body: memoryview) -> dict[int, Value]:
    fields: dict[int, Value] = {}
    offset = 0
    while offset < len(body):
        key, _, length = _FIELD.unpack_from(body, offset)
        payload = body[offset + _FIELD.size : offset + _FIELD.size + length]
        if key in _TEXT:
            fields[key] = bytes(payload[:-1]).decode("utf-8", "replace")
        else:
            fields[key] = int.from_bytes(payload, "little" if struct.pack("=H", 1)[0] else "big")
        offset += _FIELD.size + length
    return fields


class Channel:
    """The node's end of one control socket.

    `on_exit(answer)` is called for each process that ended, `on_held(answer)` for what the helper kept for a node that
    adopts the box, `on_gone()` when the other end is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_exit: Callable[[Answer], None],
        on_gone: Callable[[], None] = lambda: None,
        on_held: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        alone(sock.fileno())
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._on_gone = on_gone
        self._on_held = on_held
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._start: asyncio.Future[Answer] | None = None
        self._next_id = 1
        self._buffer = bytearray()
        self._consumed = 0  # bytes of the stream that were parsed and dropped from the buffer
        # Descriptors arrive with the last bytes of what one recvmsg returns: (stream offset of that end, fds).
        self._fds: deque[tuple[int, list[int]]] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self.open = True
        self.first_process: int | None = None  # pid of PID 1, once the helper has said it
        self._gone = self._loop.create_future()
        self._loop.add_reader(sock, self._readable)

    # -- asking ---------------------------------------------------------------------------------------------------

    def send(self, kind: Frame, request_id: int, fields: Sequence[tuple[Key, Value]], fds: Sequence[int] = ()) -> None:
        """Queue one frame. `fds` are duplicated by the kernel; when a full socket delays the frame they are duplicated
        here, so the caller may close its own at once."""
        if not self.open:
            raise HostFault("the sandbox's helper is gone")
        data = memoryview(pack(kind, request_id, fields))
        if len(data) - _HEADER.size > FRAME_MAX:
            raise ValueError(f"they are {len(data)} bytes, and a helper takes {FRAME_MAX}")
        if self._unsent:
            self._unsent.append((data, [os.dup(fd) for fd in fds]))
            return
        sent = self._try_send(data, fds)
        if sent < len(data):
            self._unsent.append((data[sent:], [os.dup(fd) for fd in fds] if sent == 0 else []))
            self._loop.add_writer(self._sock, self._writable)

    async def ask(self, kind: Frame, fields: Sequence[tuple[Key, Value]], fds: Sequence[int] = ()) -> Answer:
        """Send a request and wait for its answer. Raises HostFault when the helper goes away first."""
        request_id, answer = self.ask_soon()
        try:
            self.send(kind, request_id, fields, fds)
            return await answer
        finally:
            self._waiting.pop(request_id, None)

    def ask_soon(self) -> tuple[int, asyncio.Future[Answer]]:
        """An id for a request and the future of its answer, for callers that must know the id before they send."""
        request_id = self._next_id
        self._next_id = request_id % 0xFFFFFFFF + 1
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[request_id] = answer
        return request_id, answer

    def never_mind(self, request_id: int) -> None:
        """Of `ask_soon`, when nothing could be asked."""
        self._waiting.pop(request_id, None)

    async def started(self) -> Answer:
        """The next frame of the start: PID, READY or FAILED."""
        self._start = self._loop.create_future()
        if not self.open:
            raise HostFault("the sandbox's helper is gone")
        try:
            return await self._start
        finally:
            self._start = None

    async def hang_up(self) -> None:
        """Tell the helper to end, and wait until every process that held its end of the socket has."""
        if self.open:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            await self._gone

    def close(self) -> None:
        """Close this end; whoever still waits gets HostFault. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        shared(self._sock.fileno())
        self._sock.close()
        for _, fds in [*self._unsent, *self._fds]:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        self._fds.clear()
        for waiter in [*self._waiting.values(), *([self._start] if self._start else [])]:
            if not waiter.done():
                waiter.set_exception(HostFault("the sandbox's helper went away before it answered"))
                waiter.exception()  # whoever asked may be gone too: do not log it as never retrieved
        self._waiting.clear()
        if not self._gone.done():
            self._gone.set_result(None)

    # -- the socket -----------------------------------------------------------------------------------------------

    def _try_send(self, data: memoryview, fds: Sequence[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):  # its end shows as readable too, which closes this channel
            return len(data)
        except OSError as error:
            raise HostFault(f"a request could not be sent to the sandbox's helper: {error.strerror}") from error

    def _writable(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            sent = self._try_send(data, fds)
            if sent == 0:
                return
            for fd in fds:
                os.close(fd)
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data, control, _, _ = self._sock.recvmsg(65536, socket.CMSG_SPACE(4 * 64), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, control = b"", []
        if not data:
            self.close()
            self._on_gone()
            return
        self._buffer += data
        received: list[int] = []
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                received.extend(numbers)
        if received:
            self._fds.append((self._consumed + len(self._buffer), received))
        while self.open and self._take_frame():
            pass

    def _take_frame(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            return False
        kind, request_id, length = _HEADER.unpack_from(self._buffer)
        size = _HEADER.size + length
        if len(self._buffer) < size:
            return False
        with memoryview(self._buffer) as view:
            fields = _unpack(view[_HEADER.size : size])
        del self._buffer[:size]
        self._consumed += size
        fds: list[int] = []
        while self._fds and self._fds[0][0] <= self._consumed:
            fds += self._fds.popleft()[1]
        self._deliver(Answer(kind, request_id, fields, fds))
        return True

    def _deliver(self, answer: Answer) -> None:
        waiter: asyncio.Future[Answer] | None
        if answer.kind == Frame.EXITED:
            self._on_exit(answer)
            return
        if answer.kind == Frame.HELD:
            self._next_id = max(self._next_id, answer.id + 1)  # ids of the node before are still in use
            self._on_held(answer)
            return
        if answer.kind == Frame.PID:
            self.first_process = answer.number(Key.PID)
        waiter = self._waiting.pop(answer.id, None) if answer.kind == Frame.DONE else self._start
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)
        else:  # whoever asked has given up: what came with the answer must not leak
            for fd in answer.fds:
                os.close(fd)

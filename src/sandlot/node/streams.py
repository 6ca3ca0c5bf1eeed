"""What a command writes and reads: a pipe and a log for each of its streams.

It promises that memory is bounded by the cap, head and tail kept, and that a node which is killed loses no byte: a byte
is in the pipe or in the log, because one system call moves it, and with it the log's position, which whoever holds a
duplicate of the log shares. It never waits: what comes is taken when the event loop says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sandlot.api import Output

_PIPE_BYTES = 1 << 16  # capacity of a Linux pipe
# The middle of a long stream is given back to the kernel in pieces of this size.
_PIECE = 1 << 20
# Of a stream whose followers miss nothing: how long it waits for the first of them, here and in a node that adopts its
# box, and for one to come back when the last has gone (seconds); and the least cap with which it can: what came when
# nobody had taken it yet, and what is taken at once and at the end, are kept in the tail.
FIRST_SECONDS = 60.0
NEXT_SECONDS = 10.0
LEAST_LOSSLESS = 1 << 19
# Bytes that may be on the way to a follower, who has them as far as this process knows, and asks for them again when
# the connection breaks: Linux gives it up to 4 MiB to send and 6 MiB to receive, of which base64 makes three quarters.
ON_THE_WAY = 8 << 20
_PUNCH = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)


def punch(log: int, offset: int, size: int) -> None:
    """Give so many bytes of a memory file back to the kernel. A failure costs memory, nothing else."""
    _libc.fallocate(log, _PUNCH, ctypes.c_long(offset), ctypes.c_long(size))


class Stream:
    """One stream of a command on its way: the first half of the cap is kept from the head, the rest from the tail."""

    __slots__ = (
        "_behind",
        "_followers",
        "_grew",
        "_loop",
        "_paused",
        "_reading",
        "_timer",
        "_told",
        "_wasted",
        "cap",
        "log",
        "pipe",
        "total",
    )

    def __init__(self, cap: int, pipe: int, log: int) -> None:
        """Reads from `pipe` into `log`, a memory file at the position it has; both are this object's from now on."""
        self.cap = cap
        self.pipe = pipe
        self.log = log
        os.set_blocking(pipe, False)  # our end only: a program's own output must block when the pipe is full
        self.total = os.lseek(log, 0, os.SEEK_CUR)  # bytes that came
        # Up to here, from the head's end, the middle was given back; of a log that another node kept it may have been.
        self._wasted = max(cap // 2, self.total - (cap - cap // 2))
        self._behind = 0  # bytes that are kept before the tail, for a follower who comes back
        self._followers: dict[object, int] = {}  # those who must miss nothing, and how many bytes each has
        self._grew: list[Callable[[], None]] = []
        # Bytes that every follower has, or the last of them had; None: nobody is waited for.
        self._told: int | None = None
        self._timer: asyncio.TimerHandle | None = None  # until when a follower is waited for
        self._paused = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._readable)
        self._reading = True

    @classmethod
    def new(cls, cap: int) -> tuple[Stream, int]:
        """A stream, and the end of its pipe that the command gets, which the caller closes."""
        pipe, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            os.fchmod(theirs, 0o666)  # `tee /dev/stderr` opens it by its name, as a user whom this host may not know
            log = os.memfd_create("sandlot-output", os.MFD_CLOEXEC)
        except BaseException:
            os.close(pipe)
            os.close(theirs)
            raise
        return cls(cap, pipe, log), theirs

    def _readable(self) -> None:
        try:
            moved = os.splice(self.pipe, self.log, _PIPE_BYTES, flags=os.SPLICE_F_NONBLOCK)
        except BlockingIOError:
            return
        if moved:
            self._kept(moved)
        else:
            self.stop()

    def _kept(self, moved: int) -> None:
        self.total += moved
        for call in self._grew:
            call()
        self._pause_if_ahead()
        surplus = self.total - (self.cap - self.cap // 2) - self._behind - self._wasted
        if surplus >= _PIECE:
            punch(self.log, self._wasted, surplus)
            self._wasted += surplus

    def wait_for_followers(self) -> None:
        """From now on nothing is taken that whoever follows would miss. Its cap is LEAST_LOSSLESS or more. Of one
        that another node began they say how far they were."""
        self._told = 0
        self._behind = ON_THE_WAY
        self._wasted = max(self.cap // 2, self.total - (self.cap - self.cap // 2) - self._behind)
        self._pause_if_ahead()
        self._wait(FIRST_SECONDS)

    def _pause_if_ahead(self) -> None:
        if self._told is not None and self._reading and not self._paused and self._is_ahead(self._told):
            self._paused = True
            self._loop.remove_reader(self.pipe)

    def _wait(self, seconds: float | None) -> None:
        """For a follower, so long and no longer; None: there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and self._told is not None and self._reading:
            self._timer = self._loop.call_later(seconds, self._has_told, None)

    def _is_ahead(self, told: int) -> bool:
        return self.total - told >= self.cap // 2 - 2 * _PIPE_BYTES

    def _has_told(self, told: int | None) -> None:
        self._told = told
        if self._paused and (told is None or not self._is_ahead(told)):
            self._paused = False
            if self._reading:
                self._loop.add_reader(self.pipe, self._readable)

    @contextmanager
    def telling(self, call: Callable[[], None]) -> Iterator[None]:
        """`call` whenever more was taken."""
        self._grew.append(call)
        try:
            yield
        finally:
            self._grew.remove(call)

    @contextmanager
    def waiting_for(self, offset: int) -> Iterator[Callable[[int], None]]:
        """There is a follower who must miss nothing and begins there; by what it gets it says that it has what was
        before an offset. When it goes away, and others are there, they alone are waited for."""
        follower = object()

        def has(offset: int) -> None:
            self._followers[follower] = min(offset, self.total)  # else one who is far ahead would say so for all time
            self._ask_all()

        self._wait(None)
        has(offset)
        try:
            yield has
        finally:
            del self._followers[follower]
            if self._followers:
                self._ask_all()
            else:
                self._wait(NEXT_SECONDS)

    def _ask_all(self) -> None:
        """Who has least counts: what is taken for the others would be lost to that one."""
        if self._told is not None:
            self._has_told(min(self._followers.values()))

    def since(self, offset: int, most: int) -> tuple[int, bytes]:
        """How many bytes from there on are lost, and at most so many of those that follow."""
        lost = self._wasted - offset if self.cap // 2 <= offset < self._wasted else 0
        end = self.total if offset + lost >= self._wasted else self.cap // 2
        return lost, os.pread(self.log, max(0, min(most, end - offset - lost)), offset + lost)

    def drain(self) -> None:
        """Take what is in the pipe now. Not until its end: a child in the background may hold the other side open,
        and write on for ever."""
        if not self._reading:
            return
        left = int(struct.unpack("i", fcntl.ioctl(self.pipe, termios.FIONREAD, b"\0\0\0\0"))[0])
        while left > 0 and (moved := os.splice(self.pipe, self.log, min(left, _PIPE_BYTES))):
            self._kept(moved)
            left -= moved

    def at_end(self) -> bool:
        """Whether nobody can write to it any more, and all was taken."""
        if self._reading:
            self._readable()
        return not self._reading

    def say(self, text: str) -> None:
        self._kept(os.write(self.log, text.encode(errors="surrogateescape")))

    def output(self, total: int | None = None) -> Output:
        """What was kept so far; of the first `total` bytes, unless their tail was given back since."""
        head, tail = self.cap // 2, self.cap - self.cap // 2
        if total is None or min(total, self._wasted) > max(head, total - tail):
            total = self.total
        if total <= self.cap:
            data = os.pread(self.log, total, 0)
        else:
            data = os.pread(self.log, head, 0) + os.pread(self.log, tail, total - tail)
        return Output.model_construct(data=data, total=total)

    def stop(self) -> None:
        """Take no more."""
        if self._reading:
            self._reading = False
            self._wait(None)
            self._loop.remove_reader(self.pipe)

    def close(self) -> None:
        if self.pipe >= 0:
            self.stop()
            os.close(self.pipe)
            os.close(self.log)
            self.pipe = self.log = -1


def kept_of(output: Output, offset: int) -> tuple[int, bytes]:
    """What is kept of a finished stream from an offset on, and how many bytes before that are lost."""
    gap = output.total - len(output.data)
    head = len(output.data) // 2 if gap else len(output.data)  # as `Stream.output` cuts it
    if offset < head:
        return 0, output.data[offset:head]
    lost = max(0, head + gap - offset)
    return lost, output.data[max(head, offset - gap) :]


class Input:
    """What a program reads that is fed as it goes."""

    def __init__(self, fd: int | None = None) -> None:
        """Writes to `fd`, which is this object's from now on; without one to a pipe, whose other end is `theirs`, for
        the caller to close."""
        self.theirs, self._fd = os.pipe2(os.O_CLOEXEC) if fd is None else (-1, fd)
        os.set_blocking(self._fd, False)
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()  # there may be room, or it was closed

    async def write(self, data: bytes) -> None:
        """Returns when the pipe has taken it all. Raises BrokenPipeError: nobody reads it any more, or it is closed."""
        async with self._turn:
            left = memoryview(data)
            while left:
                if self._fd < 0:
                    raise BrokenPipeError
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    await self._writable()

    async def _writable(self) -> None:
        """Not for longer than the command reads: whoever sees its end closes this."""
        loop = asyncio.get_running_loop()
        self._wake.clear()
        loop.add_writer(self._fd, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if self._fd >= 0:
                loop.remove_writer(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._wake.set()


def input_file(data: bytes) -> int:
    """A file that holds a command's standard input, at its beginning; the caller closes it. Nobody has to feed it, so
    it reaches the command whole even if this process dies. Raises OSError."""
    fd = os.memfd_create("sandlot-input", os.MFD_CLOEXEC)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd

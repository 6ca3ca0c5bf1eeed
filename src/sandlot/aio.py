"""The only concurrency helpers: named deadlines, teardown that a cancellation cannot cut short, a program run to its
end, descriptors that no forked copy of this process has. Nothing here polls."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from sandlot.errors import DeadlineExceeded

T = TypeVar("T")


# What a process that forks without exec, as multiprocessing does, must not hand on: whoever holds a control socket or a
# lock lives, and so the sandboxes of a process that was killed would live on with its child.
_alone: set[int] = set()


def alone(fd: int) -> int:
    """From now on the descriptor leads nowhere in a forked child. To be closed by `close_alone`, or after `shared`."""
    _alone.add(fd)
    return fd


@contextmanager
def for_a_while_alone(fd: int) -> Iterator[None]:
    alone(fd)
    try:
        yield
    finally:
        shared(fd)


def shared(fd: int) -> None:
    """No longer: its number will be another's."""
    _alone.discard(fd)


def close_alone(fd: int) -> None:
    shared(fd)
    os.close(fd)


def _forked() -> None:
    """In the child. The numbers stay taken: whoever holds one there may still close it."""
    if not _alone:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _alone:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _alone.clear()


os.register_at_fork(after_in_child=_forked)


@asynccontextmanager
async def deadline(seconds: float | None, what: str, hint: str | None = None) -> AsyncIterator[None]:
    """A wait that has a name: past `seconds` (None: never) the body is cancelled and DeadlineExceeded says which."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"{what} did not finish within {seconds:g} s", hint) from None


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run a teardown to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break  # the task's own failure: `task.result()` below raises it
    if cancelled is not None:
        raise cancelled
    return task.result()


async def program(argv: Sequence[str]) -> tuple[int, str]:
    """Run a program without input to its end: its exit status (negative: the signal), what it said on stderr. When the
    caller is cancelled it is killed. Raises OSError when it cannot be started.

    Not asyncio's subprocess: with uvloop a process that has started one may sleep through its own signals.
    """
    said = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        # vfork and exec: about a millisecond, which nothing could shorten.
        pid = os.posix_spawn(  # noqa: ASYNC221
            argv[0],
            list(argv),
            dict(os.environ),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, said, 2),
            ],
        )
        watch = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(watch, ended.set)
        try:
            await ended.wait()
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            loop.remove_reader(watch)
            os.close(watch)
            _, status = os.waitpid(pid, 0)  # noqa: ASYNC222  (it has ended, or was killed)
        return os.waitstatus_to_exitcode(status), os.pread(said, 4096, 0).decode(errors="replace").strip()
    finally:
        os.close(said)

"""The only concurrency helpers: named deadlines, teardown that a cancellation cannot cut short, a program run to its
end. Nothing here polls."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sandlot.errors import DeadlineExceeded

T = TypeVar("T")


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

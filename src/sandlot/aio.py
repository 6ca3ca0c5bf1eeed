"""The only concurrency helpers: named deadlines, teardown that a cancellation cannot cut short, task groups that
record what failed. Nothing here polls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
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

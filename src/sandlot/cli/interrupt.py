"""How Ctrl-C, SIGTERM and a terminal that goes away end a command that has sandboxes: once, and to the end.

It owns these signals while an event loop runs. It promises that the first of them cancels the work once and that all
later ones change nothing until the teardown is done: `asyncio.Runner` alone raises KeyboardInterrupt in the middle of
it at the second Ctrl-C, and knows no SIGTERM. How long a teardown may take is said by its own deadlines. Work that has
a better use for a Ctrl-C takes the first one with `taken`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

NewLoop = Callable[[], asyncio.AbstractEventLoop]

# Who takes the first Ctrl-C, and the loop on which that is called.
_takers: list[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = []


class Interrupted(Exception):
    """The work was cancelled by a signal and is torn down; `code` is the exit status for it: 130, 143 or 129."""

    def __init__(self, code: int) -> None:
        super().__init__(f"interrupted by signal {code - 128}")
        self.code = code


def run(main: Coroutine[Any, Any, T], new_loop: NewLoop | None = None) -> T:
    """What `main` returns, from an event loop of its own. Raises Interrupted when a signal cancelled it, after its
    teardown; the signals are ignored from then on. One that comes too late to cancel anything changes nothing."""
    code = 0
    cancel: Callable[[int], object] | None = None

    def told(number: int, frame: FrameType | None) -> None:
        nonlocal code
        if not code:
            if number == signal.SIGINT and _takers:
                loop, take = _takers.pop()
                loop.call_soon_threadsafe(take)
                return
            code = 128 + number
            if cancel is not None:
                cancel(code)

    async def work() -> T:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        # The handler runs between any two bytecodes, perhaps while the loop sleeps: it only leaves word. Whoever is
        # cancelled finds the code in the CancelledError.
        cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if code:
            cancel(code)
        try:
            return await main
        finally:
            cancel = None

    # A signal that is ignored stays so: a shell's `&` wants it.
    before: dict[signal.Signals, Any] = {
        number: was for number in SIGNALS if (was := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, told)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:  # closing the loop is a part of the teardown
            return runner.run(work())
    except asyncio.CancelledError:
        if not code:
            raise
        # The exit status is decided: what is told between here and the end of the process changes nothing either.
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise Interrupted(code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def taken(take: Callable[[], object]) -> Iterator[None]:
    """Inside, the first Ctrl-C calls `take` on the running loop and nothing else. The next is like any other signal."""
    taker = (asyncio.get_running_loop(), take)
    _takers.append(taker)
    try:
        yield
    finally:
        if taker in _takers:
            _takers.remove(taker)


def fast_loop() -> NewLoop | None:
    """What makes uvloop's event loop, or None where it is not installed: for what serves many requests."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

"""How Ctrl-C and SIGTERM end a command that has sandboxes: once, and to the end.

It owns both signals while an event loop runs. It promises that the first of them cancels the work once and that all
later ones change nothing until the teardown is done: `asyncio.Runner` alone raises KeyboardInterrupt in the middle of
it at the second Ctrl-C, and knows no SIGTERM. How long a teardown may take is said by its own deadlines.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

NewLoop = Callable[[], asyncio.AbstractEventLoop]


class Interrupted(Exception):
    """The work was cancelled by a signal and is torn down; `code` is the exit status for it: 130 or 143."""

    def __init__(self, code: int) -> None:
        super().__init__(f"interrupted by signal {code - 128}")
        self.code = code


def run(main: Coroutine[Any, Any, T], new_loop: NewLoop | None = None) -> T:
    """What `main` returns, from an event loop of its own. Raises Interrupted when a signal cancelled it, after its
    teardown; both signals are ignored from then on. One that comes too late to cancel anything changes nothing."""
    code = 0
    cancel: Callable[[], object] | None = None

    def told(number: int, frame: FrameType | None) -> None:
        nonlocal code
        if not code:
            code = 128 + number
            if cancel is not None:
                cancel()

    async def work() -> T:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        # The handler runs between any two bytecodes, perhaps while the loop sleeps: it only leaves word.
        cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if code:
            cancel()
        try:
            return await main
        finally:
            cancel = None

    # A signal that is ignored stays so: a shell's `&` wants it.
    before: dict[signal.Signals, Any] = {
        number: was for number in _SIGNALS if (was := signal.getsignal(number)) is not signal.SIG_IGN
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


def fast_loop() -> NewLoop | None:
    """What makes uvloop's event loop, or None where it is not installed: for what serves many requests."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

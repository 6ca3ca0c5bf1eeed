"""A command of a sandbox as if it ran here: its streams are this program's, and so is its Ctrl-C.

It promises that every byte of the command's output is written in the order of its stream or said to be missing, and
that a command that somebody stays with never outlives this program, unless that is killed with -9: it is killed when
the work is cancelled, and told (SIGPIPE) when nobody reads its output any more.

    stay        waits for: the command's end; a failure of what follows
      _show     the command's output (the node), then for whoever reads ours
      _feed     our standard input, then for the command to take it; left alone when the command has ended
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandlot.aio import shielded
from sandlot.cli import interrupt, say, streams
from sandlot.errors import Conflict, HostFault, SandlotError

if TYPE_CHECKING:
    from sandlot.api import RunResult
    from sandlot.sandbox import Command

# What is kept of each stream for a caller who wants it in one piece, and of one that is shown as it comes (bytes).
OUTPUT_CAP, SHOWN_CAP = 64 << 20, 1 << 20

# Seconds after a Ctrl-C in which most commands end; who waits longer is told how to be rid of it.
_PATIENCE = 1.0


async def stay(command: Command, *, stdin: bool, shown: bool) -> RunResult:
    """How it ended. With `stdin` it is fed this program's; `shown`: its output is this program's, as it comes. Raises
    HostFault, after its end, when some of that is missing."""
    loop = asyncio.get_running_loop()
    told: list[asyncio.Future[Any]] = []
    reminder: asyncio.TimerHandle | None = None

    def pass_on() -> None:
        nonlocal reminder
        told.append(loop.create_task(_signal(command, signal.SIGINT)))
        reminder = loop.call_later(_PATIENCE, say.note, "(it goes on; Ctrl-C again kills it)")

    with interrupt.taken(pass_on):
        work: list[asyncio.Future[Any]] = [asyncio.ensure_future(_show(command) if shown else command.wait())]
        if stdin:
            work.append(asyncio.ensure_future(_feed(command)))
        try:
            # An error of either ends it; the end of the input does not.
            while not work[0].done():
                done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
                work = [each for each in work if not each.done() or each is work[0]]
            lost = work[0].result()
            result = await command.wait()
        except BaseException as error:
            gone = isinstance(error, BrokenPipeError)
            await shielded(_signal(command, signal.SIGPIPE if gone else signal.SIGKILL))
            raise
        finally:
            if reminder is not None:
                reminder.cancel()
            await shielded(_end(work + told))
    if shown and lost:
        raise HostFault(
            f"{lost} bytes of the command's output are missing: nobody took them in time",
            "let it write to a file inside, and copy that: `sandlot cp`",
        )
    return result


async def _show(command: Command) -> int:
    """Write what it writes until its end. How many bytes are missing."""
    missing = 0
    chunks = command.output()
    try:
        async for chunk in chunks:
            missing += chunk.lost
            await streams.write(1 if chunk.stream == "out" else 2, chunk.data)
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
    return missing


async def _feed(command: Command) -> None:
    with suppress(Conflict):  # it takes no more
        async for piece in streams.pieces(sys.stdin.fileno()):
            await command.write(piece)
        await command.write(b"", end=True)


def said(result: RunResult, sandbox: str, json: bool, timeout: float | None = None) -> int:
    """The exit status of a command that has ended, and what else there is to say of it."""
    if json:
        fields = result.model_dump(exclude={"out", "err"})
        cut = result.out.truncated or result.err.truncated
        say.data({**fields, "stdout": result.stdout, "stderr": result.stderr, "truncated": cut, "sandbox": sandbox})
    elif result.timed_out:
        say.note("(killed: its time was up)" if timeout is None else f"(killed: it ran longer than {timeout:g} s)")
    elif result.oom:
        say.note("(the kernel killed it for memory: a sandbox with a higher limit may help)")
    return result.exit_code


async def kill(command: Command) -> None:
    """End it, if it runs."""
    await _signal(command, signal.SIGKILL)


async def _signal(command: Command, number: int) -> None:
    with suppress(SandlotError):  # it has ended, or its server has: then there is nobody to tell
        await command.signal(number)


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

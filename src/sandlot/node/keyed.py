"""Runs with a key: each is started once, and whoever asks for it again gets the same result. One that could not be
started, or was cut short by the sandbox's end, is as if it had never been asked for.

Owns the results of one sandbox, and says when one can be forgotten. It promises that what is kept is bounded, whether
anybody comes for it or not: of results that were received the last 64 and 64 MiB, of those that nobody received the
last 512 and 256 MiB, for five minutes in which a caller may come back. What ended longest ago goes first; a key whose
result is forgotten is as if it were new.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from sandlot.api import Chunk, CommandInfo, RunResult
from sandlot.drivers.base import Process
from sandlot.errors import Conflict, NotFound, SandlotError
from sandlot.node.streams import FIRST_SECONDS, Input, Stream, kept_of

# Of results that were received, the last so many are kept for who asks once more, and so many bytes of output.
KEPT = 64
KEPT_BYTES = 64 << 20
# Of those that nobody received: as many as a sandbox has processes, unless it asks for more, for all may end before the
# first is asked for. PID 1 holds five descriptors of each, as many bytes again as its output has, and has room for 4096
# on the hosts that give a process fewest. The largest result is half of these bytes, so the last one is always there.
UNRECEIVED = 512
UNRECEIVED_BYTES = 256 << 20
# For a caller to come back for one that it did not receive: a client looks for its server for a minute (seconds).
AWAY_SECONDS = 300.0
# Bytes of output that are told at once.
PIECE = 1 << 18


# Whether who asks may do no more than look. A command neither lives nor waits for them, nor is its result kept for
# them: they could end it, stop it, and lose its output, for who may. Nor does a sandbox live for them. Of the task and
# not an argument, for NodeAPI knows no callers.
ONLY_LOOKS: ContextVar[bool] = ContextVar("ONLY_LOOKS", default=False)


def room(most: int) -> int:
    """Of what can be had so often at a time: those who only look leave half of it to who may do more."""
    return most // 2 if ONLY_LOOKS.get() else most


class Started(Protocol):
    """What is looked at of a command that has a process."""

    process: Process
    out: Stream
    err: Stream
    feed: Input | None


@dataclass(slots=True)
class _Keyed:
    """Its process is held by the box until the result is forgotten, so that another node finds it there."""

    what: str  # a fingerprint: another command under the same key is a mistake
    argv0: str
    result: asyncio.Task[RunResult]
    begun: asyncio.Future[Started]  # resolves when it has a process; cancelled when it gets none
    ended_at: float = math.inf  # of time.monotonic
    received: bool = False
    # It is to be killed when the last who listens goes away, or nobody has come within FIRST_SECONDS, here or in a node
    # that adopts its box.
    dies_alone: bool = False
    listening: int = 0
    killing: asyncio.Task[None] | None = None

    def end_if_alone(self) -> None:
        """When the last who listened has gone away, or nobody came."""
        if not self.dies_alone or self.listening or self.result.done() or self.killing is not None:
            return

        async def kill() -> None:
            started = await self.begun  # cancelled when it never begins
            with suppress(OSError, SandlotError):  # then it ends with its sandbox, or has ended
                await started.process.kill_tree()

        self.killing = asyncio.get_running_loop().create_task(kill())


class KeyedRuns:
    """Those of one sandbox, the oldest first."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Keyed] = OrderedDict()

    def has(self, key: str, what: str) -> bool:
        """Raises Conflict when it is another command."""
        found = self._runs.get(key)
        if found is not None and found.what != what:
            raise Conflict(f"another command was run with the key {key}", "take a new key for each command")
        return found is not None

    def __len__(self) -> int:
        return len(self._runs)

    def add(
        self,
        key: str,
        what: str,
        argv0: str,
        result: asyncio.Task[RunResult],
        started: Started | None = None,
        dies_alone: bool = False,
    ) -> None:
        begun: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        keyed = self._runs[key] = _Keyed(what, argv0[:100], result, begun, dies_alone=dies_alone)
        if started is not None:
            keyed.begun.set_result(started)
        coming = asyncio.get_running_loop().call_later(FIRST_SECONDS, keyed.end_if_alone) if dies_alone else None

        def ended(task: asyncio.Task[RunResult]) -> None:
            keyed.ended_at = time.monotonic()
            if coming is not None:
                coming.cancel()
            keyed.begun.cancel()
            if (task.cancelled() or task.exception() is not None) and self._runs.get(key) is keyed:
                del self._runs[key]

        result.add_done_callback(ended)

    def started(self, key: str, started: Started) -> None:
        if key in self._runs:
            self._runs[key].begun.set_result(started)

    def clear(self) -> list[Process]:
        """Forget them all, with their box: the processes that need not be held any more."""
        processes = [each.begun.result().process for each in self._runs.values() if _has_begun(each)]
        self._runs.clear()
        return processes

    async def begun(self, key: str) -> None:
        """Returns when it has a process, or its result. Raises what kept it from starting."""
        keyed = self._find(key)
        await asyncio.wait((keyed.begun, keyed.result), return_when=asyncio.FIRST_COMPLETED)
        if not _has_begun(keyed):
            await asyncio.shield(keyed.result)

    def infos(self) -> list[CommandInfo]:
        return [self.info(key) for key in self._runs]

    def info(self, key: str) -> CommandInfo:
        """Raises NotFound."""
        keyed = self._find(key)
        if keyed.result.done():
            result = keyed.result.result()
            totals = result.out.total, result.err.total
        elif _has_begun(keyed):
            totals = keyed.begun.result().out.total, keyed.begun.result().err.total
        else:
            totals = 0, 0
        running = not keyed.result.done()
        pid = keyed.begun.result().process.pid if running and _has_begun(keyed) else None
        return CommandInfo(
            id=key, argv0=keyed.argv0, pid=pid, running=running, out_total=totals[0], err_total=totals[1]
        )

    async def started_run(self, key: str) -> Started | None:
        """Its process and streams; None: it has ended. Raises NotFound."""
        keyed = self._find(key)
        await self.begun(key)
        return None if keyed.result.done() else keyed.begun.result()

    @contextmanager
    def _listening(self, keyed: _Keyed) -> Iterator[None]:
        if ONLY_LOOKS.get():
            yield
            return
        keyed.listening += 1
        try:
            yield
        finally:
            keyed.listening -= 1
            keyed.end_if_alone()

    async def follow(self, key: str, out: int, err: int) -> AsyncGenerator[Chunk, None]:
        """What it writes, as it comes, until it has ended. Raises NotFound, and what cut it short."""
        keyed = self._find(key)
        with self._listening(keyed):
            async with aclosing(self._follow(key, keyed, out, err)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _follow(self, key: str, keyed: _Keyed, out: int, err: int) -> AsyncGenerator[Chunk, None]:
        at, counts = {"out": out, "err": err}, not ONLY_LOOKS.get()
        started = await self.started_run(key)
        if started is not None:
            grew = asyncio.Event()
            streams = {"out": started.out, "err": started.err}
            has: dict[str, Callable[[int], None]] = {}
            with ExitStack() as held:
                for name, stream in streams.items():
                    held.enter_context(stream.telling(grew.set))
                    if counts:
                        has[name] = held.enter_context(stream.waiting_for(at[name]))
                while not keyed.result.done():
                    grew.clear()
                    for name, stream in streams.items():
                        while not keyed.result.done():
                            if counts:
                                has[name](at[name])
                            lost, data = stream.since(at[name], PIECE)
                            if not data:
                                break
                            at[name] += lost
                            yield _chunk(name, at[name], data, lost)
                            at[name] += len(data)
                    waiting = asyncio.ensure_future(grew.wait())
                    try:
                        await asyncio.wait((waiting, keyed.result), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        waiting.cancel()
        result = await asyncio.shield(keyed.result)
        keyed.received |= counts
        for name, output in (("out", result.out), ("err", result.err)):
            while True:
                lost, data = kept_of(output, at[name])
                if not data:
                    break
                at[name] += lost
                yield _chunk(name, at[name], data[:PIECE], lost)
                at[name] += len(data[:PIECE])

    def _find(self, key: str) -> _Keyed:
        keyed = self._runs.get(key)
        if keyed is None:
            raise NotFound(
                f"there is no command {key} in this sandbox", "it was not started, or its result is forgotten"
            )
        return keyed

    async def result(self, key: str) -> RunResult:
        """The run's result; a caller that goes away leaves the run alone, unless it is one that dies alone."""
        keyed = self._find(key)
        with self._listening(keyed):
            result = await asyncio.shield(keyed.result)
        keyed.received |= not ONLY_LOOKS.get()
        return result

    def forget(self) -> list[Process]:
        """Drop what is too much, or was: the processes that need not be held any more. To be called whenever a run
        has ended, or its result was received."""
        now = time.monotonic()
        dropped: list[Process] = []
        received, unreceived = _Room(KEPT, KEPT_BYTES), _Room(UNRECEIVED, UNRECEIVED_BYTES)
        over = [(key, each) for key, each in self._runs.items() if _is_over(each)]
        over.sort(key=lambda named: named[1].ended_at)
        for key, each in reversed(over):
            room = received if each.received or now - each.ended_at >= AWAY_SECONDS else unreceived
            if not room.take(each.result.result()):
                del self._runs[key]
                if _has_begun(each):
                    dropped.append(each.begun.result().process)
        return dropped


@dataclass(slots=True)
class _Room:
    """For so many results and bytes of their output."""

    count: int
    size: int

    def take(self, result: RunResult) -> bool:
        """Whether there was still room for it."""
        self.count -= 1
        self.size -= len(result.out.data) + len(result.err.data)
        return self.count >= 0 and self.size >= 0


def _is_over(keyed: _Keyed) -> bool:
    return keyed.result.done() and not keyed.result.cancelled() and keyed.result.exception() is None


def _has_begun(keyed: _Keyed) -> bool:
    return keyed.begun.done() and not keyed.begun.cancelled()


def _chunk(stream: str, offset: int, data: bytes, lost: int) -> Chunk:
    return Chunk.model_construct(stream=stream, offset=offset, data=data, lost=lost)

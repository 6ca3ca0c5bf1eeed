"""Runs with a key: each is started once, and whoever asks for it again gets the same result. One that could not be
started, or was cut short by the sandbox's end, is as if it had never been asked for.

Owns the results of one sandbox, and says when one can be forgotten. It promises that a result which nobody may have
received is kept for as long as a caller comes back for it; and that what is kept of those that were is bounded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from sandlot.api import Chunk, CommandInfo, RunResult
from sandlot.drivers.base import Process
from sandlot.errors import Conflict, NotFound
from sandlot.node.streams import Input, Stream, kept_of

# Of results that were received, the last so many are kept for who asks once more, and so many bytes of output.
KEPT = 64
KEPT_BYTES = 64 << 20
# For a caller to come back for one that it did not receive: a client looks for its server for a minute (seconds).
AWAY_SECONDS = 300.0
# Bytes of output that are told at once.
PIECE = 1 << 18


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
        self, key: str, what: str, argv0: str, result: asyncio.Task[RunResult], started: Started | None = None
    ) -> None:
        keyed = self._runs[key] = _Keyed(what, argv0[:100], result, asyncio.get_running_loop().create_future())
        if started is not None:
            keyed.begun.set_result(started)

        def ended(task: asyncio.Task[RunResult]) -> None:
            keyed.ended_at = time.monotonic()
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

    async def follow(self, key: str, out: int, err: int) -> AsyncIterator[Chunk]:
        """What it writes, as it comes, until it has ended. Raises NotFound, and what cut it short."""
        keyed = self._find(key)
        at = {"out": out, "err": err}
        started = await self.started_run(key)
        if started is not None:
            grew = asyncio.Event()
            streams = {"out": started.out, "err": started.err}
            with started.out.telling(grew.set), started.err.telling(grew.set):
                while not keyed.result.done():
                    grew.clear()
                    for name, stream in streams.items():
                        while not keyed.result.done():
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
        keyed.received = True
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
        """The run's result; a caller that goes away leaves the run alone."""
        keyed = self._find(key)
        result = await asyncio.shield(keyed.result)
        keyed.received = True
        return result

    def forget(self) -> list[Process]:
        """Drop what nobody needs: the processes that need not be held any more."""
        now = time.monotonic()
        dropped: list[Process] = []
        count = size = 0
        for key, each in reversed(list(self._runs.items())):
            if not each.result.done() or each.result.cancelled() or each.result.exception() is not None:
                continue
            if not each.received and now - each.ended_at < AWAY_SECONDS:
                continue
            result = each.result.result()
            count += 1
            size += len(result.out.data) + len(result.err.data)
            if count > KEPT or size > KEPT_BYTES:
                del self._runs[key]
                if _has_begun(each):
                    dropped.append(each.begun.result().process)
        return dropped


def _has_begun(keyed: _Keyed) -> bool:
    return keyed.begun.done() and not keyed.begun.cancelled()


def _chunk(stream: str, offset: int, data: bytes, lost: int) -> Chunk:
    return Chunk.model_construct(stream=stream, offset=offset, data=data, lost=lost)

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
from dataclasses import dataclass

from sandlot.api import RunResult
from sandlot.drivers.base import Process
from sandlot.errors import Conflict

# Of results that were received, the last so many are kept for who asks once more, and so many bytes of output.
KEPT = 64
KEPT_BYTES = 64 << 20
# For a caller to come back for one that it did not receive: a client looks for its server for a minute (seconds).
AWAY_SECONDS = 300.0


@dataclass(slots=True)
class _Keyed:
    """`process` is held by the box until the result is forgotten, so that another node finds it there."""

    what: str  # a fingerprint: another command under the same key is a mistake
    result: asyncio.Task[RunResult]
    process: Process | None = None
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

    def add(self, key: str, what: str, result: asyncio.Task[RunResult], process: Process | None = None) -> None:
        keyed = self._runs[key] = _Keyed(what, result, process)

        def ended(task: asyncio.Task[RunResult]) -> None:
            keyed.ended_at = time.monotonic()
            if (task.cancelled() or task.exception() is not None) and self._runs.get(key) is keyed:
                del self._runs[key]

        result.add_done_callback(ended)

    def started(self, key: str, process: Process) -> None:
        if key in self._runs:
            self._runs[key].process = process

    def clear(self) -> list[Process]:
        """Forget them all, with their box: the processes that need not be held any more."""
        processes = [each.process for each in self._runs.values() if each.process is not None]
        self._runs.clear()
        return processes

    async def result(self, key: str) -> RunResult:
        """The run's result; a caller that goes away leaves the run alone."""
        keyed = self._runs[key]
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
                if each.process is not None:
                    dropped.append(each.process)
        return dropped

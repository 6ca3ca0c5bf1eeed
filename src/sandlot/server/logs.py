"""What a server says while it runs: a line for each thing, as JSON or for a person, on stderr.

It promises that no line holds what a caller sent or was sent: there are names of routes, ids, numbers, and of an error
its kind and where it was raised, never its words, for these may repeat a request. Lines are written by a thread, so
that whoever reads them slowly holds nothing up; what it cannot take is left out and counted.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import threading
import time
import traceback
from typing import BinaryIO, Literal

LOGGER = logging.getLogger("sandlot.server")

Format = Literal["text", "json"]

# What moves a cursor or ends a line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# Lines that may wait for whoever reads them.
_MOST_WAITING = 10_000
# Seconds for the last of them to be read at the end.
_END_SECONDS = 2.0


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What is told of a record."""
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    told: dict[str, object] = {
        "at": f"{at}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        # Of a library's longer ones the lines below the first repeat an exception.
        "said": (record.getMessage().splitlines() or [""])[0],
        **getattr(record, "fields", {}),
    }
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        told["error"] = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        told["trace"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return told


def written(told: dict[str, object], form: Format) -> bytes:
    """As a line."""
    if form == "json":
        return json.dumps(told).encode() + b"\n"
    rest = {name: value for name, value in told.items() if name not in ("at", "level", "said", "trace")}
    words = " ".join(f"{name}={value}" for name, value in rest.items() if value is not None)
    trace = "".join(f"\n    {line}" for line in told.get("trace", ()))  # type: ignore[attr-defined]
    # A line is one line, and a terminal that shows it is told nothing else by it.
    line = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], f"{told['at']} {told['level']:7} {told['said']}  {words}")
    return (line.rstrip() + trace + "\n").encode(errors="backslashreplace")


class Log(logging.Handler):
    """Where lines go from `start` until `stop`."""

    def __init__(self, form: Format, stream: BinaryIO | None = None) -> None:
        super().__init__()
        self._form = form
        self._stream = stream or sys.stderr.buffer
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._writer = threading.Thread(target=self._write, name="sandlot-log", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(written(fields_of(record), self._form))
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            lost, self._lost = self._lost, 0
            if lost:
                told = fields_of(logging.makeLogRecord({"msg": "lines were left out", "levelname": "WARNING"}))
                line += written({**told, "lines": lost}, self._form)
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads them any more
                return

    def start(self, every_request: bool) -> Log:
        """From now on all that this process logs is written here; of requests those that failed, or every one."""
        self._writer.start()
        logging.getLogger().addHandler(self)
        LOGGER.setLevel(logging.INFO if every_request else logging.WARNING)
        return self

    def stop(self) -> None:
        logging.getLogger().removeHandler(self)
        LOGGER.setLevel(logging.NOTSET)
        try:
            self._waiting.put(None, timeout=_END_SECONDS)
        except queue.Full:
            return
        self._writer.join(_END_SECONDS)

"""Every word for people on the terminal: errors, hints, notes, lines of a list. Nothing else in the package prints.

Data goes to stdout, all else to stderr. An error is its sentence, a blank line, and a hint with a command in
backticks; nobody ever sees the traceback of a SandlotError. Colour only adds to what the words say already, and is
left out where the stream is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from sandlot.api import Capability
from sandlot.cli.interrupt import Interrupted
from sandlot.errors import InvalidRequest, SandlotError

INTERRUPTED = 130  # 128 + SIGINT, as shells say it

_RED, _GREEN, _YELLOW, _CYAN = "1;31", "1;32", "1;33", "1;36"
_STATES = {"kept": ("works", _GREEN), "loss": ("missing", _YELLOW), "impossible": ("cannot", _RED)}


def painted(text: str, colour: str, stream: TextIO) -> str:
    """`text` in colour where that stream shows it."""
    if "NO_COLOR" in os.environ or not stream.isatty():
        return text
    return f"\033[{colour}m{text}\033[0m"


def out(text: str) -> None:
    """A line of data, for whoever reads stdout."""
    print(text, flush=True)


def data(value: Any) -> None:
    """One JSON value on stdout."""
    out(json.dumps(value, ensure_ascii=False))


def note(text: str) -> None:
    """A line for the person who watches."""
    print(text, file=sys.stderr, flush=True)


def begun(text: str) -> None:
    """What is being done, for who watches a terminal: its line is written again by `done`."""
    if sys.stderr.isatty():
        print(f"{text} …", end="", file=sys.stderr, flush=True)


def done(text: str) -> None:
    """A line about what was done."""
    note(f"\r{text}" if sys.stderr.isatty() else text)


def error(message: str, hint: str | None = None) -> None:
    """What went wrong, and what to do about it."""
    print(f"{painted('error:', _RED, sys.stderr)} {message}", file=sys.stderr)
    if hint:
        print(f"\n{painted('hint:', _CYAN, sys.stderr)} {hint}", file=sys.stderr)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, with their heads where there are any."""
    if not rows:
        note("there are none")
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        out("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def capabilities(found: Sequence[Capability]) -> None:
    """The lines of `doctor`: one for each need, with the fix below it where something is missing."""
    width = max((len(capability.name) for capability in found), default=0)
    for capability in found:
        word, colour = _STATES[capability.state]
        out(f"{painted(f'{word:7}', colour, sys.stdout)}  {capability.name:{width}}  {capability.found}")
        if capability.fix and capability.state != "kept":
            out(f"{'':7}  {'':{width}}  {painted('fix:', _CYAN, sys.stdout)} {capability.fix}")


def guarded(work: Callable[[], int]) -> int:
    """The exit status of `work`, with what it raises said: 2 for a wrong request, 130 or 143 for a signal, else 1."""
    try:
        return work()
    except SandlotError as failure:
        error(failure.message, failure.hint)
        return 2 if isinstance(failure, InvalidRequest) else 1
    except Interrupted as interrupted:
        return interrupted.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left (`| head`). Nothing more can be said to them, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

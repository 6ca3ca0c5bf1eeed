"""Every word for people on the terminal: errors, hints, notes, lines of a list. Nothing else in the package prints.

Data goes to stdout, all else to stderr. An error is its sentence, a blank line, and a hint with a command in
backticks; nobody ever sees the traceback of a SandlotError. Colour only adds to what the words say already, and is
left out where the stream is no terminal or NO_COLOR is set. A name that somebody chose, perhaps inside a sandbox,
cannot speak to the terminal: its control characters are written out.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from sandlot.cli.interrupt import Interrupted
from sandlot.errors import InvalidRequest, SandboxEnded, SandlotError

if TYPE_CHECKING:
    from sandlot.api import Capability, Change

# Exit statuses, where it is not that of a command in a sandbox. `docs/guides/command-line.md` has the table.
FAILED = 1
WRONG = 2
ENDED = 3  # the sandbox has ended
INTERRUPTED = 130  # 128 + SIGINT, as shells say it

RED, GREEN, YELLOW, CYAN, BOLD = "1;31", "1;32", "1;33", "1;36", "1"
_CAPABILITIES = {"kept": ("works", GREEN), "loss": ("missing", YELLOW), "impossible": ("cannot", RED)}
# In the column `state` of a table.
_STATES = {"running": GREEN, "paused": YELLOW}

_CHANGES = {"added": ("A", GREEN), "changed": ("C", YELLOW), "deleted": ("D", RED)}

# All but the tab and the line's end; and bytes that are not UTF-8, as `os.fsdecode` gives them.
_UNSAID = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\udc80-\udcff]")


def painted(text: str, colour: str, stream: TextIO) -> str:
    """`text` in colour where that stream shows it."""
    if "NO_COLOR" in os.environ or not stream.isatty():
        return text
    return f"\033[{colour}m{text}\033[0m"


def clean(text: str) -> str:
    """`text` that others chose, as a terminal can be given it: `\\x1b` for an escape."""
    return _UNSAID.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", text)


def out(text: str) -> None:
    """A line of data, for whoever reads stdout."""
    print(text, flush=True)


def data(value: Any) -> None:
    """One JSON value on stdout."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a file's name that is not UTF-8: its bytes as `\\udcXX`
        text = json.dumps(value)
    out(text)


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
    print(f"{painted('error:', RED, sys.stderr)} {clean(message)}", file=sys.stderr)
    if hint:
        print(f"\n{painted('hint:', CYAN, sys.stderr)} {clean(hint)}", file=sys.stderr)
    sys.stderr.flush()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows in columns, with their heads where there are any."""
    if not rows:
        note("there are none")
        return
    cells = [tuple(clean(cell).replace("\n", "\\n") for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    out(
        painted(
            "  ".join(f"{cell:{width}}" for cell, width in zip(head, widths, strict=True)).rstrip(), BOLD, sys.stdout
        )
    )
    for row in cells:
        line = ""
        for name, cell, width in zip(head, row, widths, strict=True):
            colour = _STATES.get(cell) if name == "state" else None
            shown = painted(cell, colour, sys.stdout) if colour else cell
            line += f"{shown}{'':{width - len(cell)}}  "
        out(line.rstrip())


def changes(found: Sequence[Change]) -> None:
    """The lines of `diff`: A, C or D, and the path."""
    for change in found:
        letter, colour = _CHANGES[change.kind]
        path = clean(change.path).replace("\n", "\\n") + ("/" if change.directory else "")
        out(f"{painted(letter, colour, sys.stdout)} {path}")


def capabilities(found: Sequence[Capability]) -> None:
    """The lines of `doctor`: one for each need, with the fix below it where something is missing."""
    width = max((len(capability.name) for capability in found), default=0)
    for capability in found:
        word, colour = _CAPABILITIES[capability.state]
        out(f"{painted(f'{word:7}', colour, sys.stdout)}  {capability.name:{width}}  {capability.found}")
        if capability.fix and capability.state != "kept":
            out(f"{'':7}  {'':{width}}  {painted('fix:', CYAN, sys.stdout)} {capability.fix}")


def status(failure: SandlotError) -> int:
    """The exit status that goes with it."""
    if isinstance(failure, SandboxEnded):
        return ENDED
    return WRONG if isinstance(failure, InvalidRequest) else FAILED


def guarded(work: Callable[[], int]) -> int:
    """The exit status of `work`, with what it raises said: 2 for a wrong request, 3 for a sandbox that has ended, 130,
    143 or 129 for a signal, else 1."""
    try:
        try:
            return work()
        except SandlotError as failure:
            error(failure.message, failure.hint)
            return status(failure)
    except Interrupted as interrupted:
        return interrupted.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left (`| head`). Nothing more can be said to them, at exit neither.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(nowhere, stream.fileno())
        return FAILED

"""The `sandlot` program: a quiet end for Ctrl-C, SIGTERM and SIGHUP first, then everything else.

It imports nothing heavy before the signals are seen to, because loading the rest takes a few tenths of a second in
which a person may well change their mind. While a command has sandboxes, `interrupt.run` sees to the signals instead.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> None:
    """The program. Exits. Who gives it `arguments` calls it inside a process whose signals are not ours."""
    if arguments is None:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's `&` wants it ignored
                signal.signal(number, _leave)
        _have_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)

    from sandlot.cli import commands, say

    status = say.guarded(lambda: commands.run(words))
    if arguments is None:
        for number in _SIGNALS:  # the interpreter's own end would give them back their defaults
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


def _leave(number: int, frame: FrameType | None) -> None:
    # There is nothing to tear down. An exception from here could be raised, and lost, anywhere in an import.
    os._exit(128 + number)


def _have_streams() -> None:
    """Give a program that was started without one of its standard streams an empty one: the first file or connection
    that it opens would be taken for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))

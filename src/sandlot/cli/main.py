"""The `sandlot` program: a quiet end for Ctrl-C and SIGTERM first, then everything else.

It imports nothing heavy before the signals are seen to, because loading the rest takes a few tenths of a second in
which a person may well change their mind. While a command has sandboxes, `interrupt.run` sees to the signals instead.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> None:
    """The program. Exits. Who gives it `arguments` calls it inside a process whose signals are not ours."""
    if arguments is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's `&` wants it ignored
                signal.signal(number, _leave)
    words = list(sys.argv[1:] if arguments is None else arguments)

    from sandlot.cli import commands, say

    status = say.guarded(lambda: commands.run(words))
    if arguments is None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the interpreter's own end would give them back their defaults
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


def _leave(number: int, frame: FrameType | None) -> None:
    # There is nothing to tear down. An exception from here could be raised, and lost, anywhere in an import.
    os._exit(128 + number)

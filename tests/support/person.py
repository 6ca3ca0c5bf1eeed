"""A person at a terminal: what is typed, and what is seen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time


class Person:
    """Sits before a program, which is started on a terminal of its own."""

    def __init__(self, words: list[str], env: dict[str, str], rows: int = 30, columns: int = 100) -> None:
        self.fd, theirs = pty.openpty()
        self._resize(rows, columns)
        self._mode = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, close_fds=True
        )
        os.close(theirs)
        self.seen = b""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def sees(self, pattern: str, seconds: float = 20) -> str:
        """Waits for it; forgets what came up to there."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern.encode(), self.seen)):
            left = end - time.monotonic()
            assert left > 0 and select.select([self.fd], [], [], left)[0], (pattern, self.seen)
            try:
                self.seen += os.read(self.fd, 65536)
            except OSError:  # a terminal's word for the end
                raise AssertionError((pattern, self.seen)) from None
        self.seen = self.seen[match.end() :]
        return match[0].decode()

    def resize(self, rows: int, columns: int) -> None:
        self._resize(rows, columns)
        os.kill(self.process.pid, 28)  # SIGWINCH, as the terminal's owner would: it is in a session without one

    def _resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def is_raw(self) -> bool:
        return termios.tcgetattr(self.fd)[3] != self._mode[3]

    def leaves(self, seconds: float = 20) -> int:
        """The program's exit status, once it has ended; all that it said is in `seen`."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            assert left > 0, self.seen
            if select.select([self.fd], [], [], min(left, 0.1))[0]:
                try:
                    self.seen += os.read(self.fd, 65536)
                    continue
                except OSError:
                    pass
            try:
                return self.process.wait(min(left, 0.1))
            except subprocess.TimeoutExpired:
                continue

    def close(self) -> None:
        os.close(self.fd)

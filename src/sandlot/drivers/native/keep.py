"""Records of boxes that may outlive their node: a file for each, and a socket on which the next node comes in.

PID 1 holds the file locked for as long as it lives, so whoever finds the lock free knows that the box is gone; and it
writes why it left as the file's last word. The first line is what a new node must know, written before anybody is told
of the box. Never decides who adopts whom: that is `driver.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BACKLOG = 4
_WIDTH = 1 << 14  # of the first line, so that it can be written anew in place


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A path of the directory that always fits a socket's address (108 bytes)."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


@dataclass(slots=True)
class Record:
    """One box's. `file` and `listener` are open until they were passed to PID 1."""

    directory: Path
    key: str
    file: int = -1
    listener: int = -1

    @property
    def path(self) -> Path:
        return self.directory / self.key

    @classmethod
    def make(cls, directory: Path, key: str) -> Record:
        """Raises OSError."""
        directory.mkdir(mode=0o700, exist_ok=True)
        record = cls(directory, key)
        try:
            record.file = os.open(record.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(record.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener,
                _short(directory) as short,
            ):
                listener.bind(f"{short}/{key}.sock")
                listener.listen(_BACKLOG)
                record.listener = listener.detach()
        except BaseException:
            record.passed()
            record.remove()
            raise
        return record

    def passed(self) -> None:
        """PID 1 has its copies: ours would keep the lock after its death."""
        for fd in (self.file, self.listener):
            if fd >= 0:
                os.close(fd)
        self.file = self.listener = -1

    def write(self, facts: dict[str, Any]) -> None:
        """In place: the file that PID 1 has locked stays the same. Raises OSError, ValueError (too long)."""
        line = json.dumps(facts, separators=(",", ":")).encode()
        if len(line) >= _WIDTH:
            raise ValueError(f"a record of {len(line)} bytes is longer than {_WIDTH}: are there many labels?")
        fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, line.ljust(_WIDTH - 1) + b"\n", 0)
        finally:
            os.close(fd)

    def last_word(self) -> str:
        """Why PID 1 left; "" when it was killed before it could say."""
        try:
            with self.path.open("rb") as file:
                file.seek(_WIDTH)
                return file.read(64).decode(errors="replace").strip()
        except OSError:
            return ""

    def remove(self) -> None:
        for path in (self.path, self.directory / f"{self.key}.sock"):
            with suppress(FileNotFoundError):
                path.unlink()

    def facts(self) -> dict[str, Any] | None:
        """The first line; None if the node died before it wrote it."""
        with self.path.open("rb") as file:
            line = file.read(_WIDTH).strip()
        try:
            found = json.loads(line)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def alive(self) -> bool:
        """Whether PID 1 lives."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def connect(self) -> socket.socket:
        """The control socket, to a PID 1 that its node has left. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with _short(self.directory) as short:
                sock.connect(f"{short}/{self.key}.sock")
        except BaseException:
            sock.close()
            raise
        return sock


def records(directory: Path) -> list[Record]:
    """Those in a node's directory, dead or alive."""
    if not directory.is_dir():
        return []
    return [Record(directory, path.name) for path in sorted(directory.iterdir()) if path.suffix != ".sock"]

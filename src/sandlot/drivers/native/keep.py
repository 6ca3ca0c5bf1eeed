"""Records of boxes that may outlive their node, in `boxes/` of the node's directory:

    KEY        locked by PID 1 for as long as it lives: whoever finds the lock free knows that the box is gone; PID 1
               writes into it why it left
    KEY.json   what a new node must know, written before anybody is told of the box, replaced as a whole
    KEY.sock   on which the next node comes in

Never decides who adopts whom: that is `driver.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BACKLOG = 4
# A record without one of these is of another version.
_FACTS = frozenset(
    {
        *("id", "pid", "base", "many", "image", "cgroups", "limits", "losses", "mounts"),
        *("routes", "oom", "paused", "parked", "note", "host_network"),
    }
)


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
        """Raises OSError."""
        partial = self.directory / f".{self.key}"
        partial.write_text(json.dumps(facts, separators=(",", ":")))
        partial.replace(self.directory / f"{self.key}.json")

    def last_word(self) -> str:
        """Why PID 1 left; "" when it was killed before it could say."""
        try:
            return self.path.read_text(errors="replace").strip()
        except OSError:
            return ""

    def remove(self) -> None:
        for name in (f"{self.key}.json", self.key, f"{self.key}.sock", f".{self.key}"):
            (self.directory / name).unlink(missing_ok=True)

    def facts(self) -> dict[str, Any] | None:
        """What was written; None if the node died before it was, or was of another version."""
        try:
            found = json.loads((self.directory / f"{self.key}.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.keys() >= _FACTS else None

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
    names = {path.name.removesuffix(".json").removesuffix(".sock").removeprefix(".") for path in directory.iterdir()}
    return [Record(directory, name) for name in sorted(names) if (directory / name).exists()]

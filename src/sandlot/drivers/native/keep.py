"""Records of boxes that may outlive their node, in `boxes/` of the node's directory:

    KEY        locked by PID 1 for as long as it lives: whoever finds the lock free knows that the box is gone. Lines
               of what a new node must know, the last whole one counts, the first is there before the box is whole,
               and says so by `losses` of null, the next before anybody is told of it; then, of PID 1, the word why it
               left, perhaps behind half a line
    KEY.json   the same of a box that has lived on, replaced as a whole
    KEY.sock   on which the next node comes in

Of two files, and no more, for most: ext4 takes the longer for each new file the more were deleted in the last minutes.
Never decides who adopts whom: that is `driver.py`.
"""

from __future__ import annotations

import errno
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
# A record without one of these is of another version.
_FACTS = frozenset(
    {
        *("id", "pid", "base", "many", "image", "cgroups", "limits", "losses", "mounts"),
        *("routes", "oom", "paused", "parked", "note", "host_network"),
    }
)
# Of PID 1, each with the end of a line.
_WORDS = ("lifetime", "orphaned")


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
    def path(self) -> str:
        """A string, as all that has a box's name in it: see `cgroup.py`."""
        return f"{self.directory}/{self.key}"

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

    def write(self, facts: dict[str, Any], starting: bool = False) -> None:
        """Raises OSError. A box that is `starting` may get a few lines, as nothing else may be added for ever."""
        text = json.dumps(facts, separators=(",", ":"))
        if starting:
            with open(self.path, "ab", buffering=0) as file:  # noqa: PTH123
                if file.write(line := f"{text}\n".encode()) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            return
        partial = f"{self.directory}/.{self.key}"
        with open(partial, "w") as file:  # noqa: PTH123
            file.write(text)
        os.replace(partial, f"{self.path}.json")  # noqa: PTH105

    def last_word(self) -> str:
        """Why PID 1 left; "" when it was killed before it could say."""
        text = self._text()
        return next((word for word in _WORDS if text.endswith(f"{word}\n")), "")  # a whole line of ours ends in "}"

    def _text(self) -> str:
        try:
            with open(self.path, errors="replace") as file:  # noqa: PTH123
                return file.read()
        except OSError:
            return ""

    def remove(self) -> None:
        for name in (f"{self.key}.json", self.key, f"{self.key}.sock", f".{self.key}"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self.directory}/{name}")  # noqa: PTH108

    def facts(self) -> dict[str, Any] | None:
        """What was written; None if the node died before it was, or was of another version."""
        try:
            texts = [Path(f"{self.path}.json").read_text()]
        except OSError:
            texts = self._text().splitlines()[::-1]
        for text in texts:
            with suppress(ValueError):
                found = json.loads(text)
                return found if isinstance(found, dict) and found.keys() >= _FACTS else None
        return None

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

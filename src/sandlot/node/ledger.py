"""What exists on this node and why things died: a directory of its own, a file of lines in it, and counts.

It owns the node's directory (one per node, its lock held as long as the node lives) and the record of every create
and ending. It promises that created = running + the sum of the endings at every moment, and that two nodes on a host
never take each other for dead. It never touches a box: what a dead node left behind is removed by the driver, which
`Node.start` asks for every directory that `abandoned` yields.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandlot.aio import alone, close_alone
from sandlot.api import Ending, Info
from sandlot.errors import HostFault, host_fault

# A directory that is being made is not locked yet for some microseconds; one this old (seconds) never will be.
_HALF_MADE_SECONDS = 60
# Another node holds the lock of a dead one's directory for as long as it takes to see whether boxes live.
_SWEPT_SECONDS = 2.0
_SYSTEM = Path("/var/lib/sandlot")
_NAME = "name"  # the file that says which server's directory it is


def default_state_dir() -> Path:
    """Where the nodes of this user keep their directories; made on first use."""
    user = os.geteuid()
    if user == 0:
        # On disk rather than under /run: before Linux 6.3 a tmpfs cannot show its files with other owners.
        if _is_ours(_SYSTEM):
            return _SYSTEM
        # Root of a user namespace only, so an ordinary user of the host: the second word is who that is.
        user = int(Path("/proc/self/uid_map").read_text().split()[1])
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "sandlot") if runtime else Path(f"/tmp/sandlot-{user}")


def image_store(state_dir: Path | None = None) -> Path:
    """Where the nodes of a state directory (None: this user's default) keep their images. Of an ordinary user's
    default not in there: it is in memory mostly, where a gigabyte is dear and gone with the next start of the host."""
    root = (state_dir or default_state_dir()).absolute()
    if state_dir is not None or root == _SYSTEM:
        return root / "images"
    data = Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"))  # noqa: PTH111  (may be none)
    first = next(each for each in (data, *data.parents) if each.exists())
    return (data / "sandlot" if data.is_absolute() and os.access(first, os.W_OK) else root) / "images"


def _is_ours(root: Path) -> bool:
    """Whether `root` belongs to this user, or, where there is none, can be made."""
    try:
        return root.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return os.access(root.parent, os.W_OK)


class NodeDirectory:
    """A directory that belongs to one node. Its lock is the proof of life: the kernel lets it go when the node dies."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = alone(lock)

    @property
    def short_id(self) -> str:
        """Six characters; part of each sandbox id made here."""
        return self.path.name.removeprefix("node-")

    @classmethod
    def claim(cls, state_dir: Path | None = None, name: str | None = None) -> NodeDirectory:
        """A directory under `state_dir` (None: this user's default), locked: a new one, or that of a dead node of the
        same name. Raises HostFault."""
        root = (state_dir or default_state_dir()).absolute()
        short_id = secrets.token_hex(3)
        made = root / f".new-{short_id}"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = root.stat()
            # In /tmp anybody could have made it first, to read or replace what is kept there.
            elsewhere = "name another directory with `--state-dir`"
            if found.st_uid != os.geteuid():
                raise HostFault(f"{root} belongs to user {found.st_uid}, not to us (user {os.geteuid()})", elsewhere)
            if stat.S_IMODE(found.st_mode) & 0o022:
                raise HostFault(f"{root} can be written by other users", elsewhere)
            if name is not None and (old := cls._of_name(root, name)) is not None:
                return old
            made.mkdir(mode=0o700)
            try:
                if name is not None:
                    (made / _NAME).write_text(name)
                lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Named only when it is locked, so that no sweep can take it for an abandoned one.
                return cls(made.rename(root / f"node-{short_id}"), lock)
            except OSError:
                shutil.rmtree(made, ignore_errors=True)
                raise
        except OSError as error:
            raise host_fault(error, f"make a node's directory in {root}") from error

    @classmethod
    def _of_name(cls, root: Path, name: str) -> NodeDirectory | None:
        for path in root.glob("node-*"):
            try:
                if (path / _NAME).read_text() != name:
                    continue
                lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # without a name, or swept between the listing and now
            until = time.monotonic() + _SWEPT_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.exists():
                        return cls(path, lock)
                except BlockingIOError:  # its node lives, or another looks whether it does: a lock has no deadline
                    if time.monotonic() < until:
                        time.sleep(0.02)
                        continue
                os.close(lock)
                break
        return None

    def abandoned(self) -> Iterator[NodeDirectory]:
        """The directories beside this one whose node is dead, each locked while the caller looks at it."""
        for path in sorted(self.path.parent.iterdir()):
            half_made = path.name.startswith(".new-")
            if path == self.path or not (half_made or path.name.startswith("node-")):
                continue
            try:
                if half_made and time.time() - path.stat().st_mtime < _HALF_MADE_SECONDS:
                    continue
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                continue  # another node swept it between the listing and now
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue  # its node lives
            yield NodeDirectory(path, lock)

    def is_awaited(self, seconds: float) -> bool:
        """Of a directory from which the sandboxes are gone: whether it is a server's that was found dead less than so
        long ago. Its ledger and its records tell a server that takes it over how they ended."""
        if not (self.path / _NAME).exists():
            return False
        # A sweep that finds something to remove changes the directory too.
        changed = [path.stat().st_mtime for path in (self.path, self.path / "ledger.jsonl") if path.exists()]
        return time.time() - max(changed, default=0.0) < seconds

    def release(self) -> None:
        """Let go of the lock; the directory stays. Idempotent."""
        if self._lock >= 0:
            close_alone(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove the directory, then let go of the lock. Raises OSError if something in it cannot be removed."""
        try:
            shutil.rmtree(self.path)
        finally:
            self.release()


class Ledger:
    """The record of creates and endings: lines in `directory/ledger.jsonl` for after a crash, counts for now."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "ledger.jsonl"
        self._counts: Counter[str] = Counter()
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise host_fault(error, f"write {self.path}") from error

    def begin(self, sandbox_id: str, image: str, labels: Mapping[str, str]) -> None:
        """A create begins. Raises HostFault, and then counts nothing, where it cannot be written down."""
        try:
            self._write(event="create", id=sandbox_id, image=image, labels=dict(labels))
        except OSError as error:
            raise host_fault(error, f"write {self.path}") from error
        self._counts["created"] += 1

    def adopt(self, sandbox_id: str) -> None:
        """A sandbox of the node before is taken over: it was begun there."""
        self._counts["created"] += 1
        self.note(event="adopt", id=sandbox_id)

    def end(self, sandbox_id: str, ending: Ending, detail: str | None, losses: tuple[str, ...] = ()) -> None:
        """A sandbox that was begun has ended. Never fails: an ending happens whether or not it can be written."""
        self._counts[ending] += 1
        self.note(event="end", id=sandbox_id, ending=ending, detail=detail, losses=losses)

    def note(self, **fields: object) -> None:
        """A line for the reader of the file, if there is room for it."""
        try:
            self._write(**fields)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            # The worst that comes of a missing line is a look, after a crash, for a sandbox that is already gone.

    def past(self, since: float) -> tuple[list[Info], list[Info]]:
        """What the file tells of sandboxes that ended after `since` (Unix time, seconds), and of those that were begun
        and of which it tells no end."""
        if not self.path.is_file():
            return [], []
        open_: dict[str, Info] = {}
        ended: list[Info] = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
                if entry["event"] == "create":
                    known = {name: entry[name] for name in ("id", "image", "labels")}
                    open_[entry["id"]] = Info(state="running", created_at=entry["at"], **known)
                elif entry["event"] == "end" and (begun := open_.pop(entry["id"], None)) and entry["at"] > since:
                    known = {name: entry[name] for name in ("ending", "detail", "losses")}
                    ended.append(
                        Info.model_validate({**begun.model_dump(), "state": "ended", "ended_at": entry["at"], **known})
                    )
            except (ValueError, KeyError):  # the node was killed in the middle of a line
                continue
        return ended, list(open_.values())

    def counts(self) -> dict[str, int]:
        """`created`, `running` and every ending, zeros included."""
        endings = {ending.value: self._counts[ending] for ending in Ending}
        created = self._counts["created"]
        return {"created": created, "running": created - sum(endings.values()), **endings}

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, **fields: object) -> None:
        # On the event loop: it is a write of ~100 bytes into the page cache (10 µs). There is no fsync, because a
        # host that loses its page cache has lost its sandboxes too.
        line = json.dumps({"at": round(time.time(), 3), **fields}).encode() + b"\n"
        written = os.write(self._fd, line)
        if written < len(line):  # the disk filled up in the middle of it: take the half line back
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

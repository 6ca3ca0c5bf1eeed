"""What exists on this node and why things died: a directory of its own, a database in it, and counts.

It owns the node's directory (one per node, its lock held as long as the node lives) and the record of every create
and ending. It promises that created = running + the sum of the endings at every moment; that what was written is there
after a node that was killed, and that an ended sandbox can be asked about for an hour and costs no memory meanwhile;
and that two nodes on a host never take each other for dead. It never touches a box: what a dead node left behind is
removed by the driver, which `Node.start` asks for every directory that `abandoned` yields.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import math
import os
import secrets
import shutil
import sqlite3
import stat
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sandlot.aio import alone, close_alone
from sandlot.api import Ending, Filter, Info
from sandlot.errors import HostFault, host_fault

# How long an ended sandbox can be asked about (seconds), and of how many at most: ~500 bytes of disk each.
ENDED_SECONDS = 3600.0
ENDED_KEPT = 100_000

# A directory that is being made is not locked yet for some microseconds; one this old (seconds) never will be.
_HALF_MADE_SECONDS = 60
# Another node holds the lock of a dead one's directory for as long as it takes to see whether boxes live.
_SWEPT_SECONDS = 2.0
_SYSTEM = Path("/var/lib/sandlot")
STATE_DIR = "SANDLOT_STATE_DIR"
_NAME = "name"  # the file that says which server's directory it is
_LEDGER = "ledger.db"  # and with it what SQLite puts beside it


def default_state_dir() -> Path:
    """Where the nodes of this user keep their directories, unless SANDLOT_STATE_DIR names another place; made on first
    use."""
    if named := os.environ.get(STATE_DIR):
        return Path(named).absolute()
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
    if state_dir is not None or STATE_DIR in os.environ or root == _SYSTEM:
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

    def __init__(self, path: Path, lock: int, is_new: bool = False) -> None:
        self.path = path
        self._lock = alone(lock)
        self.is_new = is_new  # nothing of a node before is in it

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
                return cls(made.rename(root / f"node-{short_id}"), lock, is_new=True)
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
            if not path.exists():  # it was removed by who held the lock
                os.close(lock)
                continue
            yield NodeDirectory(path, lock)

    def is_awaited(self, seconds: float) -> bool:
        """Of a directory from which the sandboxes are gone: whether it is a server's that was found dead less than so
        long ago. Its ledger and its records tell a server that takes it over how they ended."""
        if not (self.path / _NAME).exists():
            return False
        # A sweep that finds something to remove changes the directory too.
        changed = [path.stat().st_mtime for path in (self.path, *self.path.glob(f"{_LEDGER}*"))]
        return time.time() - max(changed) < seconds

    def release(self) -> None:
        """Let go of the lock; the directory stays. Idempotent."""
        if self._lock >= 0:
            close_alone(self._lock)
            self._lock = -1

    def give_up(self) -> None:
        """Of a node that could not start: a new directory goes; in one that was taken over sandboxes may live, which
        wait for the next node. Raises OSError."""
        if self.is_new:
            self.remove()
        else:
            self.release()

    def remove(self) -> None:
        """Remove the directory, then let go of the lock. Raises OSError if something in it cannot be removed."""
        # Under another name first: where its lock's file is gone a sweep would make a new one, and call it abandoned.
        going = self.path.with_name(f".new-{self.path.name.removeprefix('.new-')}")
        try:
            self.path.rename(going)
            os.utime(going)
            shutil.rmtree(going)
        finally:
            self.release()


# The loop makes every call of the ledger itself, so each has to take microseconds. Measured with 100,000 sandboxes in
# it, median and 99th percentile: a create 12 and 90, an end 13 and 600 (one of 32 looks for what is too old), a look-up
# 9 and 17. Nothing waits for a disk: a host that loses its page cache has lost its sandboxes too.
_SCHEMA = """
BEGIN;
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, image TEXT NOT NULL, tenant TEXT, labels TEXT NOT NULL, created_at REAL NOT NULL,
    key TEXT, what TEXT, told INTEGER NOT NULL,
    ended_at REAL, ending TEXT, detail TEXT, losses TEXT
);
CREATE INDEX IF NOT EXISTS by_key ON sandboxes (key, tenant) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_age ON sandboxes (created_at, id) WHERE ended_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_end ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS notes (at REAL NOT NULL, said TEXT NOT NULL);
PRAGMA user_version = 1;
COMMIT;
"""
_VERSION = 1  # of the tables: another number when what is in them changes
_BEGIN = """
INSERT INTO sandboxes (id, image, tenant, labels, created_at, key, what, told) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO NOTHING
"""
# One that ended before anybody heard of it stays one of which nobody did.
_TOLD = "UPDATE sandboxes SET told = 1 WHERE id = ? AND ended_at IS NULL"
_END = "UPDATE sandboxes SET image = ?, ended_at = ?, ending = ?, detail = ?, losses = ? WHERE id = ?"
_INFO = "id, image, tenant, labels, created_at, ended_at, ending, detail, losses"
_LATELY = f"SELECT {_INFO} FROM sandboxes WHERE ended_at > ?"
_ENDED = f"SELECT {_INFO} FROM sandboxes WHERE id = ? AND ended_at > ?"
_BEGUN = f"SELECT {_INFO}, told FROM sandboxes WHERE ended_at IS NULL"
_MADE = """
SELECT id, what FROM sandboxes WHERE key = ? AND tenant IS ? AND told AND (ended_at IS NULL OR ended_at > ?)
ORDER BY created_at DESC LIMIT 1
"""
_AFTER = "FROM sandboxes WHERE ended_at > :since AND (created_at, id) > (:at, :id) ORDER BY created_at, id"
_LATER = f"""
SELECT {_INFO} FROM (SELECT * {_AFTER} LIMIT :looked_at)
WHERE (:image IS NULL OR image = :image) AND (:tenant IS NULL OR tenant = :tenant)
AND NOT EXISTS (SELECT 1 FROM json_each(:labels) WHERE NOT instr(labels, value))
ORDER BY created_at, id LIMIT :most
"""
_LAST = f"SELECT created_at, id {_AFTER} LIMIT 1 OFFSET :looked_at - 1"
_KEPT = "SELECT count(*) FROM sandboxes WHERE ended_at IS NOT NULL"
_DROP = """
DELETE FROM sandboxes WHERE id IN (
    SELECT id FROM sandboxes WHERE ended_at <= ? ORDER BY ended_at LIMIT ?
)
"""

# Of how many ended sandboxes one look at the list goes through: three milliseconds if all of them fit, else a half.
_LOOKED_AT = 250
# After so many ends what is too old is dropped, at most twice as many at once: half a millisecond.
_ENDS_BETWEEN = 32
# What went wrong, for who reads the database; the last so many.
_MOST_NOTES = 1000

# How long before the end of a node its sandboxes end.
_MOMENT_SECONDS = 60.0
# For a person who looks into a dead node's database to let go of it.
_OPEN_SECONDS = 2.0

# What SQLite says of a mistake of ours; 0: it was not SQLite that said so.
_OURS = (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISUSE)

_LOGGER = logging.getLogger(__name__)


class Begun(NamedTuple):
    """A sandbox of which no end is written down."""

    info: Info
    told: bool  # whether who asked for it by a key, if anybody did, has heard of it


class _Owed(NamedTuple):
    """A change for which there was no room."""

    change: str
    words: tuple[object, ...]
    info: Info | None = None  # of a sandbox whose end it is


class Ledger:
    """The record of creates and endings: a database, `directory/ledger.db`, for afterwards, and counts for now.

    What is not written at once, for want of room on the disk, is kept in memory until it is. Those are endings of boxes
    that there were when the disk became full: without room there are no more creates.
    """

    def __init__(self, directory: Path) -> None:
        """Raises HostFault. A database that is damaged, or of another version, is put aside, and that is logged:
        sandboxes that ended are forgotten by it, those that live are known to the driver."""
        self.path = directory / _LEDGER
        self._counts: Counter[str] = Counter()
        self._owed: deque[_Owed] = deque()
        self._last: dict[str, Info] | None = None  # once it is closed: those that ended a moment before
        try:
            self._db = self._opened()
        except sqlite3.DatabaseError as error:
            raise self._fault("open", error) from error
        self._ends = 0  # since old ones were dropped

    def begin(self, info: Info, key: str | None = None, what: str | None = None) -> None:
        """A create begins, which may have a key with a fingerprint (`what`). Raises HostFault, and then counts nothing,
        where it cannot be written down."""
        try:
            self._pay()
            self._db.execute(_BEGIN, (*_begun(info), key, what, False))
        except sqlite3.DatabaseError as error:
            raise self._fault("write", error) from error
        self._counts["created"] += 1

    def adopt(self, info: Info, key: str | None = None, what: str | None = None) -> None:
        """A sandbox of the node before is taken over: it was begun there. If that is not known any more it counts as
        one that was told of: it shall stay."""
        self._counts["created"] += 1
        self._write(_BEGIN, (*_begun(info), key, what, True))

    def told(self, sandbox_id: str) -> None:
        """Whoever asked for it by a key is about to hear of it. Never fails."""
        self._write(_TOLD, (sandbox_id,))

    def end(self, info: Info) -> None:
        """A sandbox that was begun has ended. Never fails: an ending happens whether or not it can be written."""
        assert info.ending is not None
        self._counts[info.ending] += 1
        # As JSON: an error may have named a file whose name is not UTF-8, and an image may be one.
        image, detail, losses = json.dumps(info.image), json.dumps(info.detail), json.dumps(info.losses)
        self._write(_END, (image, info.ended_at, info.ending, detail, losses, info.id), info)
        self._ends += 1
        if self._ends >= _ENDS_BETWEEN:
            self._ends = 0
            self._drop()

    def note(self, **fields: object) -> None:
        """A word for who reads the database, if there is room for it."""
        try:
            at = self._db.execute("INSERT INTO notes VALUES (?, ?)", (time.time(), json.dumps(fields))).lastrowid or 0
            self._db.execute("DELETE FROM notes WHERE rowid <= ?", (at - _MOST_NOTES,))
        except sqlite3.DatabaseError as error:
            self._fault("write", error)

    # Questions. Each raises HostFault where the database cannot be read.

    def past(self) -> list[Begun]:
        """Those of a node before this one of which no end is told."""
        return [Begun(_info(row[:-1]), bool(row[-1])) for row in self._ask(_BEGUN)]

    def ended(self, sandbox_id: str) -> Info | None:
        """One that has ended; None: there was none of that name, or it was too long ago."""
        for owed in self._owed:
            if owed.info is not None and owed.info.id == sandbox_id:
                return owed.info
        if self._last is not None:
            return self._last.get(sandbox_id)
        rows = self._ask(_ENDED, (sandbox_id, time.time() - ENDED_SECONDS))
        return _info(rows[0]) if rows else None

    def made(self, tenant: str | None, key: str) -> tuple[str, str] | None:
        """Which sandbox the tenant was told of that was made with this key, and its fingerprint."""
        rows = self._ask(_MADE, (key, tenant, time.time() - ENDED_SECONDS))
        return rows[0] if rows else None

    def owed(self) -> list[Info]:
        """Those that have ended, and are not written down yet."""
        return [owed.info for owed in self._owed if owed.info is not None]

    def later(self, wanted: Filter, after: tuple[float, str], most: int) -> tuple[list[Info], tuple[float, str] | None]:
        """The first of those that have ended which fit, in the order of their creation, from a place in it; and the
        place to look on from, if there may be more."""
        at, sandbox_id = after
        words = {
            "since": time.time() - ENDED_SECONDS,
            "at": at,
            "id": sandbox_id,
            "looked_at": _LOOKED_AT,
            "image": None if wanted.image is None else json.dumps(wanted.image),
            "tenant": wanted.tenant,
            "labels": _wanted(wanted.labels),
            "most": most,
        }
        infos = [_info(row) for row in self._ask(_LATER, words)]
        last = self._ask(_LAST, words)
        return infos, last[0] if last else None

    def counts(self) -> dict[str, int]:
        """`created`, `running` and every ending, zeros included."""
        endings = {ending.value: self._counts[ending] for ending in Ending}
        created = self._counts["created"]
        return {"created": created, "running": created - sum(endings.values()), **endings}

    def close(self) -> None:
        """Those that ended a moment ago can be asked about still: whoever waited for them is told afterwards."""
        last: list[Any] = []
        with suppress(HostFault):
            last = self._ask(_LATELY, (time.time() - _MOMENT_SECONDS,))
        self._last = {row[0]: _info(row) for row in last}
        _connections.discard(self._db)
        self._db.close()

    # The database.

    def _opened(self) -> sqlite3.Connection:
        try:
            return _open(self.path)
        except sqlite3.DatabaseError as error:
            if _code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
            aside = self.path.with_name(f"{_LEDGER}.damaged")
            found = " ".join(str(error).split())  # on one line: a log has no more
            said = f"{self.path} is damaged ({found}) and kept as {aside.name}: how sandboxes ended is forgotten"
            _LOGGER.warning(said)
        for more in ("", "-wal"):
            with suppress(FileNotFoundError):
                os.replace(f"{self.path}{more}", f"{aside}{more}")  # noqa: PTH105  (beside each other)
        return _open(self.path)

    def _write(self, change: str, words: tuple[object, ...], info: Info | None = None) -> None:
        self._owed.append(_Owed(change, words, info))
        try:
            self._pay()
        except sqlite3.DatabaseError as error:
            self._fault("write", error)

    def _pay(self) -> None:
        """Raises sqlite3.DatabaseError where the host is in the way. What nothing will ever make possible is dropped:
        else it would stay the first, and nothing were written any more."""
        while self._owed:
            try:
                self._db.execute(self._owed[0].change, self._owed[0].words)
            except (sqlite3.Error, ValueError, OverflowError) as error:
                if isinstance(error, sqlite3.DatabaseError) and _code(error) not in _OURS:
                    raise
                _LOGGER.exception("a change of the ledger is lost, for it cannot be written")
            self._owed.popleft()

    def _ask(self, question: str, words: Sequence[object] | Mapping[str, object] = ()) -> list[Any]:
        if self._last is not None:
            raise HostFault("the node is shutting down")
        try:
            return self._db.execute(question, words).fetchall()
        except sqlite3.DatabaseError as error:
            raise self._fault("read", error) from error
        except UnicodeEncodeError:  # half a character: nothing here is called that
            return []

    def _drop(self) -> None:
        """Some of those that nobody can ask about any more."""
        try:
            (kept,) = self._db.execute(_KEPT).fetchone()
            most, before = 2 * _ENDS_BETWEEN, time.time() - ENDED_SECONDS
            if kept > ENDED_KEPT:
                most, before = min(most, kept - ENDED_KEPT), math.inf
            self._db.execute(_DROP, (before, most))
        except sqlite3.DatabaseError as error:
            self._fault("write", error)

    def _fault(self, doing: str, error: sqlite3.DatabaseError) -> HostFault:
        """What the host does not let us do; what is a mistake of ours is raised as it is."""
        code = _code(error)
        if code in _OURS:
            raise error
        full = code == sqlite3.SQLITE_FULL
        why = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else OSError(str(error))
        return host_fault(why, f"{doing} {self.path}")


def _open(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError, of a damaged database too."""
    db = sqlite3.connect(path, isolation_level=None, timeout=_OPEN_SECONDS)
    try:
        # Ours alone, as its directory is: then no lock is taken for each change, and there is no file shared with
        # others, for which there may be no room. The lock dies with the process.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
        # In memory half a MiB (2 by default); a log of 200 pages is 0.8 MiB, and copying it takes a millisecond.
        db.execute("PRAGMA cache_size = -512")
        db.execute("PRAGMA wal_autocheckpoint = 200")
        # 50 ms for as many sandboxes as are kept.
        (said,) = db.execute("PRAGMA quick_check(1)").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if said == "ok" and version != _VERSION and db.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
            said = f"its tables are of version {version}, not {_VERSION}"
        if said != "ok":
            damaged = sqlite3.DatabaseError(said)
            damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damaged
        if version != _VERSION:  # else there is nothing to write, for which there may be no room
            db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    _connections.add(db)
    return db


_connections: set[sqlite3.Connection] = set()


def _forked() -> None:
    """In a forked child. When it let go of one, as at its exit, it would write the log that is its parent's to where it
    belongs, and remove it: it never does."""
    for db in _connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


os.register_at_fork(after_in_child=_forked)


def _code(error: sqlite3.DatabaseError) -> int:
    """Of what went wrong, without the details; 0: it was not SQLite that said so."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _begun(info: Info) -> tuple[object, ...]:
    return info.id, json.dumps(info.image), info.tenant, _labels(info.labels), info.created_at


def _labels(labels: Mapping[str, str]) -> str:
    """As JSON without its braces, each on a line that begins with a line feed: so one can be found by its text."""
    return "\n" + json.dumps(labels, separators=(",\n", ":"))[1:-1]


def _wanted(labels: Mapping[str, str | None]) -> str:
    """What the text of those that fit contains, as a list in JSON."""
    ends = {name: "" if value is None else json.dumps(value) for name, value in labels.items()}
    return json.dumps([f"\n{json.dumps(name)}:{end}" for name, end in ends.items()])


def _info(row: tuple[Any, ...]) -> Info:
    sandbox_id, image, tenant, labels, created_at, ended_at, ending, detail, losses = row
    # It is ours, and was checked when it was made.
    return Info.model_construct(
        id=sandbox_id,
        image=json.loads(image),
        state="running" if ended_at is None else "ended",
        created_at=created_at,
        ended_at=ended_at,
        ending=None if ending is None else Ending(ending),
        detail=None if detail is None else json.loads(detail),
        labels=json.loads(f"{{{labels}}}"),
        losses=() if losses is None else tuple(json.loads(losses)),
        tenant=tenant,
    )

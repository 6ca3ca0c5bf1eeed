"""Who may call a server: its API keys, in a file beside its images, and what each of them may do.

It promises that the file never holds a key, only its SHA-256; that whoever reads the file while it is written sees the
old one or the new one; and that a key which was revoked opens nothing from then on, in a server that runs too, which
looks at the file's time before each request, and before each piece of an answer that goes on. A plain hash is enough
because a key is 256 random bits: there is nothing to guess it by, so nothing to slow a guesser down for, and a slow
hash would have to be paid at every request.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from sandlot.api import TENANT, Model, Quota
from sandlot.errors import HostFault, NotFound, QuotaExceeded, host_fault
from sandlot.node.ledger import image_store

# How a key begins, for who finds one where it does not belong.
_BEGINS = "sandlot-"


class Scope(StrEnum):
    """What a key may do with what it sees. One that has no tenant sees everybody's."""

    READ = "read"  # look: lists, files, output, images, metrics
    RUN = "run"  # and make, run, write, end


class Key(Model):
    """What is known of a key."""

    id: str
    hash: str = Field(description="SHA-256 of the key")
    tenant: str | None = Field(default=None, pattern=TENANT, description="null: the operator's, of all tenants")
    scope: Scope = Scope.RUN
    quota: Quota = Quota()
    rate: float | None = Field(default=None, gt=0, description="requests a second")
    created_at: float = 0.0


_KEYS = TypeAdapter(list[Key])


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request is made."""

    key: str | None = None  # the id of the key
    tenant: str | None = None  # None: the operator, who sees everybody's
    may_run: bool = True


# Where there is no key, whoever reaches the server.
ANYBODY = Caller()


def keys_file(state_dir: Path | None = None) -> Path:
    """Where the keys of servers with this state directory (None: this user's default) are: beside the images, so that
    they are there after a restart of the host."""
    return image_store(state_dir).parent / "keys.json"


class _Bucket:
    """As many tokens as a second of requests, and at least one; each request takes one."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._most = self._left = max(1.0, rate)
        self._at = now

    def take(self, now: float) -> float:
        """Seconds until there is one again; 0: it was taken."""
        self._left = min(self._most, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / self.rate


class Keys:
    """The keys in a file (None: no file), as they are now, and `full`, the operator's that a server began with."""

    def __init__(self, path: Path | None = None, full: str | None = None) -> None:
        self.path = path
        self._full = _hash(full.encode()) if full else None
        self._seen: tuple[int, int, int] | None = None  # which file was read
        self._by_hash: dict[str, Key] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._had_some = full is not None  # keys, or a file of them

    # Of a server.

    @property
    def required(self) -> bool:
        """Whether a caller needs a key. Once it does, it does: the last key's end opens nothing, in the next server
        neither, for the file is still there. Raises HostFault."""
        self._look()
        return self._had_some

    @property
    def let_nobody_in(self) -> bool:
        """Whether a caller needs a key, and there is none. Raises HostFault."""
        return self.required and self._full is None and not self._by_hash

    def caller(self, key: bytes) -> Caller | None:
        """Who calls with it; None: it is not one of ours. Raises QuotaExceeded (too many requests), HostFault."""
        self._look()
        hashed = _hash(key)
        if hashed == self._full:  # of two hashes nothing is told by how long their comparison takes
            return ANYBODY
        found = self._by_hash.get(hashed)
        if found is None:
            return None
        if found.rate is not None:
            self._take_turn(found.id, found.rate)
        return Caller(found.id, found.tenant, found.scope is Scope.RUN)

    def holds(self, caller: Caller) -> bool:
        """Whether who was let in still would be. It is no request of its own. Raises HostFault."""
        self._look()
        if caller.key is None:
            return self._full is not None or not self.required
        return any(key.id == caller.key for key in self._by_hash.values())

    def quota(self, tenant: str) -> Quota | None:
        """What a tenant may use at once: as much as that of its keys which gives most of it. Raises HostFault."""
        self._look()
        quotas = [key.quota for key in self._by_hash.values() if key.tenant == tenant and key.scope is Scope.RUN]
        if not quotas:
            return None
        return Quota(
            boxes=None if any(each.boxes is None for each in quotas) else max(each.boxes or 0 for each in quotas),
            cpus=None if any(each.cpus is None for each in quotas) else max(each.cpus or 0 for each in quotas),
            memory=None if any(each.memory is None for each in quotas) else max(each.memory or 0 for each in quotas),
        )

    def _take_turn(self, key_id: str, rate: float) -> None:
        now = time.monotonic()
        bucket = self._buckets.get(key_id)
        if bucket is None or bucket.rate != rate:
            bucket = self._buckets[key_id] = _Bucket(rate, now)
        left = bucket.take(now)
        if left:
            raise QuotaExceeded(
                f"this key is good for {rate:g} requests a second", "wait as long as `Retry-After` says", left
            )

    # Of the command line.

    def all(self) -> list[Key]:
        """The oldest first. Raises HostFault."""
        self._look()
        return sorted(self._by_hash.values(), key=lambda key: key.created_at)

    def create(self, tenant: str | None, scope: Scope, quota: Quota, rate: float | None) -> tuple[Key, str]:
        """A new one, and its words, which nobody can find out any more afterwards. Raises HostFault."""
        words = _BEGINS + secrets.token_urlsafe(32)
        made = Key(
            id=f"k-{secrets.token_hex(4)}",
            hash=_hash(words.encode()),
            tenant=tenant,
            scope=scope,
            quota=quota,
            rate=rate,
            created_at=time.time(),
        )
        with self._changing():
            self._write([*self.all(), made])
        return made, words

    def revoke(self, key_id: str) -> None:
        """Raises NotFound, HostFault."""
        with self._changing():
            left = [key for key in self.all() if key.id != key_id]
            if len(left) == len(self._by_hash):
                raise NotFound(f"there is no key {key_id}", "`sandlot keys list` says which there are")
            self._write(left)

    # The file.

    def _look(self) -> None:
        """Read it again if it has changed. Blocks for microseconds, or as long as it takes to read some kB."""
        if self.path is None:
            return
        try:
            if self._seen == _version(self.path.stat()):
                return
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._seen, self._by_hash = None, {}
            return
        except OSError as error:
            raise host_fault(error, f"read {self.path}") from error
        self._had_some = True
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(file)
            if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
                raise HostFault(f"{self.path} can be written by other users", f"`chmod 600 {self.path}`")
            try:
                keys = _KEYS.validate_python(json.load(opened)["keys"])
            except (ValidationError, ValueError, KeyError, TypeError):
                raise HostFault(
                    f"{self.path} is not a file of keys, so nobody is let in",
                    f"put back one that is, or begin anew: `rm {self.path}`, then `sandlot keys create`",
                ) from None
        self._seen, self._by_hash = _version(found), {key.hash: key for key in keys}

    def _write(self, keys: list[Key]) -> None:
        assert self.path is not None
        text = json.dumps({"keys": [key.model_dump(mode="json") for key in keys]}, indent=1)
        new = self.path.with_name(f".keys-{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise host_fault(error, f"write {self.path}") from error

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One at a time, of all programs."""
        assert self.path is not None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise host_fault(error, f"write in {self.path.parent}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held by others for as long as it takes to write some kB
            yield
        finally:
            os.close(lock)


def retry_after(error: QuotaExceeded) -> str | None:
    """Of a header: whole seconds."""
    return None if error.retry_after is None else str(math.ceil(error.retry_after))


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_ino, found.st_size

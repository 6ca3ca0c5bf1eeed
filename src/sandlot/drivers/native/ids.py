"""Host ids for boxes: each box of a root node is one range of 65,536 uids and gids that no other live box has.

Ranges are handed out in blocks of 256. A block belongs to the node that holds the lock on its file, so nodes on one
host never share a range, and a dead node's blocks are free at once: the kernel drops the lock.

A node that is not root borrows ids from /etc/subuid, through the set-id programs newuidmap and newgidmap: one range,
which all its boxes share. Where there are none it has its own id to give, and no other.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from sandlot.aio import alone, close_alone, deadline, program
from sandlot.errors import HostFault

RANGE = 65_536
# Away from people's ids, from /etc/subuid's usual ranges (below 1 billion here) and from systemd's (0x00080000 to
# 0x6FFFFFFF); below 2^32 - 2, which is "no id".
_FIRST = 0x7000_0000
_BLOCKS = 120
_PER_BLOCK = 256
_LOCKS = Path("/run/sandlot/ids")
_SUB_FILES = (Path("/etc/subuid"), Path("/etc/subgid"))
_PROGRAMS = ("newuidmap", "newgidmap")
MAP_SECONDS = 10.0


def mapped(uid_map: str) -> bool:
    """Whether the first range exists in a user namespace with this map: elsewhere there is nothing to hand out."""
    for line in uid_map.splitlines():
        first, _, count = (int(number) for number in line.split())
        if first <= _FIRST and first + count >= _FIRST + _PER_BLOCK * RANGE:
            return True
    return False


class HostIds:
    """The ranges of one node."""

    def __init__(self, locks: Path = _LOCKS) -> None:
        self._locks = locks
        self._held: dict[int, int] = {}  # lock by block
        self._free: list[int] = []
        self._next_block = 0

    def take(self) -> int:
        """The first id of a range. Raises HostFault when all are in use."""
        if not self._free:
            self._take_block()
        return self._free.pop()

    def give_back(self, base: int) -> None:
        self._free.append(base)

    def lock_of(self, base: int) -> int:
        """The lock of the range's block: held by a box that may outlive its node, so that nobody takes the range."""
        return self._held[(base - _FIRST) // (RANGE * _PER_BLOCK)]

    def close(self) -> None:
        for fd in self._held.values():
            close_alone(fd)
        self._held.clear()
        self._free.clear()

    def _take_block(self) -> None:
        self._locks.mkdir(parents=True, exist_ok=True)
        while self._next_block < _BLOCKS:
            block, self._next_block = self._next_block, self._next_block + 1
            fd = os.open(self._locks / str(block), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            self._held[block] = alone(fd)
            first = _FIRST + block * _PER_BLOCK * RANGE
            self._free = [first + n * RANGE for n in reversed(range(_PER_BLOCK))]
            return
        raise HostFault(
            f"all {_BLOCKS * _PER_BLOCK} id ranges for sandboxes are in use on this host", "end some sandboxes first"
        )


@dataclass(frozen=True, slots=True)
class SubIds:
    """Ids lent to an ordinary user: root inside is the user, the others are the first of the lent range."""

    programs: tuple[str, str]  # for uids, for gids
    first: tuple[int, int]
    ours: tuple[int, int]

    @classmethod
    def find(cls, files: tuple[Path, Path] = _SUB_FILES) -> SubIds | str:
        """What is lent to this user, or why nothing is."""
        programs = [shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/bin") for name in _PROGRAMS]
        if None in programs:
            return "the node is not root, and there is no newuidmap"
        uid = os.geteuid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = ""
        first = [_lent(file, name, uid) for file in files]
        if None in first:
            return f"the node is not root, and {files[first.index(None)]} lends its user no 65,536 ids"
        return cls(tuple(programs), tuple(first), (uid, os.getegid()))  # type: ignore[arg-type]

    async def map(self, pid: int) -> None:
        """Write both maps of the user namespace of `pid`, gids first. Raises HostFault in the programs' own words."""
        for which in (1, 0):
            name = self.programs[which]
            numbers = (pid, 0, self.ours[which], 1, 1, self.first[which], RANGE - 1)
            async with deadline(MAP_SECONDS, name, "does it wait for a directory service?"):
                status, said = await program((name, *map(str, numbers)))
            if status != 0:
                raise HostFault(f"{name} refused: {said or status}")


def _lent(file: Path, name: str, uid: int) -> int | None:
    """The first id of a range in /etc/subuid or /etc/subgid that is long enough."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        owner, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if owner in (name, str(uid)) and count.strip().isdigit() and int(count) >= RANGE - 1 and first.isdigit():
            return int(first)
    return None

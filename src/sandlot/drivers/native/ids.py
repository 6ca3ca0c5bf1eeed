"""Host ids for boxes: each box of a root node is one range of 65,536 uids and gids that no other live box has.

Ranges are handed out in blocks of 256. A block belongs to the node that holds the lock on its file, so nodes on one
host never share a range, and a dead node's blocks are free at once: the kernel drops the lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sandlot.errors import HostFault

RANGE = 65_536
# Away from people's ids, from /etc/subuid's usual ranges (below 1 billion here) and from systemd's (0x00080000 to
# 0x6FFFFFFF); below 2^32 - 2, which is "no id".
_FIRST = 0x7000_0000
_BLOCKS = 120
_PER_BLOCK = 256
_LOCKS = Path("/run/sandlot/ids")


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
        self._held: list[int] = []
        self._free: list[int] = []
        self._next_block = 0

    def take(self) -> int:
        """The first id of a range. Raises HostFault when all are in use."""
        if not self._free:
            self._take_block()
        return self._free.pop()

    def give_back(self, base: int) -> None:
        self._free.append(base)

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)
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
            self._held.append(fd)
            first = _FIRST + block * _PER_BLOCK * RANGE
            self._free = [first + n * RANGE for n in reversed(range(_PER_BLOCK))]
            return
        raise HostFault(
            f"all {_BLOCKS * _PER_BLOCK} id ranges for sandboxes are in use on this host", "end some sandboxes first"
        )

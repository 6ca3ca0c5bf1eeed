"""Whether a server should be sent requests: it does not stop just now, and there is room on the disks it writes on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sandlot.errors import Unreachable

# With less than this a create or a pull fails before long (bytes, files).
LEAST_BYTES = 64 << 20
LEAST_FILES = 1000


def check(draining: bool, places: Iterable[Path]) -> None:
    """Blocks for as long as a file system takes to say how full it is. Raises Unreachable with the reason."""
    if draining:
        raise Unreachable("this server is about to stop")
    for place in places:
        try:
            found = os.statvfs(place)
        except OSError as error:
            raise Unreachable(f"{place} cannot be looked at: {os.strerror(error.errno or 0)}") from None
        free = found.f_bavail * found.f_frsize
        if free < LEAST_BYTES:
            raise Unreachable(f"the disk of {place} is full: {free >> 20} MiB are left", "free some space there")
        if found.f_files and found.f_favail < LEAST_FILES:  # a file system may have no such number
            raise Unreachable(f"the disk of {place} takes {found.f_favail} more files", "delete some there")

"""Users of a box by name: its own /etc/passwd says what number one has, and where its home is.

It promises that what a box makes of that file costs the node one read of bounded size, and leads nowhere else: it is
read inside, as a regular file. It never guesses: a name that is not there is the caller's mistake. The group is the
number of the user, as everywhere.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from sandlot.aio import deadline
from sandlot.api import MOST_USER
from sandlot.drivers.base import Box
from sandlot.errors import InvalidRequest

_PASSWD = "/etc/passwd"

# A thousand users take 60 kB; what lies further in the file is not looked for.
_MOST_BYTES = 1 << 20

_STEP_SECONDS = 30.0

# What opening it says where there is something else, or nothing: then it names nobody. All else is the box's trouble.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.EACCES}


@dataclass(frozen=True, slots=True)
class Person:
    """Who runs a command. `home` None: nobody said."""

    number: int
    home: str | None = None


ROOT = Person(0, "/root")


async def person(box: Box, user: int | str | None) -> Person | None:
    """Who that is in the box; None for nobody in particular. Raises InvalidRequest (no such name), OSError."""
    if user is None:
        return None
    if isinstance(user, int):
        return Person(user)
    if user == "root":
        return ROOT
    async with deadline(_STEP_SECONDS, f"looking up the user {user}"):
        known = people(await _passwd(box))
    if user not in known:
        names = ", ".join(list(known)[:10]) or "nobody"
        raise InvalidRequest(f"there is no user {user!r} in the sandbox", f"its {_PASSWD} knows {names}")
    found = known[user]
    if found.number > MOST_USER:
        raise InvalidRequest(f"user {user!r} has the number {found.number}; a sandbox has users up to {MOST_USER}")
    return found


def people(text: bytes) -> dict[str, Person]:
    """Those that a passwd file names; of two lines with one name the first counts, as everywhere."""
    known: dict[str, Person] = {}
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        fields = line.split(":")
        if len(fields) > 5 and fields[2].isascii() and fields[2].isdigit() and len(fields[2]) <= 10:
            home = fields[5] if fields[5].startswith("/") else None
            known.setdefault(fields[0], Person(int(fields[2]), home))
    return known


async def _passwd(box: Box) -> bytes:
    try:
        fd = await box.open(_PASSWD, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            return b""
        raise
    try:
        found = os.fstat(fd)
        # A file of /proc, to which the name may lead, says that it is empty: it could hold much and take long.
        return os.read(fd, min(found.st_size, _MOST_BYTES)) if stat.S_ISREG(found.st_mode) else b""
    finally:
        os.close(fd)

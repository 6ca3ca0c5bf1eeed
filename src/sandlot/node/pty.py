"""A pseudo terminal inside a box, as the node holds it: by its own end, the master."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from sandlot.drivers.base import PTYS, Box

_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431  # which Python does not name
FULL = f"there is none left: a sandbox has {PTYS}, and all of this host what `sysctl kernel.pty.max` says"


async def open_pty(box: Box, user: int) -> tuple[int, int]:
    """Our end of a new one, which never blocks, and the end that a program gets. Raises OSError: there is none left."""
    flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK
    master = await box.open("/dev/ptmx", flags, user=user)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(master, _TIOCGPTN, b"\0\0\0\0"))[0]
        theirs = await box.open(f"/dev/pts/{number}", flags, user=user)
    except BaseException:
        os.close(master)
        raise
    os.set_blocking(theirs, True)
    return master, theirs


def size(master: int) -> tuple[int, int]:
    """Its rows and columns."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(master, termios.TIOCGWINSZ, b"\0" * 8))
    return rows, columns


def resize(master: int, rows: int, columns: int) -> None:
    """The kernel tells whoever stands in its foreground (SIGWINCH)."""
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

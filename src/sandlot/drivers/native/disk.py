"""A box's files on the host's disk, for those that do not fit in its memory: a sparse loop file with its own ext4.

Only root can. The file has no name by the time the box starts and the loop device lets go of it with its last mount, so
whoever dies, nothing is left. (Project quotas would save the loop device, but few file systems are mounted with them.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import tempfile
from pathlib import Path

from sandlot.aio import deadline, program
from sandlot.drivers.native.trees import mount_device
from sandlot.errors import HostFault, Unsupported

# mke2fs leaves the tables unwritten: milliseconds for any size.
FORMAT_SECONDS = 30.0

_CONTROL = Path("/dev/loop-control")
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
# struct loop_config: fd, block size, then struct loop_info64 with its flags in the 14th word, then reserved.
_CONFIG = struct.Struct("=II 5Q 3I I 64x 64x 32x 2Q 8Q")
_INODE_BYTES = 256  # the file system's own record of a file comes on top
_BLOCK = 4096
_GROUP = 8 * _BLOCK * _BLOCK  # bytes of a file system that share one block of bits for what is in use
LEAST_BYTES = 8 << 20
_ATTEMPTS = 64  # others may take the free device between the question and the answer


def why_not() -> str | None:
    """Why this host cannot give boxes a disk larger than memory; None: it can. Says what to do."""
    if os.geteuid() != 0:
        return "run the node as root"
    if not _CONTROL.exists():
        return "`modprobe loop`, or give the outer container /dev/loop-control"
    if shutil.which("mke2fs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
        return "`apt install e2fsprogs`"
    return None


async def make(directory: Path, size: int, inodes: int, owner: int) -> int:
    """A detached mount of a new, empty file system of `size` bytes whose root belongs to the host id `owner`, as a
    descriptor that the caller closes. Raises Unsupported, HostFault."""
    fix = why_not()
    if fix is not None:
        raise Unsupported(f"this host cannot give a sandbox {size} bytes of disk, more than its memory", fix)
    free = shutil.disk_usage(directory).free
    if size > free:
        raise Unsupported(f"a sandbox cannot have {size} bytes of disk: {directory} has {free} free", "ask for less")
    # As many files as its groups can hold evenly, which is no more than was asked for unless that is too few for them.
    groups = -(-(size + inodes * _INODE_BYTES) // _GROUP)
    step = groups * (_BLOCK // _INODE_BYTES)
    inodes = max(step, inodes // step * step)
    handle, name = tempfile.mkstemp(dir=directory, suffix=".ext4")
    try:
        try:
            os.truncate(handle, size + inodes * _INODE_BYTES)
            await _format(name, inodes, owner)
            device = _attach(handle)
        finally:
            os.unlink(name)  # noqa: PTH108
            os.close(handle)
    except OSError as error:
        raise HostFault(f"a disk for the sandbox could not be made in {directory}: {error.strerror}") from error
    try:
        return mount_device("ext4", f"/dev/loop{device[0]}")
    except OSError as error:
        raise HostFault(f"a disk for the sandbox could not be mounted: {error.strerror}") from error
    finally:
        os.close(device[1])


async def _format(name: str, inodes: int, owner: int) -> None:
    words = ("-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-b", str(_BLOCK), "-N", str(inodes))
    extended = f"nodiscard,lazy_itable_init=1,root_owner={owner}:{owner}"
    tool = shutil.which("mke2fs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "mke2fs"
    async with deadline(FORMAT_SECONDS, "making a disk for a sandbox"):
        status, said = await program((tool, *words, "-E", extended, name))
    if status != 0:
        raise HostFault(f"mke2fs could not make a disk for the sandbox: {said or status}")


def _attach(file: int) -> tuple[int, int]:
    """A loop device over the file: its number, and a descriptor that keeps it until it is mounted."""
    control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            number = fcntl.ioctl(control, _GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            config = _CONFIG.pack(file, 0, 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, *([0] * 10))
            try:
                fcntl.ioctl(device, _CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
                continue
            return number, device
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

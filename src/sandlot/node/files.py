"""Files of a box, on descriptors that were opened inside it, as its own users see them.

It owns the descriptors it asks for and closes them. It promises that no path, symlink or device leads out of the box
or hangs the node: regular files only, opened non-blocking; and that nothing is written to the kernel's own, in /proc
or /sys, which would take the node's word for more than that of anybody inside. A write is not atomic: the file is
truncated and written in place, so a reader inside may see half of it. What does not fit in memory is not for `read` and
`write`.

A tree comes as a tar, which is passed on as it comes and unpacked inside, by the helper. Through descriptors alone it
could not be: a root node's ids may make nothing in a box (its file system does not know them), and what the node writes
counts as the node's memory, not the box's.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator

from sandlot.aio import shielded
from sandlot.drivers.base import Box
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandlotError, host_fault
from sandlot.node.streams import Input

# Bytes that one call may carry: what a node is willing to hold in memory for it.
MOST_BYTES = 64 << 20

# Up to this many bytes are copied on the event loop (0.3 ms); a thread costs more than that.
_INLINE_BYTES = 1 << 20

_CHUNK = 1 << 20


async def read(box: Box, path: str) -> bytes:
    """The bytes of the regular file `path`. Raises NotFound, InvalidRequest (not regular, too large), HostFault."""
    try:
        fd = await box.open(_checked(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            size = _regular(fd, path).st_size
            if 0 < size <= _INLINE_BYTES:  # a file of /proc says 0, and may hold much and take long
                return _read(fd, path)
            return await shielded(asyncio.to_thread(_read, fd, path))  # the thread uses the descriptor to its end
        finally:
            os.close(fd)
    except OSError as error:
        raise _explained(error, "read", path) from error


async def write(box: Box, path: str, data: bytes, mode: int) -> None:
    """Make or replace the regular file `path`, with its missing parents. Raises InvalidRequest, HostFault."""
    if not 0 <= mode <= 0o777:
        raise InvalidRequest(f"mode {mode:#o} of {path} is not between 0 and 0o777")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = await box.open(_checked(path), flags, mode, parents=True)
        try:
            if stat.S_IMODE(_regular(fd, path).st_mode) != mode:  # it was there already, or the umask took bits away
                os.fchmod(fd, mode)
            if len(data) <= _INLINE_BYTES:
                _write(fd, data)
            else:
                await shielded(asyncio.to_thread(_write, fd, data))
        finally:
            os.close(fd)
    except OSError as error:
        raise _explained(error, "write", path) from error


async def upload(box: Box, path: str, tar: AsyncIterator[bytes], user: int) -> None:
    """Unpack a tar below `path`, as `NodeAPI.upload` says. What `tar` raises is raised."""
    _checked(path)
    pipe = Input()
    unpacking = asyncio.ensure_future(box.unpack(path, pipe.theirs, user))
    sending = asyncio.ensure_future(_send(tar, pipe))
    try:
        # An error of either ends it: the box reads no more, or there is no more to read.
        await asyncio.wait((unpacking, sending), return_when=asyncio.FIRST_COMPLETED)
        if not unpacking.done():
            await sending
        try:
            await unpacking
        except OSError as error:
            raise _not_unpacked(error, path) from error
    finally:
        for task in (unpacking, sending):
            task.cancel()
        await asyncio.wait((unpacking, sending))
        os.close(pipe.theirs)
        pipe.close()


async def _send(chunks: AsyncIterator[bytes], pipe: Input) -> None:
    async for chunk in chunks:
        await pipe.write(chunk)
    pipe.close()


def _not_unpacked(error: OSError, path: str) -> SandlotError:
    where = error.filename or path
    if error.errno in (errno.EBADMSG, errno.E2BIG):
        return InvalidRequest(f"what was sent for {path} is not a whole tar (near {where})", "`tar -c` makes one")
    if error.errno == errno.ENOTSUP:
        return InvalidRequest(f"{where} of the tar is neither a file, a directory nor a link")
    if error.errno == errno.EINVAL:
        return InvalidRequest(f"the tar has a path that leads out of {path}: {where}")
    if error.errno == errno.EISDIR:
        return Conflict(f"there is a directory at {where}, where a file is to be", "name a file in it, or remove it")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return Conflict(f"there is a file where a directory is to be, on the way to {where}", "remove it")
    return _explained(error, "write", where)


def _checked(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{path!r} is not an absolute path", "paths of files begin with `/`")
    return path


def _regular(fd: int, path: str) -> os.stat_result:
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return found
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket"
    raise InvalidRequest(f"{path} is {kind}, not a regular file")


def _read(fd: int, path: str) -> bytes:
    chunks: list[bytes] = []
    total = 0
    while chunk := os.read(fd, _CHUNK):
        chunks.append(chunk)
        total += len(chunk)
        if total > MOST_BYTES:
            limit = f"{MOST_BYTES >> 20} MiB"
            raise InvalidRequest(f"{path} is larger than {limit}", "read it in parts with a command such as `dd`")
    return b"".join(chunks)


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _explained(error: OSError, verb: str, path: str) -> SandlotError:
    """Whose fault it is: the path's, the box's or the host's."""
    number = error.errno or 0
    if number in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(f"there is no file {path}")
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
        return host_fault(error, f"{verb} {path}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return InvalidRequest(
            f"could not {verb} {path}: the sandbox's disk is full", "raise its `disk` or `inodes` limit"
        )
    if number == errno.EOPNOTSUPP:
        return InvalidRequest(
            f"could not {verb} {path}: it is the kernel's own, as those in /proc and /sys are",
            "write it with a command, which has the rights of the sandbox",
        )
    if number in (errno.ENXIO, errno.EAGAIN):
        return InvalidRequest(f"{path} is a device, pipe or socket, not a regular file")
    return InvalidRequest(f"could not {verb} {path}: {os.strerror(number).lower()}")

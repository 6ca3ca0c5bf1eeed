"""Single files of a box: read on descriptors that were opened inside it, written and changed by its helper, inside.

It owns the descriptors it asks for and closes them. It promises that no path, symlink or device leads out of the box
or hangs the node: regular files only, opened non-blocking; that nothing is written to the kernel's own, in /proc or
/sys, which would take the node's word for more than that of anybody inside; and that what is written is there whole or
not at all. More than MOST_READ is never held here: it comes and goes in pieces.

What is written is not written on a descriptor of the node's: a root node's ids may make nothing in a box (its file
system does not know them), and what the node writes counts as the node's memory, not the box's. So bytes go through a
pipe to the helper, as trees do. Looking at more than one file is `looks.py`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import posixpath
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from sandlot.aio import shielded
from sandlot.api import MOST_OFFSET, MOST_READ, MOST_USER
from sandlot.drivers.base import Box
from sandlot.drivers.told import etag, piece, pieces
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandlotError, host_fault
from sandlot.node.streams import Input

# Up to this many bytes are copied on the event loop (0.3 ms); a thread costs more than that.
_INLINE_BYTES = 1 << 20

_CHUNK = 1 << 20

# Of a pipe to the helper: with the default of 64 kB two processes would be woken sixteen times as often.
_PIPE_BYTES = 1 << 20

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OpenedFile:
    """`api.OpenFile` on a descriptor, which it owns."""

    def __init__(self, fd: int, path: str, what: os.stat_result) -> None:
        self._fd = fd
        self._path = path
        # A file of /proc says that it is empty, one of /sys that it is longer than it is: small ones are read at once.
        self._data: bytes | None = None
        self.size = what.st_size
        self.etag: str | None = etag(what.st_mtime_ns, what.st_size, what.st_ino)

    async def settle(self) -> None:
        """Find out how long it really is. Raises OSError, InvalidRequest (a file of the kernel that is too large)."""
        if self.size > _INLINE_BYTES:
            return
        if self.size:
            self._data = _read(self._fd, self._path, 0, None)
        else:  # it may hold much and take long; the thread uses the descriptor to its end
            self._data = await shielded(asyncio.to_thread(_read, self._fd, self._path, 0, None))
        if len(self._data) != self.size:
            self.size, self.etag = len(self._data), None

    async def chunks(self, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        end = self.size if length is None else min(self.size, offset + length)
        if self._data is not None:
            for at in range(offset, end, _CHUNK):
                yield self._data[at : min(end, at + _CHUNK)]
            return
        while offset < end:
            try:
                chunk = await shielded(asyncio.to_thread(os.pread, self._fd, min(_CHUNK, end - offset), offset))
            except OSError as error:
                raise explained(error, "read", self._path) from error
            if not chunk:
                raise Conflict(f"{self._path} became shorter while it was read", "read it again")
            yield chunk
            offset += len(chunk)

    def close(self) -> None:
        os.close(self._fd)


async def opened(box: Box, path: str) -> OpenedFile:
    """The regular file at `path`, which the caller closes. Raises NotFound, InvalidRequest (not regular), HostFault."""
    try:
        fd = await box.open(checked(path), _READ)
        try:
            file = OpenedFile(fd, path, _regular(fd, path))
            await file.settle()
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise explained(error, "read", path) from error
    return file


async def read(box: Box, path: str, offset: int = 0, length: int | None = None) -> bytes:
    """The bytes of the regular file `path`. Raises NotFound, InvalidRequest (not regular, too large), HostFault."""
    if not 0 <= offset <= MOST_OFFSET or (length is not None and length < 0):
        raise InvalidRequest(f"{offset} and {length} are no part of a file", "an offset and a length are 0 or more")
    try:
        fd = await box.open(checked(path), _READ)
        try:
            size = _regular(fd, path).st_size
            wanted = size - offset if length is None else length
            if size > 0 and wanted <= _INLINE_BYTES:  # a file of /proc says 0, and may hold much and take long
                return _read(fd, path, offset, length)
            return await shielded(asyncio.to_thread(_read, fd, path, offset, length))  # which uses it to its end
        finally:
            os.close(fd)
    except OSError as error:
        raise explained(error, "read", path) from error


async def write(box: Box, path: str, data: bytes | AsyncIterator[bytes], mode: int, append: bool) -> None:
    """Make, replace or add to the regular file `path`, as `NodeAPI.write_file` says. What `data` raises is raised."""
    if not 0 <= mode <= 0o777:
        raise InvalidRequest(f"mode {mode:#o} of {path} is not between 0 and 0o777")
    if checked(path).endswith("/"):
        raise InvalidRequest(f"{path} is the path of a directory", "a file's does not end with `/`")

    async def store(source: int) -> None:
        try:
            await box.store(path, source, mode, append)
        except OSError as error:
            raise _not_written(error, path) from error

    if not isinstance(data, bytes):
        await _feed(store, data, _send_pieces)
        return
    file = await asyncio.to_thread(_held, data) if len(data) > _INLINE_BYTES else _held(data)
    try:
        await store(file)
    finally:
        os.close(file)


def _held(data: bytes) -> int:
    """A file of this process for the helper to read: nobody has to feed it."""
    fd = os.memfd_create("sandlot-file", os.MFD_CLOEXEC)
    try:
        for part in pieces((data,)):
            left = memoryview(part)
            while left:
                left = left[os.write(fd, left) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


async def upload(box: Box, path: str, tar: AsyncIterator[bytes], user: int) -> None:
    """Unpack a tar below `path`, as `NodeAPI.upload` says. What `tar` raises is raised."""
    checked(path)
    _checked_user(user)

    async def unpack(source: int) -> None:
        try:
            await box.unpack(path, source, user)
        except OSError as error:
            raise _not_unpacked(error, path) from error

    await _feed(unpack, tar, _send)


async def _feed(
    taking: Callable[[int], Awaitable[None]],
    chunks: AsyncIterator[bytes],
    send: Callable[[AsyncIterator[bytes], Input], Awaitable[None]],
) -> None:
    """What comes, through a pipe, to who takes it."""
    pipe = Input()
    with suppress(OSError):  # an ordinary user's pipes may be as large as they may be
        fcntl.fcntl(pipe.theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    taken = asyncio.ensure_future(taking(pipe.theirs))
    sending = asyncio.ensure_future(send(chunks, pipe))
    try:
        # An error of either ends it: the box reads no more, or there is no more to read.
        await asyncio.wait((taken, sending), return_when=asyncio.FIRST_COMPLETED)
        if not taken.done():
            await sending
        await taken
    finally:
        for task in (taken, sending):
            task.cancel()
        await asyncio.wait((taken, sending))
        os.close(pipe.theirs)
        pipe.close()


async def _send(chunks: AsyncIterator[bytes], pipe: Input) -> None:
    async for chunk in chunks:
        await pipe.write(chunk)
    pipe.close()


async def _send_pieces(chunks: AsyncIterator[bytes], pipe: Input) -> None:
    async for chunk in chunks:
        if chunk:
            await pipe.write(piece(chunk))
            await pipe.write(chunk)
    await pipe.write(piece(b""))
    pipe.close()


async def make_directory(box: Box, path: str, mode: int, parents: bool) -> None:
    checked(path)
    try:
        await box.make_directory(path.rstrip("/") or "/", _checked_mode(mode, path), parents)
    except FileExistsError:
        raise Conflict(f"there is something at {path} already", "look at it: `stat_file`") from None
    except FileNotFoundError:
        raise _no_parent(path) from None
    except OSError as error:
        raise _not_written(error, path) from error


async def move(box: Box, path: str, to: str, replace: bool) -> None:
    checked(path)
    checked(to)
    try:
        await box.move(path, to, replace)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise Conflict(f"there is something at {to} already", "say that it is to be replaced") from None
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY) and not error.filename:
            why = "is a directory" if error.errno == errno.EISDIR else "is not an empty directory"
            raise Conflict(f"{path} cannot take the place of {to}, which {why}", "remove that first") from None
        if error.errno == errno.EINVAL:
            raise InvalidRequest(f"{path} cannot be moved to {to}: that is in it, or not the name of a file") from None
        if error.errno == errno.ENOENT and error.filename:
            raise _no_parent(to) from None
        raise explained(error, "move", to if error.filename else path) from error


async def remove(box: Box, path: str, recursive: bool) -> None:
    checked(path)
    try:
        await box.remove(path, recursive)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            hint = "something was written there meanwhile" if recursive else "say that it is to go with what is in it"
            raise Conflict(f"{path} is not empty", hint) from None
        if error.errno == errno.EINVAL:
            raise InvalidRequest(f"{path} cannot be removed", "name it by its own name") from None
        raise explained(error, "remove", path) from error


async def change(box: Box, path: str, mode: int | None, user: int | None, group: int | None) -> None:
    checked(path)
    if mode is not None:
        _checked_mode(mode, path)
    for number in (user, group):
        if number is not None:
            _checked_user(number)
    try:
        await box.change_file(path, mode, user, group)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise InvalidRequest(
                f"{path} cannot belong to {user}:{group}: this sandbox has no such user",
                "run the node as root, or lend its user ids in /etc/sub{uid,gid}",
            ) from None
        raise explained(error, "change", path) from error


def _no_parent(path: str) -> NotFound:
    return NotFound(f"there is no directory {posixpath.dirname(path.rstrip('/'))}", "make it: `make_directory`")


def _checked_mode(mode: int, path: str) -> int:
    if not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"mode {mode:#o} of {path} is not between 0 and 0o7777")
    return mode


def _checked_user(number: int) -> None:
    if not 0 <= number <= MOST_USER:
        raise InvalidRequest(f"{number} is not the number of a user or group", "they go from 0 to 65535")


def checked(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest(f"{path!r} is not an absolute path", "paths of files begin with `/`")
    return path


def _regular(fd: int, path: str) -> os.stat_result:
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return found
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket"
    raise InvalidRequest(f"{path} is {kind}, not a regular file")


def _read(fd: int, path: str, offset: int, length: int | None) -> bytes:
    """Up to `length` bytes (None: all), to its end: how long it is, a file of the kernel says only there."""
    found: list[bytes] = []
    total = 0
    while (left := _CHUNK if length is None else min(_CHUNK, length - total)) > 0:
        if not (chunk := os.pread(fd, left, offset + total)):
            break
        found.append(chunk)
        total += len(chunk)
        if total > MOST_READ:
            limit = f"{MOST_READ >> 20} MiB"
            raise InvalidRequest(f"{path} is larger than {limit}", "read it in parts, or as a stream: `download`")
    return b"".join(found)


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
    return explained(error, "write", where)


def _not_written(error: OSError, path: str) -> SandlotError:
    if error.errno == errno.EISDIR:
        return InvalidRequest(f"{path} is a directory, not a regular file", "name a file in it, or remove it")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return Conflict(f"there is a file where a directory is to be, on the way to {path}", "remove it")
    return explained(error, "write", path)


def explained(error: OSError, verb: str, path: str) -> SandlotError:
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
            "do it with a command, which has the rights of the sandbox",
        )
    if number == errno.ELOOP:
        return InvalidRequest(
            f"could not {verb} {path}: it leads through too many links or directories, or an open file in /proc"
        )
    if number == errno.EBUSY:
        return Conflict(
            f"could not {verb} {path}: it is, or holds, what is mounted there", "volumes stay where they are"
        )
    if number in (errno.ENXIO, errno.EAGAIN):
        return InvalidRequest(f"{path} is a device, pipe or socket, not a regular file")
    return InvalidRequest(f"could not {verb} {path}: {os.strerror(number).lower()}")

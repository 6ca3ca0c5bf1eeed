"""Files of this host as entries of a tar: owners, modes, times to the nanosecond, attributes, holes, names of one file.

It promises that a directory that is packed here and unpacked by `drivers/oci/unpack.py` is the same afterwards, but for
sockets, which no tar has; and that one which cannot be packed whole is an error, never a shorter tar. No link in it is
followed. Which directories are images is known here, for client and node.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import struct
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from sandlot.errors import InvalidRequest, Unsupported

# What is a root file system has one of these. Anything else that is a directory is most likely a mistake.
ROOTS = ("bin", "etc", "lib", "usr", "sbin", "root", "home", "var")

_PIECE = 1 << 20
# Of a file capability (linux/capability.h): the version is in the first byte; 3 has the root of a namespace at its end.
_CAPABILITY = "security.capability"
_ROOTLESS, _ROOTED, _REVISION = 0x02000000, 0x03000000, 0xFF000000


def is_layout(directory: Path) -> bool:
    """Whether a directory is an OCI layout."""
    return (directory / "index.json").is_file() and (directory / "oci-layout").is_file()


def check_image(directory: Path) -> None:
    """Raises InvalidRequest unless it is a layout or a root file system."""
    if not is_layout(directory) and not any(os.path.lexists(directory / name) for name in ROOTS):
        raise InvalidRequest(
            f"{directory} is no root file system and no image: it has no {', '.join(ROOTS[:4])}, and no index.json"
        )


def opened(out: IO[bytes]) -> tarfile.TarFile:
    """A tar that is written to `out`, for `add`."""
    return tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8")


def add(tar: tarfile.TarFile, path: Path, name: str, user: int = 0) -> None:
    """One file, under a name. A file with holes goes as what is in it, and where: a few bytes may span a terabyte. What
    belongs to `user` is root's inside: of another user than 0 it was checked that all is. Blocks. Raises OSError,
    Unsupported (no tar can say it)."""
    what = path.lstat()
    if not stat.S_ISREG(what.st_mode):
        info = tar.gettarinfo(path, name)
        if info is not None:  # a socket
            tar.addfile(_said(info, path, what, user))
        return
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = tar.gettarinfo(arcname=name, fileobj=file)
        _said(info, path, what, user)
        if not info.isreg() or what.st_blocks * 512 >= what.st_size:  # another name of a file that is in already; whole
            tar.addfile(info, file)
            return
        spans = list(_spans(file.fileno(), info.size))
        numbers = [len(spans), *(number for span in spans for number in span)]
        table = "".join(f"{number}\n" for number in numbers).encode()
        table += bytes(-len(table) % tarfile.BLOCKSIZE)
        # GNU's form, version 1.0: the table of what is where comes first in the data.
        info.pax_headers = {
            **info.pax_headers,
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": name,
            "GNU.sparse.realsize": str(info.size),
        }
        # For who does not know the form. Short and plain: a long one would come as another header, after the true name.
        info.name = "GNUSparseFile.0/" + re.sub(r"[^!-~]", "_", path.name)[:50]
        info.size = len(table) + sum(length for _, length in spans)
        tar.addfile(info, cast(IO[bytes], _Packed(table, file, spans)))


def packed(directory: Path) -> BinaryIO:
    """A directory, or the one that a link leads to, as a tar, written by a thread while it is read. To be closed.
    Who reads is told at its end why the rest cannot be packed: what `add` raises."""
    directory = directory.resolve()
    read, write = os.pipe2(os.O_CLOEXEC)
    pipe = _Pipe(read)

    def work() -> None:
        with suppress(BrokenPipeError), os.fdopen(write, "wb") as out:  # nobody reads any more
            try:
                with opened(out) as tar:
                    for name, path in _below(directory):
                        add(tar, path, name)
            except Exception as error:  # whatever it is: without it the end of the pipe is that of the tar
                pipe.failed = error

    threading.Thread(target=work, name="sandlot-packing", daemon=True).start()
    return io.BufferedReader(pipe, _PIECE)


class _Pipe(io.FileIO):
    failed: Exception | None = None

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if count == 0:
            self._end()
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._end()
        return data

    def _end(self) -> None:
        if self.failed is not None:
            raise self.failed


def _below(top: Path) -> Iterator[tuple[str, Path]]:
    """A directory and all that is in it, each before what it holds."""
    left = [("", top)]
    while left:
        name, path = left.pop()
        yield name or ".", path
        if stat.S_ISDIR(path.lstat().st_mode):
            left += [(f"{name}/{each.name}".lstrip("/"), each) for each in sorted(path.iterdir(), reverse=True)]


def _said(info: tarfile.TarInfo, path: Path, what: os.stat_result, user: int) -> tarfile.TarInfo:
    info.uname = info.gname = ""
    if user:
        info.uid = info.gid = 0
    seconds, rest = divmod(abs(what.st_mtime_ns), 10**9)
    sign = "-" if what.st_mtime_ns < 0 else ""  # before 1970
    info.mtime = int(f"{sign}{seconds}")
    words: dict[str, str] = {}
    if rest:
        words["mtime"] = f"{sign}{seconds}.{rest:09}"
    names: list[str] = []
    with suppress(OSError):  # a file system without any
        names = os.listxattr(path, follow_symlinks=False)
    for name in names:
        if name == _CAPABILITY or (name.startswith("user.") and not name.startswith("user.overlay.")):
            with suppress(OSError):  # it is gone, or another namespace's
                value = os.getxattr(path, name, follow_symlinks=False)
                if name == _CAPABILITY:
                    value = _as_roots(value, user)
                if value:
                    words[f"SCHILY.xattr.{_keyword(name, path)}"] = value.decode("utf-8", "surrogateescape")
    info.pax_headers = words
    return info


def _keyword(name: str, path: Path) -> str:
    """An attribute's name as GNU tar writes it, for a word of a header ends at its first `=`."""
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise Unsupported(
                f"{path} has an attribute whose name a tar cannot hold, {os.fsencode(name)!r}: it is not UTF-8",
                "remove the attribute, or leave the file out",
            ) from None
    return name.replace("%", "%25").replace("=", "%3D")


def _as_roots(value: bytes, user: int) -> bytes:
    """A file capability as the root of any namespace has it; empty: it is that of another root than `user`."""
    if len(value) != 24:
        return value
    (magic,), (root,) = struct.unpack("<I", value[:4]), struct.unpack("<I", value[20:])
    if magic & _REVISION != _ROOTED or root != user:
        return b""
    return struct.pack("<I", magic & ~_REVISION | _ROOTLESS) + value[4:20]


def _spans(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file holds data: offset and length. The last one is at its end, and may be empty."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < size:
            yield start, end - start
    yield size, 0


class _Packed:
    """The spans of a file one after the other, and a table before them, to be read."""

    def __init__(self, table: bytes, file: IO[bytes], spans: list[tuple[int, int]]) -> None:
        self._rest = table
        self._chunks = _chunks(file, spans)

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


def _chunks(file: IO[bytes], spans: list[tuple[int, int]]) -> Iterator[bytes]:
    for start, length in spans:
        file.seek(start)
        while length > 0 and (chunk := file.read(min(length, 1 << 16))):
            length -= len(chunk)
            yield chunk

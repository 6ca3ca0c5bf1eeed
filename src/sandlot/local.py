"""Files of this host, on their way into a sandbox and out of it.

It promises that no file is held in memory whole; that links are copied as links; and that a tree which comes out of a
sandbox, whose programs nobody trusts, is written below the directory that it was asked to and nowhere else, whatever it
says and whatever links an earlier one has left there: what is below it is reached by descriptors, and no link followed.
It never talks to a sandbox: it makes tars and takes them apart.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandlot.errors import BadImage, Conflict, InvalidRequest, NotFound, host_fault

# Bytes that are read and handed on at once.
_CHUNK = 1 << 20
_BLOCK = 512

# A directory that can be gone through from, and is not behind a link.
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def header(path: Path, name: str, hint: str | None = None) -> tarfile.TarInfo:
    """What a tar says of a file of this host. Raises OSError, InvalidRequest (neither file, directory nor link)."""
    what = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(what.st_mode), int(what.st_mtime)
    if stat.S_ISDIR(what.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(what.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
    elif stat.S_ISREG(what.st_mode):
        info.size = what.st_size
    else:
        raise InvalidRequest(f"{path} is neither a file, a directory nor a link", hint)
    return info


def packed(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def contents(path: Path, size: int) -> Iterator[bytes]:
    """A file's bytes, of which there are so many. Blocks. Raises OSError, InvalidRequest (it has become shorter)."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        while size > 0:
            chunk = file.read(min(size, _CHUNK))
            if not chunk:
                raise InvalidRequest(f"{path} became shorter while it was copied", "copy it again")
            size -= len(chunk)
            yield chunk


async def streamed(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What a generator that blocks yields, in chunks that are worth a thread's while."""

    def some() -> bytes:
        found = bytearray()
        while len(found) < _CHUNK and (chunk := next(chunks, None)) is not None:
            found += chunk
        return bytes(found)

    while chunk := await asyncio.to_thread(some):
        yield chunk


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"there is no {error.filename}") from None
    except OSError as error:
        raise InvalidRequest(f"{error.filename} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Sent:
    """Something of this host that is to be sent: its bytes, and how many there are."""

    size: int
    chunks: Iterator[bytes]
    mode: int | None  # of a file; None: it is a tree, as a tar


def send(path: Path) -> Sent:
    """A file, or what is in a directory. Blocks. Raises NotFound, InvalidRequest (it cannot be read; in it is what is
    neither file, directory nor link)."""
    with _reading():
        what = path.stat()
        if stat.S_ISREG(what.st_mode):
            return Sent(what.st_size, _read(path.resolve(), what.st_size), stat.S_IMODE(what.st_mode) & 0o777)
        if not stat.S_ISDIR(what.st_mode):
            raise InvalidRequest(f"{path} is neither a file nor a directory")
        entries = [(header(each, name), each) for name, each in below(path)]
        size = sum(len(packed(info)) + info.size + -info.size % _BLOCK for info, _ in entries) + 2 * _BLOCK
        return Sent(size, _tar(entries), None)


def _read(path: Path, size: int) -> Iterator[bytes]:
    with _reading():
        yield from contents(path, size)


def below(top: Path, is_entered: Callable[[Path], bool] = lambda _: True) -> Iterator[tuple[str, Path]]:
    """All that is in a directory, each before what it holds, as deep as it may be. Blocks. Raises OSError."""
    left = _within(top, "")
    while left:
        name, path, whole = left.pop()
        yield name, path
        if whole and is_entered(path):
            left += _within(path, f"{name}/")


def _within(directory: Path, before: str) -> list[tuple[str, Path, bool]]:
    """Names, the last first; and whether each is a directory."""
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda each: each.name, reverse=True)
    return [(before + each.name, Path(each.path), each.is_dir(follow_symlinks=False)) for each in entries]


def _tar(entries: Iterable[tuple[tarfile.TarInfo, Path]]) -> Iterator[bytes]:
    with _reading():
        for info, path in entries:
            yield packed(info)
            if info.size:
                yield from contents(path, info.size)
                yield bytes(-info.size % _BLOCK)
        yield bytes(2 * _BLOCK)


async def receive_file(chunks: AsyncIterator[bytes], path: Path) -> None:
    """Make or replace a file of this host, at once. Raises HostFault."""
    unfinished = path.with_name(f".sandlot-{secrets.token_hex(6)}")
    try:
        try:
            with unfinished.open("xb") as file:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise host_fault(error, f"write {path}") from error


async def receive_tree(tar: AsyncIterator[bytes], top: Path) -> None:
    """Take a tar apart below a directory, which is made. Files are replaced, directories are added to. Raises Conflict
    (the directory is a link, which an earlier tree may have left), HostFault, BadImage (it is no tar, or leads out)."""
    read, write = os.pipe2(os.O_CLOEXEC)
    taking = asyncio.ensure_future(asyncio.to_thread(_take_apart, os.fdopen(read, "rb"), top))
    try:
        # Who takes it says why it stopped.
        with os.fdopen(write, "wb", buffering=0) as pipe, suppress(BrokenPipeError):
            async for chunk in tar:
                await asyncio.to_thread(_write_all, pipe, chunk)
        await asyncio.shield(taking)
    finally:
        await asyncio.wait((taking,))
        taking.exception()  # seen: what `tar` raises says more


def _write_all(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def refuse_link(path: Path) -> None:
    """Raises Conflict where a link is, which leads to where nobody said that anything is to be written."""
    if path.is_symlink():
        raise Conflict(
            f"{path} is a link, perhaps one that a sandbox made: nothing is written to where it leads",
            f"remove it, or name the directory itself: `realpath {path}`",
        )


def _take_apart(file: BinaryIO, top: Path) -> None:
    links: list[tuple[list[str], str]] = []
    modes: list[tuple[list[str], int]] = []
    parts: list[str] = []
    try:
        with file, tarfile.open(fileobj=file, mode="r|") as tar, _Below(top) as inside:
            for info in tar:
                parts = _parts(info.name)
                if info.isdir():
                    directory = inside.directory(parts, make=True)
                    if info.mode & 0o700 == 0o700:
                        _change_mode(directory, info.mode & 0o777)
                    else:
                        modes.append((parts, info.mode & 0o777))
                    continue
                if not parts:
                    raise BadImage(f"the tar has a file without a name, for {top}")
                directory = inside.directory(parts[:-1], make=True)
                if info.issym():
                    links.append((parts, info.linkname))
                    continue
                _remove(directory, parts[-1])
                if info.islnk():
                    inside.link(_parts(info.linkname), parts)
                elif info.isreg():
                    _write(tar, info, directory, parts[-1])
            # Links last, so that none is in the way of a file; after them the modes that forbid to write.
            for parts, target in links:
                directory = inside.directory(parts[:-1])
                _remove(directory, parts[-1])
                os.symlink(target, parts[-1], dir_fd=directory)
            for parts, mode in reversed(modes):
                _change_mode(inside.directory(parts), mode)
    except (tarfile.TarError, ValueError, OverflowError) as error:  # the last two: no path, no time
        raise BadImage(f"what came for {top} is no whole tar: {error}") from error
    except OSError as error:
        raise host_fault(error, f"write {top.joinpath(*parts)}") from error


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise BadImage(f"the tar has a path that leads out: {name}")
    return parts


class _Below:
    """The directories below one, which is made: by descriptors, so that no link is followed."""

    def __init__(self, top: Path) -> None:
        refuse_link(top)
        top.mkdir(parents=True, exist_ok=True)
        self._top = os.open(top, _DIRECTORY)
        self._parts: list[str] = []  # where it was last, for what is next is mostly there or below
        self._last = os.dup(self._top)

    def __enter__(self) -> _Below:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._top)
        os.close(self._last)

    def directory(self, parts: list[str], *, make: bool = False) -> int:
        """A descriptor that is good until the next call. With `make` those on the way are made, and a link that an
        earlier tree has left there is none, and goes. Raises OSError."""
        if parts[: len(self._parts)] != self._parts:
            self._go([], os.dup(self._top))
        for part in parts[len(self._parts) :]:
            if make:
                _make(part, self._last)
            self._go([*self._parts, part], os.open(part, _DIRECTORY, dir_fd=self._last))
        return self._last

    def _go(self, parts: list[str], directory: int) -> None:
        os.close(self._last)
        self._parts, self._last = parts, directory

    def link(self, there: list[str], here: list[str]) -> None:
        """Another name of a file that is there. Raises OSError."""
        source = os.dup(self.directory(there[:-1]))
        try:
            directory = self.directory(here[:-1])
            os.link("".join(there[-1:]), here[-1], src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(source)


def _change_mode(directory: int, mode: int) -> None:
    Path(f"/proc/self/fd/{directory}").chmod(mode)  # one that was opened to go through it only takes no fchmod


def _make(name: str, directory: int) -> None:
    try:
        os.mkdir(name, dir_fd=directory)
    except FileExistsError:
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)
            os.mkdir(name, dir_fd=directory)


def _remove(directory: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _write(tar: tarfile.TarFile, info: tarfile.TarInfo, directory: int, name: str) -> None:
    source = tar.extractfile(info)
    assert source is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
        while chunk := source.read(_CHUNK):
            file.write(chunk)
        os.fchmod(file.fileno(), info.mode & 0o777)
        file.flush()
        os.utime(file.fileno(), (info.mtime, info.mtime))

"""What is in a box, as its helper tells it: directories, patterns, texts, whole trees, and what happens to them.

It owns the pipe through which it is told, and promises that memory is bounded by what is asked for: whoever has heard
enough, or goes away, ends the teller. It never follows a link itself: that is done inside.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import re
import stat
import tarfile
from asyncio import StreamReader
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar

from sandlot.api import MOST_FOUND, FileEvent, FileInfo, FilesFound, TextFound, TextHit
from sandlot.drivers.base import Box, Look
from sandlot.drivers.told import Entry, entry_at, event_at, hit_at
from sandlot.errors import Conflict, HostFault, InvalidRequest
from sandlot.node.files import checked, explained

T = TypeVar("T")

# What is read from the pipe and not yet taken (bytes): some hundred entries, of which the event loop makes values in a
# few milliseconds.
_AHEAD = 1 << 16
# What is handed on of a tar at once: small files are put together.
_CHUNK = 1 << 18
_BLOCK = 512
_SIGNS = re.compile(r"[*?[\\]")


class _Told:
    """A look that is being told."""

    def __init__(self, reader: StreamReader, telling: asyncio.Future[None]) -> None:
        self._reader = reader
        self._telling = telling
        self._have = b""  # what has come
        self._at = 0  # and how much of that was taken

    async def each(self, read: Callable[[bytes, int], tuple[T, int] | None]) -> AsyncGenerator[T, None]:
        """Everything. Raises OSError when it broke off."""
        while True:
            while (found := read(self._have, self._at)) is not None:
                item, self._at = found
                yield item
            more = await self._reader.read(_AHEAD)
            if not more:
                break
            self._have, self._at = self._have[self._at :] + more, 0
        if self._at < len(self._have):
            raise await self._broken()
        await self._telling

    async def contents(self, size: int) -> AsyncIterator[bytes]:
        """So many bytes, which follow an entry."""
        while size > 0:
            piece = self._have[self._at : self._at + size] or await self._reader.read(min(size, _AHEAD))
            if not piece:
                raise await self._broken()
            self._at = min(len(self._have), self._at + len(piece))
            yield piece
            size -= len(piece)

    async def _broken(self) -> HostFault:
        await self._telling  # which says why, most likely
        return HostFault("the sandbox's helper told half of something")


@asynccontextmanager
async def _telling(look: Callable[[int], Awaitable[None]]) -> AsyncIterator[_Told]:
    """While the body reads, `look` writes to a pipe; whatever is left at its end is not told any more."""
    loop = asyncio.get_running_loop()
    read, write = os.pipe2(os.O_CLOEXEC)
    reader = StreamReader(_AHEAD)
    try:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", buffering=0)
        )
    except BaseException:
        os.close(write)
        raise
    task = asyncio.ensure_future(look(write))
    task.add_done_callback(lambda _: os.close(write))  # then the reader comes to its end
    try:
        yield _Told(reader, task)
    finally:
        transport.close()
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # seen: who has heard enough does not ask


async def stat_file(box: Box, path: str, follow: bool) -> FileInfo:
    """Raises NotFound, InvalidRequest."""
    checked(path)
    try:
        async with _telling(partial(box.look, Look(path, follow=follow))) as told:
            (entry,) = [entry async for entry in told.each(entry_at)]
    except OSError as error:
        raise explained(error, "look at", path) from error
    return _info(path, entry)


async def list_files(box: Box, path: str) -> list[FileInfo]:
    checked(path)
    found: list[FileInfo] = []
    kind = await stat_file(box, path, True)
    if kind.kind != "directory":
        raise InvalidRequest(f"{path} is a {kind.kind}, not a directory", "`stat_file` tells of it")
    try:
        async with _telling(partial(box.look, Look(path, "*", follow=True))) as told:
            async for entry in told.each(entry_at):
                found.append(_info(path, entry))
                if len(found) > MOST_FOUND:
                    raise InvalidRequest(
                        f"{path} has more than {MOST_FOUND} names in it", "ask for some: `glob_files`, with a pattern"
                    )
    except OSError as error:
        raise explained(error, "list", path) from error
    return found


async def glob_files(box: Box, pattern: str, limit: int) -> FilesFound:
    checked(pattern)
    _check_limit(limit)
    top, rest = split(pattern)
    found: list[FileInfo] = []
    look = Look(top, rest or None, follow=bool(rest))
    try:
        async with _telling(partial(box.look, look)) as told, aclosing(told.each(entry_at)) as entries:
            async for entry in entries:
                if len(found) == limit:
                    return FilesFound(files=tuple(found), more=True)
                found.append(_info(top, entry))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):  # then it names nothing
            raise explained(error, "look through", pattern) from error
    return FilesFound(files=tuple(found))


def split(pattern: str) -> tuple[str, str]:
    """The directory where a pattern begins, and the pattern below it."""
    parts = [part for part in pattern.split("/") if part]
    for index, part in enumerate(parts):
        if _SIGNS.search(part):
            return "/" + "/".join(parts[:index]), "/".join(parts[index:])
    return "/" + "/".join(parts), ""


async def find_text(
    box: Box, text: str, path: str, *, names: str, regex: bool, ignore_case: bool, limit: int
) -> TextFound:
    checked(path)
    _check_limit(limit)
    if not text or "\0" in text or "\n" in text:
        raise InvalidRequest(
            "what is looked for is part of a line: it is not empty, and holds no NUL and no line's end"
        )
    if "\0" in names:
        raise InvalidRequest(f"{names!r} is no pattern of names")
    found: list[TextHit] = []
    # Whose case does not matter is looked for as an expression: the helper knows no other way.
    words = re.sub(r"([][\\.*+?^$(){}|])", r"\\\1", text) if ignore_case and not regex else text
    kind = await stat_file(box, path, True)
    look = Look(
        path,
        names if kind.kind == "directory" else None,
        follow=True,
        text=words,
        regex=regex or ignore_case,
        any_case=ignore_case,
    )
    try:
        async with _telling(partial(box.look, look)) as told, aclosing(told.each(hit_at)) as hits:
            async for hit in hits:
                if len(found) == limit:
                    return TextFound(hits=tuple(found), more=True)
                where = _below(path, hit.path)
                found.append(TextHit.model_construct(path=where, line=hit.line, column=hit.column, text=hit.text))
    except OSError as error:
        if error.errno == errno.EINVAL:
            why = error.filename or "it cannot be read"
            raise InvalidRequest(
                f"{text!r} is not an extended regular expression: {why}", "as `grep -E` takes it"
            ) from None
        raise explained(error, "look through", path) from error
    return TextFound(hits=tuple(found))


def _check_limit(limit: int) -> None:
    if not 0 < limit <= MOST_FOUND:
        raise InvalidRequest(f"a limit of {limit} is not between 1 and {MOST_FOUND}")


def _below(top: str, path: str) -> str:
    return posixpath.join(top, path) if path else top


def _info(top: str, entry: Entry) -> FileInfo:
    return FileInfo.model_construct(
        path=_below(top, entry.path),
        kind=entry.kind,
        size=entry.size,
        mode=stat.S_IMODE(entry.mode),
        user=entry.user,
        group=entry.group,
        modified_at=entry.mtime_ns / 1e9,
        target=entry.target if entry.kind == "link" else None,
        etag=entry.etag,
    )


async def watch_files(box: Box, path: str, recursive: bool) -> AsyncGenerator[FileEvent, None]:
    checked(path)
    try:
        async with (
            _telling(partial(box.watch, path, deep=recursive)) as told,
            aclosing(told.each(event_at)) as events,
        ):
            async for event in events:
                where = _below(path, event.path)
                yield FileEvent.model_construct(kind=event.kind, path=where, directory=event.directory)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EMFILE):
            raise Conflict(
                f"{path} cannot be watched: the kernel gives this sandbox no more watches",
                "watch fewer directories, or raise `fs.inotify.max_user_watches` on the host",
            ) from error
        raise explained(error, "watch", path) from error


async def download(box: Box, path: str) -> AsyncGenerator[bytes, None]:
    """A tar. Raises as it is made: what came before an error is no whole tar."""
    checked(path)
    first: dict[tuple[int, int], str] = {}  # of a file with several names, by device and inode
    ready = bytearray()
    look = Look(path, "**", follow=True, contents=True)
    try:
        async with _telling(partial(box.look, look)) as told, aclosing(told.each(entry_at)) as entries:
            async for entry in entries:
                info = _member(entry, posixpath.basename(path.rstrip("/")) or "file", first)
                if info is not None:
                    ready += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
                async for piece in told.contents(entry.size if entry.contents else 0):
                    if info is not None and info.isreg():
                        ready += piece
                    if len(ready) >= _CHUNK:
                        yield bytes(ready)
                        ready.clear()
                if info is not None and info.isreg():
                    ready += bytes(-info.size % _BLOCK)
        yield bytes(ready) + bytes(2 * _BLOCK)
    except OSError as error:
        raise explained(error, "read", posixpath.join(path, error.filename or "")) from error


def _member(entry: Entry, name: str, first: dict[tuple[int, int], str]) -> tarfile.TarInfo | None:
    """What a tar says of it. None: nothing."""
    kind = entry.kind
    if kind not in ("file", "directory", "link") or (kind == "directory" and not entry.path):
        return None  # a pipe and a socket are nothing without who is at them; where to unpack is the reader's business
    info = tarfile.TarInfo(entry.path or name)
    info.mode, info.uid, info.gid = stat.S_IMODE(entry.mode), entry.user, entry.group
    info.mtime = entry.mtime_ns // 1_000_000_000
    if kind == "directory":
        info.type = tarfile.DIRTYPE
    elif kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    else:
        info.size = entry.size if entry.contents else 0
        known = first.setdefault((entry.device, entry.inode), info.name) if entry.links > 1 else info.name
        if known != info.name:
            info.type, info.linkname, info.size = tarfile.LNKTYPE, known, 0
    return info

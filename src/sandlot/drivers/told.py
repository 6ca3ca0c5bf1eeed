"""The words in which a driver tells of files: what comes through the pipe of `Box.look` and `Box.watch`, and what goes
through that of `Box.store`. The numbers are those of init/look.c, watch.c and files.c.

Whoever reads does so as far as it likes: a pipe that is not read makes the teller wait.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from sandlot.api import EventKind, FileKind

_ENTRY = struct.Struct("=IIIIIIQQQqII")
_HIT = struct.Struct("=IIII")
_EVENT = struct.Struct("=IIII")
_PIECE = struct.Struct("=I")

_KINDS: dict[int, FileKind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}
_EVENTS: tuple[EventKind, ...] = get_args(EventKind)
_NS = 1_000_000_000


def etag(mtime_ns: int, size: int, inode: int) -> str:
    """Another one when what a file holds has changed."""
    return f"{mtime_ns:x}-{size:x}-{inode:x}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing. `path` is below where the look began, "" for that itself. `size` bytes follow if it has `contents`."""

    path: str
    mode: int
    user: int
    group: int
    links: int
    device: int
    inode: int
    size: int
    mtime_ns: int
    target: str = ""
    contents: bool = False

    @property
    def kind(self) -> FileKind:
        return _KINDS.get(stat.S_IFMT(self.mode), "device")

    @property
    def etag(self) -> str:
        return etag(self.mtime_ns, self.size, self.inode)

    def pack(self) -> bytes:
        path, target = os.fsencode(self.path), os.fsencode(self.target)
        seconds, nanoseconds = divmod(self.mtime_ns, _NS)
        numbers = (self.mode, self.user, self.group, self.links, self.device, self.inode, self.size)
        return _ENTRY.pack(len(path), len(target), *numbers, seconds, nanoseconds, self.contents) + path + target


@dataclass(frozen=True, slots=True)
class Hit:
    """A line in which a text was found."""

    path: str
    line: int
    column: int
    text: str

    def pack(self) -> bytes:
        path, text = os.fsencode(self.path), os.fsencode(self.text)
        return _HIT.pack(len(path), len(text), self.line, self.column) + path + text


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    kind: EventKind
    path: str = ""
    directory: bool = False

    def pack(self) -> bytes:
        path = os.fsencode(self.path)
        return _EVENT.pack(_EVENTS.index(self.kind) + 1, len(path), self.directory, 0) + path


def entry_at(told: bytes, at: int) -> tuple[Entry, int] | None:
    """What is told there, and where the next begins, or what it holds. None: it is not all there yet."""
    begin = at + _ENTRY.size
    if len(told) < begin:
        return None
    head = _ENTRY.unpack_from(told, at)
    path, target, mode, user, group, links, device, inode, size, seconds, nanoseconds, contents = head
    middle, end = begin + path, begin + path + target
    if len(told) < end:
        return None
    entry = Entry(
        os.fsdecode(told[begin:middle]),
        mode,
        user,
        group,
        links,
        device,
        inode,
        size,
        seconds * _NS + nanoseconds,
        os.fsdecode(told[middle:end]) if target else "",
        bool(contents),
    )
    return entry, end


def hit_at(told: bytes, at: int) -> tuple[Hit, int] | None:
    begin = at + _HIT.size
    if len(told) < begin:
        return None
    path, text, line, column = _HIT.unpack_from(told, at)
    middle, end = begin + path, begin + path + text
    if len(told) < end:
        return None
    return Hit(os.fsdecode(told[begin:middle]), line, column, os.fsdecode(told[middle:end])), end


def event_at(told: bytes, at: int) -> tuple[Event, int] | None:
    begin = at + _EVENT.size
    if len(told) < begin:
        return None
    kind, path, directory, _ = _EVENT.unpack_from(told, at)
    if len(told) < begin + path:
        return None
    return Event(_EVENTS[kind - 1], os.fsdecode(told[begin : begin + path]), bool(directory)), begin + path


def piece(data: bytes) -> bytes:
    """What a piece is preceded by. An empty one is the end, without which what came is not whole."""
    return _PIECE.pack(len(data))


def pieces(data: Iterable[bytes]) -> Iterator[bytes]:
    """Something whole, for `Box.store`."""
    for each in data:
        if each:
            yield piece(each)
            yield each
    yield piece(b"")


def unpieced(stored: bytes) -> bytes | None:
    """What was put together so; None: it broke off."""
    found, at = bytearray(), 0
    while at + _PIECE.size <= len(stored):
        (size,) = _PIECE.unpack_from(stored, at)
        at += _PIECE.size
        if not size:
            return bytes(found)
        found += stored[at : at + size]
        at += size
    return None

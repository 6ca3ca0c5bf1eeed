"""The files beside a build: what a step copies of them, as a tar and as a hash of what matters.

It promises that nothing outside the context's directory is read, that what `.dockerignore` names is not seen (or, where
the build file has a list of its own, `Dockerfile.dockerignore`, what that names), and that no file is held in memory
whole. Links in a directory are copied as links; one that is itself the source of a copy is followed, if it leads to
something in the context.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandlot.errors import InvalidRequest, NotFound
from sandlot.local import below, contents, header, packed

IGNORED = ".dockerignore"

_BLOCK = 512

# How what ADD would unpack elsewhere begins, if it is no tar itself: gzip, bzip2, xz, zstd.
_PACKED = (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, directory or link, and what it is called in the tar."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Tree:
    """What one step copies. `named` are the files that are sources themselves, not those in a directory that is one;
    `alone` is the name of its only file, where that is what the target names."""

    entries: tuple[Entry, ...]
    named: tuple[Entry, ...] = ()
    alone: str | None = None


NOTHING = Tree(())


class Context:
    """A directory of this host, and the `file` that says how to build."""

    def __init__(self, directory: Path, file: Path | None = None) -> None:
        self._top = directory.resolve()
        if not self._top.is_dir():
            raise NotFound(f"there is no directory {directory}", "`--context` names where the files to copy are")
        own = Path(f"{file}{IGNORED}")
        self._list = own if file is not None and own.is_file() else self._top / IGNORED
        with _reading():
            text = self._list.read_text("utf-8", "surrogateescape") if self._list.is_file() else ""
        try:
            self._ignored = Ignored(text.removeprefix("\ufeff").split("\n"))
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._list}: {error.message}", error.hint) from error

    def find(self, sources: Iterable[str]) -> Tree:
        """What paths and patterns name, sorted. Blocks. Raises NotFound, InvalidRequest (it leads out of the context,
        or cannot be read)."""
        with _reading():
            return self._find(tuple(sources))

    def _find(self, sources: tuple[str, ...]) -> Tree:
        entries: list[Entry] = []
        named: list[Entry] = []
        count = 0
        for source in sources:
            for found in self._matches(source):
                count += 1
                path = self._inside(found)
                if path.is_dir():
                    entries += self._below(path)
                else:
                    named.append(Entry(found.name, path))
                    entries.append(named[-1])
        if count == 0:
            shown = ", ".join(f"`{source}`" for source in sources)
            raise NotFound(
                f"there is no {shown} in {self._top}", f"is it named in {self._list.name}, or is `--context` another?"
            )
        return Tree(tuple(entries), tuple(named), named[0].name if count == len(named) == 1 else None)

    def _matches(self, source: str) -> list[Path]:
        parts = [part for part in posixpath.normpath("/" + source).split("/") if part]
        if ".." in source.split("/") and posixpath.normpath(source).startswith(".."):
            raise InvalidRequest(f"{source} leads out of {self._top}", "copy it there, or name another `--context`")
        found = [self._top]
        for part in parts:
            found = [deeper for each in found for deeper in _matching(each, part)]
        return [each for each in found if each == self._top or not self._is_ignored(each)]

    def _is_ignored(self, path: Path) -> bool:
        return self._ignored.matches(path.relative_to(self._top).as_posix()) and not (
            path.is_dir() and self._ignored.has_exceptions
        )

    def _inside(self, path: Path) -> Path:
        real = path.resolve()
        if real != self._top and self._top not in real.parents:
            raise InvalidRequest(f"{path} leads out of {self._top}", "copy what it leads to into the context")
        return real

    def _below(self, directory: Path) -> Iterator[Entry]:
        def matches(path: Path) -> bool:
            return self._ignored.matches(path.relative_to(self._top).as_posix())

        for name, path in below(directory, lambda path: self._ignored.has_exceptions or not matches(path)):
            if not matches(path):
                yield Entry(name, path)


def _matching(directory: Path, part: str) -> list[Path]:
    """What a part of a path names in a directory; several where it is a pattern."""
    if not re.search(r"[*?[]", part):
        return [directory / part] if os.path.lexists(directory / part) else []
    if not directory.is_dir():
        return []
    pattern = _compiled(part)
    return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))


class Ignored:
    """The patterns of a `.dockerignore`: the last that matches a path, or a directory above it, decides."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._patterns: list[tuple[bool, re.Pattern[str]]] = []
        for line in lines:
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            excepted = text.startswith("!")
            text = posixpath.normpath(text.lstrip("!").strip()).strip("/")
            self._patterns.append((not excepted, _compiled(text, "(?:/.*)?")))
        self.has_exceptions = any(not ignores for ignores, _ in self._patterns)

    def matches(self, path: str) -> bool:
        found = False
        for ignores, pattern in self._patterns:
            if pattern.fullmatch(path):
                found = ignores
        return found


def _compiled(pattern: str, more: str = "") -> re.Pattern[str]:
    try:
        return re.compile(_as_regex(pattern) + more, re.DOTALL)
    except re.error as error:
        raise InvalidRequest(
            f"`{pattern}` is no pattern: {error.msg}",
            "a range goes up, `[a-z]`; a `\\` before a `[` means the letter",
        ) from None


def _as_regex(pattern: str) -> str:
    """A pattern of Go's `filepath.Match`, with `**` for any number of directories."""
    said, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            said, at = said + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            said, at = said + ".*", at + 2
        elif pattern[at] == "*":
            said, at = said + "[^/]*", at + 1
        elif pattern[at] == "?":
            said, at = said + "[^/]", at + 1
        elif (group := re.compile(r"\[(\^?)([^]]+)\]").match(pattern, at)) is not None:
            said, at = said + f"[{group[1]}{group[2].replace('[', chr(92) + '[')}]", group.end()
        else:
            at += pattern[at] == "\\" and at + 1 < len(pattern)
            said, at = said + re.escape(pattern[at]), at + 1
    return said


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{error.filename} cannot be read: {error.strerror}", f"name it in {IGNORED}?") from error


def check_unpacked(named: Iterable[Entry]) -> None:
    """Raises InvalidRequest for an archive, which is told by how it begins, whatever it is called. Blocks."""
    for entry in named:
        if entry.path.is_file():
            with _reading(), entry.path.open("rb") as file:
                begin = file.read(_BLOCK)
            if begin.startswith(_PACKED) or _begins_tar(begin):
                raise InvalidRequest(*no_archive(entry.name))


def no_archive(name: str) -> tuple[str, str]:
    """What is said of an archive that ADD names, and what to do."""
    return f"ADD does not unpack {name}", f"`COPY {name} /tmp/` and `RUN tar -xf …` it; COPY also leaves it as it is"


def _begins_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def pack(entries: Iterable[Entry], mode: int | None, digest: Any, called: str | None = None) -> Iterator[bytes]:
    """A tar of the entries, bit by bit; a single one may be `called` otherwise in it. `digest` is fed with what the
    image will have of them: names, kinds, modes, contents; not the times, which a checkout changes. Blocks. Raises
    InvalidRequest for what is no file, directory or link, cannot be read, or changes meanwhile."""
    with _reading():
        yield from _packed(entries, mode, digest, called)


def _packed(entries: Iterable[Entry], mode: int | None, digest: Any, called: str | None) -> Iterator[bytes]:
    for entry in entries:
        info = header(entry.path, called or entry.name, f"name it in {IGNORED}")
        if mode is not None and not info.issym():
            info.mode = mode
        facts = (entry.name, info.type.decode(), info.mode, info.size, info.linkname)
        digest.update(json.dumps(facts).encode())
        yield packed(info)
        if info.size:
            for chunk in contents(entry.path, info.size):
                digest.update(chunk)
                yield chunk
            yield bytes(-info.size % _BLOCK)
    yield bytes(2 * _BLOCK)


def hashed(entries: Iterable[Entry], mode: int | None) -> str:
    """The hash of what `pack` would write. Blocks; raises as it does."""
    digest = hashlib.sha256()
    for _ in pack(entries, mode, digest):
        pass
    return digest.hexdigest()

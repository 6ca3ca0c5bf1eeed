"""Images in files of this host: an OCI layout, what `docker save` writes, a root file system; or a tar of either.

What a file is, is seen in it. Its manifest and config are checked by digest; its layers by the digests of their tars,
while they are unpacked. Nothing is extracted here. Of a stranger's tar that holds an image only the headers are read,
and what they say is bounded: how many members, how many words. One that is packed is inflated into a file without a
name as far as it is looked at, and whole if it holds an image, for that has to be read here and there.
"""

from __future__ import annotations

import io
import math
import os
import posixpath
import stat
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sandlot import packing
from sandlot.api import NO_CONFIG, is_reference
from sandlot.drivers import layers
from sandlot.drivers.oci import inflate, manifest, unpack
from sandlot.drivers.oci.manifest import Blob, Contents
from sandlot.drivers.oci.reference import Reference
from sandlot.errors import BadImage, InvalidRequest, NotFound, host_fault

Open = Callable[[], BinaryIO]

# `docker save` of old has four members for each layer. A root file system has far more, and is not looked at further.
_MOST_MEMBERS = 8 * manifest.MOST_LAYERS
# Bytes of headers beside those of members.
_MOST_WORDS = 4 << 20
# The first link of those that say where a member is, to the last.
_MOST_LINKS = 8


@dataclass(frozen=True, slots=True)
class Archive:
    """An image in files: `layers` open each layer from the lowest up. `closing` is open as long as they are used."""

    contents: Contents
    layers: tuple[Open, ...]
    blobs: tuple[Blob, ...]
    digest: str | None = None
    closing: list[_Source] = field(default_factory=list)

    def close(self) -> None:
        for each in self.closing:
            each.close()


@dataclass(frozen=True, slots=True)
class Spool:
    """Where what is packed is inflated: a directory, and how much of it, as long as its disk has room."""

    directory: Path
    most: float = math.inf
    given_up: threading.Event = field(default_factory=threading.Event)


def kept_as(name: str) -> str:
    """The full name under which an import is kept. Raises InvalidRequest."""
    if not is_reference(name):
        layers.check_name(name)
        return name
    where = Reference.parse(name)
    if where.digest:
        raise InvalidRequest(f"{name} says what is in it by a digest", "give what you import a tag of its own")
    return str(where)


def opened(path: Path, spool: Spool) -> Archive:
    """The image at a path. Blocks. Raises NotFound, InvalidRequest (no image at all), BadImage, Unsupported, HostFault
    (no room to inflate it)."""
    what = _named(path)
    try:
        if path.is_dir():
            packing.check_image(path)
            if packing.is_layout(path):
                return _of_layout(what, lambda name: (path / name).open("rb"))
            return Archive(Contents(NO_CONFIG, "", None), (lambda: packing.packed(path),), (Blob("", 0),))
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidRequest(f"{what} is neither a file nor a directory")
        return _of_members(path, spool) or _of_tar(path)
    except FileNotFoundError as error:
        raise NotFound(f"there is no {error.filename or what} on this host") from error
    except OSError as error:
        raise InvalidRequest(f"{what} cannot be read: {error.strerror}") from error


def _named(path: Path) -> str:
    """What it is called: a file without a name is one that was sent to a server."""
    return "what was sent" if path.is_relative_to("/proc/self/fd") else str(path)


def _of_layout(what: str, find: Callable[[str], BinaryIO]) -> Archive:
    """`find` opens a file of the layout. The image for this host, of the index or of one that it names."""

    def blob(each: Blob) -> Open:
        return lambda: find(f"blobs/{each.digest.replace(':', '/')}")

    def read(each: Blob) -> bytes:
        with blob(each)() as file:
            return manifest.checked(file.read(manifest.MOST_BYTES), each.digest, f"a manifest in {what}")

    with find("index.json") as file:
        document = manifest.decoded(file.read(manifest.MOST_BYTES), f"the index of {what}")
    digest = ""
    for _ in range(8):  # an index may name an index
        entries = document.get("manifests") if not digest else ()
        if not isinstance(entries, list | tuple):
            raise BadImage(f"the index of {what} names no manifests")
        if len([each for each in entries if isinstance(each, dict) and "platform" not in each]) > 1:
            raise InvalidRequest(f"{what} holds several images", "`skopeo copy` one of them into a layout of its own")
        inner = manifest.chosen(document, what)
        if inner is None:
            break
        digest, document = inner.digest, manifest.decoded(read(inner), what)
    found = manifest.manifest(document, digest, what)
    contents = manifest.contents(manifest.decoded(read(found.config), what), what)
    _check_count(what, contents, len(found.layers))
    return Archive(contents, tuple(blob(each) for each in found.layers), found.layers, digest)


def _check_count(what: str, contents: Contents, count: int) -> None:
    if contents.diff_ids is None or len(contents.diff_ids) != count:
        raise BadImage(f"{what} has {count} layers, and its config names {len(contents.diff_ids or ())}")


class _Source:
    """A tar as a file that can be read here and there: where it is packed, as far as somebody has asked to `have` it.
    To be closed."""

    def __init__(self, path: Path, what: str, spool: Spool) -> None:
        self._what, self._spool = what, spool
        self.cut = False  # there is more, and no room for it
        self._pieces: Iterator[bytes] = iter(())
        self._packed = path.open("rb")
        self.file: BinaryIO = self._packed
        if not inflate.is_packed(self._packed.peek(4)[:4]):
            self._size = os.fstat(self.file.fileno()).st_size
            return
        self._size = 0
        self._pieces = inflate.inflated(self._packed, what)
        try:
            self._room = layers.Room.of(spool.directory)
            self.file = tempfile.TemporaryFile(dir=spool.directory)  # noqa: SIM115
        except OSError as error:
            self._packed.close()
            raise host_fault(error, f"inflate {what} in {spool.directory}") from error

    def close(self) -> None:
        self._packed.close()
        self.file.close()

    def have(self, end: float) -> int:
        """So many bytes of it, or all there are and is room for; how many it has now."""
        while self._size < end and (piece := next(self._pieces, b"")):
            try:
                small = self._size + len(piece) <= self._spool.most
                lasts = self._room.lasts(self._spool.directory, len(piece))
                if not (small and lasts) or self._spool.given_up.is_set():
                    self._pieces, self.cut = iter(()), True
                    break
                while piece:
                    written = os.pwrite(self.file.fileno(), piece, self._size)
                    self._size, piece = self._size + written, piece[written:]
            except OSError as error:
                raise host_fault(error, f"inflate {self._what} in {self._spool.directory}") from error
        return self._size


class _Members(unpack.Layer):
    """The headers of a tar."""

    def __init__(self, source: _Source) -> None:
        super().__init__(source.file, sys.maxsize)
        self._source = source
        self._words = 0

    def count(self, size: int) -> None:
        super().count(size)
        self._source.have(self.file.tell() + size)

    def skip(self, size: int) -> None:
        end = self.file.tell() + size
        if self._source.have(end) < end:
            raise unpack.Refused("it breaks off in the middle")
        self.file.seek(size, os.SEEK_CUR)

    def words(self, size: int) -> bytes:
        self._words += unpack.BLOCK + size
        if self._words > _MOST_WORDS:
            raise unpack.Refused(f"its headers say more than {_MOST_WORDS} bytes")
        return super().words(size)


class _Tar:
    """A tar of which the first members are known: where they are, and how long."""

    def __init__(self, source: _Source, what: str) -> None:
        self._what = what
        self.file = source.file
        self.failed = ""  # why the rest is not known
        self._found: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        try:
            self._look(_Members(source))
        except unpack.Refused as error:
            self.failed = str(error)

    def _look(self, layer: _Members) -> None:
        for count, (info, about, _) in enumerate(unpack.entries(layer)):
            if count >= _MOST_MEMBERS or info.type == tarfile.GNUTYPE_SPARSE:
                return  # no tool makes an image so
            name = posixpath.normpath(info.name).lstrip("/")
            plain = info.type in unpack.FILES and not any(word.startswith("GNU.sparse.") for word in about)
            self._links.pop(name, None)
            self._found[name] = (self.file.tell(), info.size) if plain else (0, -1)
            if info.type == tarfile.SYMTYPE:
                self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))
            elif info.type == tarfile.LNKTYPE:
                self._links[name] = posixpath.normpath(info.linkname).lstrip("/")
            layer.skip(info.size + -info.size % unpack.BLOCK if info.type in unpack.FILES else 0)

    @property
    def kind(self) -> str:
        """The file that says what image it is; "": it is none that is known. A root file system may have such files."""
        if "oci-layout" in self._found and "index.json" in self._found:
            return "index.json"
        roots = {name.partition("/")[0] for name in self._found}
        return "manifest.json" if "manifest.json" in self._found and roots.isdisjoint(packing.ROOTS) else ""

    def _where(self, name: str) -> tuple[int, int]:
        """Where a member is, and how long. Raises BadImage."""
        found = posixpath.normpath(name)
        for _ in range(_MOST_LINKS):  # `docker save` of old has a link for a layer that it has already
            found = self._links.get(found, found)
        if found not in self._found:
            why = f": {self.failed}" if self.failed else ""
            raise BadImage(f"{self._what} has no {name}, which it names itself{why}", "was it copied whole?")
        place, size = self._found[found]
        if size < 0:
            raise BadImage(f"in {self._what} {name} is no file")
        return place, size

    def size(self, name: str) -> int:
        return self._where(name)[1]

    def find(self, name: str) -> BinaryIO:
        """A member, to be read while this is open. Raises BadImage."""
        return io.BufferedReader(_Part(self.file.fileno(), *self._where(name)), 1 << 20)


class _Part(io.RawIOBase):
    """Some bytes of a file, which several may read at a time."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._at, self._end = fd, start, start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._end - self._at]
        count = os.preadv(self._fd, [view], self._at) if view else 0
        self._at += count
        return count


def _of_members(path: Path, spool: Spool) -> Archive | None:
    """A tar that holds a layout or what `docker save` writes; None: it is another tar, or none."""
    what = _named(path)
    with ExitStack() as unless_made:
        source = unless_made.enter_context(closing(_Source(path, what, spool)))
        tar = _Tar(source, what)
        if not tar.kind:
            return None
        source.have(math.inf)
        if source.cut:
            raise layers.no_room(f"inflate {what}")
        made = _of_layout(what, tar.find) if tar.kind == "index.json" else _of_docker(what, tar)
        made.closing.append(source)
        unless_made.pop_all()
        return made


def _of_docker(what: str, tar: _Tar) -> Archive:
    with tar.find("manifest.json") as file:
        images = manifest.decoded(b'{"images":' + file.read(manifest.MOST_BYTES) + b"}", what)["images"]
    try:
        (image,) = images
        config, names = str(image["Config"]), [str(each) for each in image["Layers"]]
    except (ValueError, TypeError, KeyError):
        count = len(images) if isinstance(images, list) else 0
        raise InvalidRequest(
            f"{what} holds {count} images", "`docker save` one at a time: each has a name of its own here"
        ) from None
    with tar.find(config) as file:
        contents = manifest.contents(manifest.decoded(file.read(manifest.MOST_BYTES), what), what)
    if len(names) > manifest.MOST_LAYERS:
        raise BadImage(f"{what} has {len(names)} layers, more than {manifest.MOST_LAYERS}")
    _check_count(what, contents, len(names))
    blobs = tuple(Blob(*each) for each in zip(contents.diff_ids or (), map(tar.size, names), strict=True))
    return Archive(contents, tuple(partial(tar.find, name) for name in names), blobs)


def _of_tar(path: Path) -> Archive:
    """A tar of a root file system."""
    contents = Contents(NO_CONFIG, "", None)
    return Archive(contents, (lambda: path.open("rb"),), (Blob("", path.stat().st_size),))

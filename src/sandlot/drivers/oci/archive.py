"""Images in files of this host: an OCI layout, what `docker save` writes, a root file system; or a tar of either.

What a file is, is seen in it. Its manifest and config are checked by digest; its layers by the digests of their tars,
while they are unpacked. Nothing is extracted here.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from sandlot.api import NO_CONFIG
from sandlot.drivers.oci import manifest
from sandlot.drivers.oci.manifest import Blob, Contents
from sandlot.errors import BadImage, InvalidRequest, NotFound

Open = Callable[[], BinaryIO]

# What is a root file system has one of these. Anything else that is a directory is most likely a mistake.
_ROOTS = ("bin", "etc", "lib", "usr", "sbin", "root", "home", "var")


@dataclass(frozen=True, slots=True)
class Archive:
    """An image in files: `layers` open each layer from the lowest up. Without `diff_ids` nobody knows what they should
    be. `closing` is open as long as they are used."""

    contents: Contents
    layers: tuple[Open, ...]
    blobs: tuple[Blob, ...]
    digest: str | None = None
    closing: list[BinaryIO | tarfile.TarFile] = field(default_factory=list)

    def close(self) -> None:
        for each in self.closing:
            each.close()


def opened(path: Path) -> Archive:
    """The image at a path. Blocks. Raises NotFound, InvalidRequest (no image at all), BadImage, Unsupported."""
    what = _named(path)
    try:
        if path.is_dir():
            return _of_layout(what, lambda name: (path / name).open("rb")) if _is_layout(path) else _of_directory(path)
        with path.open("rb") as file:
            packed = file.read(4)
        if packed[:2] == b"\x1f\x8b" or packed == b"\x28\xb5\x2f\xfd":
            return _of_tar(path)  # a tar of layers is not packed itself, for it has to be read here and there
        return _of_members(path) or _of_tar(path)
    except FileNotFoundError as error:
        raise NotFound(f"there is no {error.filename or what} on this host") from error
    except OSError as error:
        raise InvalidRequest(f"{what} cannot be read: {error.strerror}") from error


def _named(path: Path) -> str:
    """What it is called: a file without a name is one that was sent to a server."""
    return "what was sent" if path.is_relative_to("/proc/self/fd") else str(path)


def _is_layout(path: Path) -> bool:
    return (path / "index.json").is_file() and (path / "blobs").is_dir()


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
        if not digest and len([each for each in document["manifests"] if "platform" not in each]) > 1:
            raise InvalidRequest(f"{what} holds several images", "`skopeo copy` one of them into a layout of its own")
        inner = manifest.chosen(document, what)
        if inner is None:
            break
        digest, document = inner.digest, manifest.decoded(read(inner), what)
    found = manifest.manifest(document, digest, what)
    contents = manifest.contents(manifest.decoded(read(found.config), what), what)
    return Archive(contents, tuple(blob(each) for each in found.layers), found.layers, digest)


def _of_members(path: Path) -> Archive | None:
    """A tar that holds a layout or what `docker save` writes; None: it is another tar, or none."""
    what = _named(path)
    try:
        tar = tarfile.open(path, "r:")  # noqa: SIM115  (open as long as its layers are read)
    except tarfile.TarError:
        return None

    def find(name: str) -> BinaryIO:
        try:
            found = tar.extractfile(name)
        except KeyError:
            raise BadImage(f"{what} has no {name}, which it names itself") from None
        if found is None:
            raise BadImage(f"in {what} {name} is no file")
        return cast(BinaryIO, found)

    try:
        names = _first_names(tar)
        if "index.json" in names:
            made = _of_layout(what, find)
        elif "manifest.json" in names:
            made = _of_docker(what, tar, find)
        else:
            tar.close()
            return None
    except tarfile.TarError as error:
        raise BadImage(f"{what} is damaged: {error}", "was it copied whole?") from error
    made.closing.append(tar)
    return made


def _first_names(tar: tarfile.TarFile) -> set[str]:
    """Names in a tar. Of a root file system only some: it has far more members than an image has parts."""
    names: set[str] = set()
    while len(names) < 4 * manifest.MOST_LAYERS and (member := tar.next()) is not None:
        names.add(member.name.removeprefix("./"))
    return names


def _of_docker(what: str, tar: tarfile.TarFile, find: Callable[[str], BinaryIO]) -> Archive:
    with find("manifest.json") as file:
        images = manifest.decoded(b'{"images":' + file.read(manifest.MOST_BYTES) + b"}", what)["images"]
    try:
        (image,) = images
        config, layers = str(image["Config"]), [str(each) for each in image["Layers"]]
    except (ValueError, TypeError, KeyError):
        count = len(images) if isinstance(images, list) else 0
        raise InvalidRequest(
            f"{what} holds {count} images", "`docker save` one at a time: each has a name of its own here"
        ) from None
    with find(config) as file:
        contents = manifest.contents(manifest.decoded(file.read(manifest.MOST_BYTES), what), what)
    if len(contents.diff_ids) != len(layers):
        raise BadImage(f"{what} has {len(layers)} layers, and its config names {len(contents.diff_ids)}")
    blobs = tuple(
        Blob(diff_id, tar.getmember(name).size) for name, diff_id in zip(layers, contents.diff_ids, strict=True)
    )
    return Archive(contents, tuple(partial(find, name) for name in layers), blobs)


def _of_tar(path: Path) -> Archive:
    """A tar of a root file system."""
    contents = Contents(NO_CONFIG, "", ())
    return Archive(contents, (lambda: path.open("rb"),), (Blob("", path.stat().st_size),))


def _of_directory(path: Path) -> Archive:
    """A root file system. It is read as a tar."""
    if not any(os.path.lexists(path / name) for name in _ROOTS):
        raise InvalidRequest(
            f"{path} is no root file system and no image: it has no {', '.join(_ROOTS[:4])}, and no index.json"
        )
    return Archive(Contents(NO_CONFIG, "", ()), (lambda: tar_of(path),), (Blob("", 0),))


def tar_of(path: Path) -> BinaryIO:
    """A directory as a tar, written by a thread while it is read."""
    read, write = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        try:
            with (
                os.fdopen(write, "wb") as out,
                tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                for each in sorted(path.iterdir()):
                    tar.add(each, each.name)
                tar.addfile(tar.gettarinfo(path, "."))
        except BrokenPipeError:
            pass
        except OSError as error:
            reading.failed = error

    reading = _Reading(read)
    threading.Thread(target=work, name="sandlot-tar", daemon=True).start()
    return io.BufferedReader(reading, 1 << 20)


class _Reading(io.FileIO):
    """The end of a pipe whose writer may have failed: that is told at its end."""

    failed: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if count == 0 and self.failed is not None:
            raise self.failed
        return count

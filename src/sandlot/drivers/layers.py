"""Snapshots on disk: named images that lie over another image, as layers that are copied once and never changed.

Owns `images/` of a state directory, which all nodes with that directory share:

    NAME.json       what an image is: its base, its layers from the lowest up, its size
    layers/ID/      the files of one layer, owners as the box saw them
    layers/ID.lock  locked by whoever writes the layer, and, shared, by each box that stands on it

A layer that no image names and nobody has locked is removed. Nothing here copies a file: the driver does, inside.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import secrets
import shutil
import stat
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandlot.api import ImageInfo
from sandlot.errors import Conflict, InvalidRequest, NotFound

# Each layer is one more directory to look a name up in; the kernel takes many more, a program's start does not.
MOST_LAYERS = 16

# Images that were given no name begin with this.
FORK = "fork-"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An image's file."""

    info: ImageInfo
    layers: tuple[str, ...]  # ids, the lowest first


class Layer:
    """One that is being written: `path` is an empty directory. It is dropped unless it is `named`."""

    def __init__(self, store: Layers) -> None:
        self.id = secrets.token_hex(8)
        self._store = store
        self.path = store.layer_path(self.id)
        self._lock = store.lock(self.id, fcntl.LOCK_EX)
        self.path.mkdir(mode=0o755)

    def close(self) -> None:
        os.close(self._lock)

    def downgrade(self) -> None:
        """From a writer's lock to a user's: for as long as this is open it cannot be removed."""
        fcntl.flock(self._lock, fcntl.LOCK_SH)


class Layers:
    """The snapshots of one state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._layers = directory / "layers"

    def layer_path(self, layer: str) -> Path:
        return self._layers / layer

    def begin(self) -> Layer:
        """A new layer to be filled. Raises OSError."""
        self._layers.mkdir(mode=0o755, parents=True, exist_ok=True)
        return Layer(self)

    def lock(self, layer: str, how: int) -> int:
        """A descriptor that holds the layer's lock. Raises BlockingIOError."""
        fd = os.open(self._layers / f"{layer}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def use(self, snapshot: Snapshot) -> list[int]:
        """Locks that keep its layers where they are. Raises NotFound when it is being deleted."""
        locks: list[int] = []
        try:
            for layer in snapshot.layers:
                locks.append(self.lock(layer, fcntl.LOCK_SH))
                if not self.layer_path(layer).is_dir():
                    raise NotFound(f"the image {snapshot.info.name} was deleted a moment ago")
        except BaseException as error:
            for fd in locks:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise NotFound(f"the image {snapshot.info.name} was deleted a moment ago") from error
            raise
        return locks

    def name(self, info: ImageInfo, layers: tuple[str, ...]) -> Snapshot:
        """Make an image of layers. Raises Conflict when there is one of that name."""
        text = json.dumps({"info": info.model_dump(), "layers": layers})
        path = self._directory / f"{info.name}.json"
        partial = self._directory / f".{secrets.token_hex(8)}"
        partial.write_text(text)
        try:
            os.link(partial, path)  # whole or not at all, and never over another
        except FileExistsError:
            raise Conflict(
                f"there is an image {info.name} already", "choose another name, or delete that one first"
            ) from None
        finally:
            partial.unlink()
        return Snapshot(info, layers)

    def find(self, name: str) -> Snapshot:
        """Raises NotFound."""
        try:
            if not _NAME.fullmatch(name):
                raise FileNotFoundError
            found = json.loads((self._directory / f"{name}.json").read_text())
        except FileNotFoundError:
            names = ", ".join(f"`{each.info.name}`" for each in self.all()[:10] if not each.info.name.startswith(FORK))
            raise NotFound(
                f"there is no image {name!r} on this node", f"images that exist: `host`{', ' if names else ''}{names}"
            ) from None
        return Snapshot(ImageInfo(**found["info"]), tuple(found["layers"]))

    def all(self) -> list[Snapshot]:
        found = []
        for path in sorted(self._directory.glob("[!.]*.json")):
            with suppress(NotFound):  # deleted meanwhile
                found.append(self.find(path.stem))
        return found

    def delete(self, name: str) -> None:
        """The name goes at once, its layers when nothing stands on them any more. Raises NotFound."""
        self.find(name)
        (self._directory / f"{name}.json").unlink(missing_ok=True)

    def unused(self) -> list[str]:
        """Layers that no image names. An image without a name that nobody stands on is a dead node's and goes first."""
        if not self._layers.is_dir():
            return []
        for each in self.all():
            if each.info.name.startswith(FORK):
                with suppress(BlockingIOError, NotFound):
                    os.close(self.lock(each.layers[-1], fcntl.LOCK_EX))
                    self.delete(each.info.name)
        named = {layer for each in self.all() for layer in each.layers}
        return [path.stem for path in self._layers.glob("*.lock") if path.stem not in named]

    def drop(self, layer: str) -> bool:
        """Remove a layer that no image names. False: a box stands on it. Raises OSError when its files resist."""
        try:
            lock = self.lock(layer, fcntl.LOCK_EX)
        except BlockingIOError:
            return False
        try:
            if any(layer in each.layers for each in self.all()):  # named since
                return False
            if self.layer_path(layer).exists():
                shutil.rmtree(self.layer_path(layer), onerror=_insist)
            (self._layers / f"{layer}.lock").unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True

    def prune(self) -> None:
        """Remove what nothing needs. What resists stays, for a node with more rights."""
        for layer in self.unused():
            with suppress(OSError):
                self.drop(layer)


def check_name(name: str) -> None:
    """Raises InvalidRequest unless it can be an image's name."""
    if not _NAME.fullmatch(name) or name == "host" or name.startswith(FORK):
        raise InvalidRequest(
            f"{name!r} cannot be the name of a snapshot",
            f"use small letters, digits, `.`, `_` and `-`; not `host`, and not `{FORK}…`",
        )


def _insist(_function: object, name: str, _error: object) -> None:
    """A directory whose own mode shuts its owner out."""
    path = Path(name)
    path.parent.chmod(stat.S_IRWXU)
    if path.is_dir() and not path.is_symlink():
        path.chmod(stat.S_IRWXU)
        shutil.rmtree(path)
    else:
        path.unlink()


def export(paths: list[Path], out: int, root: int) -> None:
    """Layers, the lowest first, as one tar in the form of OCI layers; files of the user `root` are root's. Blocks.
    Raises OSError (EPIPE: nobody reads)."""

    def owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uname = info.gname = ""
        if root and info.uid == root:
            info.uid = info.gid = 0
        return info

    with os.fdopen(os.dup(out), "wb") as file, tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            _export(tar, path, owner)


def _export(tar: tarfile.TarFile, top: Path, owner: Callable[[tarfile.TarInfo], tarfile.TarInfo]) -> None:
    for directory, names, files in os.walk(top):
        here = Path(directory)
        inside = here.relative_to(top)
        if here != top and _is_opaque(here):
            _mark(tar, inside / ".wh..wh..opq")
        for name in sorted(names):
            tar.add(here / name, str(inside / name), recursive=False, filter=owner)
        for name in sorted(files):
            what = (here / name).lstat()
            if stat.S_ISCHR(what.st_mode) and what.st_rdev == 0:
                _mark(tar, inside / f".wh.{name}")
            elif not stat.S_ISSOCK(what.st_mode):
                tar.add(here / name, str(inside / name), recursive=False, filter=owner)


def _mark(tar: tarfile.TarFile, name: Path) -> None:
    info = tarfile.TarInfo(str(name))
    info.mtime = int(time.time())
    tar.addfile(info, io.BytesIO())


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, "user.overlay.opaque") == b"y"
    except OSError:
        return False

"""Images on disk, as layers that are written once and never changed.

Owns `images/` of a state directory, which all nodes with that directory share:

    NAME.json       what an image is: its base, its layers from the lowest up, its size; the name quoted as in a URL
    NAME.lock       locked by who fetches the image of that name
    .ID             what an image is before it has its name
    layers/ID/      the files of one layer, owners as the box saw them
    layers/ID.lock  locked by whoever writes the layer, and, shared, by each box that stands on it

A snapshot lies over another image: `host`, a directory, or one whose lowest layer is a whole root file system, as that
of a pulled image is. A layer that no image names and nobody has locked is removed. Nothing here copies a file: the
driver does, inside.
Nobody but the node's user may enter `images/`, for a layer's set-id programs are as good as those of the host.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from sandlot import packing
from sandlot.api import STEP, ImageInfo, is_reference
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, Unsupported, host_fault

# Each layer is one more directory to look a name up in; the kernel takes many more, a program's start does not.
MOST_LAYERS = 16

# Images that were given no name begin with this.
FORK = "fork-"
# Neither they nor the steps of a build, which are named by a hash of all that made them, are listed.
HIDDEN = (FORK, STEP)

# What is left of a disk for others: a twentieth of what is free, at most so much (bytes).
_MOST_LEFT = 1 << 30

# How often who waits for another node's pull looks whether it is over (seconds).
_LOOK_SECONDS = 0.2

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_STEP = re.compile(STEP + r"[0-9a-f]{32}")
_LAYER = re.compile(r"[0-9a-f]{16}")
# An image's file that is not linked to its name after so many seconds never will be: its node was killed.
_UNFINISHED_SECONDS = 60

# How the files of a container's layer begin that say what is gone from those below it.
_MARK = ".wh."
# What group and others may do.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# A directory that is gone through and neither read nor, where it is a link, followed.
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Room:
    """What images may take of a disk, so that room is left for others."""

    bytes: int
    entries: float  # infinite where files are not counted
    block: int  # bytes that the smallest file takes

    @classmethod
    def of(cls, directory: Path | str) -> Room:
        """Raises OSError."""
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        entries = found.f_favail - found.f_favail // 20 if found.f_files else math.inf
        return cls(free - min(free // 20, _MOST_LEFT), entries, found.f_frsize)

    def lasts(self, directory: Path | str, size: int) -> bool:
        """Whether what was left for others is free still after so many bytes more: whoever else has counted the same
        room takes of it too. Raises OSError."""
        now = Room.of(directory)
        return now.bytes - size >= min(self.bytes // 20, _MOST_LEFT) and now.entries >= self.entries / 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An image's file."""

    info: ImageInfo
    layers: tuple[str, ...]  # ids, the lowest first

    @property
    def roots(self) -> int:
        """How many of the layers, the lowest, are not over the base but it: 1, or 0 where that is not in the store."""
        return int(self.info.base != "host" and not self.info.base.startswith("/"))


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

    def sync(self) -> None:
        """Have its files on the disk before it has a name: else a host that loses power may keep the name and lose what
        it stands for. Blocks. Raises HostFault."""
        # The store's directory, on the same file system: the layer itself may be closed to all but a user of an image.
        fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _libc.syncfs(fd) != 0:
                number = ctypes.get_errno()
                raise host_fault(OSError(number, os.strerror(number)), f"write {self.path} to the disk")
        finally:
            os.close(fd)


class Layers:
    """The images of one state directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._layers = directory / "layers"
        self._looking = threading.Lock()  # two who look at once whether a fork is in use would each be in the way

    def layer_path(self, layer: str) -> Path:
        return self._layers / layer

    def _file(self, name: str) -> Path:
        """Where an image of that name is. Raises FileNotFoundError for what cannot be one."""
        if not _NAME.fullmatch(name) and not is_reference(name):
            raise FileNotFoundError
        return self.directory / f"{quote(name, safe='')}.json"

    def begin(self) -> Layer:
        """A new layer to be filled. Raises OSError, HostFault."""
        self._layers.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_private()
        return Layer(self)

    def _check_private(self) -> None:
        """Raises HostFault unless nobody but this user gets at the layers: they hold set-id programs and file
        capabilities just as a box made them, which count here, outside, for whoever runs them."""
        for directory in (self.directory, self._layers):
            try:
                # A link of somebody else's could lead anywhere, by now or later.
                ours = {directory.lstat().st_uid, directory.stat().st_uid} == {os.geteuid()}
                if ours and directory.stat().st_mode & _OTHERS:
                    directory.chmod(stat.S_IRWXU)
                private = ours and not directory.stat().st_mode & _OTHERS
            except FileNotFoundError:
                continue
            except OSError:
                private = False
            if not private:
                raise HostFault(
                    f"{directory} is not this user's alone: programs that sandboxes made could be run from there",
                    f"`chown {os.geteuid()} {directory} && chmod 700 {directory}`, or another state directory",
                )

    def lock(self, layer: str, how: int) -> int:
        """A descriptor that holds the layer's lock. Raises BlockingIOError."""
        fd = os.open(self._layers / f"{layer}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def use(self, snapshot: Snapshot, wait: bool = True) -> list[int]:
        """Locks that keep its layers where they are. Raises NotFound when it is being deleted, HostFault; and, unless
        it may `wait` until somebody has looked whether a layer is in use, BlockingIOError."""
        self._check_private()
        locks: list[int] = []
        try:
            for layer in snapshot.layers:
                locks.append(self._lock_to_use(layer, snapshot.info.name, wait))
                if not self.layer_path(layer).is_dir():
                    raise NotFound(f"the image {snapshot.info.name} was deleted a moment ago")
        except BaseException:
            for fd in locks:
                os.close(fd)
            raise
        return locks

    def wait_for(self, snapshot: Snapshot) -> None:
        """Until `use` would not have to wait. Blocks, for a moment. Raises what it does."""
        for fd in self.use(snapshot):
            os.close(fd)

    def _lock_to_use(self, layer: str, image: str, wait: bool) -> int:
        try:
            return self.lock(layer, fcntl.LOCK_SH)
        except BlockingIOError:
            if not wait:
                raise
        # Who removes a layer has seen, under its lock, that no image names it. Of one that is named somebody only looks
        # whether it is in use: that takes a moment.
        if not any(layer in each.layers for each in self.all()):
            raise NotFound(f"the image {image} was deleted a moment ago")
        fd = os.open(self._layers / f"{layer}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
        return fd

    async def only_one(self, name: str) -> int:
        """A descriptor that holds the lock of those who fetch an image of this name, once nobody else has it."""
        self._layers.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._file(name).with_suffix(".lock")
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_ino == os.fstat(fd).st_ino:  # else it was removed by who had it
                    return fd
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            await asyncio.sleep(_LOOK_SECONDS)  # no event tells that another process lets go of a lock

    def let_go(self, name: str, lock: int) -> None:
        self._file(name).with_suffix(".lock").unlink(missing_ok=True)
        os.close(lock)

    def name(self, info: ImageInfo, layers: tuple[str, ...], replace: bool = False) -> Snapshot:
        """Make an image of layers. Raises Conflict when there is one of that name that is not to be replaced; but a
        built one takes the place of an older one, unless that is the same: then it stays. Raises HostFault."""
        text = json.dumps({"info": info.model_dump(), "layers": layers})
        path = self._file(info.name)
        unfinished = self.directory / f".{secrets.token_hex(8)}"
        try:
            with unfinished.open("w") as file:
                file.write(text)
                if not info.name.startswith(FORK):  # one without a name does not outlive its node anyway
                    file.flush()
                    os.fsync(file.fileno())  # else a host that loses power may keep the name and lose the text
            if replace:
                unfinished.rename(path)
            else:
                os.link(unfinished, path)  # whole or not at all, and never over another
        except FileExistsError:
            with suppress(NotFound):
                older = self.find(info.name)
                if info.kind == older.info.kind == "built":
                    if older == Snapshot(info.model_copy(update={"created_at": older.info.created_at}), layers):
                        return older
                    unfinished.replace(path)
                    return Snapshot(info, layers)
            raise taken(info.name) from None
        except OSError as error:
            raise host_fault(error, f"write down the image {info.name} in {self.directory}") from error
        finally:
            unfinished.unlink(missing_ok=True)
        return Snapshot(info, layers)

    def find(self, name: str) -> Snapshot:
        """Raises NotFound, HostFault."""
        self._check_private()
        try:
            return _read(name, self._file(name).read_text())
        except FileNotFoundError:
            shown = [f"`{each.info.name}`" for each in self.all() if not each.info.name.startswith(HIDDEN)]
            hint = f"images that exist: {', '.join(['`host`', *shown[:10]])}"
            if _NAME.fullmatch(name):
                hint += f"; that of a registry has its tag in its name: `{name}:latest`"
            raise NotFound(f"there is no image {name!r} on this node", hint) from None
        except ValueError as error:
            raise NotFound(
                f"the image {name} is damaged: {self._file(name)} does not say what it is",
                f"delete it: `sandlot image rm {name}`",
            ) from error

    def of_digest(self, digest: str) -> Snapshot | None:
        """An image that was pulled or imported, as its manifest of this digest says it is, under whatever name."""
        return next((each for each in self.all() if each.info.digest == digest), None)

    def all(self) -> list[Snapshot]:
        """Those that are whole. Raises HostFault."""
        self._check_private()
        found = []
        for path in sorted(self.directory.glob("[!.]*.json")):
            with suppress(FileNotFoundError, ValueError):  # deleted meanwhile, or damaged
                found.append(_read(unquote(path.stem), path.read_text()))
        return found

    def delete(self, name: str) -> None:
        """The name goes at once, its layers when nothing stands on them any more. Raises NotFound, HostFault."""
        self._check_private()
        try:
            self._file(name).unlink()
        except FileNotFoundError:
            self.find(name)  # says which there are

    def unused(self) -> list[str]:
        """Layers that no image names. An image without a name that nobody stands on is a dead node's and goes first,
        and so does what a node was killed over while it fetched or named one."""
        if not self._layers.is_dir():
            return []
        for path in self.directory.glob(".*"):
            if _LAYER.fullmatch(path.name[1:]):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS:
                        path.unlink()
        for path in self.directory.glob("*.lock"):
            with suppress(OSError):
                self._remove_lock(path)
        self._forget_forks()
        named = {layer for each in self.all() for layer in each.layers}
        return [path.stem for path in self._layers.glob("*.lock") if path.stem not in named]

    def _forget_forks(self) -> None:
        """Those on which no box stands any more."""
        with self._looking:
            for each in self.all():
                if each.info.name.startswith(FORK):
                    with suppress(BlockingIOError, NotFound):
                        os.close(self.lock(each.layers[-1], fcntl.LOCK_EX))
                        self.delete(each.info.name)

    def _remove_lock(self, path: Path) -> None:
        """That of a name which nobody fetches any more. Raises BlockingIOError: somebody does."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(fd).st_ino:
                path.unlink()
        finally:
            os.close(fd)

    def idle(self) -> list[ImageInfo]:
        """Those that can be had again and on which no box stands: a build's steps, and the pulled images on which no
        other image stands either."""
        self._forget_forks()
        found = self.all()
        others = [each for each in found if each.info.kind != "pulled" and not each.info.name.startswith(STEP)]
        idle = []
        for each in found:
            step = each.info.name.startswith(STEP)
            if not step and (each.info.kind != "pulled" or any(each.layers[0] in other.layers for other in others)):
                continue
            with suppress(BlockingIOError):
                os.close(self.lock(each.layers[-1], fcntl.LOCK_EX))
                idle.append(each.info)
        return idle

    def drop(self, layer: str) -> bool:
        """Remove a layer that no image names. False: a box stands on it. Raises OSError when its files resist, and
        RecursionError when its directories are too deep for this process, as a box can make them."""
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


def no_room(doing: str) -> HostFault:
    """There is less `Room` than it takes to do that."""
    return HostFault(
        f"there is no space left to {doing}",
        "free some (`sandlot image prune`), or use another state directory",
    )


def taken(name: str) -> Conflict:
    return Conflict(f"there is an image {name} already", "choose another name, or delete that one first")


def _read(name: str, text: str) -> Snapshot:
    """An image from the text of its file. Raises ValueError: it is damaged."""
    try:
        found = json.loads(text)
        snapshot = Snapshot(ImageInfo(**found["info"]), tuple(found["layers"]))
        whole = snapshot.info.name == name and bool(snapshot.layers)
        if whole and all(_LAYER.fullmatch(layer) for layer in snapshot.layers):
            return snapshot
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r} in an image's file") from error
    raise ValueError("an image's file names another image, or no layers")


def check_name(name: str) -> None:
    """Raises InvalidRequest unless it can be the name of an image that is made here."""
    hidden = name.startswith(HIDDEN) and not _STEP.fullmatch(name)
    if not _NAME.fullmatch(name) or name == "host" or hidden:
        raise InvalidRequest(
            f"{name!r} cannot be the name of an image that is made here",
            f"use small letters, digits, `.`, `_` and `-`; not `host`, and not `{FORK}…` or `{STEP}…`",
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


def export(paths: list[Path], base: Path | None, out: int, root: int) -> None:
    """Layers, the lowest first, as one tar in the form of an OCI layer over `base` (None: over nothing). Of an ordinary
    user (`root`; 0: ids are as the box saw them) that user's files are root's. Blocks. Raises BrokenPipeError (nobody
    reads), HostFault, Unsupported for what cannot be read, or be said in this form."""
    tops = paths[::-1]
    over = base is not None
    try:
        with closing(Tree(base or paths[0])) as below:
            if root:  # before the first byte: a tar that breaks off is easily taken for a whole one
                for _, path in _merged(tops, "", below, over):
                    if path is not None:
                        _check_ours(path, root)
            with os.fdopen(os.dup(out), "wb") as file, packing.opened(file) as tar:
                if not over:  # of a snapshot the directory itself says nothing
                    packing.add(tar, tops[0], ".", root)
                for name, path in _merged(tops, "", below, over):
                    if path is not None:
                        packing.add(tar, path, name, root)
                    else:
                        mark = tarfile.TarInfo(name)
                        mark.mtime = int(time.time())
                        tar.addfile(mark, io.BytesIO())
    except PermissionError as error:
        raise unreadable(str(error.filename)) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise host_fault(error, f"read {error.filename or 'the files of the image'} or write the tar") from error
        raise _too_deep(tops) from error
    except RecursionError as error:
        raise _too_deep(tops) from error


def _too_deep(tops: list[Path]) -> Unsupported:
    return Unsupported(f"directories in {tops[0]} are too deep to be exported", "pack them with `tar` in a sandbox")


def _check_ours(path: Path, root: int) -> None:
    """Raises Unsupported unless a file of a layer is the user's own and can be read. Whose it is inside when it belongs
    to an id that is lent, only the box knew."""
    what = path.lstat()
    ours = what.st_uid == root and what.st_gid == os.getegid()
    if not ours or (stat.S_ISREG(what.st_mode) and not os.access(path, os.R_OK)):
        raise unreadable(str(path))


def _merged(here: list[Path], inside: str, base: Tree, over: bool) -> Iterator[tuple[str, Path | None]]:
    """What directories of layers, the highest first, show over one another: its name in the tar and where it is, or
    None for the mark of what is gone. `over`: the base's directory shows through them."""
    for name in sorted({each.name for directory in here for each in directory.iterdir()}):
        path = inside + name
        if name.startswith(_MARK):
            raise Unsupported(f"a container's layer cannot hold /{path}: there the name says that a file is deleted")
        found, shows = _over_one_another([directory / name for directory in here], over)
        what, before = found[0].lstat(), base.look(path)[0] if over else None
        if stat.S_ISDIR(what.st_mode):
            yield path, found[0]
            was_directory = before is not None and stat.S_ISDIR(before.st_mode)
            if was_directory and not shows:
                yield f"{path}/{_MARK}{_MARK}.opq", None
            yield from _merged(found, f"{path}/", base, was_directory and shows)
        elif not is_whiteout(what) and not stat.S_ISSOCK(what.st_mode):
            yield path, found[0]
        elif before is not None:
            yield f"{inside}{_MARK}{name}", None


def _over_one_another(places: list[Path], over: bool) -> tuple[list[Path], bool]:
    """Of one path in several layers, the highest first, those that are seen: a file, or directories; and whether what
    is below them all shows through."""
    found: list[Path] = []
    for place in places:
        try:
            what = place.lstat()
        except FileNotFoundError:
            continue
        directory = stat.S_ISDIR(what.st_mode)
        if directory or not found:
            found.append(place)
        if not directory or _is_opaque(place):
            return found, False
    return found, over


class Tree:
    """A directory tree that a box may have written, looked at from outside: no link in it is followed, for it would be
    followed into the host. To be closed. Raises Unsupported for what the node may not read."""

    def __init__(self, top: Path) -> None:
        self._path = top
        self._top = os.open(top, _PLACE)
        # The directory of the last question, since the next one is mostly about a file beside it: its path, itself
        # (None: there is none) and whether this tree hides what trees below it have in it.
        self._at: str | None = None
        self._fd: int | None = None
        self._hides = False

    def close(self) -> None:
        os.close(self._top)
        if self._fd is not None:
            os.close(self._fd)

    def look(self, path: str) -> tuple[os.stat_result | None, bool]:
        """What is at a path (None: nothing), and whether the tree hides what trees below it have there."""
        parent, _, name = path.rpartition("/")
        try:
            self._enter(parent)
            what = None if self._fd is None else os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            what = None
        except PermissionError as error:
            raise unreadable(f"{self._path}/{path}") from error
        return what, self._hides

    def names(self, path: str) -> list[str]:
        """The names in a directory; none in what is no directory."""
        try:
            self._enter(path)
            if self._fd is None:
                return []
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except PermissionError as error:
            raise unreadable(f"{self._path}/{path}") from error
        try:
            return os.listdir(fd)  # noqa: PTH208  (a path would be looked up again)
        finally:
            os.close(fd)

    def _enter(self, path: str) -> None:
        if path == self._at:
            return
        if self._fd is not None:
            os.close(self._fd)
        self._at, self._fd, self._hides = None, None, False
        fd = os.dup(self._top)
        try:
            for name in path.split("/") if path else ():
                inner = os.open(name, _PLACE, dir_fd=fd)
                os.close(fd)
                fd = inner
                # By its name in /proc: the kernel reads no attribute through a descriptor of a mere place.
                self._hides = self._hides or _is_opaque(Path(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            os.close(fd)
        except NotADirectoryError:  # a file or a link, which hides the directory that a tree further down may have
            os.close(fd)
            self._hides = True
        except BaseException:
            os.close(fd)
            raise
        else:
            self._fd = fd
        self._at = path


def is_whiteout(what: os.stat_result) -> bool:
    """Whether it stands for the deletion of what lies below."""
    return stat.S_ISCHR(what.st_mode) and what.st_rdev == 0


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, "user.overlay.opaque") == b"y"
    except PermissionError:
        raise
    except OSError:
        return False


def unreadable(path: str) -> Unsupported:
    return Unsupported(
        f"the node may not read {path}: it belongs to an id that is only lent to the node's user, or its mode shuts "
        "its owner out",
        "do this from the start on a node that is root: it may read everything",
    )

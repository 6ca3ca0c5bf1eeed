"""How to get a box on this host: the two protocols that a driver implements.

A driver makes boxes and knows nothing of ids that users see, of deadlines, of output caps or of who asks: that is
`node/node.py`. All drivers must pass `drivers/conformance.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandlot.api import (
    Capability,
    Change,
    Ending,
    ImageConfig,
    ImageInfo,
    LayerProgress,
    PullProgress,
    SandboxSpec,
    Stats,
)


@dataclass(frozen=True, slots=True)
class Spawn:
    """A process to start in a box. `argv[0]` is looked up in PATH of `env`, inside the box."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: int = 0
    tty: bool = False  # its standard input is a terminal of the box, and shall be its controlling one


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a box is to know of the node that makes it, for the case that the node dies."""

    grace: float = 0.0  # seconds that the box outlives it; 0: not at all, and nothing is recorded
    note: str = ""  # the node's own, told again to whoever adopts the box
    parked: bool = False  # it waits for `claim` and is ended by any adoption before that


NOT_KEPT = Keeping()

# Pseudo terminals of a box. The host has 4,096 in all, of which 1,024 are reserved, and one box must not take them all;
# two hundred shells, which have one each, and a few for people must fit.
PTYS = 256

# What can be held of a process: descriptors, and bytes of a note about them.
MOST_HELD = 8
MOST_NOTE = 500


@dataclass(frozen=True, slots=True)
class Hold:
    """What is to be kept of a process for a node that adopts its box. The driver duplicates the descriptors."""

    fds: tuple[int, ...]  # at most 8
    note: str  # at most 500 bytes

    def __post_init__(self) -> None:
        size = len(os.fsencode(self.note))
        if len(self.fds) > MOST_HELD or size > MOST_NOTE:
            raise ValueError(f"{len(self.fds)} descriptors and a note of {size} bytes are more than can be held")


@dataclass(frozen=True, slots=True)
class Look:
    """What to tell of: the thing at `path`, or with a `pattern` (`**/*.c`) what that names below it, `**` the thing
    itself too. With a `text` the lines that hold it, of the files among them."""

    path: str
    pattern: str | None = None
    follow: bool = False  # a link at the end of `path`
    contents: bool = False  # of files, behind each
    text: str | None = None
    regex: bool = False
    any_case: bool = False  # only of a regex


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Exactly one of `code`, `signal`, `error` says it.

    `error` is the errno with which the program could not be started (ENOENT: not found, in PATH or its cwd).
    """

    code: int | None = None
    signal: int | None = None
    error: int | None = None
    error_step: str = ""  # which step failed: "chdir", "exec", …
    cpu_seconds: float = 0.0
    oom: bool = False  # the kernel killed something of this process's tree for memory


@dataclass(frozen=True, slots=True)
class Death:
    """Why a box is gone, as far as the driver can tell."""

    ending: Ending
    detail: str | None = None


class Process(Protocol):
    """A process that runs in a box."""

    pid: int  # as seen inside the box

    async def wait(self) -> Exit:
        """How it ended. Returns at once if it has; if the box dies first, Exit(signal=9)."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to it and to those of its descendants that stayed in its process group. Raises
        ProcessLookupError when it has ended."""
        ...

    async def kill_tree(self) -> None:
        """SIGKILL it and all its descendants, those that left its group or session too. Idempotent."""
        ...

    async def hold(self, more: Hold) -> Callable[[], None]:
        """Keep more of a process that was spawned with a `hold`, until what is returned is called, or `release`. Raises
        OSError, HostFault."""
        ...

    async def release(self) -> None:
        """Let go of what the driver keeps for it; its background children live on. Idempotent, after wait()."""
        ...


class Box(Protocol):
    """One live box."""

    losses: tuple[str, ...]  # defaults that are not kept, a sentence each
    paused: bool
    death: asyncio.Future[Death]  # resolves once, when the box is gone for whatever reason

    @property
    def config(self) -> ImageConfig:
        """What its image says of commands, as far as they can be run so here."""
        ...

    async def spawn(self, what: Spawn, stdin: int, stdout: int, stderr: int, hold: Hold | None = None) -> Process:
        """Start a process on these descriptors. They are duplicated: the caller still owns and closes its own.
        A program that cannot be started is an Exit with `error`, not an exception. `hold` is kept until `release`."""
        ...

    async def listen(self, port: int, note: str | None = None) -> socket.socket:
        """A non-blocking TCP listener on 127.0.0.1:port inside. Raises Conflict when taken. The caller owns it. With a
        `note` it is kept for a node that adopts the box."""
        ...

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:port inside. Raises NotFound when nothing listens. The caller owns it."""
        ...

    async def open(self, path: str, flags: int, mode: int = 0o644, user: int = 0, parents: bool = False) -> int:
        """A descriptor of a path as `user` sees it inside, so that no symlink leads out. `parents` makes missing
        directories. Raises OSError with the errno from inside. The caller owns it."""
        ...

    async def unpack(self, path: str, source: int, user: int = 0) -> None:
        """Unpack the tar that is read from the pipe `source`, to its end, as `NodeAPI.upload` says. Raises OSError with
        the errno from inside and the path that it is about: EBADMSG (no tar, or half of one), ENOTSUP (an entry that is
        neither file, directory nor link), EINVAL (a `..`). The caller owns the descriptor; cancelled, nothing more is
        written."""
        ...

    # What follows is done as root inside. OSErrors have the errno from inside, and a path where it is another than the
    # one that was asked for. InvalidRequest: the box has no memory, or no process, left for it.

    async def look(self, what: Look, out: int) -> None:
        """Tell what is there through the pipe `out`: an `Entry` for each thing, or a `Hit` for each line. Returns when
        all was told; cancelled, nothing more is. The caller owns the descriptor. Raises OSError; EINVAL: the text is no
        expression, and why."""
        ...

    async def store(self, path: str, source: int, mode: int = 0o644, append: bool = False) -> None:
        """The file at `path` becomes what comes through the pipe `source` in the form of `pieces`, as
        `NodeAPI.write_file` says: when that breaks off (EBADMSG) it is as it was. Raises OSError: EISDIR, ENXIO (a
        device, pipe or socket), EOPNOTSUPP (the kernel's own). The caller owns the descriptor."""
        ...

    async def make_directory(self, path: str, mode: int = 0o755, parents: bool = False) -> None:
        """As `NodeAPI.make_directory`. Raises OSError."""
        ...

    async def move(self, path: str, to: str, replace: bool = False) -> None:
        """As `NodeAPI.move_file`. Raises OSError."""
        ...

    async def remove(self, path: str, deep: bool = False) -> None:
        """As `NodeAPI.remove_file`. Raises OSError: EBUSY for what something is mounted on."""
        ...

    async def change_file(
        self, path: str, mode: int | None = None, user: int | None = None, group: int | None = None
    ) -> None:
        """As `NodeAPI.change_file`. Raises OSError: EINVAL for a user that the box does not have."""
        ...

    async def watch(self, path: str, out: int, deep: bool = False) -> None:
        """Tell what happens through the pipe `out`, an `Event` each, the first of which says that it begins. Returns
        when the directory is gone; cancelled, nothing more is told. The caller owns the descriptor. Raises OSError:
        ENOSPC, EMFILE when there are too many watches."""
        ...

    async def interrupt(self, terminal: int, number: int) -> None:
        """Send a signal to the process group in the foreground of a terminal of the box. Nobody there is no error."""
        ...

    async def stats(self) -> Stats:
        """What it uses now."""
        ...

    async def changes(self) -> list[Change]:
        """What differs from the image, sorted by path."""
        ...

    async def pause(self) -> None:
        """Stop every process where it is. Idempotent. Files can still be read and written, nothing can be spawned."""
        ...

    async def resume(self) -> None:
        """Let them go on. Idempotent."""
        ...

    async def destroy(self, ending: Ending = Ending.EXIT) -> Death:
        """End it. On return no process of it is left, nor anything that the driver keeps for it. Idempotent; the first
        ending given is the one that counts. Of a box that died of itself it removes what is left: called by whoever has
        written down how it died, for until then another node must be told of it."""
        ...


@dataclass(frozen=True, slots=True)
class More:
    """What was held of a process in addition, until `release` is called."""

    process: Process
    note: str
    fds: tuple[int, ...]
    release: Callable[[], None]


@dataclass(slots=True)
class Adopted:
    """A box that a dead node left, with what was held for it. Whoever gets it owns the descriptors."""

    box: Box
    note: str
    runs: list[tuple[Process, str, tuple[int, ...]]]  # each with its note and what was held
    more: list[More]  # what `Process.hold` added to them
    listeners: list[tuple[socket.socket, int, str]]  # each with its port and note

    def close(self) -> None:
        """Close all descriptors, of a box that is nobody's."""
        for fds in (*(fds for _, _, fds in self.runs), *(each.fds for each in self.more)):
            for fd in fds:
                os.close(fd)
        for listener, _, _ in self.listeners:
            listener.close()


@dataclass(frozen=True, slots=True)
class Remains:
    """A box that died while it had no node. It is told of again until `forget` is called, once that is written down."""

    note: str
    death: Death
    forget: Callable[[], None] = lambda: None


class Progress:
    """How far an image is on its way here. Whoever fetches it says so; whoever wants to know looks."""

    def __init__(self) -> None:
        self._layers: list[LayerProgress] = []
        self._fetched: list[int] = []  # beside them: it changes a thousand times a second

    def begin(self, layers: list[LayerProgress]) -> None:
        self._layers, self._fetched = layers, [layer.fetched for layer in layers]

    def fetched(self, index: int, have: int) -> None:
        self._fetched[index] = have

    def unpacked(self, index: int) -> None:
        self._layers[index] = self._layers[index].model_copy(update={"unpacked": True})

    def seen(self) -> PullProgress:
        layers = zip(self._layers, self._fetched, strict=True)
        return PullProgress(layers=tuple(layer.model_copy(update={"fetched": have}) for layer, have in layers))


class Driver(Protocol):
    """Makes boxes."""

    name: str

    async def create(
        self,
        box_id: str,
        spec: SandboxSpec,
        named: frozenset[str],
        keeping: Keeping = NOT_KEPT,
        like: Box | None = None,
    ) -> Box:
        """A box in which a process can start. `named` holds the fields of `spec.limits` that the user set by name,
        for which a loss is a refusal. `like` lives and was made from `spec.image`: the same files, even if another
        image has that name by now. Raises NotFound (image), Unsupported, StartFailed, InvalidRequest (volume)."""
        ...

    def fits(self, parked: SandboxSpec, spec: SandboxSpec, named: frozenset[str], like: Box | None = None) -> bool:
        """Whether a box that was parked with one spec can become one with the other, from the files that `like` was
        made from. Raises Unsupported for a limit that this host cannot keep."""
        ...

    async def claim(self, box: Box, spec: SandboxSpec, named: frozenset[str], keeping: Keeping) -> None:
        """Give a parked box the limits, lifetime and note that it was not made with. Raises
        Unsupported (the kernel refuses a limit), OSError, SandlotError: then it is of no use."""
        ...

    async def adopt(self) -> tuple[list[Adopted], list[Remains]]:
        """Take over the boxes that a dead node left in this driver's directory. Before the first `create`. Parked ones
        are ended; of those that died meanwhile it is told how. Of all others nothing is left."""
        ...

    async def snapshot(self, box: Box, name: str | None, config: ImageConfig | None = None) -> ImageInfo:
        """Copy what the box has written into an image; nothing of it runs meanwhile. `name` None: under one that nobody
        lists, until `forget`; `config` None: the box's. Raises Conflict (the name is taken), Unsupported, HostFault."""
        ...

    async def images(self) -> list[ImageInfo]: ...

    async def image(self, name: str) -> ImageInfo:
        """One image, those that are not listed too. Raises NotFound."""
        ...

    async def pull(self, reference: str, progress: Progress) -> ImageInfo:
        """Fetch an image from its registry, under its full name; one that is here as it is there is only named. Waits
        for another node of the same store that fetches it. Whoever fails or is cancelled leaves nothing. Raises what
        `NodeAPI.pull_image` does."""
        ...

    async def import_(self, name: str, path: Path, progress: Progress) -> ImageInfo:
        """Make an image of a file or directory: see `NodeAPI.import_image`."""
        ...

    async def idle_images(self) -> list[ImageInfo]:
        """The pulled images on which nothing stands."""
        ...

    async def tag(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        """Another name for the same layers, as `NodeAPI.tag_image` says."""
        ...

    async def forget(self, image: str) -> None:
        """Delete a snapshot; boxes made from it live on, and `create` takes it from them. One without a name goes when
        nobody stands on it. Raises NotFound, Conflict (it cannot be deleted)."""
        ...

    async def prune(self) -> None:
        """Remove files of images that nobody names or stands on. Never fails: what resists stays."""
        ...

    async def export(self, image: str, out: int) -> None:
        """Write an image's own layers as one tar to a descriptor, in the form of an OCI layer (whiteouts as `.wh.`
        files). Raises NotFound."""
        ...

    async def sweep(self, directory: Path) -> bool:
        """Remove what the boxes of a dead node left behind, processes, cgroups and mounts, going by what that node's
        driver recorded in `directory`. The caller holds that directory's lock and removes it afterwards. False: there
        are boxes that live and wait for their node, and nothing was touched."""
        ...

    async def capabilities(self) -> list[Capability]: ...

    async def close(self) -> None:
        """Let go of what the driver itself holds (not of boxes)."""
        ...

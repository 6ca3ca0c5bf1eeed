"""A layer of the store out of the tars of an image: `oci/unpack.py`, run in a box.

Owns that box and the pipes to it. It promises that what strangers packed is parsed by nobody but a program in a box
whose only volume is the layer's directory; that a tar is the one that its digest names; and that nothing stays of an
image that could not be unpacked whole. It never says under which name an image is kept.

    layer(n) is there ──▶ a thread inflates it, hashes the tar ──▶ pipe ──▶ unpack.py ──▶ one line of what came of it
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sandlot.aio import deadline, shielded
from sandlot.api import Ending, ImageConfig, SandboxSpec, Volume
from sandlot.drivers.base import Process, Progress, Spawn
from sandlot.drivers.images import interpreter_prefix
from sandlot.drivers.layers import Layer, Room, no_room
from sandlot.drivers.oci import inflate, unpack
from sandlot.drivers.oci.manifest import Contents
from sandlot.errors import BadImage, HostFault, SandlotError, Unsupported, host_fault

if TYPE_CHECKING:
    from sandlot.drivers.native.box import NativeBox
    from sandlot.drivers.native.driver import NativeDriver

# A layer of tens of gigabytes, at the speed of a disk (seconds).
UNPACK_SECONDS = 3600.0
SETTLE_SECONDS = 30.0

# The largest images that people train on hold some hundred thousand.
MOST_ENTRIES = 4_000_000

# The default of 64 kB would wake two processes sixteen times as often.
_PIPE_BYTES = 1 << 20
_MOST_ANSWER = 1 << 16
_TARGET = "/mnt/image"
_PROGRAM = Path(unpack.__file__).read_text()


@dataclass(slots=True)
class Bounds:
    """What an image may unpack to. `bytes` None: as much as the disk has room for, of files too."""

    entries: int = MOST_ENTRIES
    bytes: int | None = None


@dataclass(slots=True)
class _Left:
    """What is left of that for the layers to come. `full`: the bounds that are the disk's, not the driver's; `lasts`:
    whether it has room for so much still, for others take of it at the same time."""

    entries: int
    bytes: int
    block: int
    full: frozenset[str]
    lasts: Callable[[int], bool]

    @classmethod
    def of(cls, bounds: Bounds, layer: Layer, progress: Progress) -> _Left:
        room = Room.of(layer.path)
        # What is still to be fetched will lie on the same disk, packed.
        packed = sum(each.size - each.fetched for each in progress.seen().layers)
        few = room.entries < bounds.entries
        return cls(
            int(min(room.entries, bounds.entries)),
            max(room.bytes - packed, 0) if bounds.bytes is None else bounds.bytes,
            room.block,
            frozenset({"bytes"} if bounds.bytes is None else ()) | frozenset({"entries"} if few else ()),
            partial(room.lasts, layer.path.parent),
        )


@dataclass(frozen=True, slots=True)
class Extracted:
    """What became of an image's layers."""

    config: ImageConfig
    entries: int
    bytes: int
    losses: tuple[str, ...]  # what is not as the image says, as `Info.losses` says it


async def extract(
    driver: NativeDriver,
    layer: Layer,
    what: str,
    contents: Contents,
    layers: Sequence[Callable[[], Awaitable[BinaryIO]]],
    progress: Progress,
    bounds: Bounds,
    turn: asyncio.Semaphore,
) -> Extracted:
    """Unpack an image's layers, from the lowest up, over one another into the directory of `layer`, each when it is its
    `turn`. Raises BadImage, Unsupported (owners cannot be written), HostFault (the disk is full)."""
    left = _Left.of(bounds, layer, progress)
    if contents.diff_ids is not None and len(contents.diff_ids) != len(layers):
        raise BadImage(f"{what} has {len(layers)} layers, and its config names {len(contents.diff_ids)}")
    volume = Volume(source=str(layer.path), target=_TARGET, read_only=False)
    box = await driver.create(f"unpack-{layer.id}", SandboxSpec(volumes=(volume,)), frozenset())
    entries = size = nobodys = 0
    try:
        for index, opened in enumerate(layers):
            name = f"layer {index + 1} of {len(layers)} of {what}"
            packed = await opened()
            async with turn, deadline(UNPACK_SECONDS, f"unpacking {name}"):
                options = {
                    "entries": left.entries,
                    "bytes": left.bytes,
                    "block": left.block,
                    "first": index == 0,
                }
                diff_id = contents.diff_ids[index] if contents.diff_ids else None
                found = await _feed(box, packed, options, diff_id, name, left)
            left.entries -= found["entries"]
            left.bytes -= found["taken"]
            entries, size = entries + found["entries"], size + found["bytes"]
            nobodys += found["nobodys"]
            progress.unpacked(index)
        async with deadline(SETTLE_SECONDS, f"looking for the user of {what}"):
            words = {"user": contents.user, "workdir": contents.config.workdir}
            who = await _run(box, words, None, what)
    finally:
        await shielded(_end(box))
    lost = f"file owners: {nobodys} files of the image belong to ids above {unpack.MOST_ID}, and are nobody's"
    return Extracted(contents.config.model_copy(update=who), entries, size, (lost,) if nobodys else ())


async def _end(box: NativeBox) -> None:
    await box.destroy(Ending.EXIT)


async def _feed(
    box: NativeBox, packed: BinaryIO, options: dict[str, Any], diff_id: str | None, what: str, left: _Left
) -> dict[str, Any]:
    """Unpack one layer, and close it."""
    try:
        read, write = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        packed.close()
        raise host_fault(error, f"unpack {what}") from error
    with suppress(OSError):  # an ordinary user's pipes may be as large as they may be
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    feeding = asyncio.ensure_future(asyncio.to_thread(_pump, packed, write, diff_id, what, left.lasts))
    try:
        found = await _run(box, options, read, what, left.full)
    except BaseException as error:
        # What was wrong with what it was given says more than that it could not read it.
        failed = await shielded(_failure(feeding))
        if isinstance(error, BadImage) and failed is not None:
            raise failed from error
        raise
    failed = await shielded(_failure(feeding))
    if failed is not None:
        raise failed
    return found


async def _failure(feeding: asyncio.Future[None]) -> BaseException | None:
    await asyncio.wait((feeding,))
    return feeding.exception()


def _pump(packed: BinaryIO, out: int, diff_id: str | None, what: str, lasts: Callable[[int], bool]) -> None:
    """Inflate a layer into a pipe, and see whether it is the one that it should be. In a thread."""
    digest = hashlib.sha256()
    with packed, os.fdopen(out, "wb", buffering=0) as pipe:
        try:
            for piece in inflate.inflated(packed, what):
                if not lasts(len(piece)):
                    raise _error("space", "", what, frozenset())
                if diff_id is not None:
                    digest.update(piece)
                left = memoryview(piece)
                while left:
                    left = left[pipe.write(left) :]
        except BrokenPipeError:
            return  # who read it says why it stopped
        except OSError as error:
            raise HostFault(f"{what} cannot be read: {error.strerror or error}") from error
        if diff_id is not None and f"sha256:{digest.hexdigest()}" != diff_id:
            raise BadImage(f"{what} has the digest sha256:{digest.hexdigest()}, and should have {diff_id}")


async def _run(
    box: NativeBox, options: dict[str, Any], stdin: int | None, what: str, full: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The answer of the program in the box; `stdin` is closed, whatever happens, for somebody writes to it."""
    argv = (
        f"{interpreter_prefix()}/bin/python3",
        "-I",
        "-S",
        "-X",
        "utf8",
        "-c",
        _PROGRAM,
        _TARGET,
        json.dumps(options),
    )
    with ExitStack() as until_read:
        try:
            with ExitStack() as until_spawned:
                if stdin is not None:
                    until_spawned.callback(os.close, stdin)
                answer = os.memfd_create("unpack", os.MFD_CLOEXEC)
                until_read.callback(os.close, answer)
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                until_spawned.callback(os.close, null)
                process = await box.spawn(
                    Spawn(argv, {"PATH": "/usr/bin:/bin"}, "/"), null if stdin is None else stdin, answer, answer
                )
        except OSError as error:
            raise host_fault(error, f"unpack {what}") from error
        try:
            ended = await process.wait()
        finally:
            await shielded(_stop(process))
        text = os.pread(answer, _MOST_ANSWER, 0).decode("utf-8", "replace")
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        how = "it took more memory than there is" if ended.oom else text.strip()[-200:] or "it was ended"
        raise HostFault(f"{what} could not be unpacked: {how}") from None
    if "error" in found:
        raise _error(found["kind"], found["error"], what, full)
    return found


async def _stop(process: Process) -> None:
    await process.kill_tree()
    await process.wait()
    await process.release()


def _error(kind: str, said: str, what: str, full: frozenset[str]) -> SandlotError:
    if kind == "space" or kind in full:
        return no_room(f"unpack {what}")
    if kind == "owners":
        return Unsupported(
            f"{what} cannot be unpacked: this kernel cannot map owners where images are kept",
            "use Linux 5.12 or newer and a state directory on ext4, xfs or btrfs",
        )
    return BadImage(f"{what} cannot be unpacked: {said}", None if kind == "bad" else "is it what you think it is?")

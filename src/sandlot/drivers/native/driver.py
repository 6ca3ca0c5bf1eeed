"""NativeDriver makes boxes out of namespaces.

It owns what a node has once: the image directory, its cgroups, its ranges of host ids, the records of boxes that may
outlive it. What a single box owns is in `box.py`.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from sandlot.aio import deadline, shielded
from sandlot.api import (
    Capability,
    Ending,
    ImageConfig,
    ImageInfo,
    LayerProgress,
    Profile,
    SandboxSpec,
    Volume,
)
from sandlot.drivers import layers
from sandlot.drivers.base import NOT_KEPT, Adopted, Box, Death, Keeping, Progress, Remains, Spawn
from sandlot.drivers.images import Image, Images
from sandlot.drivers.layers import MOST_LAYERS, Layer, Layers, Snapshot
from sandlot.drivers.native import cgroup, disk, ids, seccomp
from sandlot.drivers.native.box import NativeBox, Start
from sandlot.drivers.native.cgroup import BoxGroup, Cgroups
from sandlot.drivers.native.extract import Bounds, extract
from sandlot.drivers.native.ids import HostIds, SubIds
from sandlot.drivers.native.keep import Record, records
from sandlot.drivers.native.plan import RESOLVER, Host, Plan, make_plan, most_files
from sandlot.drivers.native.promises import LIMITED_BY, Facts, losses, promises
from sandlot.drivers.native.trees import file_system, kernel, open_tree
from sandlot.drivers.oci import archive
from sandlot.drivers.oci.manifest import Contents
from sandlot.drivers.oci.reference import Reference, full
from sandlot.errors import (
    Conflict,
    HostFault,
    InvalidRequest,
    NotFound,
    SandlotError,
    StartFailed,
    Unsupported,
    host_fault,
)

HELPER = Path(__file__).parent / "bin" / "sandlot-init"

# A start takes about 5 ms; a host that swaps may take seconds. Past this the host is not usable.
START_SECONDS = 20.0
# A parked box answers in a tenth of a millisecond; one that takes this long is not handed out.
CLAIM_SECONDS = 0.5
# PID 1 takes a new node in at once, unless it is stopped.
ADOPT_SECONDS = 5.0
# An image that is unpacked takes a processor and a half; more of them at once only wait for one another.
_UNPACKED_AT_ONCE = 2

_RUNNABLE = 0o555
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# Tests remove one protection at a time by handing the driver another planner than make_plan.
Planner = Callable[[SandboxSpec, Image, Host], Plan]


def _has_root() -> bool:
    """Whether this process is root with root's powers: in a container it often is root by name only, or has no ids to
    give away, and then boxes are made as an ordinary user makes them."""
    if os.geteuid() != 0 or not ids.mapped(Path("/proc/self/uid_map").read_text()):
        return False
    try:
        os.close(open_tree("/"))
    except OSError:
        return False
    return True


def _attributes_on_tmpfs() -> bool:
    """Whether a tmpfs keeps attributes of users, with which an overlay marks a directory that replaces another."""
    file = os.memfd_create("probe")
    try:
        os.setxattr(file, "user.overlay.probe", b"y")
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _kill(record: Record, pid: int) -> None:
    with suppress(ProcessLookupError):
        target = os.pidfd_open(pid)
        try:
            if record.alive():  # so the number is still its
                signal.pidfd_send_signal(target, signal.SIGKILL)
        finally:
            os.close(target)


def _is_nobodys(facts: dict[str, Any]) -> bool:
    """Whether no caller was told of the box: it is parked, or its node died before it was whole."""
    return facts["parked"] or facts["losses"] is None


def _reap(pid: int) -> None:
    """A PID 1 that is dead or dying, where it is a child of this process: of a server that started itself anew."""

    def reap() -> bool:
        with suppress(ChildProcessError):
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        return True

    if reap():
        return
    loop, watch = asyncio.get_running_loop(), os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(watch)
        os.close(watch)
        reap()

    loop.add_reader(watch, ended)


def _held(spec: SandboxSpec) -> int:
    """Bytes of files that a box of this spec holds in its memory."""
    memory = spec.limits.memory
    return spec.limits.disk if memory is None else min(spec.limits.disk, most_files(memory))


class Helper:
    """The helper's program, run from a sealed copy in memory. PID 1 of an ordinary user's box shows its program to root
    inside, who is that user, and could change the file's mode or times for every box after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy = -1

    def runnable(self) -> str:
        """A path to run now. Raises OSError."""
        if self._copy < 0 or os.fstat(self._copy).st_mode & 0o777 != _RUNNABLE:
            self.close()
            self._copy = self._make()
        return str(self.path) if self._copy < 0 else f"/proc/self/fd/{self._copy}"

    def _make(self) -> int:
        try:
            fd = os.memfd_create("sandlot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return -1  # a host that forbids programs in memory
        try:
            os.write(fd, self.path.read_bytes())
            os.fchmod(fd, _RUNNABLE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        if self._copy >= 0:
            os.close(self._copy)
            self._copy = -1


class NativeDriver:
    """Boxes from namespaces. `directory` is the node's own, `store` holds the images of all nodes beside it (None:
    `images` beside the directory). `registries` are those that images are pulled from (None: any; empty: any that is
    public). Nothing is made before the first `create`."""

    name = "native"

    def __init__(
        self,
        directory: Path,
        helper: Path = HELPER,
        planner: Planner = make_plan,
        store: Path | None = None,
        registries: Sequence[str] | None = None,
    ) -> None:
        self._helper = Helper(helper)
        self._directory = directory
        self._images = Images(directory / "images")
        self._layers = Layers(store or directory.parent / "images")
        self._records = directory / "boxes"
        self.cgroups = Cgroups(directory.name, directory)
        self._ids = HostIds() if _has_root() else None
        self._sub_ids: SubIds | None = None
        self._registries = registries
        self.bounds = Bounds()  # of an image that is unpacked
        self._unpacking = asyncio.Semaphore(_UNPACKED_AT_ONCE)
        self._forks: dict[str, Layer] = {}  # images without a name, until they are forgotten
        self._started = False
        self._host = Host(root=False, stage="/tmp", pids_by_cgroup=False)
        self.planner = planner
        self.facts = Facts(ids="one")

    async def create(
        self,
        box_id: str,
        spec: SandboxSpec,
        named: frozenset[str] = frozenset(),
        keeping: Keeping = NOT_KEPT,
        like: Box | None = None,
    ) -> NativeBox:
        self._start()
        for volume in spec.volumes:
            if not os.path.exists(volume.source):  # noqa: ASYNC240, PTH110  (one stat of a local path)
                raise InvalidRequest(f"the volume {volume.source} does not exist on this host")
        facts = self._facts_of(named)
        self._check_limits(spec, named, facts)
        with ExitStack() as until_started:
            image, snapshot = self._resolve(spec.image) if like is None else self._made_from(like)
            locks = await self._locks_of(snapshot, like)
            for fd in locks:
                until_started.callback(os.close, fd)
            group = self.cgroups.make(box_id, spec.limits)
            record: Record | None = None
            try:
                refused = self._check_kept(spec, named, group)
                record = self._record(box_id, keeping)
                lent = self._sub_ids if facts.ids == "shared" else None
                box = NativeBox(box_id, image, group, self.cgroups, self._ids, lent, record)
            except BaseException:
                if record is not None:
                    record.passed()
                    record.remove()
                group.remove()
                raise
            try:
                async with deadline(START_SECONDS, "the start of a sandbox", "is the host out of memory?"):
                    files = await self._disk(spec, named, box)
                    if files is not None:
                        until_started.callback(os.close, files)
                        refused += self._check_disk(files, spec, named)
                    plan = self.planner(spec, image, replace(self._host, disk=files is not None))
                    await box.start(Start(self._helper.runnable(), plan, files, tuple(locks), keeping))
                self._learn(box)
                for volume in spec.volumes:
                    if volume.source in box.unmapped and kernel() >= (5, 12):  # before that it is the kernel
                        where = file_system(volume.source)
                        refused += (
                            f"file owners: files of a volume belong to nobody inside: {where} cannot map owners",
                        )
                box.lose(losses(self._facts_of(named), spec, image.config, files is not None) + image.losses + refused)
            except BaseException:
                await shielded(box.destroy(Ending.START_FAILED))
                raise
        return box

    def _facts_of(self, named: frozenset[str]) -> Facts:
        """What holds for a box of which these limits are named. Several ids inside are a default, and one that would
        multiply the limit on processes where no cgroup counts them."""
        if self.facts.ids != "shared" or "pids" not in named or "pids" in self.facts.controllers:
            return self.facts
        return replace(self.facts, ids="one", ids_reason="with more the limit on pids that was asked for is not kept")

    def _record(self, box_id: str, keeping: Keeping) -> Record | None:
        if not keeping.grace:
            return None
        try:
            return Record.make(self._records, box_id)
        except OSError as error:
            raise StartFailed(f"the sandbox's record could not be made in {self._records}: {error.strerror}") from error

    def _resolve(self, name: str) -> tuple[Image, Snapshot | None]:
        if name == "host" or name.startswith("/"):
            return self._images.resolve(name), None
        snapshot = self._layers.find(full(name))
        info = snapshot.info
        paths = tuple(str(self._layers.layer_path(layer)) for layer in snapshot.layers)
        if snapshot.roots:
            base = Image(info.name, paths[0], base=info.base)
            paths = paths[1:]
        else:
            base = self._images.resolve(info.base)
        return replace(base, name=info.name, layers=paths, config=info.config, losses=info.losses), snapshot

    def _made_from(self, box: Box) -> tuple[Image, Snapshot | None]:
        """The same of a box that lives: whatever became of the name, its layers are there."""
        assert isinstance(box, NativeBox)
        return box.image, self._snapshot_of(box.image)

    async def _disk(self, spec: SandboxSpec, named: frozenset[str], box: NativeBox) -> int | None:
        """A file system for a box that is to hold more files than fit in its memory, where they are otherwise."""
        if not self._on_disk(spec, named):
            return None
        return await disk.make(self._directory, spec.limits.disk, spec.limits.inodes, box.root_id)

    def _on_disk(self, spec: SandboxSpec, named: frozenset[str]) -> bool:
        """Whether more files were asked for by name than fit in the memory."""
        memory = spec.limits.memory
        return "disk" in named and memory is not None and spec.limits.disk > most_files(memory)

    def _learn(self, box: NativeBox) -> None:
        """What only the making of a box shows."""
        shown = tuple(source for source, _ in box.image.binds)
        if shown and shown != self.facts.shown:
            self.facts = replace(self.facts, shown=shown)
        if box.owners_mapped is not self.facts.owners_mapped:
            own = next((path for path in box.unmapped if path == box.image.root), next(iter(box.unmapped), ""))
            where = file_system(own) if own and kernel() >= (5, 19) else ""
            self.facts = replace(self.facts, owners_mapped=box.owners_mapped, unmapped=where)
        if box.refused_ids and self._sub_ids is not None:
            self._sub_ids = None
            self.facts = replace(self.facts, ids="one", ids_reason=f"the node is not root, and {box.refused_ids}")

    # -- parked boxes ---------------------------------------------------------------------------------------------

    def fits(self, parked: SandboxSpec, spec: SandboxSpec, named: frozenset[str], like: Box | None = None) -> bool:
        facts = self._facts_of(named)
        self._check_limits(spec, named, facts)
        if facts is not self.facts or self._on_disk(spec, named) or _held(parked) != _held(spec):
            return False
        if like is not None and parked.image == spec.image and not self._is_named(like, spec.image):
            return False
        by_cgroup = {name for name, (controller, _) in LIMITED_BY.items() if controller in self.cgroups.controllers}
        loose = {*by_cgroup, "cpus", "cpu_weight", "output"}  # what is not kept is not in the way either
        fixed = ("image", "network", "profile", "setuid", "nested", "hostname", "volumes")
        return all(getattr(parked, name) == getattr(spec, name) for name in fixed) and all(
            getattr(parked.limits, name) == getattr(spec.limits, name)
            for name in type(spec.limits).model_fields
            if name not in loose
        )

    def _is_named(self, box: Box, name: str) -> bool:
        """Whether the name still means what the box was made from."""
        with suppress(NotFound):
            return self._resolve(name)[0].layers == self._made_from(box)[0].layers
        return False

    async def claim(self, box: Box, spec: SandboxSpec, named: frozenset[str], keeping: Keeping) -> None:
        assert isinstance(box, NativeBox)
        image, _ = self._resolve(spec.image)
        if (image.root, image.layers) != (box.image.root, box.image.layers):
            raise HostFault(f"the parked box {box.id} was made from another image of the name {spec.image}")
        async with deadline(CLAIM_SECONDS, f"claiming the parked box {box.id}"):
            if box.group.limits != spec.limits:  # each of a dozen writes to the kernel is dear here
                self.cgroups.set(box.group, spec.limits)
            refused = self._check_kept(spec, named, box.group)
            await box.claim(spec, keeping, losses(self.facts, spec, image.config) + image.losses + refused)

    # -- adoption -------------------------------------------------------------------------------------------------

    async def adopt(self) -> tuple[list[Adopted], list[Remains]]:
        adopted: list[Adopted] = []
        remains: list[Remains] = []
        for record in records(self._records):
            self._start()
            found = await self._adopt(record)
            if isinstance(found, Adopted):
                adopted.append(found)
            elif found is not None:
                remains.append(found)
        boxes = [each.box for each in adopted if isinstance(each.box, NativeBox)]
        kept = {path for box in boxes for path in box.group.directories}
        with suppress(HostFault, OSError):  # what resists is told by whoever removes the node's own
            await asyncio.to_thread(cgroup.sweep, self._directory, kept)
        return adopted, remains

    async def _adopt(self, record: Record) -> Adopted | Remains | None:
        facts = record.facts()
        if facts is None:  # its node died before it was made, and PID 1 has seen that; or of another version
            if not record.alive():
                record.remove()
            return None
        if facts["losses"] is None and record.alive():
            _kill(record, facts["pid"])
        elif record.alive():
            try:
                async with deadline(ADOPT_SECONDS, f"taking over sandbox {facts['id']}"):
                    found = await NativeBox.adopted(facts, record, self.cgroups)
            except (OSError, SandlotError):
                if record.alive():  # it does not answer: of no use to anybody
                    _kill(record, facts["pid"])
            else:
                if not facts["parked"]:
                    return found
                await found.box.destroy(Ending.DRAINED)
                return None
        _reap(facts["pid"])
        ending = {"lifetime": Ending.LIFETIME, "orphaned": Ending.ORPHANED}.get(record.last_word(), Ending.HELPER_DIED)
        if not _is_nobodys(facts):
            return Remains(facts["note"], Death(ending), record.remove)
        record.remove()
        return None

    # -- images ---------------------------------------------------------------------------------------------------

    async def snapshot(self, box: Box, name: str | None, config: ImageConfig | None = None) -> ImageInfo:
        assert isinstance(box, NativeBox)
        if name is not None:
            layers.check_name(name)
            with suppress(NotFound):
                self._layers.find(name)
                raise layers.taken(name)
        below = self._snapshot_of(box.image)
        roots = below.roots if below else 0
        over = below.layers[roots:] if below else ()
        flatten = len(over) >= MOST_LAYERS
        try:
            layer = self._layers.begin()
        except OSError as error:
            raise HostFault(f"a snapshot cannot be written: {error.strerror}", "is the disk full?") from error
        try:
            with ExitStack() as until_named:  # else, when the box ends before that, nobody needs what is below
                for fd in await self._locks_of(below, box):
                    until_named.callback(os.close, fd)
                sources = [self._layers.layer_path(each) for each in over] if flatten else []
                copied = await box.copy_upper(layer.path, sources)
                kept = (*(below.layers[:roots] if below else ()), *(() if flatten else over), layer.id)
                older = [below.info] if below and over and not flatten else []
                info = ImageInfo(
                    name=name or f"{layers.FORK}{layer.id}",
                    base=box.image.base,
                    created_at=time.time(),
                    bytes=copied.bytes + sum(each.bytes for each in older),
                    files=copied.files + sum(each.files for each in older),
                    layers=len(kept) - roots,
                    config=config or box.image.config,
                    losses=box.image.losses,
                )
                layer.downgrade()
                if name is not None:  # one without does not outlive its node anyway
                    await shielded(asyncio.to_thread(layer.sync))
                await shielded(asyncio.to_thread(self._layers.name, info, kept))  # it waits for the disk
        except BaseException:
            layer.close()
            await shielded(self.prune())
            raise
        if name is None:
            self._forks[info.name] = layer  # nobody stands on it yet, and it is not to be taken for a dead node's
        else:
            layer.close()
        return info

    async def _locks_of(self, snapshot: Snapshot | None, box: Box | None) -> list[int]:
        """That keep an image's layers where they are. Those of a `box` are there, named or not, as long as it lives."""
        try:
            while snapshot is not None:
                try:
                    return self._layers.use(snapshot, wait=False)
                except BlockingIOError:
                    await asyncio.to_thread(self._layers.wait_for, snapshot)
            return []
        except NotFound as error:
            if box is None:
                raise
            raise HostFault("the sandbox that stands on the image is ending") from error

    def _snapshot_of(self, image: Image) -> Snapshot | None:
        """The layers that a box stands on, whether or not they still have a name."""
        paths = (Path(path) for path in (image.root, *image.layers))
        ids = tuple(path.name for path in paths if path == self._layers.layer_path(path.name))
        if not ids:
            return None
        with suppress(NotFound):
            found = self._layers.find(image.name)
            if found.layers == ids:
                return found
        return Snapshot(ImageInfo(name=image.name, base=image.base, created_at=0.0), ids)

    async def images(self) -> list[ImageInfo]:
        found = await asyncio.to_thread(self._layers.all)
        return [each.info for each in found if not each.info.name.startswith(layers.HIDDEN)]

    async def tag(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        layers.check_name(name)
        found = self._layers.find(full(image))
        info = found.info.model_copy(
            update={
                "name": name,
                "kind": "built",
                "created_at": time.time(),
                "digest": None,  # the config is no longer the one that the manifest names
                "config": config or found.info.config,
            }
        )
        locks = self._layers.use(found)  # that they do not go in between
        try:
            named = await shielded(asyncio.to_thread(self._layers.name, info, found.layers))
        finally:
            for fd in locks:
                os.close(fd)
        await self.prune()  # of the one that had the name
        return named.info

    async def image(self, name: str) -> ImageInfo:
        if name == "host":
            return ImageInfo(name=name, base=name, created_at=0.0)
        return self._layers.find(full(name)).info

    async def idle_images(self) -> list[ImageInfo]:
        return await asyncio.to_thread(self._layers.idle)

    async def pull(self, reference: str, progress: Progress) -> ImageInfo:
        from sandlot.drivers.oci.registry import Registry  # and with it all of HTTP

        where = Reference.parse(reference)
        name = str(where)
        async with self._fetching(name):
            with suppress(NotFound):
                if (kind := self._layers.find(name).info.kind) != "pulled":
                    raise Conflict(
                        f"there is an image {name} already, which was {kind} here and not pulled",
                        f"`sandlot image rm {name}`, if it is to be the registry's",
                    )
            registry = Registry(where, self._layers.directory, self._registries)
            try:
                found = await registry.manifest()
                layers_of = [LayerProgress(digest=blob.digest, size=blob.size) for blob in found.layers]
                if (same := await asyncio.to_thread(self._layers.of_digest, found.digest)) is not None:
                    here = [each.model_copy(update={"fetched": each.size, "unpacked": True}) for each in layers_of]
                    progress.begin(here)
                    return await self._name_again(same, name)
                progress.begin(layers_of)
                contents = await registry.contents(found)
                registry.start(progress)
                opened = [partial(registry.layer, index) for index in range(len(found.layers))]
                return await self._extract(name, "pulled", found.digest, contents, opened, progress)
            finally:
                await shielded(registry.close())

    async def import_(self, name: str, path: Path, progress: Progress) -> ImageInfo:
        name = archive.kept_as(name)
        async with self._fetching(name):
            with suppress(NotFound):
                self._layers.find(name)
                raise layers.taken(name)
            spool = archive.Spool(self._layers.directory, self.bounds.bytes or math.inf)
            try:
                found = await asyncio.to_thread(archive.opened, path, spool)
            finally:
                spool.given_up.set()  # nobody waits for the thread any more
            try:
                layers_of = [LayerProgress(digest=blob.digest, size=blob.size) for blob in found.blobs]
                progress.begin([each.model_copy(update={"fetched": each.size}) for each in layers_of])
                opened = [partial(asyncio.to_thread, each) for each in found.layers]
                return await self._extract(name, "imported", found.digest, found.contents, opened, progress)
            finally:
                found.close()

    @asynccontextmanager
    async def _fetching(self, name: str) -> AsyncIterator[None]:
        """While nobody else fetches an image of this name."""
        self._start()
        try:
            lock = await self._layers.only_one(name)
        except OSError as error:
            raise host_fault(error, f"keep images in {self._layers.directory}") from error
        try:
            yield
        finally:
            self._layers.let_go(name, lock)

    async def _name_again(self, same: Snapshot, name: str) -> ImageInfo:
        """One more name, a pulled one, of an image that is here. An older one of that name is replaced."""
        if same.info.name == name:
            return same.info
        locks = self._layers.use(same)
        try:
            info = same.info.model_copy(update={"name": name, "base": name, "kind": "pulled"})
            await shielded(asyncio.to_thread(self._layers.name, info, same.layers, True))
        finally:
            for fd in locks:
                os.close(fd)
        await self.prune()  # of the one that had the name
        return info

    async def _extract(
        self,
        name: str,
        kind: Literal["pulled", "imported"],
        digest: str | None,
        contents: Contents,
        opened: Sequence[Callable[[], Awaitable[BinaryIO]]],
        progress: Progress,
    ) -> ImageInfo:
        """Make an image of one layer of an image's layers. What is pulled replaces what was pulled before."""
        try:
            layer = self._layers.begin()
        except OSError as error:
            raise host_fault(error, f"write an image to {self._layers.directory}") from error
        try:
            found = await extract(self, layer, name, contents, opened, progress, self.bounds, self._unpacking)
            info = ImageInfo(
                name=name,
                base=name,
                created_at=time.time(),
                kind=kind,
                digest=digest,
                config=found.config,
                bytes=found.bytes,
                files=found.entries,
                losses=found.losses,
            )
            layer.downgrade()
            await shielded(asyncio.to_thread(layer.sync))
            await shielded(asyncio.to_thread(self._layers.name, info, (layer.id,), kind == "pulled"))
        finally:
            layer.close()
            await shielded(self.prune())  # what was not named, or had the name before
        return info

    async def forget(self, image: str) -> None:
        if image == "host":
            raise Conflict("the image `host` is this machine itself, and cannot be deleted")
        name = full(image)
        if name in self._forks:
            self._forks.pop(name).close()
        else:
            self._layers.delete(name)
        await self.prune()

    async def export(self, image: str, out: int) -> None:
        found = self._layers.find(full(image))
        locks = self._layers.use(found)
        try:
            paths = [self._layers.layer_path(each) for each in found.layers]
            base: Path | None
            if not found.roots:
                base = Path(self._images.resolve(found.info.base).root)
            elif len(paths) > 1:
                base, *paths = paths
            else:
                base = None
            await asyncio.to_thread(layers.export, paths, base, out, os.geteuid() if self._ids is None else 0)
        finally:
            for fd in locks:
                os.close(fd)

    async def prune(self) -> None:
        """Remove layers that neither an image nor a box needs. Files that belong to ids which are only lent to this
        user are removed by who has them: root in a box."""
        for layer in await asyncio.to_thread(self._layers.unused):
            try:
                await asyncio.to_thread(self._layers.drop, layer)
            except (OSError, RecursionError):
                with suppress(SandlotError, OSError):
                    await self._remove_inside(layer)

    async def _remove_inside(self, layer: str) -> None:
        path = self._layers.layer_path(layer)
        lock = self._layers.lock(layer, fcntl.LOCK_EX)
        try:
            spec = SandboxSpec(volumes=(Volume(source=str(path.parent), target="/mnt/layers", read_only=False),))
            box = await self.create(f"prune-{layer}", spec)
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                argv = ("rm", "-rf", f"/mnt/layers/{layer}")
                process = await box.spawn(Spawn(argv, {"PATH": "/usr/bin:/bin"}, "/"), null, null, null)
                await process.wait()
            finally:
                os.close(null)
                await box.destroy()
        finally:
            os.close(lock)
        self._layers.drop(layer)

    # -- the host -------------------------------------------------------------------------------------------------

    async def capabilities(self) -> list[Capability]:
        from sandlot.drivers.native import checks  # it knows this module

        return await checks.probe(self)

    async def try_out(self, box: NativeBox) -> None:
        """What a box in its memory does not show: whether one on the host's disk can be had, and snapshots written."""
        if self.facts.disk_fix is None:
            try:
                os.close(await disk.make(self._directory, disk.LEAST_BYTES, 64, box.root_id))
            except (OSError, SandlotError) as error:
                fix = "see whether `mount -o loop` works for the node's user here, outside of it and as root"
                self.facts = replace(self.facts, disk_fix=fix, disk_failure=str(error))
        copies = next(path for path in self._layers.layer_path("").parents if path.is_dir())
        try:
            os.close(box.as_seen(copies))
            self.facts = replace(self.facts, copies_unmapped="")
        except (OSError, Unsupported):
            self.facts = replace(self.facts, copies_unmapped=file_system(str(copies)))

    @property
    def has_root(self) -> bool:
        return self._ids is not None

    async def sweep(self, directory: Path) -> bool:
        """Remove what boxes of a dead node left behind: their cgroups. The rest went with their processes."""
        for record in records(directory / "boxes"):
            facts = record.facts()
            if record.alive() and not (facts is not None and _is_nobodys(facts)):
                return False
        await asyncio.to_thread(cgroup.sweep, directory)
        return True

    async def close(self) -> None:
        for layer in self._forks.values():
            layer.close()
        self._forks.clear()
        self._helper.close()
        self.cgroups.close()
        if self._ids is not None:
            self._ids.close()

    def _start(self) -> None:
        """Look at the host, once."""
        if self._started:
            return
        if not self._helper.path.exists():
            raise Unsupported(
                "this installation has no sandlot-init, so it cannot make native sandboxes",
                "install a compiler and reinstall: `apt install gcc libc6-dev`, then reinstall sandlot",
            )
        stage = next((path for path in ("/tmp", "/run", "/mnt") if Path(path).is_dir()), None)
        if stage is None:
            raise Unsupported("this host has no /tmp, /run or /mnt to put a sandbox together on", "`mkdir /tmp`")
        self.cgroups.start()
        kept = self.cgroups.controllers
        self._host = Host(
            root=self._ids is not None,
            stage=stage,
            pids_by_cgroup="pids" in kept,
            memory_by_cgroup="memory" in kept,
            resolver=os.path.realpath(RESOLVER) if os.path.exists(RESOLVER) else "",  # noqa: PTH110
        )
        lent = SubIds.find() if self._ids is None else ""
        self._sub_ids = lent if isinstance(lent, SubIds) else None
        self.facts = Facts(
            ids="own" if self._ids is not None else "one" if self._sub_ids is None else "shared",
            ids_reason=lent if isinstance(lent, str) else "",
            controllers=kept,
            kill_groups=self.cgroups.v2_kill,
            filtered=bool(seccomp.program()),
            limits_namespaces=kernel() >= (5, 14),
            restricts_below=kernel() >= (5, 12),
            directories_replaced=_attributes_on_tmpfs(),
            disk_fix=disk.why_not() if self._ids is not None else "run the node as root",
        )
        self._started = True

    def _check_kept(self, spec: SandboxSpec, named: frozenset[str], group: BoxGroup) -> tuple[str, ...]:
        """The kernel may refuse a value where it takes others: a refusal if it was asked for, else a loss."""
        refused = []
        for name, (controller, promise) in LIMITED_BY.items():
            value = getattr(spec.limits, name)
            if value is None or controller not in self.cgroups.controllers or controller in group.kept:
                continue
            if name in named:
                raise Unsupported(f"the kernel does not take {value} as a limit on {name}", "ask for another value")
            refused.append(f"{promise}: the kernel does not take {value} for {name}")
        return tuple(refused)

    def _check_disk(self, files: int, spec: SandboxSpec, named: frozenset[str]) -> tuple[str, ...]:
        """A file system has so many files for its size at least."""
        most = os.fstatvfs(files).f_files
        if most <= spec.limits.inodes:
            return ()
        if "inodes" in named:
            raise Unsupported(
                f"a disk of {spec.limits.disk} bytes holds {most} files, more than the limit of {spec.limits.inodes}",
                f"ask for a limit on inodes of {most} or more, or for a smaller disk",
            )
        return (f"disk limit: it holds {most} files, more than {spec.limits.inodes}",)

    def _check_limits(self, spec: SandboxSpec, named: frozenset[str], facts: Facts) -> None:
        if spec.profile is Profile.STRICT and not facts.filtered:
            raise Unsupported(
                "the profile `strict` is a system call filter, and this processor's calls are not known here",
                "use x86_64 or aarch64, or another profile and accept the loss",
            )
        lost = {line.name: line for line in promises(facts) if line.state == "loss"} if named else {}
        for name, (_, promise) in LIMITED_BY.items():
            if name in named and promise in lost and getattr(spec.limits, name) is not None:
                raise Unsupported(
                    f"this host cannot keep a limit on {name}: {lost[promise].found}",
                    f"{lost[promise].fix}; or leave the limit out and accept the loss",
                )
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if spec.limits.open_files > hard:
            raise Unsupported(
                f"a sandbox's process cannot have {spec.limits.open_files} open files: the node's own limit is {hard}",
                "raise the node's hard limit of open files (`ulimit -Hn`), and `/proc/sys/fs/nr_open` for more",
            )

"""Carries out a build: a box made from the step before, what the step says, a snapshot. The snapshot's name is the
cache.

A step's name is a hash of the base image's identity and of all that every step up to it says and copies, so a step with
the name of one that is there need not be done. It promises that no box is left, whatever happens; that a failure leaves
no image but the steps before it; that a step stands on what its name says: where a base is replaced or a step is pruned
meanwhile, the build begins again; that commands have the host's network only where they were given it, and what is made
never. Steps that make no file take no box.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from sandlot import api
from sandlot.aio import shielded
from sandlot.api import MOST_USER, STEP, ImageConfig, ImageInfo, Limits, NodeAPI, SandboxSpec
from sandlot.build import context as files
from sandlot.build.context import NOTHING, Context, Tree
from sandlot.build.steps import Build, Configure, Copy, Run, Step, User, Workdir
from sandlot.errors import BuildFailed, Conflict, InvalidRequest, NotFound, SandlotError, Unsupported, invalid
from sandlot.local import streamed

# What of its hash is a hidden image's name.
_DIGITS = 32
# Begins every hash: another way of doing the same steps is another number.
_VERSION = "sandlot build 1"

# How often a build begins, while others prune and pull. What is still there is not done again.
_TRIES = 5

# What a step may write where the host has a disk for it; elsewhere files are in memory, under the usual limits.
DISK = 16 << 30
# A file of a package is seldom smaller on average (bytes).
_FILE = 16 << 10

# Seconds that one command may take.
STEP_SECONDS = 3600.0
# Bytes of a command's output that are kept of each stream, and its last lines that an error shows.
_OUTPUT = 1 << 20
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Options:
    """How to build."""

    network: Literal["none", "host"] = "none"  # of the commands
    cache: bool = True
    limits: Mapping[str, Any] = field(default_factory=dict)  # as of a sandbox; those that are named
    timeout: float = STEP_SECONDS


@dataclass(frozen=True, slots=True)
class Progress:
    """A step, when it begins (`seconds` None) and when it is done. `output` is what its command wrote."""

    number: int
    total: int
    step: Step
    seconds: float | None = None
    cached: bool = False
    output: str = ""


async def build(
    node: NodeAPI,
    what: Build,
    name: str,
    context: Context,
    options: Options | None = None,
    told: Callable[[Progress], None] = lambda progress: None,
) -> ImageInfo:
    """The image of that name. A built image that has the name is replaced. Raises BuildFailed for a command that fails,
    and every other error with the line that it is about."""
    return await _Builder(node, context, options or Options(), told).build(what, name)


class _Builder:
    def __init__(self, node: NodeAPI, context: Context, options: Options, told: Callable[[Progress], None]) -> None:
        self._node = node
        self._context = context
        self._options = options
        self._told = told
        self._spec: SandboxSpec | None = None  # of every box, once it is known

    async def build(self, what: Build, name: str) -> ImageInfo:
        await self._spec_of_boxes()  # limits that are none are said before any work
        with suppress(NotFound):
            if (await self._node.image(name)).kind != "built":  # rather now than when all is done
                raise Conflict(f"the image {name} was not built, and is not replaced", "choose another name")
        for _ in range(_TRIES):
            with suppress(_Overtaken):
                return await self._try(what, name)
        raise Conflict(
            f"what the image {name} is built on was deleted or replaced while it was built, {_TRIES} times",
            "build it again when nobody prunes or pulls images",
        )

    async def _try(self, what: Build, name: str) -> ImageInfo:
        """Raises _Overtaken."""
        with _about(what.where):
            base = await self._base(what.base)
        image, config = what.base, base.config
        key = _hash(_VERSION, base.name, base.digest or str(base.created_at))
        steps = what.steps(config)
        for number, step in enumerate(steps, 1):
            begun, cached, output = time.monotonic(), True, ""
            with _about(step.where):
                tree, content = await asyncio.to_thread(self._files, step)
                key = _hash(key, step.identity(), content)
                if isinstance(step.do, Configure):
                    config, cached = step.do.over(config), False
                else:
                    found = await self._cached(key)
                    if found is None:
                        self._told(Progress(number, len(steps), step))
                        found, output = await self._make(_Making(image, base, key, config, step, tree, content))
                        cached = False
                    image, config = found.name, found.config
            self._told(Progress(number, len(steps), step, time.monotonic() - begun, cached, output))
        if image == what.base:  # nothing was done in a box
            key = _hash(key, "an empty layer", "")
            with _about(what.where):
                made = await self._cached(key) or (await self._make(_Making(image, base, key, config)))[0]
            image = made.name
        with _there(image):
            return await self._node.tag_image(image, name, config)

    async def _base(self, name: str) -> ImageInfo:
        if name.startswith("/"):
            raise Unsupported(
                f"a build cannot start from a directory, {name}: what is in it may change",
                f"`sandlot image import NAME {name}` makes an image of it",
            )
        try:
            base = await self._node.image(name)
        except NotFound:  # of another kind of name, perhaps: then the first box fetches it
            box = await self._node.create(SandboxSpec(image=name))
            await shielded(self._node.destroy(box.id))
            base = await self._node.image(name)
        if base.config.on_build:
            raise Unsupported(
                f"{name} asks for instructions in each build over it, which are not carried out: ONBUILD "
                + "; ONBUILD ".join(base.config.on_build),
                "start from the image that it was built from, and write them into this file",
            )
        return base

    async def _cached(self, key: str) -> ImageInfo | None:
        if self._options.cache:
            with suppress(NotFound):
                return await self._node.image(STEP + key)
        return None

    def _files(self, step: Step) -> tuple[Tree, str]:
        """What the step copies, and the hash of it. Blocks."""
        if not isinstance(step.do, Copy):
            return NOTHING, ""
        tree = self._context.find(step.do.sources)
        if step.do.add:
            files.check_unpacked(tree.named)
        return tree, files.hashed(tree.entries, step.do.mode)

    async def _make(self, what: _Making) -> tuple[ImageInfo, str]:
        """Do a step in a box, and seal it; with what its command wrote."""
        do = None if what.step is None else what.step.do
        network = self._options.network if isinstance(do, Run) else "none"
        spec = (await self._spec_of_boxes()).model_copy(update={"image": what.image, "network": network})
        config, output = what.config, ""
        with _there(what.image):
            box = (await self._node.create(spec)).id
        try:
            if not what.image.startswith(STEP):
                await self._check_same(what.image, what.base)
            if isinstance(do, Run):
                output = await self._run(box, do, config)
            elif isinstance(do, Copy):
                await self._copy(box, do, what)
            elif isinstance(do, Workdir):
                config = await self._make_workdir(box, do, config)
            elif isinstance(do, User):
                user, home = await self._who(box, do.name)
                config = config.model_copy(update={"user": user, "group": None, "home": home})
            if not self._options.cache:
                with suppress(NotFound):
                    await self._node.delete_image(STEP + what.key)
            try:
                return await self._node.snapshot(box, STEP + what.key, config), output
            except Conflict:  # another build has done the same meanwhile
                with _there(STEP + what.key):
                    return await self._node.image(STEP + what.key), output
        finally:
            await shielded(self._node.destroy(box))

    async def _check_same(self, name: str, base: ImageInfo) -> None:
        """A tag may have moved between looking at it and standing on it."""
        found = None
        with suppress(NotFound):
            found = await self._node.image(name)
        if found != base:
            raise _Overtaken

    async def _spec_of_boxes(self) -> SandboxSpec:
        if self._spec is None:
            named = dict(self._options.limits)
            lines = {line.name: line.state for line in await self._node.capabilities()}
            try:
                usual, disk = Limits().disk, Limits.model_validate(named).disk
                if lines.get("disk beyond memory") == "kept":
                    disk = named.setdefault("disk", DISK) if "disk" not in named else disk
                elif disk > usual:
                    named.setdefault("memory", None)  # it is for files, whose limit is the one that was named
                if disk > usual:
                    named.setdefault("inodes", disk // _FILE)
                self._spec = SandboxSpec.model_validate({"limits": named} if named else {})
            except ValidationError as error:
                raise invalid(error) from None
        return self._spec

    async def _run(self, box: str, do: Run, config: ImageConfig) -> str:
        run = api.Run(
            argv=do.argv,
            env={**do.args, **({"HOME": config.home} if config.home else {}), **config.env},
            cwd=config.workdir or "/",
            user=config.user or 0,
            timeout=self._options.timeout,
            output_cap=_OUTPUT,
        )
        result = await self._node.run(box, run)
        output = result.stdout + result.stderr
        if result.ok:
            return output
        ended = f"exited with {result.exit_code}"
        if result.timed_out:
            ended = f"was killed after {self._options.timeout:g} s"
        elif result.oom:
            ended = f"was killed for memory (exit code {result.exit_code})"
        tail = "\n".join(output.rstrip().splitlines()[-_TAIL_LINES:])
        said = f"; the end of what it wrote:\n{tail}" if tail else ", and wrote nothing"
        hint = "commands of a build have no network; for one that needs it: `--network host`"
        command = do.argv[-1] if len(do.argv) == 3 and do.argv[1] == "-c" else " ".join(do.argv)
        raise BuildFailed(f"`{command}` {ended}{said}", hint if self._options.network == "none" else None)

    async def _make_workdir(self, box: str, do: Workdir, config: ImageConfig) -> ImageConfig:
        path = posixpath.normpath(posixpath.join(config.workdir or "/", do.path))
        await self._node.upload(box, path, streamed(files.pack((), None, hashlib.sha256())))
        return config.model_copy(update={"workdir": path})

    async def _copy(self, box: str, do: Copy, what: _Making) -> None:
        words = do.user
        if words is not None and words.isdecimal():
            words = f"{words}:{words}"  # whatever /etc/passwd says of it, as elsewhere
        user = 0 if words is None else (await self._who(box, words))[0]
        target = posixpath.join(what.config.workdir or "/", do.target)

        async def upload(path: str, called: str | None = None) -> None:
            digest = hashlib.sha256()
            chunks = files.pack(what.tree.entries, do.mode, digest, called)
            await self._node.upload(box, posixpath.normpath(path), streamed(chunks), user)
            if digest.hexdigest() != what.content:  # else the step's name would promise something else for ever
                raise InvalidRequest("its files were changed while they were copied", "run the build again")

        if what.tree.alone is None or target.endswith(("/", "/.", "/..")):
            await upload(target)
            return
        try:
            await upload(*posixpath.split(target))
        except Conflict:  # it names a directory of the image
            await upload(target)

    async def _who(self, box: str, words: str) -> tuple[int, str | None]:
        """The number of a user of the image, and the home that is known of it."""
        name, _, group = words.partition(":")
        entry = await self._entry(box, "/etc/passwd", name)
        number = entry[2] if entry else name
        group_entry = await self._entry(box, "/etc/group", group) if group else None
        if group and (group_entry[2] if group_entry else group) != number:
            raise InvalidRequest(
                f"user {name} with the group {group}: a user's group has the user's own number in a sandbox",
                f"leave `:{group}` out",
            )
        if entry and not group and entry[3] != number:
            raise InvalidRequest(
                f"user {name} has the group {entry[3]} in /etc/passwd: a user's group has the user's own number in a "
                "sandbox",
                f"`{name}:{number}` if that will do, or give it that group in a step before",
            )
        if not number.isdecimal() or int(number) > MOST_USER:
            raise InvalidRequest(
                f"there is no user {name!r} in the image",
                f"`useradd {name}` in a step before, or give a number below 65536",
            )
        return int(number), entry[5] if entry and len(entry) > 5 and entry[5].startswith("/") else None

    async def _entry(self, box: str, path: str, name: str) -> list[str] | None:
        """The fields of who has this name or number in /etc/passwd or /etc/group."""
        try:
            text = (await self._node.read_file(box, path)).decode("utf-8", "replace")
        except NotFound:
            return None
        entries = [line.split(":") for line in text.splitlines() if line.count(":") >= 3]
        return next((entry for entry in entries if name in (entry[0], entry[2])), None)


@dataclass(frozen=True, slots=True)
class _Making:
    """A step that is to be done. `step` None: nothing is done, and sealed."""

    image: str  # that it stands on
    base: ImageInfo
    key: str
    config: ImageConfig
    step: Step | None = None
    tree: Tree = NOTHING
    content: str = ""


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:_DIGITS]


class _Overtaken(Exception):
    """What a step stands on went, or became something else."""


@contextmanager
def _there(image: str) -> Iterator[None]:
    """A step that is there no more, for it was, was pruned meanwhile."""
    try:
        yield
    except NotFound as error:
        if image.startswith(STEP):
            raise _Overtaken from error
        raise


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Errors say which line they are about."""
    try:
        yield
    except SandlotError as error:
        raise type(error)(f"{where}: {error.message}", error.hint) from error

"""`sandlot cp`: files and directories between this host and a sandbox, by way of streams too.

Where they go is said as for `cp -r`: into a directory that is there, else under the name that is given. On a stream, a
directory is a tar and a file its bytes.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from sandlot.cli import completion, interrupt, options, say, streams
from sandlot.cli.exec import person
from sandlot.errors import InvalidRequest, NotFound
from sandlot.local import refuse_link
from sandlot.sandbox import Sandbox

if TYPE_CHECKING:
    from sandlot.api import NodeAPI

_STREAM = "-"


class Inside(NamedTuple):
    """A place in a sandbox, as `ID:/PATH` says it."""

    sandbox: str
    path: str


def cp(
    source: Annotated[
        str,
        typer.Argument(metavar="FROM", help="A path here, `ID:/PATH`, or `-`.", autocompletion=completion.places),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="The same, for the other side.", autocompletion=completion.places)
    ],
    user: Annotated[
        str, typer.Option("--user", "-u", help="Number or name of a user inside, whose the files become.")
    ] = "0",
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Copy files and whole directories into a sandbox and out of it.

    What is copied goes into TO if that is a directory, else it gets that name; of `FROM/.` only what is in it. With `-`
    a file is its bytes, and a directory a tar: one that is read from standard input is unpacked into a TO that is a
    directory or ends with `/`.
    """
    here, there = _place(source), _place(target)
    copy: Callable[[NodeAPI, Shown], Awaitable[None]]
    if isinstance(here, Inside) and isinstance(there, Inside):
        raise InvalidRequest(
            "there is no way from one sandbox straight into another", f"`sandlot cp {source} - | sandlot cp - {target}`"
        )
    if isinstance(there, Inside):
        copy = partial(_into, str(here), there, user)
    elif isinstance(here, Inside):
        copy = partial(_out_of, here, there)
    else:
        raise InvalidRequest("neither place is in a sandbox", f"write it as `sandlot cp {source} ID:/PATH`")

    if json and target == _STREAM:
        raise InvalidRequest("what is copied goes to standard output, and no JSON with it", "leave out `--json`")

    async def work() -> int:
        async with options.server(url, api_key) as node:
            with Shown(between=target == _STREAM and sys.stdout.isatty()) as shown:
                await copy(node, shown)
            if json:
                say.data({"from": source, "to": target, "bytes": shown.done})
            else:
                say.note(f"copied {shown.done / 1e6:.1f} MB to {'standard output' if target == _STREAM else target}")
        return 0

    return interrupt.run(work())


def _place(word: str) -> Inside | str:
    """Where a word leads: in a sandbox, or a path of this host, which with a colon is `./a:b`. Raises
    InvalidRequest."""
    sandbox, colon, path = word.partition(":")
    if not colon or not sandbox or "/" in sandbox or sandbox.startswith("."):
        return word
    if not path.startswith("/"):
        raise InvalidRequest(f"{word} is not ID:/PATH: a path inside begins with `/`", f"`{sandbox}:/root/{path}`?")
    return Inside(sandbox, path)


async def _into(here: str, there: Inside, owner: str, node: NodeAPI, shown: Shown) -> None:
    box = await Sandbox.attach(there.sandbox, node=node)
    user = await _number(box, owner)
    folder = there.path.endswith("/") or await _is_directory(box, there.path)
    if here == _STREAM:
        chunks = _counted(streams.pieces(sys.stdin.fileno()), shown)
        if folder:
            await node.upload(box.id, there.path, chunks, user)
        else:
            await node.write_file(box.id, there.path, chunks)
            if user:
                await box.change_owner(there.path, user, user)
        return
    await box.upload(here, _name_inside(here, there.path, folder), user=user, progress=shown)


async def _out_of(here: Inside, there: str, node: NodeAPI, shown: Shown) -> None:
    box = await Sandbox.attach(here.sandbox, node=node)
    whole = await _is_directory(box, here.path)
    if there == _STREAM:
        if whole and sys.stdout.isatty():
            raise InvalidRequest("a tar is not for a terminal", f"`sandlot cp {':'.join(here)} - > files.tar`")
        if whole:
            async with aclosing(node.download(box.id, here.path)) as chunks:
                async for chunk in chunks:
                    await streams.write(1, chunk)
                    shown.more(len(chunk))
            return
        async with node.open_file(box.id, here.path) as file:
            async for chunk in file.chunks():
                await streams.write(1, chunk)
                shown.more(len(chunk), file.size)
        return
    await box.download(here.path, _name_here(here, there, whole), progress=shown)


async def _number(box: Sandbox, owner: str) -> int:
    """Of a user inside. Raises InvalidRequest."""
    who = person(owner)
    if isinstance(who, int):
        return who
    with suppress(NotFound):
        for line in (await box.read_file("/etc/passwd")).decode("utf-8", "replace").splitlines():
            name, _, number, *_ = [*line.split(":"), "", "", ""]
            if name == owner and isinstance(found := person(number), int):
                return found
    raise InvalidRequest(f"sandbox {box.id} has no user {owner}", f"`sandlot exec {box.id} cat /etc/passwd` lists them")


def _name_inside(here: str, path: str, folder: bool) -> str:
    """What a file or directory of this host is called there."""
    local = Path(here)
    if not folder or (_contents(here) and local.is_dir()):
        return path
    return posixpath.join(path, local.resolve().name if local.name in ("", "..") else local.name)


def _name_here(source: Inside, there: str, whole: bool) -> Path:
    """What a file, or with `whole` a directory, of a sandbox is called here. What was typed may be a link to a
    directory; what comes below it may not, for a sandbox may have made it. Raises NotFound, Conflict."""
    local = Path(there)
    if local.is_dir():
        local = local.resolve()
        if not whole or _contents(source.path):
            return local
        local = local / (posixpath.basename(posixpath.normpath(source.path)) or source.sandbox)
        refuse_link(local)
        return local
    missing = local if there.endswith("/") and not whole else local.absolute().parent
    if not missing.is_dir():
        raise NotFound(f"there is no directory {missing}", f"`mkdir -p {missing}`")
    return local


def _contents(path: str) -> bool:
    """Whether it says that what is in the directory is meant, not the directory."""
    return path == "." or path.endswith("/.")


async def _is_directory(box: Sandbox, path: str) -> bool:
    try:
        return (await box.stat_file(path, follow=True)).kind == "directory"
    except NotFound:
        return False


async def _counted(chunks: AsyncIterator[bytes], shown: Shown) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
        shown.more(len(chunk))


class Shown:
    """How far a copy is: a bar on a terminal, unless what is copied is written there too."""

    def __init__(self, between: bool) -> None:
        self.done = 0
        self._between = between
        self._update: Callable[[int, int | None], None] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Shown:
        if sys.stderr.isatty() and not self._between:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            bars = self._open.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
            bar = bars.add_task("", total=None)
            self._update = lambda done, total: bars.update(bar, completed=done, total=total)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __call__(self, done: int, total: int | None) -> None:
        self.done = done
        if self._update is not None:
            self._update(done, total)

    def more(self, count: int, total: int | None = None) -> None:
        self(self.done + count, total)

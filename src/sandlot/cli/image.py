"""`sandlot image`: the images of this host, or of a server."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from sandlot.api import ImageInfo, LayerProgress, NodeAPI, PullProgress
from sandlot.cli import interrupt, say
from sandlot.cli.build import build
from sandlot.errors import InvalidRequest
from sandlot.sandbox import open_node

image = typer.Typer(help="Root file systems that sandboxes start from.")
image.command("build")(build)

Name = Annotated[str, typer.Argument(help="The image's name.")]
Url = Annotated[str | None, typer.Option(envvar="SANDLOT_URL", help="A server; without one, this host.")]
Key = Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")]
State = Annotated[Path | None, typer.Option(help="Where the nodes of this host keep their images.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@asynccontextmanager
async def _open(url: str | None, api_key: str | None, state_dir: Path | None) -> AsyncIterator[NodeAPI]:
    node = await open_node(url, api_key, state_dir)
    try:
        yield node
    finally:
        await node.close()


def _with(
    work: Callable[[NodeAPI], Awaitable[None]], url: str | None, api_key: str | None, state_dir: Path | None
) -> int:
    async def do() -> int:
        async with _open(url, api_key, state_dir) as node:
            await work(node)
        return 0

    return interrupt.run(do())


@image.command()
def pull(
    reference: Annotated[str, typer.Argument(help="As `debian:12`, `ghcr.io/owner/name:tag`, `name@sha256:…`.")],
    url: Url = None,
    api_key: Key = None,
    state_dir: State = None,
    json: Json = False,
) -> int:
    """Fetch an image from its registry, or what has changed there since."""

    async def work(node: NodeAPI) -> None:
        found = await pulled(node, reference)
        if json:
            say.data(found.model_dump())
        else:
            say.note(f"pulled {found.name}: {_size(found.bytes)}, {found.files} files")

    return _with(work, url, api_key, state_dir)


@image.command("import")
def import_(
    name: Annotated[str, typer.Argument(help="What it will be called, as `mine` or `debian:12`.")],
    path: Annotated[
        Path,
        typer.Argument(
            help="An OCI layout, what `docker save` writes, a root file system: a directory or a tar, packed or not."
        ),
    ],
    url: Url = None,
    api_key: Key = None,
    state_dir: State = None,
    json: Json = False,
) -> int:
    """Make an image of a file or a directory of this host."""

    async def work(node: NodeAPI) -> None:
        found = await node.import_image(name, path.absolute())
        if json:
            say.data(found.model_dump())
        else:
            say.note(f"imported {found.name}: {_size(found.bytes)}, {found.files} files")

    return _with(work, url, api_key, state_dir)


@image.command("list")
def list_(url: Url = None, api_key: Key = None, state_dir: State = None, json: Json = False) -> int:
    """Show the images that are here."""

    async def work(node: NodeAPI) -> None:
        found = await node.images()
        if json:
            say.data([each.model_dump() for each in found])
        else:
            say.table(("name", "kind", "base", "size", "files", "layers", "made"), [_row(each) for each in found])

    return _with(work, url, api_key, state_dir)


@image.command()
def inspect(name: Name, url: Url = None, api_key: Key = None, state_dir: State = None, json: Json = False) -> int:
    """Show all that is known of one."""

    async def work(node: NodeAPI) -> None:
        found = (await node.image(name)).model_dump()
        if json:
            say.data(found)
            return
        config = found.pop("config")
        for word, value in {**found, **config}.items():
            if value not in (None, (), {}):
                shown = " ".join(value) if isinstance(value, tuple) else value
                for line in [f"{key}={each}" for key, each in shown.items()] if isinstance(shown, dict) else [shown]:
                    say.out(f"{word:10}  {say.clean(str(line))}")

    return _with(work, url, api_key, state_dir)


@image.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="The images' names.")],
    url: Url = None,
    api_key: Key = None,
    state_dir: State = None,
    json: Json = False,
) -> int:
    """Delete images. Sandboxes that were made from them live on."""

    async def work(node: NodeAPI) -> None:
        for name in names:
            await node.delete_image(name)
            if not json:
                say.note(f"deleted {name}")
        if json:
            say.data([{"name": name} for name in names])

    return _with(work, url, api_key, state_dir)


@image.command()
def export(name: Name, url: Url = None, api_key: Key = None, state_dir: State = None) -> int:
    """Write what an image holds over its base to stdout, as a tar in the form of a container's layer."""
    if sys.stdout.isatty():
        raise InvalidRequest("a tar is not for a terminal", f"`sandlot image export {name} > image.tar`")

    async def work(node: NodeAPI) -> None:
        async for chunk in node.export_image(name):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()

    return _with(work, url, api_key, state_dir)


@image.command()
def prune(url: Url = None, api_key: Key = None, state_dir: State = None, json: Json = False) -> int:
    """Delete pulled images that nothing stands on, and cached steps of builds: they can be had again."""

    async def work(node: NodeAPI) -> None:
        found = await node.prune_images()
        if json:
            say.data([each.model_dump() for each in found])
            return
        for each in found:
            say.note(f"deleted {each.name}: {_size(each.bytes)}")
        if not found:
            say.note("there was nothing to delete")

    return _with(work, url, api_key, state_dir)


async def pulled(node: NodeAPI, reference: str) -> ImageInfo:
    """Pull an image, and show how far that is."""
    found: ImageInfo | None = None
    with _Shown() as shown:
        async for progress in node.pull_image(reference):
            shown.show(progress)
            found = progress.image
    assert found is not None
    return found


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _row(found: ImageInfo) -> tuple[str, ...]:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created_at))
    base = "" if found.base == found.name else found.base
    return found.name, found.kind, base, _size(found.bytes), str(found.files), str(found.layers), made


class _Shown:
    """How far a pull is, for a person: a bar for each layer on a terminal, else a line when one is done."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[state]}"),
            )
            self._bars = Progress(*columns, console=Console(stderr=True))
        self._tasks: list[TaskID] = []
        self._said: set[int] = set()

    def __enter__(self) -> _Shown:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: PullProgress) -> None:
        for index, layer in enumerate(progress.layers):
            if self._bars is not None:
                if index == len(self._tasks):
                    self._tasks.append(self._bars.add_task(_short(layer), total=layer.size, state=""))
                state = "unpacked" if layer.unpacked else "unpacking" if layer.fetched == layer.size else ""
                self._bars.update(self._tasks[index], completed=layer.fetched, state=state)
            elif layer.unpacked and index not in self._said:
                self._said.add(index)
                say.note(f"{_short(layer)}  {_size(layer.size)}  {index + 1} of {len(progress.layers)}")


def _short(layer: LayerProgress) -> str:
    return layer.digest.removeprefix("sha256:")[:12]

"""What several commands share: their options, how the words of an option are read, and where the sandboxes are."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandlot.cli.completion import sandboxes
from sandlot.errors import InvalidRequest, NotFound, SandlotError, Unreachable

if TYPE_CHECKING:
    from sandlot.api import NodeAPI
    from sandlot.sandbox import Sandbox

# Where `sandlot serve` listens unless it is told otherwise.
HERE = "http://127.0.0.1:8750"

Id = Annotated[str, typer.Argument(metavar="ID", help="A sandbox's id.", autocompletion=sandboxes)]
Ids = Annotated[list[str], typer.Argument(metavar="ID…", help="Ids of sandboxes.", autocompletion=sandboxes)]
Server = Annotated[
    str | None, typer.Option("--url", envvar="SANDLOT_URL", help=f"The server; without one {HERE}.", metavar="URL")
]
Url = Annotated[
    str | None,
    typer.Option(envvar="SANDLOT_URL", help="A server to use; without one it runs in this process.", metavar="URL"),
]
Key = Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")]
State = Annotated[
    Path | None, typer.Option(help="Where the node of this process keeps its directory; else in SANDLOT_STATE_DIR.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="May be repeated.")]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Such as `memory=512M`, `disk=2G`, `cpus=1.5`, `pids=100`; any of the API's. May be repeated.",
    ),
]
Volume = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        "-v",
        metavar="HOST:INSIDE[:rw]",
        help="Show a host directory inside, read-only; of a server only what its --allow-volumes names.",
    ),
]


@asynccontextmanager
async def server(url: str | None, api_key: str | None) -> AsyncIterator[NodeAPI]:
    """The server whose sandboxes a command is about. Of this process they could not be: they would end with it."""
    from sandlot.sandbox import open_node

    node = await open_node(url or HERE, api_key)
    try:
        yield node
    except Unreachable as error:
        if url is not None or not error.message.startswith("no server answers"):
            raise
        raise Unreachable(
            f"sandboxes that outlive a command are on a server, and none answers at {HERE}",
            "`sandlot serve &` starts one; `--url` or SANDLOT_URL names one that is elsewhere",
        ) from None
    finally:
        await node.close()


@asynccontextmanager
async def fresh(
    image: str, url: str | None, api_key: str | None, state_dir: Path | None, **more: Any
) -> AsyncIterator[Sandbox]:
    """A sandbox for this program alone, on a server or in this process. Where the work with it has failed, that is
    what is said, and not what this keeps from ending."""
    from sandlot.sandbox import Sandbox, open_node

    node = await open_node(url, api_key, state_dir)
    try:
        await fetched(node, image)
        box = await Sandbox.create(image, node=node, **more)
        try:
            yield box
        except BaseException:
            with suppress(SandlotError):
                await box.close()
            raise
        await box.close()
    finally:
        await node.close()


async def fetched(node: NodeAPI, image: str) -> None:
    """Let an image of a registry be pulled where it is missing, and say how far that is. Without this it is pulled all
    the same, in silence."""
    from sandlot.api import is_reference

    if is_reference(image):
        try:
            await node.image(image)
        except NotFound:
            from sandlot.cli.image import pulled

            await pulled(node, image)


def pairs(option: str, words: Iterable[str] | None) -> dict[str, str]:
    """What `--label a=b` and the like say. Raises InvalidRequest."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"{option} {word} is not NAME=VALUE")
        found[name] = value
    return found


def labels(words: Iterable[str] | None) -> dict[str, str | None]:
    """Those that are looked for: with a value, or None for any."""
    pairs = (word.partition("=") for word in words or ())
    return {name: value if equals else None for name, equals, value in pairs}


def environment(words: Iterable[str] | None) -> dict[str, str]:
    """What `--env` says: a value, or the name of a variable that this program has. Raises InvalidRequest."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals:
            if name not in os.environ:
                raise InvalidRequest(f"--env {word}: there is no such variable here", "write it as `--env NAME=VALUE`")
            value = os.environ[name]
        found[name] = value
    return found


def volumes(words: Iterable[str] | None) -> list[dict[str, Any]]:
    """What `--volume` says. Raises InvalidRequest."""
    found = []
    for word in words or ():
        source, _, rest = word.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target or mode not in ("", "ro", "rw"):
            raise InvalidRequest(f"--volume {word} is not HOST:INSIDE or HOST:INSIDE:rw")
        found.append({"source": os.path.abspath(source), "target": target, "read_only": mode != "rw"})  # noqa: PTH100
    return found

"""`sandlot image`: the snapshots of this host, or of a server."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sandlot.api import NodeAPI
from sandlot.cli import interrupt, say
from sandlot.errors import InvalidRequest
from sandlot.sandbox import open_node


class Action(StrEnum):
    """What to do."""

    LIST = "list"
    RM = "rm"
    EXPORT = "export"


def image(
    action: Annotated[Action, typer.Argument(help="`list` them, `rm` one, `export` one as a tar to stdout.")],
    name: Annotated[str | None, typer.Argument(help="The image's name.")] = None,
    url: Annotated[str | None, typer.Option(envvar="SANDLOT_URL", help="A server; without one, this host.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the nodes of this host keep their images.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> int:
    """Images that were made from sandboxes by `snapshot`."""
    if (name is None) is not (action is Action.LIST):
        raise InvalidRequest(
            f"`sandlot image {action}` takes {'no name' if name else 'a name'}", "`sandlot image list` shows the names"
        )
    if action is Action.EXPORT and sys.stdout.isatty():
        raise InvalidRequest("a tar is not for a terminal", f"`sandlot image export {name} > {name}.tar`")
    return interrupt.run(_do(action, name or "", url, api_key, state_dir, json))


async def _do(
    action: Action, name: str, url: str | None, api_key: str | None, state_dir: Path | None, json: bool
) -> int:
    node: NodeAPI = await open_node(url, api_key, state_dir)
    try:
        if action is Action.LIST:
            found = await node.images()
            if json:
                say.data([each.model_dump() for each in found])
            else:
                say.table(
                    ("name", "base", "size", "files", "layers", "made"),
                    [
                        (
                            each.name,
                            each.base,
                            f"{each.bytes / 1e6:.1f} MB",
                            str(each.files),
                            str(each.layers),
                            time.strftime("%Y-%m-%d %H:%M", time.localtime(each.created_at)),
                        )
                        for each in found
                    ],
                )
        elif action is Action.RM:
            await node.delete_image(name)
            say.note(f"deleted {name}")
        else:
            async for chunk in node.export_image(name):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    finally:
        await node.close()
    return 0

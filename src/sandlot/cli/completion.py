"""`sandlot completion`: the script by which a shell completes the words of `sandlot`, and what it is told of sandboxes.

The script asks this very program at each press of the tab key. It promises an answer within a second, and that nothing
is said about a server that gives none.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

import typer

from sandlot.cli import say
from sandlot.errors import SandlotError

_SECONDS = 1.0
VARIABLE = "_SANDLOT_COMPLETE"


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Whose script to print.")],
) -> int:
    """Print the script that lets a shell complete `sandlot` commands, options and the ids of sandboxes."""
    from typer._completion_shared import get_completion_script

    say.out(get_completion_script(prog_name="sandlot", complete_var=VARIABLE, shell=shell))
    return 0


def asked() -> str | None:
    """The line that a shell wants to have completed, if that is what this program was called for."""
    if VARIABLE not in os.environ:
        return None
    from typer._completion_classes import completion_init

    completion_init()
    return os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")


def places(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """What a path in a sandbox begins with. Paths of this host the shell knows."""
    return [(f"{sandbox}:", image) for sandbox, image in sandboxes(context, incomplete.partition(":")[0])]


def sandboxes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the server's sandboxes that begin so, and what tells them apart."""
    from sandlot.cli.options import server

    async def found() -> list[tuple[str, str]]:
        async with asyncio.timeout(_SECONDS), server(context.params.get("url"), context.params.get("api_key")) as node:
            listed = await node.list()
        given = context.params.values()
        named = {word for value in given if isinstance(value, list | tuple) for word in value}
        return [(each.id, each.image) for each in listed if each.id.startswith(incomplete) and each.id not in named]

    try:
        return asyncio.run(found())
    except (SandlotError, TimeoutError):
        return []

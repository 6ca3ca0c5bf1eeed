"""`sandlot doctor`: what this host keeps of what Sandlot promises, found by trying."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sandlot.api import Capability
from sandlot.cli import interrupt, say
from sandlot.sandbox import open_node


def doctor(
    url: Annotated[
        str | None, typer.Option(envvar="SANDLOT_URL", help="A server whose host to look at; without one, this host.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the node of this process keeps its directory.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> int:
    """Say what this host can and cannot do, a line per need, with the command that fixes what is missing.

    Exits with 1 if no sandbox can be made here.
    """
    found = interrupt.run(_look(url, api_key, state_dir))
    if json:
        say.data([capability.model_dump() for capability in found])
    else:
        say.capabilities(found)
    return 1 if any(capability.state == "impossible" for capability in found) else 0


async def _look(url: str | None, api_key: str | None, state_dir: Path | None) -> list[Capability]:
    node = await open_node(url, api_key, state_dir)
    try:
        return await node.capabilities()
    finally:
        await node.close()

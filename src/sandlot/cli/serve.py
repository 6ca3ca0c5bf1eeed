"""`sandlot serve`: the sandboxes of this host over HTTP, until it is told to stop.

It promises that who reaches the server gets sandboxes and nothing of the host: what of it may be seen inside is named
at the start by `--allow-volumes`, and by default that is nothing. So a server without a key, which listens to this
machine only, gives a local user no more than sandboxes, not even where the server is root.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from pydantic import ValidationError

from sandlot import asgi
from sandlot.api import Profile, Warm
from sandlot.cli import interrupt, say
from sandlot.errors import Conflict, HostFault, InvalidRequest, Unsupported

if TYPE_CHECKING:
    from sandlot.server.volumes import AllowedVolumes

# Seconds that answers which are being given may take once the sandboxes have ended: they only have to be written.
_DRAIN_SECONDS = 5.0


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8750,
    api_key: Annotated[
        str | None, typer.Option(envvar="SANDLOT_API_KEY", help="What callers must send as a bearer token.")
    ] = None,
    allow_volumes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR[:rw]",
            help="A directory of this host that callers may mount, it and what is below, read-only. With `:rw` as a "
            "whole only, and what they write there belongs to the server's user, programs too. May be repeated.",
        ),
    ] = None,
    allow_registry: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="A registry that images may be pulled from, and no other; it may be one that is not public. Without "
            "this option any that is public. May be repeated.",
        ),
    ] = None,
    allow_network: Annotated[
        Literal["none", "host"], typer.Option(help="`host` lets callers make sandboxes with this host's network.")
    ] = "none",
    orphan_grace: Annotated[
        float,
        typer.Option(
            min=0,
            max=10 * 365 * 86_400,
            help="Seconds that sandboxes outlive a server that is killed, for one on the same address to find them.",
        ),
    ] = 60.0,
    warm: Annotated[
        list[str] | None,
        typer.Option(metavar="IMAGE[:PROFILE]=N", help="Keep N sandboxes of this image ready. May be repeated."),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the node keeps its directory.")] = None,
) -> int:
    """Serve sandboxes of this host over HTTP. Ctrl-C or SIGTERM ends them all, and then the server.

    Who can call it can make sandboxes, mount into them what `--allow-volumes` names, by default nothing, and pull
    images from public registries, or those that `--allow-registry` names.
    """
    asgi.require()
    try:
        from sandlot.server.app import LOOPBACK
        from sandlot.server.volumes import AllowedVolumes
    except ImportError as error:
        raise Unsupported(f"serving needs {error.name}, which is missing", "`pip install 'sandlot[serve]'`") from None
    if host not in LOOPBACK and not api_key:
        raise InvalidRequest(
            f"{host} can be reached by others, and who reaches this server can run commands on this host",
            "give it a key: `sandlot serve --host … --api-key KEY`, or SANDLOT_API_KEY",
        )
    allowed = AllowedVolumes.named(allow_volumes or ())
    kept = tuple(_warm(words) for words in warm or ())
    networks, registries = frozenset({"none", allow_network}), tuple(allow_registry or ())
    work = _serve(host, port, api_key, allowed, networks, registries, state_dir, orphan_grace, kept)
    try:
        return interrupt.run(work, interrupt.fast_loop())
    except interrupt.Interrupted as told:
        return 0 if told.code == 128 + signal.SIGTERM else told.code  # to be told to stop is how a server ends


def _warm(words: str) -> Warm:
    image, _, size = words.rpartition("=")
    profile = "default"
    if image.rpartition(":")[2] in tuple(Profile):  # else it is a tag
        image, _, profile = image.rpartition(":")
    try:
        return Warm.model_validate({"image": image or "host", "profile": profile, "size": size})
    except ValidationError:
        hint = "write it as `--warm host=20`, or `--warm host:strict=20`"
        raise InvalidRequest(f"{words!r} is not a pool of warm sandboxes", hint) from None


async def _serve(
    host: str,
    port: int,
    api_key: str | None,
    allowed: AllowedVolumes,
    networks: frozenset[str],
    registries: tuple[str, ...],
    state_dir: Path | None,
    orphan_grace: float,
    warm: tuple[Warm, ...],
) -> NoReturn:
    """Serves until it is cancelled."""
    from sandlot.node.ledger import image_store
    from sandlot.sandbox import open_node
    from sandlot.server.app import create_app

    with _listener(host, port) as listener:
        # The address is ours alone, so whoever served there before is dead.
        name = f"{host} {listener.getsockname()[1]}"
        node = await open_node(
            state_dir=state_dir, name=name, orphan_grace=orphan_grace, warm=warm, registries=registries
        )
        try:
            # Beside the images, for there is room for them.
            spool = image_store(state_dir).parent
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            served = await asgi.serve(listener, create_app(node, api_key, allowed, networks, spool))
            shown = f"[{host}]" if ":" in host else host
            say.out(f"listening on http://{shown}:{listener.getsockname()[1]}")
            try:
                while True:
                    await asyncio.get_running_loop().create_future()  # which nothing ever resolves
            finally:
                await node.close()  # runs that wait are answered that their sandbox has ended
                await served.drain(_DRAIN_SECONDS)
        finally:
            await node.close()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(f"port {port} of {host} is taken", "take another one: `sandlot serve --port 0`") from None
        raise HostFault(
            f"cannot listen on {host} port {port}: {error.strerror}", "choose another `--host` or `--port`"
        ) from None
    listener.setblocking(False)
    return listener

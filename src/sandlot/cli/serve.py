"""`sandlot serve`: the sandboxes of this host over HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from sandlot import asgi
from sandlot.cli import say
from sandlot.errors import Conflict, HostFault, InvalidRequest, Unsupported

# Seconds that answers which are being given may take once the sandboxes have ended: they only have to be written.
_DRAIN_SECONDS = 5.0


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8750,
    api_key: Annotated[
        str | None, typer.Option(envvar="SANDLOT_API_KEY", help="What callers must send as a bearer token.")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the node keeps its directory.")] = None,
) -> int:
    """Serve sandboxes of this host over HTTP. Ctrl-C or SIGTERM ends them all, and then the server."""
    asgi.require()
    try:
        from sandlot.server.app import LOOPBACK
    except ImportError as error:
        raise Unsupported(f"serving needs {error.name}, which is missing", "`pip install 'sandlot[serve]'`") from None
    if host not in LOOPBACK and not api_key:
        raise InvalidRequest(
            f"{host} can be reached by others, and who reaches this server can run commands on this host",
            "give it a key: `sandlot serve --host … --api-key KEY`, or SANDLOT_API_KEY",
        )
    try:
        import uvloop
    except ImportError:
        new_loop = None
    else:
        new_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_serve(host, port, api_key, state_dir))


async def _serve(host: str, port: int, api_key: str | None, state_dir: Path | None) -> int:
    from sandlot.node.node import local_node
    from sandlot.server.app import create_app

    loop = asyncio.get_running_loop()
    told: asyncio.Future[int] = loop.create_future()  # the exit status that the signal asks for
    loop.add_signal_handler(signal.SIGTERM, _tell, told, 0)
    loop.add_signal_handler(signal.SIGINT, _tell, told, say.INTERRUPTED)
    listener = _listener(host, port)
    with listener:
        node = local_node(state_dir)
        await node.start()
        try:
            served = await asgi.serve(listener, create_app(node, api_key))
            shown = f"[{host}]" if ":" in host else host
            say.out(f"listening on http://{shown}:{listener.getsockname()[1]}")
            status = await told
        finally:
            await node.close()  # runs that wait are answered that their sandbox has ended
        await served.drain(_DRAIN_SECONDS)
    return status


def _tell(told: asyncio.Future[int], status: int) -> None:
    if not told.done():
        told.set_result(status)


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

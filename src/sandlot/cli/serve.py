"""`sandlot serve`: the sandboxes of this host over HTTP, until it is told to stop.

It promises that who reaches the server gets sandboxes and nothing of the host: what of it may be seen inside is named
at the start by `--allow-volumes`, and by default that is nothing. So a server without a key, which listens to this
machine only, gives a local user no more than sandboxes, not even where the server is root.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import ssl
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from pydantic import ValidationError

from sandlot import asgi
from sandlot.api import Profile, Warm
from sandlot.cli import interrupt, say
from sandlot.errors import Conflict, HostFault, InvalidRequest, Unsupported

if TYPE_CHECKING:
    from sandlot.server.keys import Keys
    from sandlot.server.logs import Log
    from sandlot.server.volumes import AllowedVolumes

# Seconds that answers which are being given may take once the sandboxes have ended: they only have to be written.
_WRITE_SECONDS = 5.0

# The number of the listening socket that a server which starts itself anew leaves to itself.
_LISTENER = "SANDLOT_LISTENER"


@dataclass(frozen=True)
class _Options:
    """Of `serve`, when they have been looked at."""

    host: str
    port: int
    keys: Keys
    allowed: AllowedVolumes
    networks: frozenset[str]
    registries: tuple[str, ...]
    routes: tuple[str, ...]
    state_dir: Path | None
    orphan_grace: float
    drain_seconds: float
    warm: tuple[Warm, ...]
    tls: ssl.SSLContext | None
    log: Log


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8750,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SANDLOT_API_KEY",
            help="The operator's key, which callers send as a bearer token; others are made by `sandlot keys`.",
        ),
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
    allow_route: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="A host that is not public and that tenants' sandboxes may have a route to. May be repeated.",
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
    drain_seconds: Annotated[
        float,
        typer.Option(min=0, max=86_400, help="Seconds that requests have to finish at SIGTERM, before sandboxes end."),
    ] = 10.0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, with its chain, in PEM: serve HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key in PEM; without one it is in the same file.")] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Write a line to stderr for each request; without this for what fails only."),
    ] = None,
    warm: Annotated[
        list[str] | None,
        typer.Option(metavar="IMAGE[:PROFILE]=N", help="Keep N sandboxes of this image ready. May be repeated."),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the node keeps its directory.")] = None,
) -> int:
    """Serve sandboxes of this host over HTTP. Ctrl-C or SIGTERM ends them all, and then the server.

    SIGUSR2 starts the server anew, as for another version of it, and keeps the sandboxes: it finishes what it does,
    while who comes new waits. It needs `--orphan-grace`.

    Who can call it can make sandboxes, mount into them what `--allow-volumes` names, by default nothing, and pull
    images from public registries, or those that `--allow-registry` names. Where there are keys, a tenant's routes lead
    to public hosts, and to those that `--allow-route` names.
    """
    asgi.require()
    try:
        from sandlot.server.app import LOOPBACK
        from sandlot.server.keys import Keys, keys_file
        from sandlot.server.logs import Log
        from sandlot.server.volumes import AllowedVolumes
    except ImportError as error:
        raise Unsupported(f"serving needs {error.name}, which is missing", "`pip install 'sandlot[serve]'`") from None
    keys = Keys(keys_file(state_dir), api_key)
    if host not in LOOPBACK and not keys.required:
        raise InvalidRequest(
            f"{host} can be reached by others, and who reaches this server can run commands on this host",
            "make keys first, `sandlot keys create`, or give it one: `--api-key KEY`, or SANDLOT_API_KEY",
        )
    if keys.let_nobody_in:
        say.note(f"nobody is let in, for {keys.path} holds no key: `sandlot keys create`, or remove it")
    allowed = AllowedVolumes.named(allow_volumes or ())
    kept = tuple(_warm(words) for words in warm or ())
    networks, registries = frozenset({"none", allow_network}), tuple(allow_registry or ())
    options = _Options(
        host=host,
        port=port,
        keys=keys,
        allowed=allowed,
        networks=networks,
        registries=registries,
        routes=tuple(allow_route or ()),
        state_dir=state_dir,
        orphan_grace=orphan_grace,
        drain_seconds=drain_seconds,
        warm=kept,
        tls=_tls(tls_cert, tls_key),
        log=Log(log_format or "text"),
    )
    options.log.start(every_request=log_format is not None)
    try:
        return interrupt.run(_serve(options), interrupt.fast_loop())
    except interrupt.Interrupted as told:
        return 0 if told.code == 128 + signal.SIGTERM else told.code  # to be told to stop is how a server ends
    finally:
        options.log.stop()


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


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Raises InvalidRequest."""
    if cert is None:
        if key is not None:
            raise InvalidRequest("--tls-key is of no use without a certificate", "name it: `--tls-cert FILE`")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # an SSLError is one
        said = error.strerror or type(error).__name__
        hint = "they are files in PEM, and the key is the certificate's"
        raise InvalidRequest(f"--tls-cert {cert}{f' --tls-key {key}' if key else ''}: {said}", hint) from None
    return context


async def _serve(options: _Options) -> NoReturn:
    """Serves until it is cancelled, or this process becomes another one that serves."""
    from sandlot.node.ledger import default_state_dir, image_store
    from sandlot.sandbox import open_node
    from sandlot.server import spans
    from sandlot.server.app import create_app

    _reap()
    told = _told_to_start_anew()
    gc.freeze()  # what is loaded stays, and no collection need walk it; not the sandboxes that are taken over
    with _listener(options.host, options.port) as listener:
        # The address is ours alone, so whoever served there before is dead.
        host, port = options.host, listener.getsockname()[1]
        node = await open_node(
            state_dir=options.state_dir,
            name=f"{host} {port}",
            orphan_grace=options.orphan_grace,
            warm=options.warm,
            registries=options.registries,
            quota_of=options.keys.quota,
            reachable=lambda: options.routes if options.keys.required else None,
        )
        traced = spans.configured()
        try:
            # Beside the images, for there is room for them.
            spool = image_store(options.state_dir).parent
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            places = (spool, options.state_dir or default_state_dir())
            app = create_app(
                node, None, options.allowed, options.networks, spool, options.keys, places=places, spans=traced
            )
            kept = os.dup(listener.fileno())
            served = await asgi.serve(listener, app, tls=options.tls, websockets=True)
            shown = f"[{host}]" if ":" in host else host
            say.out(f"listening on {'https' if options.tls else 'http'}://{shown}:{port}")
            try:
                await _start_anew(told, options.orphan_grace)
                served.stop()
                await app.state.work.drain(options.drain_seconds)
                if traced is not None:
                    await asyncio.to_thread(traced.close)
                options.log.stop()
                os.environ[_LISTENER] = str(kept)
                os.set_inheritable(kept, True)
                # Another SIGUSR2 would end the next program, where it comes before that has a handler: it waits.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
                # From here: what is left undone would kill commands that the next one is to find.
                _become_another(options.orphan_grace)
            except asyncio.CancelledError as cancelled:
                served.stop()
                os.close(kept)  # who comes now is refused, and not left to wait
                app.state.work.draining = True
                if cancelled.args == (128 + signal.SIGTERM,):  # Ctrl-C is a person's, who waits for the end
                    await app.state.work.drain(options.drain_seconds)
                raise
            finally:
                await node.close()  # runs that wait are answered that their sandbox has ended
                await served.drain(_WRITE_SECONDS)
        finally:
            await node.close()
            if traced is not None:
                await asyncio.to_thread(traced.close)


def _reap() -> None:
    """Whatever the program that became this one had started and did not wait for: boxes that ended by that, and what
    was making more. Before there is a child that somebody here waits for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _told_to_start_anew() -> asyncio.Event:
    """Is set at SIGUSR2."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, told.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # blocked by the program that became this one
    return told


async def _start_anew(told: asyncio.Event, orphan_grace: float) -> None:
    """Returns when it was told to, unless the sandboxes would end by it."""
    while True:
        await told.wait()
        told.clear()
        if not orphan_grace:
            say.note("not started anew: with `--orphan-grace 0` its sandboxes would end")
        elif not os.access(sys.executable, os.X_OK):
            say.note(f"not started anew: there is no program {sys.executable} any more, or it may not be run")
        else:
            return


def _become_another(orphan_grace: float) -> NoReturn:
    """The same program from its start. Where that fails this one is beyond going on, and leaves as if it were killed:
    any other way out would end the sandboxes, which wait for the next server."""
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        say.error(
            f"not started anew: {sys.executable} cannot be run: {error.strerror}",
            f"mend it and start the server again within {orphan_grace:g} s, on the same address: its sandboxes wait",
        )
        os._exit(say.FAILED)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    left = os.environ.pop(_LISTENER, None)
    if left is not None:
        listener = socket.socket(fileno=int(left))
        listener.setblocking(False)
        os.set_inheritable(listener.fileno(), False)
        return listener
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

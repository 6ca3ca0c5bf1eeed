"""`sandlot run` and `sandlot exec`: a command in a fresh sandbox, or in one that there is; and what becomes of those
that were left to themselves: `commands`, `logs`, `kill`."""

from __future__ import annotations

import re
import secrets
import signal
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandlot.aio import shielded
from sandlot.cli import foreground, interrupt, options, say, streams
from sandlot.errors import InvalidRequest, NotFound, SandlotError
from sandlot.sandbox import Sandbox

if TYPE_CHECKING:
    from sandlot.sandbox import Command

_DIGITS = re.compile(r"[0-9]{1,20}")  # and more are no number of a user, but a wrong name
Words = Annotated[list[str], typer.Argument(metavar="COMMAND", help="A program and its arguments, after `--`.")]
CommandId = Annotated[str, typer.Argument(metavar="COMMAND", help="What `sandlot exec -d` printed.")]
Cwd = Annotated[
    str | None,
    typer.Option("--cwd", "-w", help="Working directory; without one the image's, else /root, or / for another user."),
]
User = Annotated[
    str | None, typer.Option("--user", "-u", help="Number or name of a user inside; without one the image's, else 0.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds until the command is killed.")]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Give it this command's standard input.")]
OneObject = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the output.")]


def run(
    command: Words,
    image: Annotated[str, typer.Option(help="Image of the sandbox.")] = "host",
    url: options.Url = None,
    api_key: options.Key = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit, such as 512M.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit on processes and threads.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU seconds per second.")] = None,
    disk: Annotated[str | None, typer.Option(help="Limit on the files it writes, such as 1G.")] = None,
    env: options.Env = None,
    volume: options.Volume = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Timeout = None,
    state_dir: options.State = None,
    stdin: Stdin = False,
    json: OneObject = False,
) -> int:
    """Run a command in a fresh sandbox: its streams are this one's, and so is its exit status.

    The status is the command's own; 128 + the signal that ended it; 127 if there is no such program. The first Ctrl-C
    is the command's, the second ends the sandbox; so does SIGTERM at once.
    """
    limits = {"memory": memory, "pids": pids, "cpus": cpus, "disk": disk}
    named = {name: value for name, value in limits.items() if value is not None}

    async def work() -> int:
        more: dict[str, Any] = {
            "env": options.environment(env),
            "limits": named,
            "volumes": options.volumes(volume),
        }
        async with options.fresh(image, url, api_key, state_dir, **more) as box:
            started = await start(box, command, not json, cwd=cwd, user=person(user), timeout=timeout, stdin_open=stdin)
            result = await foreground.stay(started, stdin=stdin, shown=not json)
        return foreground.said(result, box.id, json, timeout)

    return interrupt.run(work())


def execute(
    sandbox: options.Id,
    command: Words,
    env: options.Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Timeout = None,
    stdin: Stdin = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it to itself and print its id, for `sandlot logs` and others.")
    ] = False,
    url: options.Server = None,
    api_key: options.Key = None,
    json: OneObject = False,
) -> int:
    """Run a command in a sandbox: its streams are this one's, and so is its exit status.

    The status is the command's own; 128 + the signal that ended it; 127 if there is no such program; 3 if the sandbox
    has ended. The first Ctrl-C is the command's, the second kills it; so does SIGTERM at once.
    """
    if detach and stdin:
        raise InvalidRequest("a command that is left to itself is given no standard input", "leave out `-i` or `-d`")

    async def work() -> int:
        async with options.server(url, api_key) as node:
            box = await Sandbox.attach(sandbox, node=node)
            more: dict[str, Any] = {
                "env": options.environment(env),
                "cwd": cwd,
                "user": person(user),
                "timeout": timeout,
            }
            if detach:
                started = await box.start(command, **more)
                if json:
                    say.data({"sandbox": sandbox, "command": started.id})
                else:
                    say.out(started.id)
                return 0
            started = await start(box, command, not json, stdin_open=stdin, **more)
            result = await foreground.stay(started, stdin=stdin, shown=not json)
        return foreground.said(result, sandbox, json, timeout)

    return interrupt.run(work())


async def start(box: Sandbox, command: Sequence[str], shown: bool, **more: Any) -> Command:
    """Started to be stayed with; `shown`: by who takes its output as it comes. Its id is known before it is asked for:
    whoever gives up meanwhile can end it; and where nobody can any more, the node does."""
    key = f"c-{secrets.token_hex(6)}"
    cap = foreground.SHOWN_CAP if shown else foreground.OUTPUT_CAP
    try:
        return await box.start(command, output_cap=cap, lossless=shown, key=key, kill_on_disconnect=True, **more)
    except SandlotError:
        raise
    except BaseException:
        await shielded(foreground.kill(await box.command(key)))
        raise


def person(name: str | None) -> int | str | None:
    """Whom `--user` means: a number, or a name inside."""
    return int(name) if name is not None and _DIGITS.fullmatch(name) else name


def commands(
    sandbox: options.Id, url: options.Server = None, api_key: options.Key = None, json: options.Json = False
) -> int:
    """Show the commands of a sandbox: those that run, and those whose end can still be asked for."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            found = await node.commands(sandbox)
        if json:
            say.data([each.model_dump() for each in found])
            return 0
        rows = [
            (each.id, each.argv0, "running" if each.running else "ended", f"{each.out_total}", f"{each.err_total}")
            for each in found
        ]
        say.table(("id", "program", "state", "stdout", "stderr"), rows)
        return 0

    return interrupt.run(work())


def logs(
    sandbox: options.Id,
    command: CommandId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")] = False,
    url: options.Server = None,
    api_key: options.Key = None,
    json: OneObject = False,
) -> int:
    """Print what a command has written. Ctrl-C ends this; the command goes on."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            found = [each for each in await node.commands(sandbox) if each.id == command]
            if not found:
                raise NotFound(
                    f"there is no command {command} in sandbox {sandbox}", f"`sandlot commands {sandbox}` lists them"
                )
            left = {"out": found[0].out_total, "err": found[0].err_total}
            kept, lost = {"out": bytearray(), "err": bytearray()}, 0
            if follow or any(left.values()):
                async with aclosing(node.follow(sandbox, command)) as chunks:
                    async for chunk in chunks:
                        lost += chunk.lost
                        if json:
                            kept[chunk.stream] += chunk.data
                        else:
                            if chunk.lost:
                                say.note(f"({chunk.lost} bytes were not kept)")
                            await streams.write(1 if chunk.stream == "out" else 2, chunk.data)
                        left[chunk.stream] -= chunk.lost + len(chunk.data)
                        if not follow and max(left.values()) <= 0:
                            break
        if json:
            out, err = (kept[name].decode("utf-8", "replace") for name in ("out", "err"))
            say.data({"sandbox": sandbox, "command": command, "stdout": out, "stderr": err, "lost": lost})
        return 0

    return interrupt.run(work())


def kill(
    sandbox: options.Id,
    command: CommandId,
    name: Annotated[
        str, typer.Option("--signal", "-s", help="A name or a number: TERM asks it to end, KILL ends its whole tree.")
    ] = "TERM",
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Send a signal to a command of a sandbox and its process group."""
    number = _number(name)

    async def work() -> int:
        async with options.server(url, api_key) as node:
            await node.signal(sandbox, command, number)
        if json:
            say.data({"sandbox": sandbox, "command": command, "signal": number})
        return 0

    return interrupt.run(work())


def _number(name: str) -> int:
    if _DIGITS.fullmatch(name):
        return int(name)
    try:
        return signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"]
    except KeyError:
        raise InvalidRequest(
            f"there is no signal {name[:40]}", "write it as `--signal TERM` or `--signal 15`"
        ) from None

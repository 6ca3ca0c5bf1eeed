"""`sandlot shell`: a terminal in a sandbox, as if it was this one.

It owns this terminal's mode while it lasts, and gives it back however it ends. It promises that a shell which was
opened here ends with this program, unless somebody leaves it on purpose (Ctrl-] twice) or the connection breaks: then
it goes on, and `--attach` comes back to it.

    stay      waits for: the program's end, being left, or a failure of what follows
      _show   what the terminal writes, then for whoever reads ours
      _type   our keys, then for the terminal to take them
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sandlot.aio import shielded
from sandlot.cli import completion, exec, foreground, interrupt, options, say, streams
from sandlot.errors import Conflict, InvalidRequest, SandlotError, Unreachable
from sandlot.sandbox import Sandbox

if TYPE_CHECKING:
    from sandlot.sandbox import Terminal

_ID = re.compile(r"sb-[0-9a-f]+")
_LEAVE = b"\x1d"  # Ctrl-]
# What a script is given to that comes through a pipe.
_READER = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


def shell(
    where: Annotated[
        str,
        typer.Argument(
            metavar="[ID|IMAGE]", help="A sandbox, or the image of a fresh one.", autocompletion=completion.sandboxes
        ),
    ] = "host",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]", help="Another program than a login shell, after `--`.")
    ] = None,
    env: options.Env = None,
    cwd: exec.Cwd = None,
    user: exec.User = None,
    attach: Annotated[
        str | None, typer.Option(metavar="TERMINAL", help="Come back to one that was left; others are shut out of it.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="With `--attach`: look on, and type nothing.")] = False,
    url: options.Url = None,
    api_key: options.Key = None,
    state_dir: options.State = None,
    json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> int:
    """Open a terminal in a sandbox, and exit with the status of its program. In a fresh one, that ends with it.

    Ctrl-] twice leaves it: its program goes on, and `--attach` comes back. What comes through a pipe is a script.
    """
    more: dict[str, Any] = {"env": options.environment(env), "cwd": cwd, "user": exec.person(user)}
    if json:  # without this it would be taken for the program's name
        raise InvalidRequest("a terminal has no `--json`: it is for a person", "`sandlot exec --json ID -- COMMAND`")
    if attach is not None and (command or env or cwd is not None or user is not None):
        raise InvalidRequest(
            "`--attach` comes back to a program that runs: COMMAND, --env, --cwd and --user are for a new one",
            f"`sandlot shell {where} --attach {attach}`",
        )
    if watch and attach is None:
        raise InvalidRequest("there is nothing to look on at", "`sandlot shell ID --attach TERMINAL --watch`")

    async def there(box: Sandbox) -> int:
        if not sys.stdin.isatty():
            if attach is not None:
                raise InvalidRequest("a terminal is attached to from a terminal", "leave `--attach` out for a script")
            started = await exec.start(box, command or _READER, shown=True, stdin_open=True, **more)
            return foreground.said(await foreground.stay(started, stdin=True, shown=True), box.id, False)
        return await _on_terminal(box, command, more, attach, watch, keeps=_ID.fullmatch(where) is not None)

    async def work() -> int:
        if _ID.fullmatch(where):
            async with options.server(url, api_key) as node:
                return await there(await Sandbox.attach(where, node=node))
        if attach is not None:
            raise InvalidRequest("a fresh sandbox has no terminal yet", "`sandlot shell ID --attach TERMINAL`")
        async with options.fresh(where, url, api_key, state_dir) as box:
            return await there(box)

    return interrupt.run(work())


def terminals(
    sandbox: options.Id, url: options.Server = None, api_key: options.Key = None, json: options.Json = False
) -> int:
    """Show the terminals of a sandbox, for `sandlot shell ID --attach`."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            found = await node.terminals(sandbox)
        if json:
            say.data([each.model_dump() for each in found])
            return 0
        rows = [
            (each.id, "ended" if each.ended else "running", "yes" if each.attached else "no", " ".join(each.command))
            for each in found
        ]
        say.table(("id", "state", "attached", "program"), rows)
        return 0

    return interrupt.run(work())


async def _on_terminal(
    box: Sandbox, command: Sequence[str] | None, more: dict[str, Any], attach: str | None, watch: bool, keeps: bool
) -> int:
    """`keeps`: the sandbox lives on, and so may the program."""
    rows, columns = _size()
    if attach is None:
        if "TERM" in os.environ:
            more = {**more, "env": {"TERM": os.environ["TERM"], **more["env"]}}
        terminal = await box.terminal(command, rows=rows, columns=columns, **more)
    else:
        terminal = await box.attach_terminal(attach, watch=watch)
    back = f"`sandlot shell {box.id} --attach {terminal.id}` comes back to it"
    try:
        with _raw():
            left = await _stay(terminal, keeps, watch)
    except Unreachable as error:
        raise Unreachable(error.message, f"its program goes on: {back}") from None
    except BaseException:
        # Its window was closed, perhaps: then it is as if the program's own was.
        await shielded(terminal.detach() if attach is not None else _close(terminal))
        raise
    if left:
        await terminal.detach()
        say.note(f"\nleft; {back}")
        return 0
    end = terminal.end
    if end is not None and end.reason == "taken":
        raise Conflict(f"somebody else came to terminal {terminal.id}, and takes your place", back)
    if end is None or end.exit_code is None:
        await box.stats()  # which says how the sandbox ended, if it has
        raise Conflict(f"terminal {terminal.id} of sandbox {box.id} was closed, perhaps by a reset")
    if not watch:
        await _close(terminal)
    return end.exit_code


async def _stay(terminal: Terminal, keeps: bool, watch: bool) -> bool:
    """Until its end; or whether it was left before."""
    loop = asyncio.get_running_loop()
    resizes: set[asyncio.Task[None]] = set()

    def resized() -> None:
        task = loop.create_task(_resize(terminal))
        resizes.add(task)
        task.add_done_callback(resizes.discard)

    showing = asyncio.ensure_future(_show(terminal))
    typing = asyncio.ensure_future(_type(terminal, keeps, watch))
    if not watch:
        loop.add_signal_handler(signal.SIGWINCH, resized)
        resized()  # it may have been another size when somebody else was here
    try:
        await asyncio.wait((showing, typing), return_when=asyncio.FIRST_COMPLETED)
        if typing.done() and typing.result():
            return True
        await showing  # what was typed last may have ended it
        return False
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        tasks = [showing, typing, *resizes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _show(terminal: Terminal) -> None:
    while data := await terminal.read():
        await streams.write(1, data)


async def _type(terminal: Terminal, keeps: bool, watch: bool) -> bool:
    """Whether it was left; else it takes no more, or there is none."""
    waits = b""
    with suppress(Conflict):
        async for piece in streams.pieces(sys.stdin.fileno()):
            typed = waits + piece
            at = typed.find(_LEAVE * 2) if keeps else -1
            waits = _LEAVE if keeps and at < 0 and typed.endswith(_LEAVE) else b""
            typed = typed[: len(typed) - len(waits)] if at < 0 else typed[:at]
            if typed and not watch:
                await terminal.write(typed)
            if at >= 0:
                return True
    return False


async def _resize(terminal: Terminal) -> None:
    with suppress(SandlotError):  # it has ended
        await terminal.resize(*_size())


async def _close(terminal: Terminal) -> None:
    with suppress(SandlotError):
        await terminal.close()


def _size() -> tuple[int, int]:
    """Rows and columns of this terminal; what was usual, where it does not say."""
    columns, rows = os.get_terminal_size(0)
    return rows or 24, columns or 80


@contextmanager
def _raw() -> Iterator[None]:
    """Every key is the program's inside."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is not thrown away
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)

"""The terminals of a node's sandboxes: opened, attached to, closed, taken over from a dead node.

It promises that a sandbox to whose terminal somebody is attached is not idle, unless all they may do is look. It never
decides which sandbox, or what an error of the box means: that is `node.py`; what a terminal is, is `terminal.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sandlot.aio import deadline
from sandlot.api import MOST_REPLAY, TerminalSpec
from sandlot.drivers.base import Process
from sandlot.errors import Conflict, InvalidRequest, NotFound
from sandlot.node.commands import STEP_SECONDS
from sandlot.node.keyed import ONLY_LOOKS
from sandlot.node.live import Live
from sandlot.node.shell import find_bash
from sandlot.node.terminal import Link, Terminal
from sandlot.node.users import person

# Each costs the node five descriptors, and the sandbox one of the PTYS of which its shells take some too.
MOST_TERMINALS = 200


class Terminals:
    """What a node does with terminals."""

    def __init__(self, holds: bool, in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`holds`: another node may come to carry on with them."""
        self._holds = holds
        self._in_background = in_background

    async def open(self, live: Live, spec: TerminalSpec) -> Terminal:
        if len(live.terminals) >= MOST_TERMINALS:
            raise _too_many(live)
        box = live.box
        user, cwd, env = live.place(spec, await person(box, spec.user))
        env = {"TERM": "xterm-256color", **env}
        async with deadline(STEP_SECONDS, f"opening a terminal in sandbox {live.id}"):
            command = spec.command or (await find_bash(box, env) or "sh", "-l")
            size = spec.rows, spec.columns
            terminal = await Terminal.open(box, command, env, cwd, user, size, holds=self._holds)
        if live.box is not box or box.death.done():
            await terminal.close()
            raise Conflict(f"sandbox {live.id} was reset or ended meanwhile")
        if len(live.terminals) >= MOST_TERMINALS:  # others came meanwhile
            await terminal.close()
            raise _too_many(live)
        live.terminals[terminal.id] = terminal
        return terminal

    def attach(self, live: Live, terminal_id: str, replay: int, watch: bool) -> Link:
        if not 0 <= replay <= MOST_REPLAY:
            raise InvalidRequest(f"{replay} bytes cannot be replayed", f"0 to {MOST_REPLAY} can")
        terminal = live.terminals.get(terminal_id)
        if terminal is None:
            raise NotFound(f"sandbox {live.id} has no terminal {terminal_id}", "a reset ends terminals: open one")
        link = terminal.attach(replay, watch)
        if not ONLY_LOOKS.get():
            live.__enter__()
            link.ended.add_done_callback(lambda _: live.__exit__())
        return link

    def carry_on(self, live: Live, terminal_id: str, process: Process, fds: Sequence[int]) -> None:
        """One that a dead node left in the box."""
        live.terminals[terminal_id] = Terminal.adopted(live.box, terminal_id, process, fds)

    def close_all(self, live: Live) -> None:
        """Of a box that is dead, or about to be."""
        for terminal in live.terminals.values():
            self._in_background(terminal.close())
        live.terminals.clear()


def _too_many(live: Live) -> Conflict:
    return Conflict(f"sandbox {live.id} has {MOST_TERMINALS} terminals already", "close some")

"""The shells of a node's sandboxes: opened, used, put in the place of ended ones, taken over from a dead node.

It promises that a sandbox has no shell of a box that it has no more. It never decides which sandbox, or what an error
of the box means: that is `node.py`; what a shell is, is `shell.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sandlot.api import ShellResult, ShellRun, ShellSpec
from sandlot.drivers.base import More, Process
from sandlot.errors import Conflict, NotFound
from sandlot.node.live import Live
from sandlot.node.shell import Shell
from sandlot.node.users import person

# Each costs the node some sixteen descriptors.
MOST_SHELLS = 1000

# Begins work with a sandbox that nobody may be waiting for: while it goes on the sandbox is not idle.
Begin = Callable[[Live, Coroutine[Any, Any, ShellResult]], "asyncio.Task[ShellResult]"]


class Shells:
    """What a node does with shells."""

    def __init__(self, holds: bool, begin: Begin, in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`holds`: another node may come to carry on with them."""
        self._holds = holds
        self._begin = begin
        self._in_background = in_background

    async def open(self, live: Live, spec: ShellSpec) -> Shell:
        if len(live.shells) >= MOST_SHELLS:
            raise _too_many(live)
        shell = await self._open(live, spec)
        if len(live.shells) >= MOST_SHELLS:  # others came meanwhile
            await shell.close()
            raise _too_many(live)
        live.shells[shell.id] = shell
        return shell

    async def _open(self, live: Live, spec: ShellSpec) -> Shell:
        box = live.box
        user, cwd, env = live.place(spec, await person(box, spec.user))
        work = _begins(self._begin, live)
        shell = await Shell.open(box, env, cwd, user, spec=spec, work=work, holds=self._holds)
        if live.box is not box or box.death.done():
            await shell.close()
            raise Conflict(f"sandbox {live.id} was reset or ended meanwhile")
        return shell

    async def run(self, live: Live, shell_id: str, run: ShellRun) -> ShellResult:
        cap = live.spec.limits.output if run.output_cap is None else run.output_cap
        restarted = False
        while True:
            shell = self.get(live, shell_id)
            try:
                result = await shell.run(
                    run.command, timeout=run.timeout, cap=cap, stdin=run.stdin, queue=run.queue, key=run.key
                )
            except Conflict:
                if not run.restart or shell.alive:
                    raise
            else:
                return result.model_copy(update={"restarted": True}) if restarted else result
            await self._restart(live, shell)
            restarted = True

    async def _restart(self, live: Live, ended: Shell) -> None:
        """Another one in its place, once for all who ask."""
        async with ended.restarting:
            if live.shells.get(ended.id) is ended:
                shell = await self._open(live, ended.spec)
                shell.id = ended.id
                shell.inherit(ended)
                live.shells[ended.id] = shell
                self._in_background(ended.close())

    async def carry_on(
        self, live: Live, shell_id: str, process: Process, fds: Sequence[int], more: Sequence[More]
    ) -> None:
        """One that a dead node left in the box."""
        work = _begins(self._begin, live)
        live.shells[shell_id] = await Shell.adopted(live.box, shell_id, process, fds, more, work)

    def get(self, live: Live, shell_id: str) -> Shell:
        shell = live.shells.get(shell_id)
        if shell is None:
            raise NotFound(f"sandbox {live.id} has no shell {shell_id}", "a reset ends shells: open one")
        return shell

    def close_all(self, live: Live) -> None:
        """Of a box that is dead, or about to be."""
        for shell in live.shells.values():
            self._in_background(shell.close())
        live.shells.clear()


def _too_many(live: Live) -> Conflict:
    return Conflict(f"sandbox {live.id} has {MOST_SHELLS} shells already", "close some")


def _begins(begin: Begin, live: Live) -> Callable[[Coroutine[Any, Any, ShellResult]], asyncio.Task[ShellResult]]:
    return lambda work: begin(live, work)

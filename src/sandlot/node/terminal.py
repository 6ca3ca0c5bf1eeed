"""One terminal of a sandbox: a program on a pseudo terminal, and who is attached to it.

It owns the master, the last of what the program wrote, and everybody's place in that. It promises that of many who are
attached one types at a time, and that memory is bounded: when who types there does not read, the program waits, as on a
real terminal; who only watches misses some. With nobody attached the program goes on and what is too much is let go.

    read     waits for: more output, the program's end, being taken or closed
    write    waits for: the program to read, or the same
    output   moved from the master to the log by the loop's readiness callbacks
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pydantic import ValidationError

from sandlot.aio import deadline
from sandlot.api import MOST_REPLAY, TerminalEnd, TerminalInfo, TerminalSize
from sandlot.drivers.base import Box, Hold, Process, Spawn
from sandlot.errors import Conflict, HostFault, InvalidRequest, invalid
from sandlot.node import pty
from sandlot.node.commands import STEP_SECONDS, exit_code, not_started
from sandlot.node.keyed import room
from sandlot.node.streams import Input, punch

# Who watches a terminal at a time, beside who is attached.
WATCHERS = 100
# What is read in one go, for others of this process have a turn in between (bytes).
_TURN = 1 << 16


class Terminal:
    """Made by `Terminal.open`."""

    def __init__(
        self, terminal_id: str, box: Box, process: Process, fds: Sequence[int], command: tuple[str, ...], cwd: str
    ) -> None:
        """`fds` are the master, the log and, where another node may come, what it must know."""
        self.id = terminal_id
        self.command = command
        self._cwd = cwd
        self._box = box
        self._process = process
        self._fds = fds
        self._master, self._log = fds[:2]
        self._total = os.lseek(self._log, 0, os.SEEK_CUR)  # bytes that came; another node goes on from there
        self._kept = max(0, self._total - 2 * MOST_REPLAY)  # those before this were given back
        self._input = Input(os.dup(self._master))
        self._owner: Link | None = None
        self._links: set[Link] = set()
        self._reading = False
        self._closed = False
        self.exit: int | None = None  # once all that the program wrote is in the log
        self._read_on()
        self._ended = asyncio.get_running_loop().create_task(self._until_ended())

    # -- its start and its end ------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        box: Box,
        command: tuple[str, ...],
        env: Mapping[str, str],
        cwd: str,
        user: int,
        size: tuple[int, int],
        *,
        holds: bool = False,
    ) -> Terminal:
        """`holds`: another node may come for it. Raises Conflict (there is no terminal left), OSError."""
        try:
            master, theirs = await pty.open_pty(box, user)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Conflict("the sandbox cannot have one more terminal: close some, or shells", pty.FULL) from error
        fds = [master]
        try:
            pty.resize(master, *size)
            fds.append(os.memfd_create("sandlot-terminal", os.MFD_CLOEXEC))
            terminal_id, hold = f"t-{secrets.token_hex(4)}", None
            if holds:
                fds.append(os.memfd_create("sandlot-facts", os.MFD_CLOEXEC))
                os.write(fds[-1], json.dumps((command, cwd)).encode(errors="surrogateescape"))
                hold = Hold(tuple(fds), json.dumps({"terminal": terminal_id}))
            spawn = Spawn(command, dict(env), cwd, user, tty=True)
            process = await box.spawn(spawn, theirs, theirs, theirs, hold)
            return cls(terminal_id, box, process, fds, command, cwd)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        finally:
            os.close(theirs)

    @classmethod
    def adopted(cls, box: Box, terminal_id: str, process: Process, fds: Sequence[int]) -> Terminal:
        """One that a dead node left, with what was held of it."""
        command, cwd = json.loads(os.pread(fds[2], os.fstat(fds[2]).st_size, 0))
        return cls(terminal_id, box, process, fds, tuple(command), cwd)

    def info(self) -> TerminalInfo:
        rows, columns = pty.size(self._master)
        return TerminalInfo(
            id=self.id,
            command=self.command,
            rows=rows,
            columns=columns,
            attached=self._owner is not None,
            ended=self.exit is not None,
            exit_code=self.exit,
        )

    async def _until_ended(self) -> None:
        ended = await self._process.wait()
        if self._box.death.done():
            self._release_all(TerminalEnd(reason="closed"))
            return
        self._pause()
        had = self._total
        while self._total - had < MOST_REPLAY // 2 and self._take():
            pass  # and not until nothing comes: a child may write on for ever
        self._input.close()
        if ended.error is not None:
            self._keep(not_started(self.command[0], self._cwd, ended).replace("\n", "\r\n").encode())
        self.exit = exit_code(ended)
        for link in self._links:
            link.woken.set()

    async def close(self) -> None:
        """End it with all that runs on it, and all who are attached. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._release_all(TerminalEnd(reason="closed"))
        async with deadline(STEP_SECONDS, f"ending terminal {self.id}"):
            with suppress(HostFault):  # the box is going, and takes it along
                await self._process.kill_tree()
            await asyncio.wait((self._ended,))
        with suppress(HostFault):
            await self._process.release()
        self._pause()
        self._input.close()
        for fd in self._fds:
            os.close(fd)

    def _release_all(self, why: TerminalEnd) -> None:
        for link in list(self._links):
            link.finish(why)

    # -- its output -----------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        if not self._reading:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._master, self._readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._master)

    def _readable(self) -> None:
        had = self._total
        while self._total - had < _TURN and self._take():
            pass
        if self._owner is not None and self._total - self._owner.at >= MOST_REPLAY:
            self._pause()  # until it has read

    def _take(self) -> bool:
        try:
            data = os.read(self._master, _TURN)
        except BlockingIOError:
            return False
        except OSError:  # nobody has its other end any more
            data = b""
        if not data:
            self._pause()
            return False
        self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        self._total += os.write(self._log, data)
        surplus = self._total - 2 * MOST_REPLAY - self._kept
        if surplus >= MOST_REPLAY:
            punch(self._log, self._kept, surplus)
            self._kept += surplus
        for link in self._links:
            link.woken.set()

    def since(self, link: Link) -> bytes:
        """What it has not read yet, or some of it."""
        if link.watches:
            link.at = max(link.at, self._kept)
        data = os.pread(self._log, min(_TURN, self._total - link.at), link.at)
        link.at += len(data)
        if link is self._owner and self.exit is None and self._total - link.at < MOST_REPLAY // 2:
            self._read_on()
        return data

    # -- who is attached ------------------------------------------------------------------------------------------

    def attach(self, replay: int, watch: bool) -> Link:
        """Raises Conflict: it was closed, or too many watch."""
        if self._closed:
            raise Conflict(f"terminal {self.id} is closed")
        if watch and (watching := sum(link.watches for link in self._links)) >= room(WATCHERS):
            raise Conflict(f"{watching} watch terminal {self.id} already")
        link = Link(self, max(self._kept, self._total - replay), watch)
        if not watch:
            if self._owner is not None:
                self._owner.finish(TerminalEnd(reason="taken"))
            self._owner = link
        self._links.add(link)
        return link

    def detach(self, link: Link) -> None:
        self._links.discard(link)
        if link is self._owner:
            self._owner = None
            if self.exit is None and not self._closed:
                self._read_on()

    async def write(self, data: bytes) -> None:
        try:
            await self._input.write(data)
        except OSError:  # BrokenPipeError too: it was closed
            raise Conflict(f"terminal {self.id} takes no more: its program has ended") from None

    def resize(self, rows: int, columns: int) -> None:
        pty.resize(self._master, rows, columns)


class Link:
    """TerminalLink to a terminal of this node."""

    def __init__(self, terminal: Terminal, at: int, watches: bool) -> None:
        self.end: TerminalEnd | None = None
        self.at = at  # how much of the output it has read
        self.watches = watches
        self.woken = asyncio.Event()  # there may be more, or no more comes
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._terminal = terminal

    def finish(self, why: TerminalEnd) -> None:
        """No more comes."""
        if not self.ended.done():
            self.end = why
            self.ended.set_result(None)
            self._terminal.detach(self)
            self.woken.set()

    async def read(self) -> bytes:
        while self.end is None:
            data = self._terminal.since(self)
            if data:
                return data
            if self._terminal.exit is not None:
                self.finish(TerminalEnd(reason="exit", exit_code=self._terminal.exit))
                break
            self.woken.clear()
            await self.woken.wait()
        return b""

    async def write(self, data: bytes) -> None:
        self._check()
        writing = asyncio.ensure_future(self._terminal.write(data))
        try:
            await asyncio.wait((writing, self.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not writing.done():  # who takes the terminal has its turn at once
                writing.cancel()
                await asyncio.wait((writing,))
        if writing.cancelled():
            self._check()
        await writing

    async def resize(self, rows: int, columns: int) -> None:
        self._check()
        try:
            size = TerminalSize(rows=rows, columns=columns)
        except ValidationError as error:
            raise invalid(error) from None
        self._terminal.resize(size.rows, size.columns)

    async def close(self) -> None:
        self.finish(TerminalEnd(reason="closed"))

    def _check(self) -> None:
        if self.watches:
            raise InvalidRequest("who only watches a terminal cannot type there", "attach without `watch`")
        if self.end is not None:
            how = {"taken": "another one was attached", "exit": "its program has ended", "closed": "it is closed"}
            raise Conflict(f"terminal {self._terminal.id} takes no more from here: {how[self.end.reason]}")

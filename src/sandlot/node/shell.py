"""One shell of a sandbox: a bash that lives on between commands, and that no text puts out of step.

It owns the files in the box's /dev/shm by which the shell is told what to do and says how it went, its terminal, and
the output of each command. It promises that a result is that of its own command whatever the text was, that a command
which is cut short leaves the shell usable, that memory per command is bounded by its cap, and that all of it can go on
in another node when this one is killed. How it does that is told in docs/design/0009-shells.md.

    run        waits for: the status, the shell's end, or the command's timeout
    output     moved from each command's own FIFOs to its log by the loop's readiness callbacks
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import secrets
import signal
import stat
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sandlot.aio import deadline, shielded
from sandlot.api import ShellInfo, ShellOutput, ShellResult, ShellSpec
from sandlot.drivers.base import Box, Exit, Hold, More, Process, Spawn
from sandlot.errors import Conflict, HostFault, InvalidRequest, SandlotError
from sandlot.node import pty
from sandlot.node.live import clock
from sandlot.node.streams import Stream

# A start takes about 10 ms; an image whose startup files take longer than this is not bash's fault.
START_SECONDS = 20.0
# How long a command may take to end after each of ^C, SIGINT and SIGKILL (seconds).
GRACE_SECONDS = (0.5, 0.5, 1.0)
# A signal to whom a terminal's ^C would go (asm-generic/ioctls.h; no module of Python names it).
_TIOCSIG = 0x40045436
# A text whose every foreground program ignores its end may start the next one, so often: then the shell is killed,
# three seconds after the first ^C.
KILLS = 4
# Pairs of FIFOs made ahead, so that no command waits for its own.
SPARE = 2
# Of commands whose children still write, the output of so many is kept, and so many results of those with a key.
BACKGROUND = 64
KEYED = 8
KEYED_BYTES = 16 << 20
# What the shell told is kept for a node after this one until it is so much (bytes), and then only its last words.
_TOLD = 1 << 20

# Bash reads its orders from `PROMPT_COMMAND`: whatever throws it back to its top level comes by there again. How the
# last text ended is told by the loop's condition, where `break` and `continue` in it lead as well.
# `-e` ends the text, not the shell: the trap returns from what is being sourced, and at the top takes `-e` away until
# the next text. (`BASHPID`: in a subshell the return would lead back into a copy of the loop.) A shell that cannot open
# its own files any more ends, rather than run a text whose output goes nowhere. `\\builtin`: a text may have functions
# and aliases of any name, but none called `exec`, which only by itself opens files for good. An interrupt may come in
# the midst of a line that is read byte by byte, and its rest is the next line: a whole one begins with its only tab.
_BASH = """\
set +o history
HISTFILE= PS1= PS2=
__sandlot='while {{ __sandlot_status=$? __sandlot_flags=$__sandlot_e$-; \\builtin set +exv; }} 2>/dev/null
PROMPT_COMMAND=$__sandlot
\\builtin unset -f exec
\\exec </dev/null >/dev/null 2>&1
\\builtin printf "$__sandlot_id %s %s %s\\0" "$__sandlot_status" "$__sandlot_flags" "${{PWD-}}" >{0}/status ||
\\builtin exit 125
IFS= \\builtin read -r __sandlot_line <{0}/control
do \\builtin eval "${{__sandlot_line##[!\t]*}}"; done; \\builtin eval "$__sandlot"'
__sandlot_e= __sandlot_id=start
trap '__sandlot_status=$?
if [[ $- == *e* && $BASHPID == $$ ]]; then
if (( ${{#BASH_SOURCE[@]}} )); then return $__sandlot_status; else __sandlot_e=e; set +e; fi
fi' ERR
set -E
PROMPT_COMMAND=$__sandlot
"""
_SH = """\
trap : INT
printf 'start 0  %s\\0' "$PWD" >{0}/status
while IFS= read -r __sandlot_line <{0}/control; do eval "$__sandlot_line"; done
"""
# The text is prefixed, not the line: what `set -x` shows must not begin with ours.
_BASH_LINE = (
    "\t__sandlot_id={id} __sandlot_e=; \\exec <{input} >{pair}.out 2>{pair}.err || \\builtin exit 125; "
    "\\builtin . {0}/text\n"
)
_SH_LINE = (
    "exec <{input} >{pair}.out 2>{pair}.err; . {0}/text; __sandlot_status=$?; exec </dev/null >/dev/null 2>&1; "
    'printf "{id} %s  %s\\0" "$__sandlot_status" "$PWD" >{0}/status\n'
)
# Says that the shell has come by, and so that whatever it was told before this has been run, or is lost.
_BASH_ASK = "\t__sandlot_id={id}-lost\n"
_SH_ASK = 'printf "{id}-lost 0  %s\\0" "$PWD" >{0}/status\n'
_KEPT_FLAGS = "ex"  # what a text set and the next one shall have; the loop itself runs without


def _nothing() -> None:
    """Nothing was held."""


class _NeverBegan(Conflict):
    """The node before this one died before it had told the shell of a text."""


@dataclass(slots=True)
class _Pair:
    """Two FIFOs by their read ends and a log for each: what one command writes. `file`, where another node may come,
    says whose they are, a line of JSON, and how that went, another line; empty, they are nobody's."""

    path: str
    out: int
    err: int
    logs: tuple[int, int]
    file: int
    release: Callable[[], None]

    def begin(self, about: _About) -> None:
        for log in self.logs:
            os.ftruncate(log, 0)
            os.lseek(log, 0, os.SEEK_SET)
        if self.file >= 0:
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, about.write(), 0)

    def conclude(self, about: _About, outcome: dict[str, Any]) -> None:
        """The first line stays as it is: a node that is killed meanwhile leaves half a second one, which is none."""
        if self.file >= 0:
            os.pwrite(self.file, json.dumps(outcome).encode() + b"\n", len(about.write()))

    def clear(self) -> None:
        if self.file >= 0:
            os.ftruncate(self.file, 0)

    def close(self) -> None:
        self.release()
        for fd in (self.out, self.err, *self.logs, *([self.file] if self.file >= 0 else [])):
            os.close(fd)


@dataclass(frozen=True, slots=True)
class _About:
    """What the result of a text will need, here or in a node that adopts the box."""

    id: str
    key: str | None
    what: str  # a fingerprint of the text, where it has a key
    cap: int
    timeout: float | None
    started_at: float  # of `clock`

    def write(self) -> bytes:
        words = (self.id, self.key, self.what, self.cap, self.timeout, self.started_at)
        return json.dumps(words).encode() + b"\n"


@dataclass(slots=True)
class _Command:
    about: _About
    pair: _Pair
    out: Stream
    err: Stream
    writers: tuple[int, ...]  # ours, so that a FIFO that the shell has not opened yet does not look finished
    status: asyncio.Future[tuple[int, str] | None]  # exit status and directory; None: it never began
    key: str | None  # by which its result can be asked for
    adopted: bool = False
    interrupted: bool = False
    line: bytes = b""  # what tells the shell to run it
    cut: bool = False  # it is being ended, for whatever reason
    result: ShellResult | None = None

    @property
    def id(self) -> str:
        return self.about.id

    def at_end(self) -> bool:
        """Whether nothing can come any more."""
        return self.out.at_end() and self.err.at_end()

    def stop(self) -> None:
        """Take no more; the descriptors are the pair's."""
        self.out.stop()
        self.err.stop()


@dataclass(frozen=True, slots=True)
class _Keyed:
    what: str
    result: asyncio.Future[ShellResult]


# Begins a piece of work that goes on when whoever asked for it has gone.
Work = Callable[[Coroutine[Any, Any, ShellResult]], "asyncio.Task[ShellResult]"]


class Shell:
    """Made by `Shell.open`. One command at a time."""

    def __init__(self, box: Box, directory: str, user: int, bash: bool, spec: ShellSpec, work: Work) -> None:
        self.id = f"sh-{secrets.token_hex(4)}"
        self.cwd = ""
        self.lacks: tuple[str, ...] = ()
        self.spec = spec
        self.restarting = asyncio.Lock()  # of whoever puts another in the place of this one
        self._box = box
        self._directory = directory
        self._user = user
        self._bash = bash
        self._work = work
        self._process: Process | None = None
        self._fds: dict[str, int] = {}
        self._terminal = -1
        self._holds = False
        self._closed = False
        self._spare: deque[_Pair] = deque()
        self._making: asyncio.Task[None] | None = None
        self._flags = ""
        self._running: _Command | None = None
        self._turn = asyncio.Lock()
        self._done: dict[str, _Command] = {}  # those that have ended, and of which something is kept
        self._keyed: dict[str, _Keyed] = {}
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Task[Exit] | None = None
        self._last = "start"  # the id that the shell told last
        self._words = b"", b""  # what it told when a text had ended, and last of all
        self._heard = 0  # bytes of what it told that were looked at
        self._replaying = False  # they were told to another node

    # -- its start and its end ------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        box: Box,
        env: Mapping[str, str],
        cwd: str,
        user: int = 0,
        bash: bool = True,
        *,
        spec: ShellSpec = ShellSpec(),  # noqa: B008
        work: Work = asyncio.ensure_future,
        holds: bool = False,
    ) -> Shell:
        """A shell in which a command can be run; a `bash` where the image has one. `holds`: another node may come for
        it, and would open another one as `spec` says. Raises HostFault, InvalidRequest (no shell in the image, no such
        directory)."""
        found = await find_bash(box, env) if bash else None
        shell = cls(box, f"/dev/shm/.sandlot-{secrets.token_hex(8)}", user, found is not None, spec, work)
        shell._holds = holds
        try:
            async with deadline(START_SECONDS, "the start of a shell"):
                await shell._start(dict(env), cwd, found)
        except BaseException:
            await shielded(shell.close())
            raise
        return shell

    async def _start(self, env: dict[str, str], cwd: str, bash: str | None) -> None:
        where = self._directory
        make = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK
        start = await self._box.open(f"{where}/start", make, 0o644, self._user, parents=True)
        try:
            os.write(start, (_BASH if self._bash else _SH).format(where).encode())
        finally:
            os.close(start)
        for name, mode in (("text", 0o644), ("input", 0o644), ("control", 0o10666), ("status", 0o10666)):
            flags = make if mode < 0o10000 else os.O_RDWR | os.O_NONBLOCK
            self._fds[name] = await self._box.open(f"{where}/{name}", flags, mode, self._user)
        self._fds["told"] = os.memfd_create("sandlot-told", os.MFD_CLOEXEC)
        terminal = await self._open_terminal()
        argv = (bash, "--noprofile", "--rcfile", f"{where}/start", "-i") if bash else ("sh", f"{where}/start")
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            stdin = null if terminal < 0 else terminal
            spawn = Spawn(argv, env, cwd, self._user, tty=terminal >= 0)
            self._process = await self._box.spawn(spawn, stdin, null, null, self._hold())
        finally:
            os.close(null)
            if terminal >= 0:
                os.close(terminal)
        self._listen()
        while len(self._spare) < SPARE:
            self._spare.append(await self._pair())
        assert self._ended is not None
        await asyncio.wait((self._started, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            ended = self._ended.result()
            reason = os.strerror(ended.error) if ended.error else f"it ended with {_status(ended)}"
            raise InvalidRequest(f"a shell could not be started in {cwd}: {reason}", "does its image have a `sh`?")

    async def _open_terminal(self) -> int:
        """The end of a new terminal that the shell gets, or -1: the host has none left."""
        if not self._bash:
            self.lacks = ("bash: this is `sh`, in which `set -e`, an interrupt or a timeout ends the shell",)
            return -1
        try:
            self._terminal, theirs = await pty.open_pty(self._box, self._user)
        except OSError:
            self.lacks = (f"a terminal: {pty.FULL}",)
            return -1
        return theirs

    def _listen(self) -> None:
        """From now on; what was told before is heard at once."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        self._ended = loop.create_task(self._process.wait())
        loop.add_reader(self._fds["status"], self._take)
        if self._terminal >= 0:
            loop.add_reader(self._terminal, self._drop_terminal_output)

    def _drop_terminal_output(self) -> None:
        """What programs write to /dev/tty: nobody looks at it, and full it would stop them."""
        try:
            if os.read(self._terminal, 1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:  # nobody has its other end
            pass
        asyncio.get_running_loop().remove_reader(self._terminal)

    @property
    def alive(self) -> bool:
        return self._ended is not None and not self._ended.done()

    def info(self) -> ShellInfo:
        ended = None if self._ended is None or not self._ended.done() else self._ended.result()
        return ShellInfo(
            id=self.id,
            cwd=self.cwd,
            running=self.running,
            ended=ended is not None,
            exit_code=None if ended is None else _status(ended),
            lacks=self.lacks,
        )

    @property
    def running(self) -> str | None:
        """The id of the command that runs."""
        return None if self._running is None else self._running.id

    async def close(self) -> None:
        """End it with all that runs in it; what it had in the box's memory is the box's again. Idempotent."""
        self._closed = True
        for name in ("text", "input"):  # of a box that has no memory left to remove them
            if name in self._fds:
                os.ftruncate(self._fds[name], 0)
        if self._process is not None:
            with suppress(HostFault):  # the box is going, and takes it along
                await self._kill()
                await self._process.release()
        if self._making is not None:
            await asyncio.wait((self._making,))
        if self._fds and not self._box.death.done():
            with suppress(OSError, SandlotError):  # it is gone, or the box is going
                await self._box.remove(self._directory, deep=True)
        self._let_go()

    def _let_go(self) -> None:
        loop = asyncio.get_running_loop()
        for name, fd in self._fds.items():
            if name == "status":
                loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()
        if self._terminal >= 0:
            loop.remove_reader(self._terminal)
            os.close(self._terminal)
            self._terminal = -1
        for pair in self._spare:
            pair.close()
        self._spare.clear()
        for command in self._done.values():
            command.stop()
            command.pair.close()
        self._done.clear()

    # -- a node after this one ------------------------------------------------------------------------------------

    def _hold(self) -> Hold | None:
        """What another node will need of it, but its commands."""
        if not self._holds:
            return None
        facts = (self._directory, self._user, self._bash, self.lacks, self.spec.model_dump(mode="json"))
        self._fds["facts"] = os.memfd_create("sandlot-shell", os.MFD_CLOEXEC)
        _write(self._fds["facts"], json.dumps(facts))
        fds = [self._fds[name] for name in _HELD]
        return Hold((*fds, *([self._terminal] if self._terminal >= 0 else [])), json.dumps({"shell": self.id}))

    @classmethod
    async def adopted(
        cls, box: Box, shell_id: str, process: Process, fds: Sequence[int], more: Sequence[More], work: Work
    ) -> Shell:
        """One that a dead node left, with what was held of it and of its commands. A text that runs goes on."""
        given = dict(zip(_HELD, fds, strict=False))
        directory, user, bash, lacks, spec = json.loads(_read(given["facts"]))
        shell = cls(box, directory, user, bash, ShellSpec.model_validate(spec), work)
        shell.id, shell.lacks, shell._holds = shell_id, tuple(lacks), True
        shell._process = process
        shell._fds = given
        if len(fds) > len(_HELD):
            shell._terminal = fds[len(_HELD)]
        shell._started.set_result(None)
        for each in more:
            out, err, out_log, err_log, file = each.fds
            pair = _Pair(f"{directory}/{each.note}", out, err, (out_log, err_log), file, each.release)
            await shell._carry_on(pair)
        shell._listen()
        shell._replaying = True
        shell._hear()
        shell._take()
        shell._replaying = False
        if shell._running is not None and shell.alive:  # has it been told of the text, and run it?
            shell._ask(shell._running)
        return shell

    async def _carry_on(self, pair: _Pair) -> None:
        about, outcome = _read_about(pair.file)
        if about is None:
            self._spare.append(pair)
            return
        out, err = Stream(about.cap, pair.out, pair.logs[0]), Stream(about.cap, pair.err, pair.logs[1])
        status: asyncio.Future[tuple[int, str] | None] = asyncio.get_running_loop().create_future()
        command = _Command(about, pair, out, err, (), status, about.key, adopted=True)
        result: asyncio.Future[ShellResult]
        if outcome is None:
            command.writers = _writers(pair)
            self._running = command
            await self._turn.acquire()
            result = self._work(self._until_done(command))
        else:
            totals = outcome.pop("totals")
            streams = (out.output(totals[0]), err.output(totals[1]))
            command.result = ShellResult.model_construct(out=streams[0], err=streams[1], **outcome)
            self._done[about.id] = command
            result = asyncio.get_running_loop().create_future()
            result.set_result(command.result)
        if about.key is not None:
            self._remember(about.key, _Keyed(about.what, result))

    def inherit(self, ended: Shell) -> None:
        """The results with a key of the one in whose place this is, as many as are kept of one: in no node after this
        one, for what it would find is the ended process's."""
        kept: list[tuple[str, _Keyed]] = []
        size = 0
        for key, keyed in reversed(list(ended._keyed.items())):
            done = keyed.result
            if not done.done() or done.cancelled() or done.exception() is not None:
                continue
            size += len(done.result().out.data) + len(done.result().err.data)
            if len(kept) >= KEYED or (kept and size > KEYED_BYTES):
                break
            kept.append((key, keyed))
        self._keyed = dict(reversed(kept))

    async def _until_done(self, command: _Command) -> ShellResult:
        """It has its turn already."""
        try:
            return await self._complete(command)
        finally:
            self._turn.release()

    # -- commands -------------------------------------------------------------------------------------------------

    async def run(
        self,
        text: str,
        *,
        timeout: float | None,
        cap: int,
        stdin: bytes = b"",
        queue: bool = False,
        key: str | None = None,
    ) -> ShellResult:
        """Run a text to its end; with a `key` once, however often it is asked for. Raises Conflict when another runs,
        unless it may `queue` for its turn, when the shell has ended before, or the key is another text's;
        InvalidRequest: the sandbox's disk is full."""
        if key is None:
            return await self._in_turn(text, timeout, cap, stdin, queue, None, "")
        what = hashlib.sha256(stdin + b"\0" + text.encode(errors="surrogateescape")).hexdigest()[:16]
        while True:
            keyed = self._keyed.get(key)
            if keyed is None:
                keyed = _Keyed(what, self._work(self._in_turn(text, timeout, cap, stdin, queue, key, what)))
                self._remember(key, keyed)
            elif keyed.what != what:
                raise Conflict(f"another text was run with the key {key}", "take a new key for each text")
            with suppress(_NeverBegan):
                return await asyncio.shield(keyed.result)

    def _remember(self, key: str, keyed: _Keyed) -> None:
        self._keyed[key] = keyed

        def ended(result: asyncio.Future[ShellResult]) -> None:
            if (result.cancelled() or result.exception() is not None) and self._keyed.get(key) is keyed:
                del self._keyed[key]

        keyed.result.add_done_callback(ended)

    async def _in_turn(
        self, text: str, timeout: float | None, cap: int, stdin: bytes, queue: bool, key: str | None, what: str
    ) -> ShellResult:
        if self._turn.locked() and not queue:
            raise Conflict(f"shell {self.id} is busy with command {self.running}", "interrupt it, or queue")
        async with self._turn:
            self._check_alive()
            about = _About(secrets.token_hex(4), key, what, cap, timeout, clock())
            return await self._complete(await self._begin(about, text, stdin))

    def _check_alive(self) -> None:
        if not self.alive or self._closed:
            ended = self._ended.result() if self._ended is not None and self._ended.done() else Exit(signal=9)
            raise Conflict(
                f"shell {self.id} has ended, with exit code {_status(ended)}",
                "open another one, or let `restart` put one in its place",
            )

    async def _begin(self, about: _About, text: str, stdin: bytes) -> _Command:
        pair = self._spare.popleft() if self._spare else await self._pair()
        command: _Command | None = None
        try:
            self._check_alive()
            pair.begin(about)
            out, err = Stream(about.cap, pair.out, pair.logs[0]), Stream(about.cap, pair.err, pair.logs[1])
            status: asyncio.Future[tuple[int, str] | None] = asyncio.get_running_loop().create_future()
            command = _Command(about, pair, out, err, (), status, about.key)
            command.writers = _writers(pair)
            kept = "".join(flag for flag in self._flags if flag in _KEPT_FLAGS)
            _write(self._fds["text"], f"set -{kept}; {text}" if kept else text)
            if stdin:
                _write(self._fds["input"], stdin)
            given = f"{self._directory}/input" if stdin else "/dev/null"
            line = (_BASH_LINE if self._bash else _SH_LINE).format(
                self._directory, input=given, pair=pair.path, id=about.id
            )
            command.line = line.encode()
            os.write(self._fds["control"], command.line)
        except BaseException as error:
            if command is not None:
                for fd in command.writers:
                    os.close(fd)
                command.stop()
            self._keep(pair)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InvalidRequest("the sandbox's disk is full: a text has no room in it") from None
            raise
        self._running = command
        return command

    async def _complete(self, command: _Command) -> ShellResult:
        """The result of a text that was begun, here or by the node before this one."""
        assert self._ended is not None
        about = command.about
        left = None if about.timeout is None else max(0.0, about.started_at + about.timeout - clock())
        timed_out = False
        try:
            async with asyncio.timeout(left):
                if not command.status.done():
                    await asyncio.wait((command.status, self._ended), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            timed_out = True
            await self._cut_short(command)
        except asyncio.CancelledError:
            await shielded(self._cut_short(command))
            self._finish(command, timed_out)
            raise
        result = self._finish(command, timed_out)
        if result is None:
            raise _NeverBegan(f"shell {self.id} had not been told of command {command.id} when its node died")
        return result

    def _outcome(self, command: _Command, timed_out: bool) -> dict[str, Any] | None:
        """All of the result but what it wrote; None: it never began."""
        assert self._ended is not None
        ended = self._ended.result() if self._ended.done() else None
        told = command.status.result() if command.status.done() else None
        fields: dict[str, Any]
        if told is not None:
            self.cwd = told[1]
            fields = {"exit_code": told[0]}
        elif ended is not None:
            fields = {"exit_code": _status(ended), "signal": ended.signal, "oom": ended.oom}
        else:
            return None
        return fields | {
            "timed_out": timed_out,
            "interrupted": command.interrupted and not timed_out,
            "ended": ended is not None,
            "cwd": self.cwd,
            "id": command.id,
            "seconds": clock() - command.about.started_at,
        }

    def _finish(self, command: _Command, timed_out: bool) -> ShellResult | None:
        """Its result; what its children in the background write from now on is its as well."""
        self._running = None
        for stream, writer in zip((command.out, command.err), command.writers, strict=True):
            stream.drain()
            os.close(writer)
        command.writers = ()
        outcome = self._outcome(command, timed_out)
        self._done[command.id] = command
        if outcome is not None:
            out, err = command.out.output(), command.err.output()
            command.result = ShellResult.model_construct(out=out, err=err, **outcome)
            command.pair.conclude(command.about, outcome | {"totals": [out.total, err.total]})
        nobodys = outcome is None or (command.key is None and not command.adopted)
        if self._closed or (nobodys and command.at_end()):
            self._forget(command)
        self._make_room()
        if self._making is None and self.alive and len(self._spare) < SPARE:
            self._making = asyncio.get_running_loop().create_task(self._make_pairs())
        return command.result

    def _make_room(self) -> None:
        """Let go of what is too much: a result whose key was not asked for again, the output of the background."""
        count = size = 0
        for each in reversed(list(self._done.values())):
            if each.key is None or each.result is None:
                continue
            count += 1
            size += len(each.result.out.data) + len(each.result.err.data)
            if count > KEYED or (count > 1 and size > KEYED_BYTES):
                self._keyed.pop(each.key, None)
                each.key = None
                if each.at_end():
                    self._forget(each)
        others = [each for each in self._done.values() if each.key is None]
        if len(others) > BACKGROUND:  # who is closed upon dies of its next word: not before those that have none
            self._forget(min(others, key=lambda each: not each.at_end()))

    def _forget(self, command: _Command) -> None:
        del self._done[command.id]
        if command.key is not None:
            self._keyed.pop(command.key, None)
        is_free = command.at_end()
        command.stop()
        if is_free:
            self._keep(command.pair)
        else:
            command.pair.close()

    def _keep(self, pair: _Pair) -> None:
        """For another command, where there is one to come."""
        if self._closed or len(self._spare) >= SPARE:
            pair.close()
        else:
            pair.clear()
            self._spare.append(pair)

    def output(self, command: str) -> ShellOutput | None:
        """All that a command and its children wrote so far. None: it has ended and left none, or that was too long
        ago."""
        found = self._done.get(command)
        if found is None and self._running is not None and self._running.id == command:
            found = self._running
        if found is None:
            return None
        code = None if found.result is None else found.result.exit_code
        return ShellOutput(exit_code=code, out=found.out.output(), err=found.err.output())

    async def _make_pairs(self) -> None:
        try:
            while len(self._spare) < SPARE and not self._closed:
                self._spare.append(await self._pair())
        except (OSError, SandlotError):
            pass  # the next command makes its own, and says what is wrong
        finally:
            self._making = None

    async def _pair(self) -> _Pair:
        assert self._process is not None
        name = secrets.token_hex(4)  # a number could meet one of those that the node before this one made
        path = f"{self._directory}/{name}"
        flags = os.O_RDONLY | os.O_NONBLOCK
        fds: list[int] = []
        release = _nothing
        try:
            # Each is known to `except` at once: a list that is made and then added would lose the first.
            for end in ("out", "err"):
                fds.append(await self._box.open(f"{path}.{end}", flags, 0o10666, self._user))  # noqa: PERF401
            fds.append(os.memfd_create("sandlot-output", os.MFD_CLOEXEC))
            fds.append(os.memfd_create("sandlot-output", os.MFD_CLOEXEC))
            if self._holds:
                fds.append(os.memfd_create("sandlot-command", os.MFD_CLOEXEC))
                release = await self._process.hold(Hold(tuple(fds), name))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return _Pair(path, fds[0], fds[1], (fds[2], fds[3]), fds[4] if self._holds else -1, release)

    # -- cutting short --------------------------------------------------------------------------------------------

    async def interrupt(self) -> bool:
        """End what runs as ^C does, then less politely. False: nothing runs."""
        command = self._running
        if command is None:
            return False
        command.interrupted = True
        await self._cut_short(command)
        return True

    async def _cut_short(self, command: _Command) -> None:
        """Returns when the command or the shell has ended."""
        assert self._process is not None and self._ended is not None
        command.cut = True
        for attempt in range(KILLS):
            step = min(attempt, len(GRACE_SECONDS) - 1)
            if step == 0 and self._terminal >= 0:
                # Not ^C written: the kernel hands that over when it finds the time, perhaps to the next command.
                fcntl.ioctl(self._terminal, _TIOCSIG, signal.SIGINT)
            elif self._terminal >= 0:
                await self._box.interrupt(self._terminal, signal.SIGINT if step == 1 else signal.SIGKILL)
            else:
                break
            await asyncio.wait(
                (command.status, self._ended), timeout=GRACE_SECONDS[step], return_when=asyncio.FIRST_COMPLETED
            )
            if command.status.done() or self._ended.done():
                return
        await self._kill()

    async def _kill(self) -> None:
        assert self._process is not None
        async with deadline(START_SECONDS, f"ending shell {self.id}"):
            await self._process.kill_tree()
            await (self._process.wait() if self._ended is None else asyncio.wait((self._ended,)))

    # -- what the shell tells -------------------------------------------------------------------------------------

    def _take(self) -> None:
        """One system call moves it into a file, and with it the file's position: a node that is killed loses none."""
        with suppress(BlockingIOError):
            os.splice(self._fds["status"], self._fds["told"], 1 << 16, flags=os.SPLICE_F_NONBLOCK)
            self._hear()

    def _hear(self) -> None:
        told = self._fds["told"]
        new = os.pread(told, os.lseek(told, 0, os.SEEK_CUR) - self._heard, self._heard)
        *words, left = new.split(b"\0")
        for word in words:
            name, _, rest = os.fsdecode(word).partition(" ")
            status, _, rest = rest.partition(" ")
            flags, _, cwd = rest.partition(" ")
            if status.isascii() and status.isdecimal() and len(status) <= 3:
                has_ended = name != self._last and not name.endswith("-lost")  # else the flags are the loop's own
                self._words = (word if has_ended else self._words[0]), word
                if self._replaying:
                    self.cwd = cwd
                    if has_ended:
                        self._flags = flags
                self._know(name, int(status), flags, cwd)
        if len(left) > 1 << 16:
            left = b""  # not ours
        self._heard += len(new) - len(left)
        if self._heard > _TOLD:  # in such an order that these words are the last ones at any moment
            kept = b"".join(word + b"\0" for word in dict.fromkeys(self._words))
            os.pwrite(told, kept + left, 0)
            os.ftruncate(told, len(kept + left))
            os.lseek(told, len(kept + left), os.SEEK_SET)
            self._heard = len(kept)

    def _know(self, name: str, status: int, flags: str, cwd: str) -> None:
        before, self._last = self._last, name
        command = self._running
        if name == "start" and not self._started.done():
            self._started.set_result(None)
        elif command is None or command.status.done():
            return
        elif name == command.id:
            self._flags = flags
            command.status.set_result((status, cwd))
        elif name == before and not self._replaying:
            # Something threw the shell back to its top: before it had read our line, or after, and then it is lost.
            # Which of the two, it says by what it tells next.
            self._ask(command)
        elif name == f"{command.id}-lost":
            if command.adopted or command.cut:
                command.status.set_result(None if command.adopted else (128 + signal.SIGINT, cwd))
            else:  # by an interrupt that was meant for the one before
                self._say(command.line)

    def _ask(self, command: _Command) -> None:
        self._say((_BASH_ASK if self._bash else _SH_ASK).format(self._directory, id=command.id).encode())

    def _say(self, line: bytes) -> None:
        with suppress(BlockingIOError):  # it has been told two thousand times, and not come by
            os.write(self._fds["control"], line)


# What is held of a shell, in this order, and its terminal if it has one.
_HELD = ("text", "input", "control", "status", "told", "facts")


def _read_about(file: int) -> tuple[_About | None, dict[str, Any] | None]:
    """Whose a pair is, and how that went, as far as it was written down."""
    first, _, second = _read(file).partition(b"\n")
    if not first:
        return None, None
    try:
        return _About(*json.loads(first)), json.loads(second)
    except ValueError:
        return _About(*json.loads(first)), None


def _writers(pair: _Pair) -> tuple[int, ...]:
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    out = os.open(f"/proc/self/fd/{pair.out}", flags)
    try:
        return out, os.open(f"/proc/self/fd/{pair.err}", flags)
    except OSError:
        os.close(out)
        raise


async def find_bash(box: Box, env: Mapping[str, str]) -> str | None:
    """Where bash is: in PATH, as the shell's user would find it."""
    for directory in dict.fromkeys([*env.get("PATH", "").split(":"), "/bin", "/usr/bin"]):
        if directory.startswith("/"):
            with suppress(OSError):
                fd = await box.open(f"{directory}/bash", os.O_PATH)
                try:
                    mode = os.fstat(fd).st_mode
                finally:
                    os.close(fd)
                if stat.S_ISREG(mode) and mode & 0o111:
                    return f"{directory}/bash"
    return None


def _write(fd: int, data: str | bytes) -> None:
    """Make a file hold just this."""
    left = memoryview(data.encode(errors="surrogateescape") if isinstance(data, str) else data)
    os.ftruncate(fd, 0)
    at = 0
    while left:
        wrote = os.pwrite(fd, left, at)
        at += wrote
        left = left[wrote:]


def _read(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _status(ended: Exit) -> int:
    return ended.code if ended.code is not None else 128 + (ended.signal or 0)

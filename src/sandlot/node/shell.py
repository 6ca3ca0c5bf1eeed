"""One shell of a sandbox: a bash that lives on between commands, and that no text puts out of step.

It owns the files in the box's /dev/shm by which the shell is told what to do and says how it went, its terminal, and
the output of each command. It promises that a result is that of its own command whatever the text was, that a command
which is cut short leaves the shell usable, and that memory per command is bounded by its cap. How it does that is told
in docs/design/0009-shells.md.

    run        waits for: the status, the shell's end, or the command's timeout
    output     moved from each command's own FIFOs to its log by the loop's readiness callbacks
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import signal
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sandlot.aio import deadline, shielded
from sandlot.api import Output, ShellInfo, ShellResult
from sandlot.drivers.base import Box, Exit, Process, Spawn
from sandlot.errors import Conflict, HostFault, InvalidRequest, SandlotError
from sandlot.node.streams import Stream

# A start takes about 10 ms; an image whose startup files take longer than this is not bash's fault.
START_SECONDS = 20.0
# How long a command may take to end after each of ^C, SIGINT and SIGKILL (seconds).
GRACE_SECONDS = (0.5, 0.5, 1.0)
# A text whose every foreground program ignores its end may start the next one; not for ever.
KILLS = 20
# Pairs of FIFOs made ahead, so that no command waits for its own.
SPARE = 2
# Of commands whose children still write, the output of so many is kept.
BACKGROUND = 64

# Bash reads its orders from `PROMPT_COMMAND`: whatever throws it back to its top level comes by there again. How the
# last text ended is told by the loop's condition, where `break` and `continue` in it lead as well.
# `-e` ends the text, not the shell: the trap returns from what is being sourced, and at the top takes `-e` away until
# the next text. (`BASHPID`: in a subshell the return would lead back into a copy of the loop.)
_BASH = """\
set +o history
HISTFILE= PS1= PS2=
__sandlot='while {{ __sandlot_status=$? __sandlot_flags=$__sandlot_e$-; set +exv; }} 2>/dev/null
PROMPT_COMMAND=$__sandlot
\\exec </dev/null >/dev/null 2>&1
builtin printf "$__sandlot_id %s %s %s\\0" "$__sandlot_status" "$__sandlot_flags" "${{PWD-}}" >{0}/status
IFS= builtin read -r __sandlot_line <{0}/control
do builtin eval "$__sandlot_line"; done; builtin eval "$__sandlot"'
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
_BASH_LINE = "__sandlot_id={id} __sandlot_e=; \\exec <{input} >{pair}.out 2>{pair}.err; . {0}/text\n"
_SH_LINE = (
    "exec <{input} >{pair}.out 2>{pair}.err; . {0}/text; __sandlot_status=$?; exec </dev/null >/dev/null 2>&1; "
    'printf "{id} %s  %s\\0" "$__sandlot_status" "$PWD" >{0}/status\n'
)
_TIOCGPTN, _TIOCSPTLCK = 0x80045430, 0x40045431  # which Python does not name
_KEPT_FLAGS = "ex"  # what a text set and the next one shall have; the loop itself runs without


@dataclass(slots=True)
class _Pair:
    """Two FIFOs of one command, by their read ends."""

    path: str
    out: int
    err: int

    def close(self) -> None:
        os.close(self.out)
        os.close(self.err)


@dataclass(slots=True)
class _Command:
    id: str
    pair: _Pair
    out: Stream
    err: Stream
    writers: tuple[int, int]  # ours, so that a FIFO that the shell has not opened yet does not look finished
    status: asyncio.Future[tuple[int, str]]  # exit status and directory
    interrupted: bool = False


class Shell:
    """Made by `Shell.open`. One command at a time."""

    def __init__(self, box: Box, directory: str, user: int, bash: bool) -> None:
        self.id = f"sh-{secrets.token_hex(4)}"
        self.cwd = ""
        self.lacks: tuple[str, ...] = ()
        self._box = box
        self._directory = directory
        self._user = user
        self._bash = bash
        self._process: Process | None = None
        self._fds: dict[str, int] = {}
        self._terminal = -1
        self._spare: deque[_Pair] = deque()
        self._pairs = 0
        self._making: asyncio.Task[None] | None = None
        self._flags = ""
        self._running: _Command | None = None
        self._turn = asyncio.Lock()
        self._background: dict[str, _Command] = {}
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Task[Exit] | None = None
        self._last = "start"  # the id that the shell told last
        self._heard = b""

    # -- its start and its end ------------------------------------------------------------------------------------

    @classmethod
    async def open(cls, box: Box, env: Mapping[str, str], cwd: str, user: int = 0, bash: bool = True) -> Shell:
        """A shell in which a command can be run; a `bash` where the image has one. Raises HostFault, InvalidRequest (no
        shell in the image, no such directory)."""
        found = await _bash(box, env) if bash else None
        shell = cls(box, f"/dev/shm/.sandlot-{secrets.token_hex(8)}", user, bash=found is not None)
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
        for _ in range(SPARE):
            self._spare.append(await self._pair())
        asyncio.get_running_loop().add_reader(self._fds["status"], self._listen)
        terminal = await self._open_terminal()
        argv = (bash, "--noprofile", "--rcfile", f"{where}/start", "-i") if bash else ("sh", f"{where}/start")
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            stdin = null if terminal < 0 else terminal
            spawn = Spawn(argv, env, cwd, self._user, tty=terminal >= 0)
            self._process = await self._box.spawn(spawn, stdin, null, null)
        finally:
            os.close(null)
            if terminal >= 0:
                os.close(terminal)
        self._ended = asyncio.get_running_loop().create_task(self._process.wait())
        await asyncio.wait((self._started, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            ended = self._ended.result()
            reason = os.strerror(ended.error) if ended.error else f"it ended with {_status(ended)}"
            raise InvalidRequest(f"a shell could not be started in {cwd}: {reason}", "does its image have a `sh`?")

    async def _open_terminal(self) -> int:
        """The end of a new terminal that the shell gets, or -1: the host has none left."""
        flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK
        if self._bash:
            self.lacks = ()
            with suppress(OSError):
                self._terminal = await self._box.open("/dev/ptmx", flags, user=self._user)
                fcntl.ioctl(self._terminal, _TIOCSPTLCK, struct.pack("i", 0))
                number = struct.unpack("i", fcntl.ioctl(self._terminal, _TIOCGPTN, b"\0\0\0\0"))[0]
                theirs = await self._box.open(f"/dev/pts/{number}", flags, user=self._user)
                os.set_blocking(theirs, True)
                asyncio.get_running_loop().add_reader(self._terminal, self._drop_terminal_output)
                return theirs
            self.lacks = ("a terminal: there is none left, `sysctl kernel.pty.max` raises the host's number",)
        else:
            self.lacks = (
                "bash: this is `sh`, in which `set -e` ends the shell, and an interrupt only the program that runs",
            )
        return -1

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
        return ShellInfo(id=self.id, cwd=self.cwd, running=self.running, ended=not self.alive, lacks=self.lacks)

    @property
    def running(self) -> str | None:
        """The id of the command that runs."""
        return None if self._running is None else self._running.id

    async def close(self) -> None:
        """End it with all that runs in it. Idempotent."""
        if self._process is not None:
            with suppress(HostFault):  # the box is going, and takes it along
                await self._kill()
                await self._process.release()
        if self._making is not None:
            await asyncio.wait((self._making,))
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
        for command in self._background.values():
            command.out.close()
            command.err.close()
        self._background.clear()

    # -- commands -------------------------------------------------------------------------------------------------

    async def run(
        self, text: str, *, timeout: float | None, cap: int, stdin: bytes = b"", queue: bool = False
    ) -> ShellResult:
        """Run a text to its end. Raises Conflict when another runs, unless it may `queue` for its turn, or when the
        shell has ended before; InvalidRequest: the sandbox's disk is full."""
        if self._turn.locked() and not queue:
            raise Conflict(f"shell {self.id} is busy with command {self.running}", "interrupt it, or queue")
        async with self._turn:
            if not self.alive:
                raise Conflict(f"shell {self.id} has ended", "open another one")
            return await self._run(text, timeout, cap, stdin)

    async def _run(self, text: str, timeout: float | None, cap: int, stdin: bytes) -> ShellResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        command = await self._begin(text, cap, stdin)
        assert self._ended is not None
        timed_out = False
        try:
            async with asyncio.timeout(timeout):
                await asyncio.wait((command.status, self._ended), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            timed_out = True
            await self._cut_short(command)
        except asyncio.CancelledError:
            await shielded(self._cut_short(command))
            self._finish(command)
            raise
        status, cwd = command.status.result() if command.status.done() else (_status(self._ended.result()), self.cwd)
        self.cwd = cwd
        out, err = self._finish(command)
        return ShellResult.model_construct(
            exit_code=status,
            timed_out=timed_out,
            interrupted=command.interrupted and not timed_out,
            ended=self._ended.done(),
            out=out,
            err=err,
            cwd=cwd,
            id=command.id,
            seconds=loop.time() - began,
        )

    async def _begin(self, text: str, cap: int, stdin: bytes) -> _Command:
        pair = self._spare.popleft() if self._spare else await self._pair()
        streams: list[Stream] = []
        writers: list[int] = []
        try:
            for end in (pair.out, pair.err):
                writers.append(os.open(f"/proc/self/fd/{end}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                log = os.memfd_create("sandlot-output", os.MFD_CLOEXEC)
                streams.append(Stream(cap, os.dup(end), log))
            kept = "".join(flag for flag in self._flags if flag in _KEPT_FLAGS)
            _write(self._fds["text"], f"set -{kept}; {text}" if kept else text)
            if stdin:
                _write(self._fds["input"], stdin)
            command = _Command(
                secrets.token_hex(4),
                pair,
                streams[0],
                streams[1],
                (writers[0], writers[1]),
                asyncio.get_running_loop().create_future(),
            )
            given = f"{self._directory}/input" if stdin else "/dev/null"
            line = (_BASH_LINE if self._bash else _SH_LINE).format(
                self._directory, input=given, pair=pair.path, id=command.id
            )
            os.write(self._fds["control"], line.encode())
        except BaseException as error:
            for stream in streams:
                stream.close()
            for fd in writers:
                os.close(fd)
            self._spare.append(pair)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InvalidRequest("the sandbox's disk is full: a text has no room in it") from None
            raise
        self._running = command
        return command

    def _finish(self, command: _Command) -> tuple[Output, Output]:
        """What it wrote; what its children in the background write from now on is its as well."""
        self._running = None
        for stream, writer in zip((command.out, command.err), command.writers, strict=True):
            stream.drain()
            os.close(writer)
        output = command.out.output(), command.err.output()
        if command.out.at_end() and command.err.at_end():
            command.out.close()
            command.err.close()
            self._spare.append(command.pair)
        else:
            command.pair.close()
            self._background[command.id] = command
            if len(self._background) > BACKGROUND:
                oldest = self._background.pop(next(iter(self._background)))
                oldest.out.close()
                oldest.err.close()
            if self._making is None and self.alive:
                self._making = asyncio.get_running_loop().create_task(self._make_pair())
        return output

    def background(self, command: str) -> tuple[Output, Output] | None:
        """All that a finished command and its children wrote so far. None: it had
        none, or that was too long ago."""
        found = self._background.get(command)
        return None if found is None else (found.out.output(), found.err.output())

    async def _make_pair(self) -> None:
        try:
            while len(self._spare) < SPARE:
                self._spare.append(await self._pair())
        except (OSError, SandlotError):
            pass  # the next command makes its own, and says what is wrong
        finally:
            self._making = None

    async def _pair(self) -> _Pair:
        self._pairs += 1
        path = f"{self._directory}/{self._pairs}"
        flags = os.O_RDONLY | os.O_NONBLOCK
        out = await self._box.open(f"{path}.out", flags, 0o10666, self._user)
        try:
            return _Pair(path, out, await self._box.open(f"{path}.err", flags, 0o10666, self._user))
        except BaseException:
            os.close(out)
            raise

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
        for attempt in range(KILLS):
            step = min(attempt, len(GRACE_SECONDS) - 1)
            if step == 0 and self._terminal >= 0:
                os.write(self._terminal, b"\3")
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

    def _listen(self) -> None:
        try:
            self._heard += os.read(self._fds["status"], 1 << 16)
        except BlockingIOError:
            return
        *words, self._heard = self._heard.split(b"\0")
        if len(self._heard) > 1 << 16:
            self._heard = b""  # not ours
        for word in words:
            name, _, rest = os.fsdecode(word).partition(" ")
            status, _, rest = rest.partition(" ")
            flags, _, cwd = rest.partition(" ")
            if not status.isdigit():
                continue
            before, self._last = self._last, name
            if name == "start" and not self._started.done():
                self.cwd = cwd
                self._started.set_result(None)
            elif self._running is None or self._running.status.done():
                continue
            elif name == self._running.id:
                self._flags = flags
                self._running.status.set_result((int(status), cwd))
            elif name == before:
                # Something threw the shell back to its top: before it had read our line, or after, and then it is lost.
                # Which of the two, it says by what it tells next.
                os.write(self._fds["control"], f"__sandlot_id={self._running.id}-lost\n".encode())
            elif name == f"{self._running.id}-lost":
                self._running.status.set_result((128 + signal.SIGINT, cwd))


async def _bash(box: Box, env: Mapping[str, str]) -> str | None:
    """Where bash is: in PATH, as the shell's user would find it."""
    for directory in dict.fromkeys([*env.get("PATH", "").split(":"), "/bin", "/usr/bin"]):
        if directory.startswith("/"):
            with suppress(OSError):
                os.close(await box.open(f"{directory}/bash", os.O_PATH))
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


def _status(ended: Exit) -> int:
    return ended.code if ended.code is not None else 128 + (ended.signal or 0)

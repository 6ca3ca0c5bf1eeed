"""The sandboxes of one host: Node is NodeAPI over a driver.

It owns the table of boxes, every deadline, the pipes of each command, the routes, and the ledger. It promises that each
sandbox ends in exactly one named way that can be asked about for an hour, that a cancelled create or destroy leaves
nothing half done, and that memory per command is bounded by its output cap. It never decides how a box is made: that is
the driver's business.

    await node.run(…)      waits for: the process's exit (the driver), or the run's timeout
      its output           read as it comes by the loop's readiness callbacks, no task, no thread
      its input            written as the pipe takes it, likewise
    a sandbox's end        destroy · its idle or lifetime timer · Box.death, whichever is first; all meet in `_finish`
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import secrets
import struct
import termios
import time
from collections import OrderedDict
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sandlot import asgi
from sandlot.aio import deadline, shielded
from sandlot.api import (
    Capability,
    Ending,
    Info,
    Output,
    Run,
    RunResult,
    SandboxSpec,
    Stats,
    Target,
    Upstream,
)
from sandlot.drivers.base import Box, Death, Driver, Exit, Process, Spawn
from sandlot.errors import HostFault, InvalidRequest, NotFound, SandboxEnded, SandlotError, host_fault
from sandlot.node import files
from sandlot.node.ledger import Ledger, NodeDirectory

if TYPE_CHECKING:
    import httpx2

    from sandlot.node.relay import Relay

T = TypeVar("T")

# Deadlines in seconds of what the driver is asked. They are far above what was ever measured (milliseconds): past
# them the host is in trouble, and the caller is better told than kept.
CREATE_SECONDS = 60.0
STEP_SECONDS = 30.0

# The kernel takes namespaces down one after another: thousands of ends at once would only outlast their deadlines.
ENDS_AT_ONCE = 32

# Seconds from the moment when a dying box no longer answers to that when its death is known. In between the kernel
# ends its processes: milliseconds, but a second or two for thousands of them.
GOING_SECONDS = 10.0

# How long an ended sandbox can be asked about (seconds), and of how many at most: ~400 bytes each.
ENDED_SECONDS = 3600.0
ENDED_KEPT = 100_000

# What a command finds in its environment before the sandbox's own and the run's are added.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PIPE_BYTES = 1 << 16  # capacity of a Linux pipe
_PAST = {
    Ending.EXIT: ("was closed by its owner", None),
    Ending.KILLED: ("was ended on request", None),
    Ending.OOM: ("ran out of memory", "raise its `memory` limit"),
    Ending.IDLE: ("ended because nothing was run in it", "raise its `idle_timeout`"),
    Ending.LIFETIME: ("reached the end of its lifetime", "raise its `lifetime`"),
    Ending.ORPHANED: ("ended because its node had died", None),
    Ending.HELPER_DIED: ("ended because its first process died", None),
    Ending.PREEMPTED: ("made room for a more urgent one", "create it again"),
    Ending.DRAINED: ("ended because its node was shut down", "create it again"),
    Ending.NODE_LOST: ("was lost with its host", "create it again"),
    Ending.START_FAILED: ("could not be started", None),
}


class _Live:
    """A running sandbox."""

    __slots__ = (
        "box",
        "busy",
        "created_at",
        "ending",
        "env",
        "id",
        "idle_timer",
        "last_used",
        "lifetime_timer",
        "routes",
        "spec",
    )

    def __init__(self, sandbox_id: str, spec: SandboxSpec, box: Box, created_at: float) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.box = box
        self.created_at = created_at
        self.env = {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": "/root", **spec.env}
        self.ending = False  # somebody is seeing to its end
        self.busy = 0  # calls in progress: while there are any it is not idle
        self.last_used = time.monotonic()
        self.idle_timer: asyncio.TimerHandle | None = None
        self.lifetime_timer: asyncio.TimerHandle | None = None
        self.routes: list[asgi.Served] = []

    def __enter__(self) -> _Live:
        self.busy += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.busy -= 1
        self.last_used = time.monotonic()

    def info(self) -> Info:
        return Info(
            id=self.id,
            image=self.spec.image,
            state="running",
            created_at=self.created_at,
            labels=self.spec.labels,
            losses=self.box.losses,
        )


class Node:
    """NodeAPI on this host. `async with Node(driver) as node:` or `start` and `close`."""

    def __init__(
        self, driver: Driver, state_dir: Path | None = None, *, directory: NodeDirectory | None = None
    ) -> None:
        """`state_dir` is where the node makes its own directory (None: the user's default). `directory` is given
        instead by who claimed it already, because its driver keeps things there too."""
        self.driver = driver
        self._state_dir = state_dir
        self._directory = directory
        self._live: dict[str, _Live] = {}
        self._ended: OrderedDict[str, Info] = OrderedDict()
        self._creates: set[asyncio.Future[None]] = set()  # one for each create in progress
        self._tasks: set[asyncio.Task[Any]] = set()
        self._upstreams: httpx2.AsyncHTTPTransport | None = None
        self._closing = False

    async def __aenter__(self) -> Node:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Claim a directory and remove what dead nodes left. Raises HostFault."""
        _raise_open_files()
        if self._directory is None:
            self._directory = NodeDirectory.claim(self._state_dir)
        self._id = self._directory.short_id
        try:
            self.ledger = Ledger(self._directory.path)
            self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._directory.remove()
            raise
        try:
            await self._sweep(self._directory)
        except BaseException:  # nobody has a node to close who was cancelled while it was made
            await self.close()
            raise

    async def _sweep(self, ours: NodeDirectory) -> None:
        for dead in ours.abandoned():
            try:
                async with deadline(STEP_SECONDS, f"removing what the dead node {dead.short_id} left"):
                    await self.driver.sweep(dead.path)
                dead.remove()
            except (OSError, SandlotError) as error:
                # It stays for the next start. Somebody else's remains are no reason for this node not to start.
                self.ledger.note(event="sweep_failed", path=str(dead.path), error=str(error))

    async def close(self) -> None:
        """End every sandbox as `drained`, then let go of the directory. Idempotent."""
        if self._closing:
            return
        self._closing = True
        await shielded(self._close())

    async def _close(self) -> None:
        if self._creates:  # each ends with a box in the table or with nothing
            await asyncio.wait(self._creates, timeout=CREATE_SECONDS)
        turn = asyncio.Semaphore(ENDS_AT_ONCE)
        ends = [self._drain(live, turn) for live in list(self._live.values())]
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STEP_SECONDS)
        if self._upstreams is not None:
            await self._upstreams.aclose()
        await self.driver.close()
        self.ledger.close()
        os.close(self._null)
        assert self._directory is not None
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            self._directory.release()  # with its records, so that the next node on this host can finish the work
            raise failed[0]
        try:
            self._directory.remove()
        except OSError as error:
            raise host_fault(error, f"remove {self._directory.path}") from error

    async def _drain(self, live: _Live, turn: asyncio.Semaphore) -> None:
        async with turn:
            await self._end(live, Ending.DRAINED)

    async def create(self, spec: SandboxSpec) -> Info:
        if self._closing:
            raise HostFault("the node is shutting down")
        sandbox_id = f"sb-{self._id}{secrets.token_hex(4)}"
        named = frozenset(spec.limits.model_fields_set) if "limits" in spec.model_fields_set else frozenset[str]()
        created_at = time.time()
        loop = asyncio.get_running_loop()
        self.ledger.begin(sandbox_id, spec.image)
        in_progress: asyncio.Future[None] = loop.create_future()
        self._creates.add(in_progress)
        try:
            async with deadline(CREATE_SECONDS, f"making sandbox {sandbox_id}", "`sandlot doctor` looks at this host"):
                box = await self.driver.create(sandbox_id, spec, named)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            detail = "the create was cancelled" if cancelled else str(error) or type(error).__name__
            self._record_end(sandbox_id, spec, created_at, Death(Ending.START_FAILED, detail))
            if isinstance(error, OSError):
                raise host_fault(error, f"make sandbox {sandbox_id}") from error
            raise
        finally:
            self._creates.discard(in_progress)
            in_progress.set_result(None)
        # No await from here to the return: a cancellation finds either nothing or a sandbox that its caller knows.
        live = self._live[sandbox_id] = _Live(sandbox_id, spec, box, created_at)
        box.death.add_done_callback(partial(self._died, live))
        if spec.lifetime is not None:
            live.lifetime_timer = loop.call_later(spec.lifetime, self._end_soon, live, Ending.LIFETIME)
        if spec.idle_timeout is not None:
            live.idle_timer = loop.call_later(spec.idle_timeout, self._idle, live, spec.idle_timeout)
        return live.info()

    async def info(self, sandbox_id: str) -> Info:
        live = self._live.get(sandbox_id)
        return live.info() if live is not None else self._past(sandbox_id)

    async def stats(self, sandbox_id: str) -> Stats:
        live = self._running(sandbox_id)
        async with deadline(STEP_SECONDS, f"asking what sandbox {sandbox_id} uses"):
            return await self._step(live, f"ask what sandbox {sandbox_id} uses", live.box.stats())

    async def run(self, sandbox_id: str, run: Run) -> RunResult:
        live = self._running(sandbox_id)
        with live:
            return await self._step(live, f"run {run.argv[0]} in sandbox {sandbox_id}", self._run(live, run))

    async def _run(self, live: _Live, run: Run) -> RunResult:
        env = {**live.env, **run.env}
        if run.user != 0 and env["HOME"] == "/root":
            env["HOME"] = "/"  # as for any numeric user without an entry in /etc/passwd
        cwd = run.cwd
        if cwd is None:  # /root, where nobody named another, is closed to all but its owner
            cwd = live.spec.cwd if run.user == 0 or "cwd" in live.spec.model_fields_set else "/"
        started = time.monotonic()
        pipes: list[_Output | _Input] = []
        theirs: list[int] = []
        try:
            cap = live.spec.limits.output if run.output_cap is None else run.output_cap
            out = _Output(cap, pipes, theirs)
            err = _Output(cap, pipes, theirs)
            stdin = _Input(run.stdin, pipes, theirs).theirs if run.stdin else self._null
            async with deadline(STEP_SECONDS, f"starting {run.argv[0]} in sandbox {live.id}"):
                process = await live.box.spawn(Spawn(run.argv, env, cwd, run.user), stdin, out.theirs, err.theirs)
            while theirs:
                os.close(theirs.pop())
            try:
                ended, timed_out = await _wait(process, run.timeout)
            except BaseException:
                await shielded(process.release())
                raise
            await process.release()
            if ended.signal is not None and live.box.death.done():
                raise self._lost(live)
            out.drain()
            err.drain()
        finally:
            for fd in theirs:
                os.close(fd)
            for pipe in pipes:
                pipe.close()
        if ended.error is not None:
            err.say(_not_started(run.argv[0], cwd, ended))
        return RunResult.model_construct(  # every field is ours and right: validation would only cost time here
            exit_code=_exit_code(ended),
            signal=ended.signal,
            timed_out=timed_out,
            oom=ended.oom,
            out=out.output(),
            err=err.output(),
            seconds=time.monotonic() - started,
            cpu_seconds=ended.cpu_seconds,
        )

    async def read_file(self, sandbox_id: str, path: str) -> bytes:
        with self._running(sandbox_id) as live:
            async with deadline(STEP_SECONDS, f"reading {path} of sandbox {sandbox_id}"):
                return await self._step(live, f"read {path} of sandbox {sandbox_id}", files.read(live.box, path))

    async def write_file(self, sandbox_id: str, path: str, data: bytes, mode: int = 0o644) -> None:
        with self._running(sandbox_id) as live:
            async with deadline(STEP_SECONDS, f"writing {path} of sandbox {sandbox_id}"):
                work = files.write(live.box, path, data, mode)
                await self._step(live, f"write {path} of sandbox {sandbox_id}", work)

    async def route(self, sandbox_id: str, port: int, target: Target) -> None:
        if not 0 < port < 65_536:
            raise InvalidRequest(f"{port} is not a port", "ports go from 1 to 65535")
        with self._running(sandbox_id) as live:
            async with deadline(STEP_SECONDS, f"listening on port {port} of sandbox {sandbox_id}"):
                work = self._listen(live.box, port, target)
                served = await self._step(live, f"listen on port {port} of sandbox {sandbox_id}", work)
            if live.box.death.done():
                served.close()
                raise self._lost(live)
            live.routes.append(served)

    async def destroy(self, sandbox_id: str, ending: Ending = Ending.EXIT) -> Info:
        live = self._live.get(sandbox_id)
        if live is not None:
            await shielded(self._end(live, ending))
        return self._past(sandbox_id)

    async def capabilities(self) -> list[Capability]:
        return await self.driver.capabilities()

    async def counts(self) -> dict[str, int]:
        return self.ledger.counts()

    async def list(self) -> list[Info]:
        return [live.info() for live in self._live.values()]

    # How a sandbox ends: everything below meets in `_finish`, which is called once for each.

    def _idle(self, live: _Live, seconds: float) -> None:
        # One timer for the whole life, looking again where it was too early: cheaper than one for each command.
        left = seconds if live.busy else live.last_used + seconds - time.monotonic()
        if left > 0:
            live.idle_timer = asyncio.get_running_loop().call_later(left, self._idle, live, seconds)
        else:
            self._end_soon(live, Ending.IDLE)

    def _end_soon(self, live: _Live, ending: Ending) -> None:
        live.ending = True
        self._in_background(self._end(live, ending))

    async def _end(self, live: _Live, ending: Ending) -> None:
        """Destroy the box. When this returns no process of it is left and its end is on record."""
        live.ending = True
        for served in live.routes:
            served.close()
        async with deadline(STEP_SECONDS, f"ending sandbox {live.id}", "`sandlot doctor` looks at this host"):
            death = await live.box.destroy(ending)
        self._finish(live, death)

    def _died(self, live: _Live, death: asyncio.Future[Death]) -> None:
        self._finish(live, death.result())
        if not live.ending:  # it died of itself: let the driver remove what is left of it
            self._end_soon(live, death.result().ending)

    def _finish(self, live: _Live, death: Death) -> None:
        if self._live.pop(live.id, None) is None:
            return
        for timer in (live.idle_timer, live.lifetime_timer):
            if timer is not None:
                timer.cancel()
        for served in live.routes:
            served.close()
        self._record_end(live.id, live.spec, live.created_at, death, live.box.losses)

    def _record_end(
        self, sandbox_id: str, spec: SandboxSpec, created_at: float, death: Death, losses: tuple[str, ...] = ()
    ) -> None:
        now = time.time()
        self.ledger.end(sandbox_id, death.ending, death.detail)
        self._ended[sandbox_id] = Info(
            id=sandbox_id,
            image=spec.image,
            state="ended",
            created_at=created_at,
            ended_at=now,
            ending=death.ending,
            detail=death.detail,
            labels=spec.labels,
            losses=losses,
        )
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= ENDED_KEPT and (oldest.ended_at or now) > now - ENDED_SECONDS:
                break
            del self._ended[oldest.id]

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._recorded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _recorded(self, work: Coroutine[Any, Any, None]) -> None:
        """The top of a task that nobody awaits."""
        try:
            await work
        except Exception as error:
            self.ledger.note(event="fault", error=f"{type(error).__name__}: {error}")

    # Small questions.

    def _running(self, sandbox_id: str) -> _Live:
        live = self._live.get(sandbox_id)
        if live is None:
            raise self._ended_error(sandbox_id)
        return live

    def _past(self, sandbox_id: str) -> Info:
        ended = self._ended.get(sandbox_id)
        if ended is None:
            raise NotFound(f"there is no sandbox {sandbox_id}", "the ids of those that run: `GET /v1/sandboxes`")
        return ended

    def _ended_error(self, sandbox_id: str) -> SandlotError:
        """SandboxEnded with the reason, as an exception to raise; raises NotFound itself for an id that never was."""
        past = self._past(sandbox_id)
        what, hint = _PAST[past.ending or Ending.KILLED]
        ago = time.time() - (past.ended_at or 0)
        detail = f" ({past.detail})" if past.detail else ""
        return SandboxEnded(f"sandbox {sandbox_id} {what} {ago:.0f} s ago{detail}", hint)

    def _lost(self, live: _Live) -> SandlotError:
        """SandboxEnded for a box whose death was noticed here before its callback ran."""
        self._died(live, live.box.death)
        return self._ended_error(live.id)

    async def _listen(self, box: Box, port: int, target: Target) -> asgi.Served:
        asgi.require()
        app = self._relay(target) if isinstance(target, Upstream) else target
        listener = await box.listen(port)
        try:
            return await asgi.serve(listener, app)
        except BaseException:
            listener.close()
            raise

    def _relay(self, upstream: Upstream) -> Relay:
        from sandlot.node.relay import Relay, new_transport

        if self._upstreams is None:
            self._upstreams = new_transport()
        return Relay(upstream, self._upstreams)

    async def _step(self, live: _Live, what: str, work: Coroutine[Any, Any, T]) -> T:
        """One piece of work with the box; what fails of it is said in terms of the sandbox."""
        try:
            return await work
        except (OSError, HostFault) as error:
            if await self._dies(live):  # a box that is going down fails its calls one way or another: say which
                raise self._lost(live) from None
            if isinstance(error, OSError):
                raise host_fault(error, what) from error
            raise

    async def _dies(self, live: _Live) -> bool:
        """Whether a box that failed a call is dead, or so far gone that it answers nothing: then its death is awaited,
        so that whoever asks next is told of it too."""
        death = live.box.death
        if not death.done():
            try:
                await live.box.stats()
            except HostFault:
                await asyncio.wait((death,), timeout=GOING_SECONDS)
            except (OSError, SandlotError):
                return False  # it answered
        return death.done()


class _Output:
    """One stream of a command on its way: the first half of the cap is kept from the head, the rest from the tail."""

    __slots__ = ("_fd", "_head", "_head_cap", "_loop", "_reading", "_tail", "_tail_cap", "_total", "theirs")

    def __init__(self, cap: int, pipes: list[_Output | _Input], theirs: list[int]) -> None:
        self._fd, self.theirs = os.pipe2(os.O_CLOEXEC)
        theirs.append(self.theirs)
        pipes.append(self)
        os.set_blocking(self._fd, False)  # our end only: a program's own output must block when the pipe is full
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)
        self._reading = True

    def _readable(self) -> None:
        try:
            chunk = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self._keep(chunk)
        else:
            self._stop()

    def _keep(self, chunk: bytes) -> None:
        self._total += len(chunk)
        room = self._head_cap - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail += chunk
            surplus = len(self._tail) - self._tail_cap
            if surplus > 0:
                del self._tail[:surplus]

    def drain(self) -> None:
        """Take what is in the pipe now. Not until its end: a child in the background may hold the other side open,
        and write on for ever."""
        if not self._reading:
            return
        left = int(struct.unpack("i", fcntl.ioctl(self._fd, termios.FIONREAD, b"\0\0\0\0"))[0])
        while left > 0 and (chunk := os.read(self._fd, min(left, _PIPE_BYTES))):
            self._keep(chunk)
            left -= len(chunk)

    def say(self, text: str) -> None:
        self._keep(text.encode(errors="surrogateescape"))

    def output(self) -> Output:
        return Output.model_construct(data=bytes(self._head + self._tail), total=self._total)

    def _stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def close(self) -> None:
        self._stop()
        os.close(self._fd)


class _Input:
    """Bytes on their way to a command's standard input, written as its pipe takes them."""

    __slots__ = ("_fd", "_left", "_loop", "theirs")

    def __init__(self, data: bytes, pipes: list[_Output | _Input], theirs: list[int]) -> None:
        self.theirs, self._fd = os.pipe2(os.O_CLOEXEC)
        theirs.append(self.theirs)
        pipes.append(self)
        os.set_blocking(self._fd, False)
        self._left = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._writable()  # most inputs fit the pipe at once
        if self._left:
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        try:
            self._left = self._left[os.write(self._fd, self._left) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = self._left[:0]  # it does not want the rest
        if not self._left:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1


async def _wait(process: Process, timeout: float | None) -> tuple[Exit, bool]:
    """How it ended, and whether it had to be ended. On cancellation the whole tree is killed first."""
    try:
        async with asyncio.timeout(timeout):
            return await process.wait(), False
    except TimeoutError:
        await _kill(process)
        return await process.wait(), True
    except asyncio.CancelledError:
        await shielded(_kill(process))
        raise


async def _kill(process: Process) -> None:
    async with deadline(STEP_SECONDS, "killing a command"):
        await process.kill_tree()
        await process.wait()


def _exit_code(ended: Exit) -> int:
    if ended.code is not None:
        return ended.code
    if ended.signal is not None:
        return 128 + ended.signal
    return 127 if ended.error == errno.ENOENT else 126


def _raise_open_files() -> None:
    """A box takes about four descriptors here and a command five more; the usual soft limit of 1,024, which exists for
    programs that use select(), would end at a hundred of each. The hard limit is the administrator's word, unless we
    are the administrator: then the kernel's own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        most = max(hard, int(Path("/proc/sys/fs/nr_open").read_text()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):  # not root
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _not_started(program: str, cwd: str, ended: Exit) -> str:
    reason = os.strerror(ended.error or 0)
    if ended.error_step == "chdir":
        return f"sandlot: working directory {cwd}: {reason}\n"
    if ended.error == errno.ENOENT:
        return f"sandlot: {program}: command not found\n"
    return f"sandlot: {program}: cannot be executed: {reason}\n"


def local_node(state_dir: Path | None = None) -> Node:
    """A node of this host's native boxes, to be started. Raises HostFault when its directory cannot be made."""
    from sandlot.drivers.native.box import NativeDriver

    directory = NodeDirectory.claim(state_dir)
    try:
        return Node(NativeDriver(directory.path), directory=directory)
    except BaseException:
        directory.remove()
        raise

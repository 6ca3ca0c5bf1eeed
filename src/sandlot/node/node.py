"""The sandboxes of one host: Node is NodeAPI over a driver.

It owns the table of boxes, every deadline, the streams of each command, the routes, and the ledger. It promises that
each sandbox ends in exactly one named way that can be asked about for an hour, that a cancelled create or destroy
leaves nothing half done, that memory per command is bounded by its output cap, and, with an `orphan_grace`, that a node
on the same directory carries on where a killed one stopped. It never decides how a box is made: that is the driver's
business.

    a sandbox's end        destroy · its idle or lifetime timer · Box.death, whichever is first; all meet in `_finish`
    a box's end by reset   `reset` puts another box in its place first, so its death is nobody's end
    close                  waits for: the boxes that are being made, then every end, then the calls that clean up
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from sandlot import asgi
from sandlot.aio import deadline, shielded
from sandlot.api import (
    Capability,
    Change,
    Chunk,
    CommandInfo,
    Ending,
    ImageConfig,
    ImageInfo,
    Info,
    PoolInfo,
    PullProgress,
    Run,
    RunResult,
    SandboxSpec,
    ShellInfo,
    ShellOutput,
    ShellResult,
    ShellRun,
    ShellSpec,
    Stats,
    Target,
    Upstream,
    Warm,
    is_reference,
)
from sandlot.drivers.base import Adopted, Box, Death, Driver, Keeping
from sandlot.drivers.layers import FORK
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, SandboxEnded, SandlotError, host_fault
from sandlot.node import files
from sandlot.node.commands import STEP_SECONDS, Commands, fingerprint
from sandlot.node.ledger import Ledger, NodeDirectory, image_store
from sandlot.node.live import About, Command, Live, Note, Route
from sandlot.node.pool import Pool
from sandlot.node.pulls import Pulls
from sandlot.node.shell import Shell
from sandlot.node.streams import Stream

if TYPE_CHECKING:
    import httpx2

    from sandlot.node.relay import Relay

T = TypeVar("T")

# As STEP_SECONDS, where many steps are taken.
CREATE_SECONDS = 60.0

# The kernel takes namespaces down one after another: thousands of ends at once would only outlast their deadlines.
ENDS_AT_ONCE = 32

# A box that is made keeps a processor busy: with thousands begun at once each would be ready when all are.
STARTS_AT_ONCE = 8

# Seconds from the moment when a dying box no longer answers to that when its death is known. In between the kernel
# ends its processes: milliseconds, but a second or two for thousands of them.
GOING_SECONDS = 10.0

# How long an ended sandbox can be asked about (seconds), and of how many at most: ~400 bytes each.
ENDED_SECONDS = 3600.0
ENDED_KEPT = 100_000

# Copying what a sandbox has written takes as long as the disk takes.
COPY_SECONDS = 1800.0
MOST_FORKS = 1000

# Each costs the node some ten descriptors.
MOST_SHELLS = 1000

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


def _info(sandbox_id: str, spec: SandboxSpec, created_at: float) -> Info:
    """What is known of a sandbox that has no box."""
    return Info(id=sandbox_id, image=spec.image, state="running", created_at=created_at, labels=spec.labels)


async def _let_go(found: Adopted) -> None:
    """End a box that is nobody's sandbox."""
    for _, _, fds in found.runs:
        for fd in fds:
            os.close(fd)
    for listener, _, _ in found.listeners:
        listener.close()
    await found.box.destroy(Ending.DRAINED)


class Node:
    """NodeAPI on this host. `async with Node(driver) as node:` or `start` and `close`."""

    def __init__(
        self,
        driver: Driver,
        state_dir: Path | None = None,
        *,
        directory: NodeDirectory | None = None,
        orphan_grace: float = 0.0,
        warm: Sequence[Warm] = (),
    ) -> None:
        """`state_dir` is where the node makes its own directory (None: the user's default). `directory` is given
        instead by who claimed it already, because its driver keeps things there too. Sandboxes outlive a node that is
        killed by `orphan_grace` seconds; `warm` are kept ready."""
        self.driver = driver
        self._grace = orphan_grace
        self._pulls = Pulls(driver)
        self._pool = Pool(driver, warm, orphan_grace, self._pulls.have)
        self._state_dir = state_dir
        self._directory = directory
        self._live: dict[str, Live] = {}
        self._ended: OrderedDict[str, Info] = OrderedDict()
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._making: set[asyncio.Future[Any]] = set()  # one for each box that is being made
        self._tasks: set[asyncio.Future[Any]] = set()  # what else is to be waited for
        self._pruning: asyncio.Task[None] | None = None
        self._upstreams: httpx2.AsyncHTTPTransport | None = None
        self._connections: asgi.Room | None = None  # on all routes of all sandboxes
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
            self._commands = Commands(self._grace > 0, self._in_background)
        except BaseException:
            self._directory.remove()
            raise
        try:
            await self._sweep(self._directory)
            await self._adopt()
            self._prune_soon()
            self._pool.start()
        except BaseException:  # nobody has a node to close who was cancelled while it was made
            await self.close()
            raise

    # What a node before this one left.

    async def _adopt(self) -> None:
        """Carry on with the sandboxes of the node whose directory this is."""
        ended, unknown = self.ledger.past(time.time() - ENDED_SECONDS)
        for past in ended:
            self._ended[past.id] = past
        adopted, remains = await self.driver.adopt()
        # A node that was killed during a reset leaves two boxes of one sandbox. The earlier one is it: the later one
        # lacks routes until the moment in which the earlier one is ended.
        first: dict[str, int] = {}
        notes = [Note.read(each.note) for each in adopted]
        for note in notes:
            if note is not None:
                first[note.id] = min(note.generation, first.get(note.id, note.generation))
        for each, note in zip(adopted, notes, strict=True):
            try:
                if note is None or first[note.id] != note.generation:  # of another version, or of half a reset
                    await _let_go(each)
                else:
                    await self._carry_on(each, note)
            except (OSError, ValueError, SandlotError) as error:  # one of them is no reason to lose the others
                self.ledger.note(event="adoption_failed", note=each.note, error=f"{type(error).__name__}: {error}")
        for gone in remains:
            note = Note.read(gone.note)
            if note is not None and note.id not in self._ended and note.id not in self._live:
                self.ledger.adopt(note.id)
                self._record_end(_info(note.id, note.spec, note.created_at), gone.death)
            gone.forget()
        for past in unknown:  # what had no record died with its node
            if past.id not in self._ended and past.id not in self._live:
                self.ledger.adopt(past.id)
                self._record_end(past, Death(Ending.ORPHANED))

    async def _carry_on(self, found: Adopted, note: Note) -> None:
        self.ledger.adopt(note.id)
        live = Live(note.id, note.spec, note.named, found.box, note.created_at, note.generation)
        self._begin_life(live, note.created_at)
        runs = [(About.read(words), process, fds) for process, words, fds in found.runs]
        for about, process, fds in sorted(runs, key=lambda run: run[0].started_at):
            out, err = Stream(about.cap, fds[0], fds[1]), Stream(about.cap, fds[2], fds[3])
            command = Command(found.box, process, out, err, about, file=fds[4] if len(fds) > 4 else -1)
            if command.is_over:  # a child that it left may write on: not into a result that was told
                out.stop()
                err.stop()
            if about.key is None:  # its caller was answered that the connection broke
                self._in_background(self._commands.drop(command))
            else:
                work = self._step(
                    live, f"run {about.argv0} in sandbox {note.id}", self._commands.complete(live, command)
                )
                task = self._task(self._busy(live, work))
                live.keyed.add(about.key, about.what, about.argv0, task, command)
        for listener, port, words in found.listeners:
            with suppress(ValidationError):
                upstream = Upstream.model_validate_json(words)
                live.routes.append(
                    Route(port, upstream, await asgi.serve(listener, self._relay(upstream), room=self._room(live)))
                )

    async def _sweep(self, ours: NodeDirectory) -> None:
        for dead in ours.abandoned():
            try:
                async with deadline(STEP_SECONDS, f"removing what the dead node {dead.short_id} left"):
                    swept = await self.driver.sweep(dead.path)
                # It stays while its sandboxes live, or can be asked about, and wait for their node.
                if swept and not dead.is_awaited(ENDED_SECONDS):
                    dead.remove()
            except (OSError, SandlotError) as error:
                # It stays for the next start. Somebody else's remains are no reason for this node not to start.
                self.ledger.note(event="sweep_failed", path=str(dead.path), error=str(error))
            finally:
                dead.release()

    async def close(self) -> None:
        """End every sandbox as `drained`, then let go of the directory. Idempotent."""
        if self._closing:
            return
        self._closing = True
        await shielded(self._close())

    async def _close(self) -> None:
        await self._pulls.close()
        if self._making:  # each ends with a box in the table or with nothing, and no more are begun
            await asyncio.wait(self._making, timeout=CREATE_SECONDS + STEP_SECONDS)
        await self._pool.close()
        turn = asyncio.Semaphore(ENDS_AT_ONCE)
        ends = [self._drain(live, turn) for live in list(self._live.values())]
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        until = time.monotonic() + STEP_SECONDS
        while self._tasks and (left := until - time.monotonic()) > 0:  # one may begin another
            await asyncio.wait(self._tasks, timeout=left)
        if self._upstreams is not None:
            await self._upstreams.aclose()
        await self.driver.close()
        self.ledger.close()
        self._commands.close()
        assert self._directory is not None
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            self._directory.release()  # with its records, so that the next node on this host can finish the work
            raise failed[0]
        try:
            self._directory.remove()
        except OSError as error:
            raise host_fault(error, f"remove {self._directory.path}") from error

    async def _drain(self, live: Live, turn: asyncio.Semaphore) -> None:
        async with turn:
            await self._end(live, Ending.DRAINED)

    @contextmanager
    def _in_progress(self, calls: set[asyncio.Future[Any]]) -> Iterator[None]:
        """One of the calls that `close` waits for. Raises HostFault when that has begun."""
        if self._closing:
            raise HostFault("the node is shutting down")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        calls.add(done)
        try:
            yield
        finally:
            calls.discard(done)
            done.set_result(None)

    async def create(self, spec: SandboxSpec) -> Info:
        if self._closing:
            raise HostFault("the node is shutting down")
        await self._pulls.have(spec.image)
        named = frozenset(spec.limits.model_fields_set) if "limits" in spec.model_fields_set else frozenset[str]()
        return await self._create(spec, named)

    async def _create(self, spec: SandboxSpec, named: frozenset[str]) -> Info:
        sandbox_id = f"sb-{self._id}{secrets.token_hex(7)}"  # 56 bits: ten thousand of them never meet
        created_at = time.time()
        with self._in_progress(self._making):
            self.ledger.begin(sandbox_id, spec.image, spec.labels)
            try:
                note = Note(sandbox_id, spec, named, created_at, 0).write() if self._grace else ""
                box = await self._make(sandbox_id, spec, named, note)
            except BaseException as error:
                cancelled = isinstance(error, asyncio.CancelledError)
                detail = "the create was cancelled" if cancelled else str(error) or type(error).__name__
                self._record_end(_info(sandbox_id, spec, created_at), Death(Ending.START_FAILED, detail))
                if isinstance(error, OSError):
                    raise host_fault(error, f"make sandbox {sandbox_id}") from error
                raise
        # No await from here to the return: a cancellation finds either nothing or a sandbox that its caller knows.
        live = Live(sandbox_id, spec, named, box, created_at)
        self._begin_life(live, created_at)
        return live.info()

    async def _make(
        self, box_id: str, spec: SandboxSpec, named: frozenset[str], note: str, like: Box | None = None
    ) -> Box:
        """A box: a warm one if there is one, else a new one; from the files that `like` was made from, if given."""
        keeping = Keeping(self._grace, note)
        async with deadline(CREATE_SECONDS, f"making sandbox {box_id}", "`sandlot doctor` looks at this host"):
            warm = await self._pool.claim(spec, named, keeping, like)
            if warm is not None:
                return warm
            async with self._starts:
                return await self.driver.create(box_id, spec, named, keeping, like)

    def _begin_life(self, live: Live, created_at: float) -> None:
        loop = asyncio.get_running_loop()
        self._live[live.id] = live
        live.box.death.add_done_callback(partial(self._died, live, live.box))
        if live.spec.lifetime is not None:
            left = max(0.0, created_at + live.spec.lifetime - time.time())
            live.lifetime_timer = loop.call_later(left, self._end_soon, live, Ending.LIFETIME)
        if live.spec.idle_timeout is not None:
            live.idle_timer = loop.call_later(live.spec.idle_timeout, self._idle, live, live.spec.idle_timeout)

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
            if run.key is None:
                return await self._step(
                    live, f"run {run.argv[0]} in sandbox {sandbox_id}", self._commands.run(live, run)
                )
            self._start(live, run, run.key)
            return await self._result(live, run.key)

    def _start(self, live: Live, run: Run, key: str) -> None:
        """A run with a key, unless it was started before."""
        same = fingerprint(run)
        if not live.keyed.has(key, same):
            work = self._step(live, f"run {run.argv[0]} in sandbox {live.id}", self._commands.run(live, run, same))
            live.keyed.add(key, same, run.argv[0], self._task(self._busy(live, work)))

    async def _result(self, live: Live, key: str) -> RunResult:
        result = await live.keyed.result(key)
        for process in live.keyed.forget():
            await process.release()
        return result

    async def launch(self, sandbox_id: str, run: Run) -> CommandInfo:
        live = self._running(sandbox_id)
        key = run.key or f"c-{secrets.token_hex(6)}"
        with live:
            self._start(live, run.model_copy(update={"key": key}), key)
            await live.keyed.begun(key)
            return live.keyed.info(key)

    async def commands(self, sandbox_id: str) -> list[CommandInfo]:
        return self._running(sandbox_id).keyed.infos()

    async def wait(self, sandbox_id: str, command_id: str) -> RunResult:
        return await self._result(self._running(sandbox_id), command_id)

    async def follow(self, sandbox_id: str, command_id: str, out: int = 0, err: int = 0) -> AsyncIterator[Chunk]:
        async for chunk in self._running(sandbox_id).keyed.follow(command_id, out, err):
            yield chunk

    async def signal(self, sandbox_id: str, command_id: str, number: int) -> None:
        if not 0 < number < 65:
            raise InvalidRequest(f"{number} is not the number of a signal", "15 asks a program to end, 9 ends it")
        live = self._running(sandbox_id)
        with live:
            command = await live.keyed.started_run(command_id)
            if command is not None:
                how = command.process.kill_tree() if number == signal.SIGKILL else command.process.signal(number)
                with suppress(ProcessLookupError):
                    await self._step(live, f"signal command {command_id} of sandbox {sandbox_id}", how)

    async def write_stdin(self, sandbox_id: str, command_id: str, data: bytes, end: bool = False) -> None:
        live = self._running(sandbox_id)
        with live:
            command = await live.keyed.started_run(command_id)
            feed = None if command is None else command.feed
            try:
                if feed is None:
                    raise BrokenPipeError
                await feed.write(data)
            except BrokenPipeError:
                reason = "it has ended" if command is None else "it was not started with `stdin_open`"
                if feed is not None:
                    reason = "its end was given, or nobody reads it any more"
                raise Conflict(f"command {command_id} takes no more input: {reason}") from None
            if end:
                feed.close()

    async def _busy(self, live: Live, work: Coroutine[Any, Any, T]) -> T:
        """Work that nobody may be waiting for: the sandbox is not idle all the same."""
        with live:
            return await work

    async def open_shell(self, sandbox_id: str, spec: ShellSpec = ShellSpec()) -> ShellInfo:  # noqa: B008
        live = self._running(sandbox_id)
        with live:
            if len(live.shells) >= MOST_SHELLS:
                raise Conflict(f"sandbox {sandbox_id} has {MOST_SHELLS} shells already", "close some")
            user, cwd, env = live.place(spec)
            box = live.box
            opening = Shell.open(box, env, cwd, user)
            shell = await self._step(live, f"open a shell in sandbox {sandbox_id}", opening)
            if live.box is not box or box.death.done():
                await shell.close()
                raise Conflict(f"sandbox {sandbox_id} was reset or ended meanwhile")
            live.shells[shell.id] = shell
            return shell.info()

    async def shells(self, sandbox_id: str) -> list[ShellInfo]:
        return [shell.info() for shell in self._running(sandbox_id).shells.values()]

    async def run_in_shell(self, sandbox_id: str, shell_id: str, run: ShellRun) -> ShellResult:
        live = self._running(sandbox_id)
        shell = self._shell(live, shell_id)
        cap = live.spec.limits.output if run.output_cap is None else run.output_cap
        with live:
            box = live.box
            work = shell.run(run.command, timeout=run.timeout, cap=cap, stdin=run.stdin, queue=run.queue)
            result = await self._step(live, f"run a text in shell {shell_id} of sandbox {sandbox_id}", work)
            if result.ended and live.box is not box:
                raise Conflict(f"sandbox {sandbox_id} was reset while a text ran in it")
            if result.ended and box.death.done():
                raise self._lost(live)
            return result

    async def shell_output(self, sandbox_id: str, shell_id: str, command_id: str) -> ShellOutput:
        found = self._shell(self._running(sandbox_id), shell_id).background(command_id)
        if found is None:
            raise NotFound(f"command {command_id} has left nothing in the background, or that was too long ago")
        return ShellOutput(out=found[0], err=found[1])

    async def interrupt_shell(self, sandbox_id: str, shell_id: str) -> bool:
        live = self._running(sandbox_id)
        with live:
            work = self._shell(live, shell_id).interrupt()
            return await self._step(live, f"interrupt shell {shell_id} of sandbox {sandbox_id}", work)

    async def close_shell(self, sandbox_id: str, shell_id: str) -> None:
        shell = self._running(sandbox_id).shells.pop(shell_id, None)
        if shell is not None:
            await shielded(shell.close())

    def _shell(self, live: Live, shell_id: str) -> Shell:
        shell = live.shells.get(shell_id)
        if shell is None:
            raise NotFound(
                f"sandbox {live.id} has no shell {shell_id}", "a reset ends shells, and a new server has none: open one"
            )
        return shell

    async def read_file(self, sandbox_id: str, path: str) -> bytes:
        live = self._running(sandbox_id)  # and not `with`: to look at it is not work
        async with deadline(STEP_SECONDS, f"reading {path} of sandbox {sandbox_id}"):
            return await self._step(live, f"read {path} of sandbox {sandbox_id}", files.read(live.box, path))

    async def write_file(self, sandbox_id: str, path: str, data: bytes, mode: int = 0o644) -> None:
        with self._running(sandbox_id) as live:
            async with deadline(STEP_SECONDS, f"writing {path} of sandbox {sandbox_id}"):
                work = files.write(live.box, path, data, mode)
                await self._step(live, f"write {path} of sandbox {sandbox_id}", work)

    async def upload(self, sandbox_id: str, path: str, tar: AsyncIterator[bytes], user: int = 0) -> None:
        with self._running(sandbox_id) as live:
            async with deadline(COPY_SECONDS, f"unpacking files at {path} of sandbox {sandbox_id}"):
                work = files.upload(live.box, path, tar, user)
                await self._step(live, f"unpack files at {path} of sandbox {sandbox_id}", work)

    async def route(self, sandbox_id: str, port: int, target: Target) -> None:
        if not 0 < port < 65_536:
            raise InvalidRequest(f"{port} is not a port", "ports go from 1 to 65535")
        with self._running(sandbox_id) as live:
            box = live.box
            async with deadline(STEP_SECONDS, f"listening on port {port} of sandbox {sandbox_id}"):
                work = self._listen(live, box, port, target)
                served = await self._step(live, f"listen on port {port} of sandbox {sandbox_id}", work)
            if live.box is box and not box.death.done():
                live.routes.append(Route(port, target, served))
                return
            served.close()
            if live.box is box:
                raise self._lost(live)
            raise Conflict(f"sandbox {sandbox_id} was reset while port {port} was being routed", "route it again")

    # What becomes of its files.

    async def reset(self, sandbox_id: str, image: str | None = None) -> Info:
        live = self._running(sandbox_id)
        with live:
            if image is not None:
                await self._pulls.have(image)
            async with live.changing:
                return await shielded(self._reset(live, image))

    async def _reset(self, live: Live, image: str | None) -> Info:
        """Another box in the place of this one. Not cut short: there is no sandbox with half a box."""
        spec = live.spec if image is None else live.spec.model_copy(update={"image": image})
        generation = live.generation + 1
        left = spec
        if spec.lifetime is not None:
            left = spec.model_copy(update={"lifetime": max(0.001, live.created_at + spec.lifetime - time.time())})
        like = live.box if image is None else None
        routes: list[Route] = []
        with self._in_progress(self._making):
            work = self._make(f"{live.id}.{generation}", left, live.named, live.note(spec, generation), like)
            box = await self._step(live, f"reset sandbox {live.id}", work)
            try:
                while not live.ending and len(routes) < len(live.routes):  # one may come in addition meanwhile
                    port, target = live.routes[len(routes)].port, live.routes[len(routes)].target
                    routes.append(Route(port, target, await self._listen(live, box, port, target)))
                if live.ending:  # whoever ends it sees to the box that it has, and not to another
                    raise await self._after_its_end(live)
            except BaseException as error:
                for route in routes:
                    route.served.close()
                await box.destroy(Ending.EXIT)
                if isinstance(error, OSError):
                    raise host_fault(error, f"reset sandbox {live.id}") from error
                raise
            # Everything in one step: from now on the sandbox is the new box, for a node that adopts it too.
            old, before = live.box, live.routes
            live.routes, live.spec, live.generation = routes, spec, generation
            live.take(box)
            box.death.add_done_callback(partial(self._died, live, box))
            for route in before:
                route.served.close()
            held = live.keyed.clear()  # of the box that ends
            self._close_shells(live)
            async with deadline(STEP_SECONDS, f"ending what ran in sandbox {live.id}"):
                await old.destroy(Ending.EXIT)
            for process in held:
                await process.release()
        if image is not None:
            self._prune_soon()
        return live.info()

    async def _after_its_end(self, live: Live) -> SandlotError:
        """SandboxEnded for a sandbox that somebody is ending, once that is done."""
        async with deadline(STEP_SECONDS, f"the end of sandbox {live.id}"):
            await asyncio.wait((live.box.death,))
        return self._lost(live)

    async def snapshot(self, sandbox_id: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        live = self._running(sandbox_id)
        with live, self._in_progress(self._tasks):
            return await self._snapshot(live, name, config)

    async def _snapshot(self, live: Live, name: str | None, config: ImageConfig | None = None) -> ImageInfo:
        async with live.changing, deadline(COPY_SECONDS, f"copying the files of sandbox {live.id}"):
            work = self.driver.snapshot(live.box, name, config)
            return await self._step(live, f"snapshot sandbox {live.id}", work)

    async def fork(self, sandbox_id: str, count: int = 1) -> list[Info]:
        if not 0 < count <= MOST_FORKS:
            raise InvalidRequest(f"a sandbox can be forked into 1 to {MOST_FORKS}, not into {count}")
        live = self._running(sandbox_id)
        turn = asyncio.Semaphore(ENDS_AT_ONCE)
        infos: list[Info] = []

        async def one(spec: SandboxSpec) -> None:
            async with turn:
                infos.append(await self._create(spec, live.named))

        async def undo() -> None:
            for info in infos:
                await self.destroy(info.id)

        with live, self._in_progress(self._tasks):
            image = (await self._snapshot(live, None)).name
            spec = live.spec.model_copy(update={"image": image})
            try:
                made = await asyncio.gather(*(one(spec) for _ in range(count)), return_exceptions=True)
                for failed in made:
                    if failed is not None:
                        raise failed
            except BaseException:  # all or none, when the caller gives up too
                await shielded(undo())
                raise
            finally:
                self._in_background(self.driver.forget(image))  # its files stay for those that were made from it
            return infos

    async def diff(self, sandbox_id: str) -> list[Change]:
        live = self._running(sandbox_id)
        async with live.changing, deadline(COPY_SECONDS, f"looking through the files of sandbox {sandbox_id}"):
            return await self._step(live, f"list the changes of sandbox {sandbox_id}", live.box.changes())

    async def pause(self, sandbox_id: str) -> Info:
        return await self._stop(sandbox_id, True)

    async def resume(self, sandbox_id: str) -> Info:
        return await self._stop(sandbox_id, False)

    async def _stop(self, sandbox_id: str, stopped: bool) -> Info:
        live = self._running(sandbox_id)
        with live:
            async with live.changing, deadline(STEP_SECONDS, f"pausing or resuming sandbox {sandbox_id}"):
                work = live.box.pause() if stopped else live.box.resume()
                await self._step(live, f"pause or resume sandbox {sandbox_id}", work)
            return live.info()

    # Images.

    async def images(self) -> list[ImageInfo]:
        return await self.driver.images()

    async def image(self, name: str) -> ImageInfo:
        return await self.driver.image(name)

    def pull_image(self, reference: str) -> AsyncGenerator[PullProgress, None]:
        if not is_reference(reference):
            raise InvalidRequest(
                f"{reference!r} names no image of a registry", f"with its tag it does: `{reference}:latest`"
            )
        return self._pulls.follow(reference)

    async def import_image(self, name: str, path: Path) -> ImageInfo:
        return await self._pulls.import_(name, path)

    async def prune_images(self) -> list[ImageInfo]:
        pruned = []
        async with deadline(COPY_SECONDS, "deleting images that nobody uses"):
            for image in await self.driver.idle_images():
                with suppress(NotFound):
                    await self.driver.forget(image.name)
                    pruned.append(image)
        return pruned

    async def tag_image(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        async with deadline(COPY_SECONDS, f"naming the image {name}"):
            return await self.driver.tag(image, name, config)

    async def delete_image(self, name: str) -> None:
        if name.startswith(FORK):
            raise Conflict(f"{name} is what sandboxes were forked as, and goes with the last of them")
        async with deadline(COPY_SECONDS, f"deleting the image {name}"):
            await self.driver.forget(name)

    async def export_image(self, name: str) -> AsyncIterator[bytes]:
        if name == "host":
            raise NotFound("the image `host` is this machine itself, and has nothing to export")
        await self.driver.image(name)
        read, write = os.pipe2(os.O_CLOEXEC)
        writing = asyncio.ensure_future(self._export(name, write))
        try:
            while chunk := await asyncio.to_thread(os.read, read, 1 << 20):
                yield chunk
            await writing
        finally:
            os.close(read)  # a writer that is not done yet gets EPIPE
            await asyncio.wait((writing,))

    async def _export(self, name: str, out: int) -> None:
        try:
            await self.driver.export(name, out)
        except BrokenPipeError:
            pass
        finally:
            os.close(out)

    async def pools(self) -> list[PoolInfo]:
        return self._pool.infos()

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

    def _idle(self, live: Live, seconds: float) -> None:
        # One timer for the whole life, looking again where it was too early: cheaper than one for each command.
        left = seconds if live.busy else live.last_used + seconds - time.monotonic()
        if left > 0:
            live.idle_timer = asyncio.get_running_loop().call_later(left, self._idle, live, seconds)
        else:
            self._end_soon(live, Ending.IDLE)

    def _end_soon(self, live: Live, ending: Ending) -> None:
        live.ending = True
        self._in_background(self._end(live, ending))

    def _prune_soon(self) -> None:
        """Remove what nobody stands on any more, once for many that end together."""
        if self._pruning is None:
            self._pruning = self._task(self._prune())

    async def _prune(self) -> None:
        self._pruning = None
        await self._recorded(self.driver.prune())

    async def _end(self, live: Live, ending: Ending) -> None:
        """Destroy the box. When this returns no process of it is left and its end is on record."""
        live.ending = True
        for route in live.routes:
            route.served.close()
        async with deadline(STEP_SECONDS, f"ending sandbox {live.id}", "`sandlot doctor` looks at this host"):
            death = await live.box.destroy(ending)
        self._finish(live, death)

    def _died(self, live: Live, box: Box, death: asyncio.Future[Death]) -> None:
        if live.box is not box:
            return  # a reset put another one in its place
        self._finish(live, death.result())
        if not live.ending:  # it died of itself: let the driver remove what is left of it
            self._end_soon(live, death.result().ending)

    def _finish(self, live: Live, death: Death) -> None:
        if self._live.get(live.id) is not live:
            return
        del self._live[live.id]
        for timer in (live.idle_timer, live.lifetime_timer):
            if timer is not None:
                timer.cancel()
        for route in live.routes:
            route.served.close()
        for process in live.keyed.clear():
            self._in_background(process.release())
        self._close_shells(live)
        if live.spec.image != "host":
            self._prune_soon()
        self._record_end(live.info(), death)

    def _close_shells(self, live: Live) -> None:
        """Of a box that is dead, or about to be."""
        for shell in live.shells.values():
            self._in_background(shell.close())
        live.shells.clear()

    def _record_end(self, info: Info, death: Death) -> None:
        now = time.time()
        self.ledger.end(info.id, death.ending, death.detail, info.losses)
        self._ended[info.id] = info.model_copy(
            update={"state": "ended", "ended_at": now, "ending": death.ending, "detail": death.detail}
        )
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= ENDED_KEPT and (oldest.ended_at or now) > now - ENDED_SECONDS:
                break
            del self._ended[oldest.id]

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that this node waits for when it closes; whoever asks for its result gets it, or its exception."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen: nobody may ask
        return task

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        self._task(self._recorded(work))

    async def _recorded(self, work: Coroutine[Any, Any, None]) -> None:
        """The top of a task that nobody awaits."""
        try:
            await work
        except Exception as error:
            self.ledger.note(event="fault", error=f"{type(error).__name__}: {error}")

    # Small questions.

    def _running(self, sandbox_id: str) -> Live:
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

    def _lost(self, live: Live) -> SandlotError:
        """SandboxEnded for a box whose death was noticed here before its callback ran."""
        self._died(live, live.box, live.box.death)
        return self._ended_error(live.id)

    def _room(self, live: Live) -> asgi.Room:
        """For connections on its routes. Each may cost two descriptors, for a relay has one of its own, and those of
        all sandboxes together leave half of this process's."""
        if self._connections is None:
            self._connections = asgi.Room(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        if live.connections is None:
            live.connections = asgi.Room(asgi.BOX_CONNECTIONS, self._connections)
        return live.connections

    async def _listen(self, live: Live, box: Box, port: int, target: Target) -> asgi.Served:
        asgi.require()
        note = None
        if isinstance(target, Upstream) and self._grace:
            note = target.model_dump_json()
        app = self._relay(target) if isinstance(target, Upstream) else target
        listener = await box.listen(port, note)
        try:
            return await asgi.serve(listener, app, room=self._room(live))
        except BaseException:
            listener.close()
            raise

    def _relay(self, upstream: Upstream) -> Relay:
        from sandlot.node.relay import Relay, new_transport

        if self._upstreams is None:
            self._upstreams = new_transport()
        return Relay(upstream, self._upstreams)

    async def _step(self, live: Live, what: str, work: Coroutine[Any, Any, T]) -> T:
        """One piece of work with the box; what fails of it is said in terms of the sandbox."""
        try:
            return await work
        except (OSError, HostFault) as error:
            if await self._dies(live):  # a box that is going down fails its calls one way or another: say which
                raise self._lost(live) from None
            if isinstance(error, OSError):
                raise host_fault(error, what) from error
            raise

    async def _dies(self, live: Live) -> bool:
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


def local_node(
    state_dir: Path | None = None,
    *,
    name: str | None = None,
    orphan_grace: float = 0.0,
    warm: Sequence[Warm] = (),
    registries: Sequence[str] | None = None,
) -> Node:
    """A node of this host's native boxes, to be started. With a `name` it takes over the directory, and with an
    `orphan_grace` the sandboxes, of a dead node of that name. It pulls from `registries` (None: any; empty: any that is
    public). Raises HostFault when its directory cannot be made."""
    from sandlot.drivers.native.driver import NativeDriver

    directory = NodeDirectory.claim(state_dir, name)
    try:
        driver = NativeDriver(directory.path, store=image_store(state_dir), registries=registries)
        return Node(driver, directory=directory, orphan_grace=orphan_grace, warm=warm)
    except BaseException:
        directory.remove()
        raise

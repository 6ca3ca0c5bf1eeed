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
import json
import os
import resource
import secrets
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from sandlot import asgi
from sandlot.aio import deadline, shielded
from sandlot.api import (
    EVERY,
    MOST_OFFSET,
    REPLAY,
    Capability,
    Change,
    Chunk,
    CommandInfo,
    Ending,
    Fault,
    FileEvent,
    FileInfo,
    FilesFound,
    Filter,
    ImageConfig,
    ImageInfo,
    Info,
    Made,
    OpenFile,
    Page,
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
    TerminalInfo,
    TerminalLink,
    TerminalSpec,
    TextFound,
    Upstream,
    Warm,
    is_reference,
)
from sandlot.drivers.base import Adopted, Box, Death, Driver, Keeping
from sandlot.drivers.layers import FORK
from sandlot.errors import (
    Conflict,
    HostFault,
    InvalidRequest,
    NotFound,
    SandboxEnded,
    SandlotError,
    host_fault,
    no_sandbox,
)
from sandlot.node import files, listing, looks
from sandlot.node.commands import STEP_SECONDS, Commands, fingerprint
from sandlot.node.creates import Creates, derived
from sandlot.node.creates import fingerprint as same_create
from sandlot.node.keyed import room
from sandlot.node.ledger import ENDED_SECONDS, Ledger, NodeDirectory, image_store
from sandlot.node.live import About, Command, Live, Note, Route
from sandlot.node.pool import Pool
from sandlot.node.pulls import Pulls
from sandlot.node.relay import Reachable, Relay, anybody, new_transport
from sandlot.node.shares import QuotaOf, Shares, no_quota
from sandlot.node.shells import Shells
from sandlot.node.streams import Stream
from sandlot.node.terminals import Terminals

if TYPE_CHECKING:
    import httpx2

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

# Copying what a sandbox has written takes as long as the disk takes.
COPY_SECONDS = 1800.0
# Looking through its files takes as long as reading them; an expression may take for ever.
FIND_SECONDS = 120.0
MOST_FORKS = 1000
MOST_AT_ONCE = 1000

# Each costs the sandbox a process, and the node a pipe.
MOST_WATCHES = 100

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
    return Info(
        id=sandbox_id,
        image=spec.image,
        state="running",
        created_at=created_at,
        labels=spec.labels,
        tenant=spec.tenant,
    )


async def _let_go(found: Adopted) -> None:
    """End a box that is nobody's sandbox."""
    found.close()
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
        quota_of: QuotaOf = no_quota,
        reachable: Reachable = anybody,
    ) -> None:
        """`state_dir` is where the node makes its own directory (None: the user's default). `directory` is given
        instead by who claimed it already, because its driver keeps things there too. Sandboxes outlive a node that is
        killed by `orphan_grace` seconds; `warm` are kept ready; a tenant has at once what `quota_of` it says, and its
        routes lead to whoever is public or `reachable`."""
        self.driver = driver
        self._grace = orphan_grace
        self._pulls = Pulls(driver)
        self._pool = Pool(driver, warm, orphan_grace, self._pulls.have)
        self._shares = Shares(quota_of)
        self._state_dir = state_dir
        self._directory = directory
        self._live: dict[str, Live] = {}
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._making: set[asyncio.Future[Any]] = set()  # one for each box that is being made
        self._tasks: set[asyncio.Future[Any]] = set()  # what else is to be waited for
        self._pruning: asyncio.Task[None] | None = None
        self._reachable = reachable
        self._upstreams: dict[Reachable, httpx2.AsyncHTTPTransport] = {}
        self._connections: asgi.Room | None = None  # on all routes of all sandboxes
        self._adopted = False  # whether what the node before left is in our hands
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
            self._creates = Creates(self._task, self.ledger.told, self._nobody_came_for, self.ledger.made)
            self._commands = Commands(self._grace > 0, self._in_background)
            self._shells = Shells(self._grace > 0, self._begin, self._in_background)
            self._terminals = Terminals(self._grace > 0, self._in_background)
        except BaseException:
            self._directory.give_up()
            raise
        try:
            await self._sweep(self._directory)
            await self._adopt()
            self._adopted = True
            self._prune_soon()
            self._pool.start()
        except BaseException:  # nobody has a node to close who was cancelled while it was made
            await self.close()
            raise

    # What a node before this one left.

    async def _adopt(self) -> None:
        """Carry on with the sandboxes of the node whose directory this is."""
        begun = {each.info.id: each for each in self.ledger.past()}
        adopted, remains = await self.driver.adopt()
        # A node that was killed during a reset leaves two boxes of one sandbox. The earlier one is it: the later one
        # lacks routes until the moment in which the earlier one is ended.
        first: dict[str, int] = {}
        notes = [Note.read(each.note) for each in adopted]
        for note in notes:
            if note is not None:
                first[note.id] = min(note.generation, first.get(note.id, note.generation))
        for each, note in zip(adopted, notes, strict=True):
            with self._one_of_many(each.note):
                if note is None or first[note.id] != note.generation:  # of another version, or of half a reset
                    await _let_go(each)
                else:
                    await self._carry_on(each, note, told=note.id not in begun or begun[note.id].told)
        for gone in remains:
            with self._one_of_many(gone.note):
                note = Note.read(gone.note)
                if note is not None and self._is_unknown(note.id):
                    info = _info(note.id, note.spec, note.created_at)
                    self.ledger.adopt(info, note.spec.key, note.what)
                    self._record_end(info, gone.death)
                gone.forget()
        for past in begun.values():  # what had no record died with its node
            with self._one_of_many(past.info.id):
                if self._is_unknown(past.info.id):
                    self.ledger.adopt(past.info)
                    self._record_end(past.info, Death(Ending.ORPHANED))

    @contextmanager
    def _one_of_many(self, note: str) -> Iterator[None]:
        """One that cannot be adopted is no reason to lose the others."""
        try:
            yield
        except (OSError, ValueError, SandlotError) as error:
            self.ledger.note(event="adoption_failed", note=note, error=f"{type(error).__name__}: {error}")

    def _is_unknown(self, sandbox_id: str) -> bool:
        """Whether it does not live, and no end of it is told."""
        return sandbox_id not in self._live and self.ledger.ended(sandbox_id) is None

    async def _carry_on(self, found: Adopted, note: Note, told: bool) -> None:
        """`told`: whoever asked for it by a key, if anybody did, has heard of it."""
        self.ledger.adopt(_info(note.id, note.spec, note.created_at), note.spec.key, note.what)
        live = Live(note.id, note.spec, note.named, found.box, note.created_at, note.generation, note.what)
        self._shares.add(live.spec)
        if note.spec.key is not None:  # in the step in which its life begins: its end forgets the key
            self._creates.restore(note.spec.tenant, note.spec.key, note.what, note.id, told)
        self._begin_life(live, note.created_at)
        runs = []
        for process, words, fds in found.runs:
            if words.startswith('{"shell'):
                more = [each for each in found.more if each.process is process]
                await self._shells.carry_on(live, json.loads(words)["shell"], process, fds, more)
            elif words.startswith('{"terminal'):
                self._terminals.carry_on(live, json.loads(words)["terminal"], process, fds)
            else:
                runs.append((About.read(words), process, fds))
        for about, process, fds in sorted(runs, key=lambda run: run[0].started_at):
            out, err = Stream(about.cap, fds[0], fds[1]), Stream(about.cap, fds[2], fds[3])
            command = Command(found.box, process, out, err, about, file=fds[4] if len(fds) > 4 else -1)
            if command.is_over:  # a child that it left may write on: not into a result that was told
                out.stop()
                err.stop()
            elif about.lossless:
                out.wait_for_followers()
                err.wait_for_followers()
            if about.key is None:  # its caller was answered that the connection broke
                self._in_background(self._commands.drop(command))
            else:
                work = self._step(
                    live, f"run {about.argv0} in sandbox {note.id}", self._commands.complete(live, command)
                )
                task = self._task(self._busy(live, work))
                live.keyed.add(about.key, about.what, about.argv0, task, command, bool(about.dies_alone))
                task.add_done_callback(partial(self._forget, live))
        for listener, port, words in found.listeners:
            with suppress(ValidationError):
                upstream = Upstream.model_validate_json(words)
                live.routes.append(
                    Route(
                        port, upstream, await asgi.serve(listener, self._relay(live, upstream), room=self._room(live))
                    )
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
        """End every sandbox as `drained`, then let go of the directory. Idempotent. Of a node that could not start it
        ends none that it has not adopted: they wait for the next one, as after a node that was killed."""
        if self._closing:
            return
        self._closing = True
        await shielded(self._close())

    async def _close(self) -> None:
        await self._pulls.close()
        self._creates.close()
        if self._making:  # each ends with a box in the table or with nothing, and no more are begun
            await asyncio.wait(self._making, timeout=CREATE_SECONDS + STEP_SECONDS)
        await self._pool.close()
        turn = asyncio.Semaphore(ENDS_AT_ONCE)
        ends = [self._drain(live, turn) for live in list(self._live.values())]
        outcomes = await asyncio.gather(*ends, return_exceptions=True)
        until = time.monotonic() + STEP_SECONDS
        while self._tasks and (left := until - time.monotonic()) > 0:  # one may begin another
            await asyncio.wait(self._tasks, timeout=left)
        for transport in self._upstreams.values():
            await transport.aclose()
        assert self._directory is not None
        ours = self._adopted or self._directory.is_new
        if ours:  # else boxes may live in the driver's places
            await self.driver.close()
        self.ledger.close()
        self._commands.close()
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed or not ours:
            self._directory.release()  # with its records, so that the next node on this host can finish the work
            if failed:
                raise failed[0]
            return
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
        named = frozenset(spec.limits.model_fields_set) if "limits" in spec.model_fields_set else frozenset[str]()
        if spec.key is None:
            await self._pulls.have(spec.image)
            return await self._create(spec, named)
        what = same_create(spec, named)

        async def make() -> Info:
            await self._pulls.have(spec.image)
            return await self._create(spec, named, what)

        return self._running(await self._creates.made(spec.tenant, spec.key, what, make)).info()

    async def create_many(self, spec: SandboxSpec, count: int) -> list[Made]:
        if not 0 < count <= MOST_AT_ONCE:
            raise InvalidRequest(f"1 to {MOST_AT_ONCE} sandboxes are made at once, not {count}")
        turn = asyncio.Semaphore(ENDS_AT_ONCE)

        async def one(number: int) -> Made:
            each = spec if spec.key is None else spec.model_copy(update={"key": derived(spec.key, number)})
            async with turn:
                try:
                    return Made(sandbox=await self.create(each))
                except SandlotError as error:
                    return Made(error=Fault.model_validate(error.to_wire()["error"]))

        making = [asyncio.ensure_future(one(number)) for number in range(count)]
        try:
            return await asyncio.gather(*making)
        except BaseException:  # the caller gave up: none of them is known to anybody
            await shielded(self._undo(making if spec.key is None else []))
            raise

    async def _undo(self, making: list[asyncio.Task[Made]]) -> None:
        for made in await asyncio.gather(*making, return_exceptions=True):
            if isinstance(made, Made) and made.sandbox is not None:
                await self.destroy(made.sandbox.id)

    def _nobody_came_for(self, sandbox_id: str) -> None:
        live = self._live.get(sandbox_id)
        if live is not None:
            self._end_soon(live, Ending.KILLED)

    async def page(self, wanted: Filter = EVERY, cursor: str | None = None, limit: int = 100) -> Page:
        after = listing.place(cursor, limit)
        found: list[Live | Info] = [*self._live.values(), *self.ledger.owed()]
        ended: list[Info] = []
        at = after if "ended" in wanted.states else None
        while at is not None and len(ended) <= limit:
            more, at = self.ledger.later(wanted, at, limit + 1 - len(ended))
            ended += more
            await asyncio.sleep(0)  # there may be a hundred thousand: they take their turns with others
        return listing.page(found, wanted, after, limit, ended)

    async def wait_ended(self, sandbox_id: str, timeout: float | None = None) -> Info:
        live = self._live.get(sandbox_id)
        if live is not None:
            if live.over is None:
                live.over = asyncio.get_running_loop().create_future()
            await asyncio.wait((live.over,), timeout=timeout)
        return await self.info(sandbox_id)

    async def _create(self, spec: SandboxSpec, named: frozenset[str], what: str = "") -> Info:
        sandbox_id = f"sb-{self._id}{secrets.token_hex(7)}"  # 56 bits: ten thousand of them never meet
        created_at = time.time()
        with self._in_progress(self._making):
            self._shares.take(spec)
            try:
                self.ledger.begin(_info(sandbox_id, spec, created_at), spec.key, what)
            except BaseException:
                self._shares.give(spec)
                raise
            try:
                note = Note(sandbox_id, spec, named, created_at, 0, what).write() if self._grace else ""
                box = await self._make(sandbox_id, spec, named, note)
            except BaseException as error:
                self._shares.give(spec)
                cancelled = isinstance(error, asyncio.CancelledError)
                detail = "the create was cancelled" if cancelled else str(error) or type(error).__name__
                self._record_end(_info(sandbox_id, spec, created_at), Death(Ending.START_FAILED, detail))
                if isinstance(error, OSError):
                    raise host_fault(error, f"make sandbox {sandbox_id}") from error
                raise
        # No await from here to the return: a cancellation finds either nothing or a sandbox that its caller knows.
        live = Live(sandbox_id, spec, named, box, created_at, what=what)
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
            task = self._task(self._busy(live, work))
            live.keyed.add(key, same, run.argv[0], task, dies_alone=run.kill_on_disconnect)
            task.add_done_callback(partial(self._forget, live))

    async def _result(self, live: Live, key: str) -> RunResult:
        result = await live.keyed.result(key)
        self._forget(live)
        return result

    def _forget(self, live: Live, *_: object) -> None:
        """Let go of the results that are too much."""
        for process in live.keyed.forget():
            self._in_background(process.release())

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

    async def follow(self, sandbox_id: str, command_id: str, out: int = 0, err: int = 0) -> AsyncGenerator[Chunk, None]:
        for offset in (out, err):
            if not 0 <= offset <= MOST_OFFSET:
                raise InvalidRequest(f"{offset} is no offset in a command's output", "an offset is 0 or more")
        live = self._running(sandbox_id)
        async with aclosing(live.keyed.follow(command_id, out, err)) as chunks:
            async for chunk in chunks:
                yield chunk
        self._forget(live)

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

    def _begin(self, live: Live, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._task(self._busy(live, work))

    async def open_shell(self, sandbox_id: str, spec: ShellSpec = ShellSpec()) -> ShellInfo:  # noqa: B008
        live = self._running(sandbox_id)
        with live:
            opening = self._shells.open(live, spec)
            return (await self._step(live, f"open a shell in sandbox {sandbox_id}", opening)).info()

    async def shells(self, sandbox_id: str) -> list[ShellInfo]:
        return [shell.info() for shell in self._running(sandbox_id).shells.values()]

    async def run_in_shell(self, sandbox_id: str, shell_id: str, run: ShellRun) -> ShellResult:
        live = self._running(sandbox_id)
        with live:
            box = live.box
            work = self._shells.run(live, shell_id, run)
            result = await self._step(live, f"run a text in shell {shell_id} of sandbox {sandbox_id}", work)
            if result.ended and live.box is not box:
                raise Conflict(f"sandbox {sandbox_id} was reset while a text ran in it")
            if result.ended and box.death.done():
                raise self._lost(live)
            return result

    async def shell_output(self, sandbox_id: str, shell_id: str, command_id: str) -> ShellOutput:
        found = self._shells.get(self._running(sandbox_id), shell_id).output(command_id)
        if found is None:
            raise NotFound(f"command {command_id} has left nothing in the background, or that was too long ago")
        return found

    async def interrupt_shell(self, sandbox_id: str, shell_id: str) -> bool:
        live = self._running(sandbox_id)
        with live:
            work = self._shells.get(live, shell_id).interrupt()
            return await self._step(live, f"interrupt shell {shell_id} of sandbox {sandbox_id}", work)

    async def close_shell(self, sandbox_id: str, shell_id: str) -> None:
        shell = self._running(sandbox_id).shells.pop(shell_id, None)
        if shell is not None:
            await shielded(shell.close())

    async def open_terminal(self, sandbox_id: str, spec: TerminalSpec = TerminalSpec()) -> TerminalInfo:  # noqa: B008
        with self._running(sandbox_id) as live:
            opening = self._terminals.open(live, spec)
            return (await self._step(live, f"open a terminal in sandbox {sandbox_id}", opening)).info()

    async def terminals(self, sandbox_id: str) -> list[TerminalInfo]:
        return [terminal.info() for terminal in self._running(sandbox_id).terminals.values()]

    async def attach_terminal(
        self, sandbox_id: str, terminal_id: str, *, replay: int = REPLAY, watch: bool = False
    ) -> TerminalLink:
        return self._terminals.attach(self._running(sandbox_id), terminal_id, replay, watch)

    async def close_terminal(self, sandbox_id: str, terminal_id: str) -> None:
        terminal = self._running(sandbox_id).terminals.pop(terminal_id, None)
        if terminal is not None:
            await shielded(terminal.close())

    # Its files: `with live` is work, which looking is not.

    async def read_file(self, sandbox_id: str, path: str, offset: int = 0, length: int | None = None) -> bytes:
        work = partial(files.read, path=path, offset=offset, length=length)
        return await self._with_files(self._running(sandbox_id), f"read {path}", work)

    @asynccontextmanager
    async def open_file(self, sandbox_id: str, path: str) -> AsyncIterator[OpenFile]:
        work = partial(files.opened, path=path)
        file = await self._with_files(self._running(sandbox_id), f"read {path}", work)
        try:
            yield file
        finally:
            file.close()

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        data: bytes | AsyncIterator[bytes],
        mode: int = 0o644,
        append: bool = False,
    ) -> None:
        work = partial(files.write, path=path, data=data, mode=mode, append=append)
        seconds = STEP_SECONDS if isinstance(data, bytes) else COPY_SECONDS
        with self._running(sandbox_id) as live:
            await self._with_files(live, f"write {path}", work, seconds)

    async def stat_file(self, sandbox_id: str, path: str, follow: bool = False) -> FileInfo:
        work = partial(looks.stat_file, path=path, follow=follow)
        return await self._with_files(self._running(sandbox_id), f"look at {path}", work)

    async def list_files(self, sandbox_id: str, path: str) -> list[FileInfo]:
        work = partial(looks.list_files, path=path)
        return await self._with_files(self._running(sandbox_id), f"list {path}", work)

    async def glob_files(self, sandbox_id: str, pattern: str, limit: int = 10_000) -> FilesFound:
        work = partial(looks.glob_files, pattern=pattern, limit=limit)
        return await self._with_files(self._running(sandbox_id), f"look through {pattern}", work, FIND_SECONDS)

    async def find_text(
        self,
        sandbox_id: str,
        text: str,
        path: str = "/",
        *,
        names: str = "**",
        regex: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
    ) -> TextFound:
        look = partial(looks.find_text, text=text, path=path, names=names, limit=limit)
        work = partial(look, regex=regex, ignore_case=ignore_case)
        return await self._with_files(self._running(sandbox_id), f"look through {path}", work, FIND_SECONDS)

    async def make_directory(self, sandbox_id: str, path: str, mode: int = 0o755, parents: bool = True) -> None:
        work = partial(files.make_directory, path=path, mode=mode, parents=parents)
        with self._running(sandbox_id) as live:
            await self._with_files(live, f"make {path}", work)

    async def move_file(self, sandbox_id: str, path: str, to: str, replace: bool = False) -> None:
        work = partial(files.move, path=path, to=to, replace=replace)
        with self._running(sandbox_id) as live:
            await self._with_files(live, f"move {path}", work, COPY_SECONDS)

    async def remove_file(self, sandbox_id: str, path: str, recursive: bool = False) -> None:
        work = partial(files.remove, path=path, recursive=recursive)
        with self._running(sandbox_id) as live:
            await self._with_files(live, f"remove {path}", work, COPY_SECONDS)

    async def change_file(
        self, sandbox_id: str, path: str, mode: int | None = None, user: int | None = None, group: int | None = None
    ) -> None:
        work = partial(files.change, path=path, mode=mode, user=user, group=group)
        with self._running(sandbox_id) as live:
            await self._with_files(live, f"change {path}", work)

    async def watch_files(self, sandbox_id: str, path: str, recursive: bool = False) -> AsyncGenerator[FileEvent, None]:
        live = self._running(sandbox_id)
        if live.watches >= room(MOST_WATCHES):
            raise Conflict(f"sandbox {sandbox_id} is watched {live.watches} times already", "end some")
        live.watches += 1
        box = live.box
        try:
            async with aclosing(looks.watch_files(box, path, recursive)) as events:
                while (event := await self._next(live, f"watch {path}", events)) is not None:
                    yield event
        except HostFault:
            if live.box is not box:
                raise Conflict(f"sandbox {sandbox_id} was reset while {path} was watched", "watch it again") from None
            raise
        finally:
            live.watches -= 1

    async def download(self, sandbox_id: str, path: str) -> AsyncGenerator[bytes, None]:
        live = self._running(sandbox_id)
        async with aclosing(looks.download(live.box, path)) as chunks:
            while (chunk := await self._next(live, f"read {path}", chunks)) is not None:
                yield chunk

    async def _with_files(
        self, live: Live, what: str, work: Callable[[Box], Coroutine[Any, Any, T]], seconds: float = STEP_SECONDS
    ) -> T:
        what = f"{what} of sandbox {live.id}"
        async with deadline(seconds, f"trying to {what}"):
            return await self._step(live, what, work(live.box))

    async def _next(self, live: Live, what: str, items: AsyncGenerator[T, None]) -> T | None:
        """One more of what comes piece by piece; None: that was all."""

        async def one() -> T | None:
            return await anext(items, None)

        return await self._step(live, f"{what} of sandbox {live.id}", one())

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
            if isinstance(target, Upstream):
                work = self._allow(live, target)
                await self._step(live, f"route port {port} of sandbox {sandbox_id} to {target.url}", work)
            async with deadline(STEP_SECONDS, f"listening on port {port} of sandbox {sandbox_id}"):
                listening = self._listen(live, box, port, target)
                served = await self._step(live, f"listen on port {port} of sandbox {sandbox_id}", listening)
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
            self._shells.close_all(live)
            self._terminals.close_all(live)
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
            spec = live.spec.model_copy(update={"image": image, "key": None})
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
        self._shares.give(live.spec)
        for timer in (live.idle_timer, live.lifetime_timer):
            if timer is not None:
                timer.cancel()
        for route in live.routes:
            route.served.close()
        for process in live.keyed.clear():
            self._in_background(process.release())
        self._shells.close_all(live)
        self._terminals.close_all(live)
        if live.spec.image != "host":
            self._prune_soon()
        self._record_end(live.info(), death)
        self._creates.ended(live.id)
        if live.over is not None:
            live.over.set_result(None)

    def _record_end(self, info: Info, death: Death) -> None:
        how = {"state": "ended", "ended_at": time.time(), "ending": death.ending, "detail": death.detail}
        self.ledger.end(info.model_copy(update=how))

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
        ended = self.ledger.ended(sandbox_id)
        if ended is None:
            raise no_sandbox(sandbox_id)
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
        app = self._relay(live, target) if isinstance(target, Upstream) else target
        listener = await box.listen(port, note)
        try:
            return await asgi.serve(listener, app, room=self._room(live))
        except BaseException:
            listener.close()
            raise

    async def _allow(self, live: Live, upstream: Upstream) -> None:
        """Raises Forbidden, and OSError when this process has no room for connections."""
        await self._relay(live, upstream).check()

    def _relay(self, live: Live, upstream: Upstream) -> Relay:
        reachable = anybody if live.spec.tenant is None else self._reachable
        if reachable not in self._upstreams:
            self._upstreams[reachable] = new_transport(reachable)
        return Relay(upstream, self._upstreams[reachable], reachable)

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
    quota_of: QuotaOf = no_quota,
    reachable: Reachable = anybody,
) -> Node:
    """A node of this host's native boxes, to be started. With a `name` it takes over the directory, and with an
    `orphan_grace` the sandboxes, of a dead node of that name. It pulls from `registries` (None: any; empty: any that is
    public). The rest is as of `Node`. Raises HostFault when its directory cannot be made."""
    from sandlot.drivers.native.driver import NativeDriver

    directory = NodeDirectory.claim(state_dir, name)
    try:
        driver = NativeDriver(directory.path, store=image_store(state_dir), registries=registries)
        return Node(
            driver, directory=directory, orphan_grace=orphan_grace, warm=warm, quota_of=quota_of, reachable=reachable
        )
    except BaseException:
        directory.give_up()
        raise

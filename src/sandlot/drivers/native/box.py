"""NativeBox is one box made of namespaces; NativeDriver makes them.

It owns its helper (PID 1, a child of this process or of one that is dead), the control socket, its cgroups, its id
range and its record, and gives all of it back in one place, `_settle`, whatever the cause; the record only with
`destroy`, for another node must be told of a death until this one has written it down. Deadlines for requests are here;
how long a box or a command may live is the node's business.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sandlot.aio import deadline, for_a_while_alone, shielded
from sandlot.api import Change, Ending, ImageConfig, Limits, SandboxSpec, Stats
from sandlot.drivers.base import Adopted, Death, Exit, Hold, Keeping, Look, More, Spawn
from sandlot.drivers.images import Image
from sandlot.drivers.native.cgroup import BoxGroup, Cgroups, RunGroup
from sandlot.drivers.native.changes import changes_over
from sandlot.drivers.native.ids import RANGE, HostIds, SubIds
from sandlot.drivers.native.keep import Record
from sandlot.drivers.native.plan import Plan
from sandlot.drivers.native.trees import file_system, kernel, map_owners, open_tree
from sandlot.drivers.native.wire import KILL_ONLY_ITSELF, Answer, Channel, Flag, Frame, Key, Operation, Value
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, StartFailed, Unsupported

# Answers of the helper take well under a millisecond.
REQUEST_SECONDS = 20.0
# To copy or list what a box has written: gigabytes at the speed of a disk.
COPY_SECONDS = 1800.0
# What the system's own words about a copy would not say.
_OF_A_COPY = {
    errno.E2BIG: "an extended attribute is larger than this disk can hold",
    errno.EINVAL: "its access list (ACL) names users, which Linux before 6.2 cannot write to a snapshot",
}
# Of a list of what a box has written, for the node to hold: bytes, and entries, each of which takes about a kilobyte in
# the end.
MOST_LISTED, MOST_CHANGES = 16 << 20, 100_000


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy of the upper directory holds."""

    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Start:
    """What `NativeBox.start` needs beside the box. `files` is a file system for the upper directory, `locks` are held
    by PID 1 for life; both stay the caller's."""

    helper: str
    plan: Plan
    files: int | None
    locks: tuple[int, ...]
    keeping: Keeping


async def _connected(sock: socket.socket) -> None:
    """Wait for a connection that the helper began. Raises OSError, and closes the socket, when it fails."""
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(sock, writable.set)
    try:
        await writable.wait()
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
    except BaseException:
        loop.remove_writer(sock)
        sock.close()
        raise
    loop.remove_writer(sock)


class NativeProcess:
    """A process in a native box."""

    def __init__(self, box: NativeBox, group: RunGroup | None) -> None:
        self._box = box
        self._group = group
        self.pid = 0
        self.run_id = 0
        # How many processes the kernel killed for memory while nothing else ran in the box, and while others did.
        self.oom_kills, self.oom_kills_perhaps = 0, 0
        self.killed = False  # by us
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Exit:
        return await asyncio.shield(self.exit)

    async def signal(self, number: int) -> None:
        if self.exit.done():
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        fields = [(Key.SIGNAL, number), (Key.RUN, self.run_id)]
        await self._box._ask(Frame.SIGNAL, "signalling a command", fields)

    async def kill_tree(self) -> None:
        if not self.exit.done():
            self.killed = True
            # The process itself first: it may not have joined its cgroup yet. Its descendants were born in there.
            flags = 0 if self._group is None else KILL_ONLY_ITSELF
            with suppress(ProcessLookupError):
                await self._box._ask(Frame.KILL, "killing a command", [(Key.RUN, self.run_id), (Key.FLAGS, flags)])
        if self._group is not None:
            self._group.kill()

    async def hold(self, more: Hold) -> Callable[[], None]:
        box = self._box
        if self.run_id not in box._held:  # nobody will come for it
            return _nothing
        channel = box._open_channel()
        request_id, answer = channel.ask_soon()
        channel.send(Frame.HOLD, request_id, [(Key.RUN, self.run_id), (Key.NOTE, more.note)], more.fds)
        box._held.add(request_id)
        try:
            async with deadline(REQUEST_SECONDS, f"holding descriptors in sandbox {box.id}"):
                number = (await answer).number(Key.ERRNO) or 0
            if number:
                raise OSError(number, os.strerror(number))
        except BaseException:
            box._release(request_id)
            raise
        return partial(box._release, request_id)

    async def release(self) -> None:
        self._box._release(self.run_id)
        if self._group is not None:
            self._group.close()


class NativeBox:
    """One box. Made by NativeDriver.create."""

    def __init__(
        self,
        box_id: str,
        image: Image,
        group: BoxGroup,
        cgroups: Cgroups,
        ids: HostIds | None = None,
        sub_ids: SubIds | None = None,
        record: Record | None = None,
    ) -> None:
        self.id = box_id
        self.image = image
        self._cgroups = cgroups
        self._record = record
        self._facts: dict[str, Any] = {}  # what is in the record
        self._held: set[int] = set()  # ids of runs and listeners that PID 1 keeps something of
        self.paused = False
        self.host_network = False  # then a port inside is a port of the host
        self.losses: tuple[str, ...] = ()
        self.owners_mapped = True  # whether files of the image have their owners inside
        self.unmapped: list[str] = []  # trees of the host whose file system cannot map them
        self.refused_ids = ""  # why the ids that are lent to this user could not be had after all
        self._sub_ids = sub_ids
        self._many_ids = ids is not None or sub_ids is not None  # whether there is another user than root inside
        loop = asyncio.get_running_loop()
        self.death: asyncio.Future[Death] = loop.create_future()
        self._loop = loop
        self.group = group
        self._ids = ids
        self._base = ids.take() if ids is not None else None
        self._channel: Channel | None = None
        self._maker = 0  # the short-lived process that makes PID 1
        self._pid = 0  # PID 1, once it is known and until it is reaped
        self._pidfd = -1  # open only while PID 1 dies: a box at rest costs one descriptor, its socket
        self._asked: Ending | None = None
        self._processes: dict[int, NativeProcess] = {}
        self._oom_seen = 0
        self._lives = False  # it has said "ready"

    @property
    def root_id(self) -> int:
        """The host id that root inside is."""
        return os.geteuid() if self._base is None else self._base

    @property
    def config(self) -> ImageConfig:
        config = self.image.config
        return config if self._many_ids or not config.user else config.model_copy(update={"user": None, "home": None})

    # -- requests -------------------------------------------------------------------------------------------------

    async def spawn(self, what: Spawn, stdin: int, stdout: int, stderr: int, hold: Hold | None = None) -> NativeProcess:
        if self.paused:
            raise Conflict("the sandbox is paused: nothing can be started in it", "resume it first")
        if what.user and not self._many_ids:
            raise self._no_such_user(what.user)
        channel = self._open_channel()
        group = self.group.make_run()
        process = NativeProcess(self, group)
        fields: list[tuple[Key, Value]] = [(Key.ARG, argument) for argument in what.argv]
        fields += [(Key.ENV, f"{name}={value}") for name, value in what.env.items()]
        fields += [(Key.CWD, what.cwd), (Key.USER, what.user)]
        if what.tty:
            fields.append((Key.TTY, 1))
        fds = [stdin, stdout, stderr] if group is None else [stdin, stdout, stderr, group.procs]
        run_id, answer = channel.ask_soon()
        if hold is not None and self._record is not None:
            name = "" if group is None else group.name  # not its path: a note has room for a few hundred bytes
            fields += [(Key.HOLD, len(hold.fds)), (Key.NOTE, f"{name}\n{hold.note}")]
            fds += hold.fds
            self._held.add(run_id)
        process.run_id = run_id
        self._count_oom()  # what was killed before it began is not its
        self._processes[run_id] = process
        try:
            try:
                channel.send(Frame.SPAWN, run_id, fields, fds)
            except ValueError as error:
                raise InvalidRequest(f"a command's words cannot be passed on: {error}") from None
            async with deadline(REQUEST_SECONDS, "starting a command"):
                done = await answer
            number = done.number(Key.ERRNO) or 0
            if number:
                raise HostFault(f"a command could not be started: {os.strerror(number)}")
        except BaseException:
            # It may have been started all the same: it is killed like any other, in order, and nobody waits for it.
            self._processes.pop(run_id, None)
            if channel.open:
                flags = 0 if group is None else KILL_ONLY_ITSELF
                channel.send(Frame.KILL, 0, [(Key.RUN, run_id), (Key.FLAGS, flags)])
            if group is not None:
                group.kill()
                group.close()
            raise
        process.pid = done.number(Key.PID) or 0
        if group is not None:
            group.joined()
        return process

    def _no_such_user(self, user: int) -> Unsupported:
        return Unsupported(
            f"user {user} does not exist in this sandbox: the node is not root, so there is only user 0",
            "run the node as root, or `apt install uidmap` and lend its user 65,536 ids in /etc/sub{uid,gid}",
        )

    async def listen(self, port: int, note: str | None = None) -> socket.socket:
        self._check_own_network()
        fields: list[tuple[Key, Value]] = [(Key.PORT, port)]
        if note is not None and self._record is not None:
            fields.append((Key.HOLD, 1))
            self._write_record(routes=self._facts["routes"] | {str(port): note})
        try:
            return self._socket(await self._ask(Frame.LISTEN, "listening inside", fields))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise  # the host's trouble, not the port's
            raise Conflict(
                f"port {port} of the sandbox cannot be listened on: {error.strerror}", "choose another port"
            ) from error

    async def connect(self, port: int) -> socket.socket:
        self._check_own_network()
        try:
            sock = self._socket(await self._ask(Frame.CONNECT, "connecting inside", [(Key.PORT, port)]))
            async with deadline(REQUEST_SECONDS, f"connecting to port {port} of sandbox {self.id}"):
                await _connected(sock)
        except OSError as error:
            raise NotFound(f"nothing listens on port {port} of the sandbox: {error.strerror}") from error
        return sock

    def _check_own_network(self) -> None:
        if self.host_network:
            raise Unsupported(
                "this sandbox has the host's network, in which its ports are the host's: none is routed or reached",
                'make it without `network="host"`',
            )

    async def open(self, path: str, flags: int, mode: int = 0o644, user: int = 0, parents: bool = False) -> int:
        fields: list[tuple[Key, Value]] = [
            (Key.PATH, path),
            (Key.FLAGS, flags),
            (Key.MODE, mode),
            (Key.USER, user),
            (Key.PARENTS, int(parents)),
        ]
        try:
            if not path.startswith("/"):
                raise ValueError
            answer = await self._ask(Frame.OPEN, f"opening {path}", fields)
        except ValueError:  # a NUL in it, or what is no letter
            raise InvalidRequest(f"{path!r} is not an absolute path") from None
        return answer.fds[0]

    async def unpack(self, path: str, source: int, user: int = 0) -> None:
        if "\0" in path or not path.startswith("/"):
            raise InvalidRequest(f"{path!r} is not an absolute path")
        if user and not self._many_ids:
            raise self._no_such_user(user)
        fields: list[tuple[Key, Value]] = [(Key.PATH, path), (Key.USER, user)]
        answer = await self._work(Frame.UNPACK, f"unpacking files at {path}", [source], fields)
        number = answer.number(Key.ERRNO) or 0
        if number:
            raise OSError(number, os.strerror(number), posixpath.join(path, answer.words()))

    async def look(self, what: Look, out: int) -> None:
        fields: list[tuple[Key, Value]] = []
        if what.pattern is not None:
            fields.append((Key.PATTERN, what.pattern))
        if what.text is not None:
            fields.append((Key.TEXT, what.text))
        flags = Flag.FOLLOW * what.follow | Flag.CONTENTS * what.contents
        flags |= Flag.REGEX * what.regex | Flag.ANY_CASE * what.any_case
        await self._files(Operation.LOOK, "looking at", what.path, flags, fields, out)

    async def store(self, path: str, source: int, mode: int = 0o644, append: bool = False) -> None:
        await self._files(
            Operation.STORE, "writing", path, Flag.APPEND * append, [(Key.MODE, mode)], source, finish=True
        )

    async def make_directory(self, path: str, mode: int = 0o755, parents: bool = False) -> None:
        await self._files(Operation.MAKE, "making", path, Flag.DEEP * parents, [(Key.MODE, mode)], finish=True)

    async def move(self, path: str, to: str, replace: bool = False) -> None:
        await self._files(Operation.MOVE, "moving", path, Flag.REPLACE * replace, [(Key.TO, to)], finish=True)

    async def remove(self, path: str, deep: bool = False) -> None:
        await self._files(Operation.REMOVE, "removing", path, Flag.DEEP * deep, finish=True)

    async def change_file(
        self, path: str, mode: int | None = None, user: int | None = None, group: int | None = None
    ) -> None:
        asked = ((Key.MODE, mode), (Key.USER, user), (Key.GROUP, group))
        fields: list[tuple[Key, Value]] = [(key, value) for key, value in asked if value is not None]
        await self._files(Operation.CHANGE, "changing", path, fields=fields, finish=True)

    async def watch(self, path: str, out: int, deep: bool = False) -> None:
        await self._files(Operation.WATCH, "watching", path, Flag.DEEP * deep, pipe=out, seconds=None)

    async def _files(
        self,
        operation: Operation,
        doing: str,
        path: str,
        flags: int = 0,
        fields: Sequence[tuple[Key, Value]] = (),
        pipe: int | None = None,
        *,
        seconds: float | None = COPY_SECONDS,
        finish: bool = False,
    ) -> None:
        """One request about files. What is to `finish` does, whether or not somebody waits for it."""
        asked: list[tuple[Key, Value]] = [(Key.OPERATION, operation), (Key.PATH, path), (Key.FLAGS, flags), *fields]
        fds = [] if pipe is None else [pipe]
        try:
            if not path.startswith("/"):
                raise ValueError
            answer = await self._work(Frame.FILES, f"{doing} {path}", fds, asked, seconds=seconds, finish=finish)
        except ValueError:  # a NUL in it, or what is no letter
            raise InvalidRequest(f"{path!r} is not an absolute path") from None
        number = answer.number(Key.ERRNO) or 0
        if number and Key.WORDS not in answer.fields:  # what did not come so far as to fail by itself
            if number == errno.EAGAIN:
                raise InvalidRequest(
                    f"sandbox {self.id} is at its limit of processes: none is left for {doing} {path}",
                    "raise its `pids` limit, or end some",
                )
            if number in (errno.EIO, errno.ENOMEM):
                raise InvalidRequest(
                    f"{doing} {path} in sandbox {self.id} took more memory than it has left", "raise its `memory` limit"
                )
        if number:
            raise OSError(number, os.strerror(number), answer.words() or None)

    async def interrupt(self, terminal: int, number: int) -> None:
        with suppress(ProcessLookupError):
            await self._ask(Frame.SIGNAL, "signalling the foreground", [(Key.SIGNAL, number)], [terminal])

    async def stats(self) -> Stats:
        # Asked of PID 1: the upper directory's file system is in no other mount namespace.
        disk = await self._ask(Frame.DISK, "asking what is written", [])
        used = {"disk": disk.number(Key.BYTES) or 0, "inodes": disk.number(Key.FILES) or 0}
        return Stats.model_validate(self.group.usage() | used)

    async def changes(self) -> list[Change]:
        read, write = os.pipe2(os.O_CLOEXEC)
        reading = asyncio.create_task(asyncio.to_thread(_read_all, read))
        try:
            async with self._standing_still():
                what = "listing what was written"
                _succeeded(await self._work(Frame.LIST, what, [write]), what)
        finally:
            os.close(write)
            listed: bytes = await shielded(_result(reading))
        if len(listed) > MOST_LISTED or listed.count(b"\0") > MOST_CHANGES:
            raise InvalidRequest(
                f"the changes of sandbox {self.id} are too many to list: more than {MOST_CHANGES}, or very long paths",
                "make a snapshot and export it, or list them with a command",
            )
        below = [Path(path) for path in (self.image.root, *self.image.layers)]
        # What the start of the box made is nobody's change: mount points, and the image's own directories.
        made = [*self._facts["mounts"], *(f"/{name}" for name, _ in self.image.directories)]
        return await asyncio.to_thread(changes_over, listed, below, made)

    async def copy_upper(self, target: Path, below: Sequence[Path]) -> Copied:
        """Copy what the box has written into the empty directory `target`, over copies of the layers `below`. Nothing
        of the box runs meanwhile. Raises Unsupported where owners cannot be written as the box sees them."""
        fds: list[int] = []
        try:
            fds.extend(self.as_seen(path) for path in (target, *below))
            async with self._standing_still():
                what = "copying what was written"
                answer = _succeeded(await self._work(Frame.COPY, what, fds), what)
        finally:
            for fd in fds:
                os.close(fd)
        return Copied(answer.number(Key.BYTES) or 0, answer.number(Key.FILES) or 0)

    @asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """While nothing of the box runs it is looked at whole, and a child of the helper has room even in a box that is
        at its limit of processes: nobody else can take it."""
        try:
            await self._stop(True)
            with self._cgroups.room(self.group):
                yield
        finally:
            if not self.paused:
                await shielded(self._stop(False))

    def as_seen(self, path: Path) -> int:
        """A directory of the host in which root inside may write, and whose owners are those that the box sees."""
        if self._base is None:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        tree = open_tree(str(path))
        namespace = os.open(f"/proc/{self._pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            map_owners(tree, namespace)
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree)
        except OSError as error:
            raise Unsupported(
                f"snapshots cannot be written: {file_system(str(path.parent))} cannot map owners with this kernel",
                "use Linux 5.12 or newer and a state directory on ext4, xfs or btrfs",
            ) from error
        finally:
            os.close(namespace)
            os.close(tree)

    async def _work(
        self,
        kind: Frame,
        what: str,
        fds: Sequence[int],
        fields: Sequence[tuple[Key, Value]] = (),
        *,
        seconds: float | None = COPY_SECONDS,
        finish: bool = False,
    ) -> Answer:
        """A request that takes a child of PID 1 as long as it takes; it is killed when nobody waits any more, unless it
        is to `finish`."""
        channel = self._open_channel()
        request_id, waiting = channel.ask_soon()
        try:
            channel.send(kind, request_id, fields, fds)
        except BaseException:
            channel.never_mind(request_id)
            raise
        try:
            async with deadline(seconds, f"{what} in sandbox {self.id}"):
                return await waiting
        except BaseException:
            if channel.open and not finish:
                channel.send(Frame.KILL, 0, [(Key.RUN, request_id), (Key.FLAGS, KILL_ONLY_ITSELF)])
            raise

    async def pause(self) -> None:
        if self.paused:
            return
        self.paused = True  # first: nothing is started while the others are being stopped
        try:
            await self._stop(True)
            self._write_record(paused=True)
        except BaseException:
            self.paused = False
            with suppress(HostFault, OSError):
                await shielded(self._stop(False))
            raise

    async def resume(self) -> None:
        if self.paused:
            self._write_record(paused=False)  # first: else a node that adopts it would stop again what was let go
        await self._stop(False)  # whether or not we know of a reason that it should stand still
        self.paused = False

    async def _stop(self, stopped: bool) -> None:
        """Stop everything that runs, and what is started meanwhile; or let it go on."""
        self._open_channel()
        if self.group.runs is not None:
            await shielded(asyncio.to_thread(self.group.freeze, stopped))
        else:
            number = signal.SIGSTOP if stopped else signal.SIGCONT
            await self._ask(Frame.SIGNAL, "stopping processes", [(Key.SIGNAL, number)])

    async def claim(self, spec: SandboxSpec, keeping: Keeping, losses: tuple[str, ...]) -> None:
        """What `NativeDriver.claim` does to the box itself."""
        self.losses = losses
        lifetime = 0 if spec.lifetime is None else max(1, int(spec.lifetime * 1000))
        fields: list[tuple[Key, Value]] = [(Key.LIFETIME, lifetime), (Key.GRACE, int(keeping.grace * 1000))]
        await self._ask(Frame.CLAIM, "claiming", fields)
        self._write_record(
            note=keeping.note,
            parked=False,
            losses=losses,
            cgroups=self.group.facts(),
            limits=self.group.limits.model_dump(mode="json"),
        )

    async def destroy(self, ending: Ending = Ending.EXIT) -> Death:
        if self._asked is None:
            self._asked = ending
            if self._pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._pid:  # our own child, not reaped: the number is nobody else's
                os.kill(self._pid, signal.SIGKILL)
        async with deadline(REQUEST_SECONDS, f"the end of sandbox {self.id}", "a process of it hangs in the kernel"):
            if not self._pid and not self.death.done():
                await self._abandon()
            death = await asyncio.shield(self.death)
        if self._record is not None:
            self._record.remove()
        return death

    def _release(self, request_id: int) -> None:
        """PID 1 need not keep anything of this run any more."""
        if request_id in self._held:
            self._held.discard(request_id)
            if self._channel is not None and self._channel.open:
                self._channel.send(Frame.RELEASE, 0, [(Key.RUN, request_id)])

    def _open_channel(self) -> Channel:
        if self._channel is None or not self._channel.open:
            raise HostFault(f"sandbox {self.id} is ending")
        return self._channel

    async def _ask(
        self, kind: Frame, what: str, fields: Sequence[tuple[Key, Value]], fds: Sequence[int] = ()
    ) -> Answer:
        """One request; an errno from inside is an OSError."""
        channel = self._open_channel()
        async with deadline(REQUEST_SECONDS, f"{what} in sandbox {self.id}"):
            answer = await channel.ask(kind, fields, fds)
        number = answer.number(Key.ERRNO) or 0
        if number == 0 and kind in (Frame.LISTEN, Frame.CONNECT, Frame.OPEN) and not answer.fds:
            number = errno.EMFILE  # the kernel dropped the descriptor: this process has no room for it
        if number:
            raise OSError(number, os.strerror(number))
        return answer

    def _socket(self, answer: Answer) -> socket.socket:
        return socket.socket(fileno=answer.fds[0])

    # -- start ----------------------------------------------------------------------------------------------------

    async def start(self, what: Start) -> None:
        """Start the helper and carry it to "ready". On any failure the caller destroys the box."""
        plan = what.plan
        self.host_network = plan.host_network
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        trees: list[int] = []
        joins = self.group.procs()
        try:
            with theirs, for_a_while_alone(theirs.fileno()):
                self._channel = Channel(ours, self._exited, self._going)
                # Not a subprocess: vfork and exec of a small static program, about 1 ms, which nothing could shorten.
                self._maker = os.posix_spawn(  # noqa: ASYNC221
                    what.helper,
                    ["sandlot-init"],
                    {},
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
                        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_RDWR, 0),
                        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_RDWR, 0),
                    ],
                )
            if self._base is not None:
                trees = [open_tree(source) for source in plan.sources]
            self._send_plan(what, trees, joins)
            answer = await self._next(Frame.PID)
            self._know(answer.number(Key.PID) or 0)
            self._write_record(
                starting=True,
                id=self.id,
                pid=self._pid,
                base=self._base,
                many=self._many_ids,
                image=self.image.facts(),
                cgroups=self.group.facts(),
                limits=self.group.limits.model_dump(mode="json"),
                losses=None,  # until it is whole: see `lose`
                mounts=plan.mount_points,
                host_network=plan.host_network,
                routes={},
                oom=0,
                paused=False,
                note=what.keeping.note,
                parked=what.keeping.parked,
            )
            if not await self._borrow_ids():
                self._write_maps(trees, plan.sources)
            self._channel.send(Frame.MAPPED, 0, [])
            await self._next(Frame.READY)
            self._reap_maker()
            self._lives = True
        except OSError as error:
            where = f" at {error.filename}" if error.filename else ""
            raise StartFailed(f"the sandbox's helper could not be set up{where}: {error.strerror}") from error
        finally:
            for fd in (*trees, *joins):
                os.close(fd)

    def _send_plan(self, what: Start, trees: list[int], joins: list[int]) -> None:
        assert self._channel is not None
        fds = trees if what.files is None else [*trees, what.files]
        first = len(fds)
        fds = [*fds, *joins]
        keeps = [*what.locks]
        if self._record is not None and self._ids is not None and self._base is not None:
            keeps.append(self._ids.lock_of(self._base))
        fields = what.plan.fields(self._base, range(first, len(fds)), range(len(fds), len(fds) + len(keeps)))
        fds += keeps
        if self._record is not None:
            fields += [(Key.RECORD, len(fds)), (Key.LISTENER, len(fds) + 1)]
            grace = 0.0 if what.keeping.parked else what.keeping.grace
            fields.append((Key.GRACE, int(grace * 1000)))
            fds += [self._record.file, self._record.listener]
        self._channel.send(Frame.PLAN, 0, fields, fds)
        if self._record is not None:
            self._record.passed()

    def lose(self, losses: tuple[str, ...]) -> None:
        """What it turned out not to get. With that it is whole: a record without it is of half a box, which no node
        takes over."""
        self.losses = losses
        self._write_record(starting=True, losses=losses)

    def _write_record(self, *, starting: bool = False, **facts: Any) -> None:
        known = self._facts | facts
        try:
            if self._record is not None:
                self._record.write(known, starting)
        except OSError as error:
            raise HostFault(
                f"the record of sandbox {self.id} cannot be written: {error.strerror}", "is the disk full?"
            ) from error
        self._facts = known

    @classmethod
    async def adopted(cls, facts: dict[str, Any], record: Record, cgroups: Cgroups) -> Adopted:
        """A box whose node has died. Raises OSError, HostFault when it dies meanwhile."""
        image = Image.restored(facts["image"])
        box = cls(facts["id"], image, BoxGroup.restored(facts["cgroups"]), cgroups, record=record)
        found = Adopted(box, facts["note"], [], [], [])
        try:
            box._facts = facts
            box._base, box._oom_seen = facts["base"], facts["oom"]
            box._many_ids = facts["many"]
            box.host_network = facts["host_network"]
            box.losses = tuple(facts["losses"])
            box._pidfd = os.pidfd_open(facts["pid"])  # no child of ours: only a descriptor names it for sure
            if not record.alive():
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            box._channel = Channel(record.connect(), box._exited, box._going, partial(box._take_held, found))
            await box._next(Frame.READY)
            box._pid, box._lives = facts["pid"], True
            box._oom_seen = box.group.oom_kills()
            box.paused = facts["paused"]
            await box._stop(box.paused)  # its node may have died in the middle of a copy
            cgroups.set(box.group, Limits.model_validate(facts["limits"]))  # and had given it room for that
        except BaseException:
            if box._channel is not None:
                box._channel.close()
            if box._pidfd >= 0:
                os.close(box._pidfd)
            box.group.close()
            found.close()
            raise
        return found

    def _take_held(self, found: Adopted, answer: Answer) -> None:
        note = str(answer.fields.get(Key.NOTE, ""))
        port = answer.number(Key.PORT)
        if port is not None:
            found.listeners.append((self._socket(answer), port, self._facts["routes"].get(str(port), "")))
            return
        self._held.add(answer.id)
        run = answer.number(Key.RUN)
        if run is not None:
            release = partial(self._release, answer.id)
            found.more.append(More(self._processes[run], note, tuple(answer.fds), release))
            return
        name, _, note = note.partition("\n")
        process = NativeProcess(self, self.group.restored_run(name))
        process.run_id, process.pid = answer.id, answer.number(Key.PID) or 0
        self._processes[answer.id] = process
        found.runs.append((process, note, tuple(answer.fds)))

    async def _next(self, expected: Frame) -> Answer:
        assert self._channel is not None
        try:
            answer = await self._channel.started()
        except HostFault as error:
            raise StartFailed(
                "the sandbox's helper ended before it was ready", "see the kernel log for its reason"
            ) from error
        if answer.kind == Frame.FAILED:
            raise StartFailed(
                f"a sandbox could not be made: {answer.words()}", "`sandlot doctor` tries each step and names the fix"
            )
        if answer.kind != expected:
            raise StartFailed(f"the helper answered out of order ({answer.kind}): it is of another version")
        return answer

    def _know(self, pid: int) -> None:
        """PID 1 is a child of this process (CLONE_PARENT)."""
        self._pid = pid
        if self._channel is not None and not self._channel.open:
            self._going()  # it was gone before it was known

    def _reap_maker(self) -> None:
        """The process that made PID 1, which has been gone since: here nobody waits for it."""
        maker, self._maker = self._maker, 0
        if maker:
            with suppress(ChildProcessError):
                os.waitpid(maker, 0)

    async def _borrow_ids(self) -> bool:
        """Map the ids that are lent to this user. False: there are none, or they could not be had."""
        if self._sub_ids is None:
            return False
        try:
            await self._sub_ids.map(self._pid)
        except HostFault as error:
            self.refused_ids = error.message
            self._sub_ids = None
            self._many_ids = False
            return False
        return True

    def _write_maps(self, trees: list[int], sources: Sequence[str]) -> None:
        proc = f"/proc/{self._pid}"
        if self._base is None:
            for name, value in (
                ("setgroups", "deny"),
                ("gid_map", f"0 {os.getegid()} 1"),
                ("uid_map", f"0 {os.geteuid()} 1"),
            ):
                with suppress(PermissionError):  # newgidmap may have worked where newuidmap did not
                    _write(f"{proc}/{name}", value)
            return
        _write(f"{proc}/uid_map", f"0 {self._base} {RANGE}")
        _write(f"{proc}/gid_map", f"0 {self._base} {RANGE}")
        if kernel() < (5, 11):
            raise StartFailed(
                "a sandbox could not be made: overlay: before Linux 5.11 it opens no file whose owner is nobody inside",
                "`sandlot doctor` tries each step and names the fix",
            )
        lowers = 1 + len(self.image.layers)
        user_namespace = os.open(f"{proc}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            last = len(trees) - self.host_network  # who resolves names is only read, and may be on a tmpfs
            old = kernel() < (5, 19)  # before that overlayfs takes its layers only as they are
            for tree, source in list(zip(trees, sources, strict=True))[lowers if old else 0 : last]:
                try:
                    map_owners(tree, user_namespace)
                except OSError:  # a kernel or file system that cannot
                    self.unmapped.append(source)
        finally:
            os.close(user_namespace)
        image = {self.image.root, *self.image.layers, *(source for source, _ in self.image.binds)}
        self.owners_mapped = not old and image.isdisjoint(self.unmapped)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _exited(self, answer: Answer) -> None:
        process = self._processes.get(answer.id)
        if process is None or process.exit.done():
            self._processes.pop(answer.id, None)
            return
        killed = answer.number(Key.SIGNAL) == signal.SIGKILL or answer.number(Key.STATUS) == 128 + signal.SIGKILL
        if not self._lives:  # told again to a node that adopts: which of them it was only its end can tell
            oom = killed and self.group.oom_kills() > self._oom_seen
        else:
            self._count_oom()
            oom = process.oom_kills > 0
            if not oom and killed and not process.killed and process.oom_kills_perhaps > 0:
                oom = True
                for other in self._processes.values():
                    other.oom_kills_perhaps = max(0, other.oom_kills_perhaps - 1)
        del self._processes[answer.id]
        others = any(each.oom_kills or each.oom_kills_perhaps for each in self._processes.values())
        if self._lives and self._facts["oom"] != self._oom_seen and not others:  # all of them have been told
            with suppress(HostFault):
                self._write_record(oom=self._oom_seen)
        error = answer.number(Key.ERRNO)
        process.exit.set_result(
            Exit(
                code=answer.number(Key.STATUS),
                signal=answer.number(Key.SIGNAL),
                error=error,
                error_step=answer.words() if error is not None else "",
                cpu_seconds=(answer.number(Key.CPU_US) or 0) / 1e6,
                oom=oom,
            )
        )

    def _count_oom(self) -> None:
        """Charge new kills for memory to who runs. The kernel counts those of the whole box: where several commands run
        it is the one that is seen to end by such a kill, or nobody."""
        kills = self.group.oom_kills()
        new, self._oom_seen = kills - self._oom_seen, kills
        if new <= 0:
            return
        alone = len(self._processes) == 1 and not self.group.outlived()
        for process in self._processes.values():
            if alone:
                process.oom_kills += new
            else:
                process.oom_kills_perhaps += new

    async def _abandon(self) -> None:
        """End a box whose start did not come as far as our knowing PID 1, which may exist all the same."""
        if self._channel is not None:
            await self._channel.hang_up()
        first = 0 if self._channel is None else self._channel.first_process or 0
        for pid in (self._maker, first):
            if pid:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)  # noqa: ASYNC222  (it has exited: its end of the socket is closed)
        self._maker = 0
        self._settle(Death(Ending.START_FAILED))

    def _going(self) -> None:
        """PID 1 has closed its end of the socket, the first thing that the kernel does for a process that dies. It is
        dead when everything in the box is."""
        if self._pid:
            if self._pidfd < 0:
                self._pidfd = os.pidfd_open(self._pid)
            self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        """PID 1 is dead, and with it, by the kernel's rule, everything in the box."""
        self._loop.remove_reader(self._pidfd)
        status: int | None = None
        with suppress(ChildProcessError):
            _, status = os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._pidfd, self._pid = -1, 0
        if self._asked is not None:
            death = Death(self._asked)
        elif not self._lives:
            death = Death(Ending.START_FAILED)
        elif self._left(status):
            death = Death(Ending.LIFETIME)
        else:
            oom = self.group.oom_kills() > self._oom_seen
            killed = status is not None and os.WIFSIGNALED(status)
            detail = (
                f"sandlot-init was ended by signal {os.WTERMSIG(status or 0)}" if killed else "sandlot-init gave up"
            )
            death = Death(Ending.OOM if oom else Ending.HELPER_DIED, detail)
        self._settle(death)

    def _left(self, status: int | None) -> bool:
        """Whether PID 1 left by itself, at the end of its lifetime. Of one that is not our child the record tells."""
        if status is None:
            return self._record is not None and self._record.last_word() == "lifetime"
        return status == 0

    def _settle(self, death: Death) -> None:
        """The one place where a box gives back what it holds."""
        self._reap_maker()
        if self._channel is not None:
            self._channel.close()
        for process in self._processes.values():
            if not process.exit.done():
                process.exit.set_result(Exit(signal=signal.SIGKILL))
        self._processes.clear()
        self.group.remove()
        if self._record is not None:
            self._record.passed()
        if self._ids is not None and self._base is not None:
            self._ids.give_back(self._base)
            self._base = None
        if not self.death.done():
            self.death.set_result(death)


def _succeeded(answer: Answer, what: str) -> Answer:
    """Raises HostFault unless a copy or a list of the upper directory came to its end."""
    number = answer.number(Key.ERRNO) or 0
    if number:
        where = f" at /{answer.words()}" if answer.words() else ""
        raise HostFault(f"{what} failed{where}: {_OF_A_COPY.get(number) or os.strerror(number)}")
    return answer


def _nothing() -> None:
    """Nothing was held."""


async def _result(task: asyncio.Task[bytes]) -> bytes:
    return await task


def _read_all(fd: int) -> bytes:
    """What comes until its end, and of more than MOST_LISTED a little more; the rest is let go by."""
    kept = bytearray()
    with os.fdopen(fd, "rb", buffering=0) as file:
        while chunk := file.read(1 << 16):
            if len(kept) <= MOST_LISTED:
                kept += chunk
    return bytes(kept)


def _write(path: str, value: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  (see cgroup.py on paths with a number or name of a box)
        file.write(value)

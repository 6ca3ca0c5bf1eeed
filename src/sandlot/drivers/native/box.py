"""NativeDriver makes boxes out of namespaces; NativeBox is one of them.

The driver owns what a node has once: the image directory, its cgroups, its ranges of host ids. A box owns its helper
(PID 1, a child of this process), the control socket, its cgroups and its id range, and gives all of it back in one
place, `_ended`, whatever the cause. Deadlines for requests are here; how long a box or a command may live is the
node's business.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import itertools
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sandlot.aio import deadline, shielded
from sandlot.api import Capability, Ending, SandboxSpec, Stats
from sandlot.drivers.base import Death, Exit, Spawn
from sandlot.drivers.images import Image, Images
from sandlot.drivers.native import cgroup, disk, ids, seccomp
from sandlot.drivers.native.cgroup import BoxGroup, Cgroups, RunGroup
from sandlot.drivers.native.ids import RANGE, HostIds, SubIds
from sandlot.drivers.native.plan import Host, Plan, make_plan, most_files
from sandlot.drivers.native.promises import LIMITED_BY, Facts, losses, promises
from sandlot.drivers.native.wire import KILL_ONLY_ITSELF, Answer, Channel, Frame, Key, Value
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, StartFailed, Unsupported

HELPER = Path(__file__).parent / "bin" / "sandlot-init"

# A start takes about 5 ms; a host that swaps may take seconds. Past this the host is not usable.
START_SECONDS = 20.0
# Answers of the helper take well under a millisecond.
REQUEST_SECONDS = 20.0

_RUNNABLE = 0o555
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

# Tests remove one protection at a time by handing the driver another planner than make_plan.
Planner = Callable[[SandboxSpec, Image, Host], Plan]

_libc = ctypes.CDLL(None, use_errno=True)
_OPEN_TREE, _MOUNT_SETATTR = 428, 442  # the same numbers on x86_64 and aarch64
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOUNT_ATTR_IDMAP = 1, 0x00100000


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _open_tree(path: str) -> int:
    """A detached copy of the mounts at `path`, as a descriptor. Only root may."""
    fd: int = _libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return fd


def _kernel() -> tuple[int, int]:
    """The running kernel's version."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(itertools.takewhile(str.isdigit, minor)) or 0)


def _has_root() -> bool:
    """Whether this process is root with root's powers: in a container it often is root by name only, or has no ids to
    give away, and then boxes are made as an ordinary user makes them."""
    if os.geteuid() != 0 or not ids.mapped(Path("/proc/self/uid_map").read_text()):
        return False
    try:
        os.close(_open_tree("/"))
    except OSError:
        return False
    return True


def _map_ids(tree: int, user_namespace: int) -> bool:
    """Show the tree's owners through the box's id map: host root's files belong to root inside. False: cannot."""
    attributes = _MountAttributes(set=_MOUNT_ATTR_IDMAP, userns_fd=user_namespace)
    flags = _AT_EMPTY_PATH | _AT_RECURSIVE
    result: int = _libc.syscall(_MOUNT_SETATTR, tree, b"", flags, ctypes.byref(attributes), ctypes.sizeof(attributes))
    return result == 0


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


class Helper:
    """The helper's program, run from a sealed copy in memory. PID 1 of an ordinary user's box shows its program to root
    inside, who is that user, and could change the file's mode or times for every box after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy = -1

    def runnable(self) -> str:
        """A path to run now. Raises OSError."""
        if self._copy < 0 or os.fstat(self._copy).st_mode & 0o777 != _RUNNABLE:
            self.close()
            self._copy = self._make()
        return str(self.path) if self._copy < 0 else f"/proc/self/fd/{self._copy}"

    def _make(self) -> int:
        try:
            fd = os.memfd_create("sandlot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return -1  # a host that forbids programs in memory
        try:
            os.write(fd, self.path.read_bytes())
            os.fchmod(fd, _RUNNABLE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        if self._copy >= 0:
            os.close(self._copy)
            self._copy = -1


class NativeDriver:
    """Boxes from namespaces. `directory` is the node's own; nothing is made before the first `create`."""

    name = "native"

    def __init__(self, directory: Path, helper: Path = HELPER, planner: Planner = make_plan) -> None:
        self._helper = Helper(helper)
        self._directory = directory
        self._images = Images(directory / "images")
        self.cgroups = Cgroups(directory.name, directory)
        self._ids = HostIds() if _has_root() else None
        self._sub_ids: SubIds | None = None
        self._started = False
        self._host = Host(root=False, stage="/tmp", pids_by_cgroup=False)
        self.planner = planner
        self.facts = Facts(ids="one")

    async def create(self, box_id: str, spec: SandboxSpec, named: frozenset[str] = frozenset()) -> NativeBox:
        if not self._started:
            self._start()
        image = self._images.resolve(spec.image)
        for volume in spec.volumes:
            if not os.path.exists(volume.source):  # noqa: ASYNC240, PTH110  (one stat of a local path)
                raise InvalidRequest(f"the volume {volume.source} does not exist on this host")
        self._check_limits(spec, named)
        group = self.cgroups.make(box_id, spec.limits)
        try:
            refused = self._check_kept(spec, named, group)
            box = NativeBox(box_id, group, self._ids, self._sub_ids)
        except BaseException:
            group.remove()
            raise
        try:
            async with deadline(START_SECONDS, "the start of a sandbox", "is the host out of memory?"):
                files = await self._disk(spec, named, box)
                plan = self.planner(spec, image, replace(self._host, disk=files is not None))
                try:
                    await box._start(self._helper.runnable(), plan, files)
                finally:
                    if files is not None:
                        os.close(files)
        except BaseException:
            await shielded(box.destroy(Ending.START_FAILED))
            raise
        self._learn(box)
        box.losses = losses(self.facts, spec) + refused
        return box

    async def _disk(self, spec: SandboxSpec, named: frozenset[str], box: NativeBox) -> int | None:
        """A file system for a box that is to hold more files than fit in its memory, where they are otherwise."""
        limits = spec.limits
        if "disk" not in named or limits.memory is None or limits.disk <= most_files(limits.memory):
            return None
        return await disk.make(self._directory, limits.disk, limits.inodes, box.root_id)

    def _learn(self, box: NativeBox) -> None:
        """What only the making of a box shows."""
        if box.owners_mapped is not self.facts.owners_mapped:
            self.facts = replace(self.facts, owners_mapped=box.owners_mapped)
        if box.refused_ids and self._sub_ids is not None:
            self._sub_ids = None
            self.facts = replace(self.facts, ids="one", ids_reason=f"the node is not root, and {box.refused_ids}")

    async def capabilities(self) -> list[Capability]:
        from sandlot.drivers.native import checks  # it knows this module

        return await checks.probe(self)

    @property
    def has_root(self) -> bool:
        return self._ids is not None

    async def sweep(self, directory: Path) -> None:
        """Remove what boxes of a dead node left behind: their cgroups. The rest went with their processes."""
        await asyncio.to_thread(cgroup.sweep, directory)

    async def close(self) -> None:
        self._helper.close()
        self.cgroups.close()
        if self._ids is not None:
            self._ids.close()

    def _start(self) -> None:
        if not self._helper.path.exists():
            raise Unsupported(
                "this installation has no sandlot-init, so it cannot make native sandboxes",
                "install a compiler and reinstall: `apt install gcc libc6-dev`, then reinstall sandlot",
            )
        stage = next((path for path in ("/tmp", "/run", "/mnt") if Path(path).is_dir()), None)
        if stage is None:
            raise Unsupported("this host has no /tmp, /run or /mnt to put a sandbox together on", "`mkdir /tmp`")
        self.cgroups.start()
        kept = self.cgroups.controllers
        self._host = Host(
            root=self._ids is not None, stage=stage, pids_by_cgroup="pids" in kept, memory_by_cgroup="memory" in kept
        )
        lent = SubIds.find() if self._ids is None else ""
        self._sub_ids = lent if isinstance(lent, SubIds) else None
        self.facts = Facts(
            ids="own" if self._ids is not None else "one" if self._sub_ids is None else "shared",
            ids_reason=lent if isinstance(lent, str) else "",
            controllers=kept,
            kill_groups=self.cgroups.v2_kill,
            filtered=bool(seccomp.program()),
            limits_namespaces=_kernel() >= (5, 14),
            restricts_below=_kernel() >= (5, 12),
            disk_fix=disk.why_not() if self._ids is not None else "run the node as root",
        )
        self._started = True

    def _check_kept(self, spec: SandboxSpec, named: frozenset[str], group: BoxGroup) -> tuple[str, ...]:
        """The kernel may refuse a value where it takes others: a refusal if it was asked for, else a loss."""
        refused = []
        for name, (controller, promise) in LIMITED_BY.items():
            value = getattr(spec.limits, name)
            if value is None or controller not in self.cgroups.controllers or controller in group.kept:
                continue
            if name in named:
                raise Unsupported(f"the kernel does not take {value} as a limit on {name}", "ask for another value")
            refused.append(f"{promise}: the kernel does not take {value} for {name}")
        return tuple(refused)

    def _check_limits(self, spec: SandboxSpec, named: frozenset[str]) -> None:
        lost = {line.name: line for line in promises(self.facts) if line.state == "loss"}
        for name, (_, promise) in LIMITED_BY.items():
            if name in named and promise in lost and getattr(spec.limits, name) is not None:
                raise Unsupported(
                    f"this host cannot keep a limit on {name}: {lost[promise].found}",
                    f"{lost[promise].fix}; or leave the limit out and accept the loss",
                )
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if spec.limits.open_files > hard:
            raise Unsupported(
                f"a sandbox's process cannot have {spec.limits.open_files} open files: the node's own limit is {hard}",
                "raise the node's hard limit of open files (`ulimit -Hn`), and `/proc/sys/fs/nr_open` for more",
            )


class NativeProcess:
    """A process in a native box."""

    def __init__(self, box: NativeBox, group: RunGroup | None) -> None:
        self._box = box
        self._group = group
        self.pid = 0
        self.run_id = 0
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Exit:
        return await asyncio.shield(self.exit)

    async def kill_tree(self) -> None:
        if not self.exit.done():
            # The process itself first: it may not have joined its cgroup yet. Its descendants were born in there.
            flags = 0 if self._group is None else KILL_ONLY_ITSELF
            with suppress(ProcessLookupError):
                await self._box._ask(Frame.KILL, "killing a command", [(Key.RUN, self.run_id), (Key.FLAGS, flags)])
        if self._group is not None:
            self._group.kill()

    async def release(self) -> None:
        if self._group is not None:
            self._group.close()


class NativeBox:
    """One box. Made by NativeDriver.create."""

    def __init__(self, box_id: str, group: BoxGroup, ids: HostIds | None, sub_ids: SubIds | None) -> None:
        self.id = box_id
        self.losses: tuple[str, ...] = ()
        self.owners_mapped = True  # whether files of the image have their owners inside
        self.refused_ids = ""  # why the ids that are lent to this user could not be had after all
        self._sub_ids = sub_ids
        loop = asyncio.get_running_loop()
        self.death: asyncio.Future[Death] = loop.create_future()
        self._loop = loop
        self._group = group
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

    # -- requests -------------------------------------------------------------------------------------------------

    async def spawn(self, what: Spawn, stdin: int, stdout: int, stderr: int) -> NativeProcess:
        if what.user and self._base is None and self._sub_ids is None:
            raise Unsupported(
                f"user {what.user} does not exist in this sandbox: the node is not root, so there is only user 0",
                "run the node as root, or `apt install uidmap` and lend its user 65,536 ids in /etc/sub{uid,gid}",
            )
        channel = self._open_channel()
        group = self._group.make_run()
        process = NativeProcess(self, group)
        fields: list[tuple[Key, Value]] = [(Key.ARG, argument) for argument in what.argv]
        fields += [(Key.ENV, f"{name}={value}") for name, value in what.env.items()]
        fields += [(Key.CWD, what.cwd), (Key.USER, what.user)]
        fds = [stdin, stdout, stderr] if group is None else [stdin, stdout, stderr, group.procs]
        run_id, answer = channel.ask_soon()
        process.run_id = run_id
        self._processes[run_id] = process
        try:
            try:
                channel.send(Frame.SPAWN, run_id, fields, fds)
            except ValueError as error:
                raise InvalidRequest(f"a command's words cannot hold a NUL byte: {error}") from None
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
        return process

    async def listen(self, port: int) -> socket.socket:
        try:
            return self._socket(await self._ask(Frame.LISTEN, "listening inside", [(Key.PORT, port)]))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise  # the host's trouble, not the port's
            raise Conflict(
                f"port {port} of the sandbox cannot be listened on: {error.strerror}", "choose another port"
            ) from error

    async def connect(self, port: int) -> socket.socket:
        try:
            sock = self._socket(await self._ask(Frame.CONNECT, "connecting inside", [(Key.PORT, port)]))
            async with deadline(REQUEST_SECONDS, f"connecting to port {port} of sandbox {self.id}"):
                await _connected(sock)
        except OSError as error:
            raise NotFound(f"nothing listens on port {port} of the sandbox: {error.strerror}") from error
        return sock

    async def open(self, path: str, flags: int, mode: int = 0o644, user: int = 0, parents: bool = False) -> int:
        if "\0" in path or not path.startswith("/"):
            raise InvalidRequest(f"{path!r} is not an absolute path")
        fields: list[tuple[Key, Value]] = [
            (Key.PATH, path),
            (Key.FLAGS, flags),
            (Key.MODE, mode),
            (Key.USER, user),
            (Key.PARENTS, int(parents)),
        ]
        answer = await self._ask(Frame.OPEN, f"opening {path}", fields)
        return answer.fds[0]

    async def stats(self) -> Stats:
        # Asked of the file system from inside: the upper directory's tmpfs is in no other mount namespace.
        root = await self.open("/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            disk = os.fstatvfs(root)
        finally:
            os.close(root)
        used = {"disk": (disk.f_blocks - disk.f_bfree) * disk.f_frsize, "inodes": disk.f_files - disk.f_ffree}
        return Stats.model_validate(self._group.usage() | used)

    async def destroy(self, ending: Ending = Ending.EXIT) -> Death:
        if self._asked is None:
            self._asked = ending
            if self._pid:  # our own child, not reaped: the number is nobody else's
                os.kill(self._pid, signal.SIGKILL)
        async with deadline(REQUEST_SECONDS, f"the end of sandbox {self.id}", "a process of it hangs in the kernel"):
            if not self._pid and not self.death.done():
                await self._abandon()
            return await asyncio.shield(self.death)

    def _open_channel(self) -> Channel:
        if self._channel is None or not self._channel.open:
            raise HostFault(f"sandbox {self.id} is ending")
        return self._channel

    async def _ask(self, kind: Frame, what: str, fields: Sequence[tuple[Key, Value]]) -> Answer:
        """One request; an errno from inside is an OSError."""
        channel = self._open_channel()
        async with deadline(REQUEST_SECONDS, f"{what} in sandbox {self.id}"):
            answer = await channel.ask(kind, fields)
        number = answer.number(Key.ERRNO) or 0
        if number == 0 and kind in (Frame.LISTEN, Frame.CONNECT, Frame.OPEN) and not answer.fds:
            number = errno.EMFILE  # the kernel dropped the descriptor: this process has no room for it
        if number:
            raise OSError(number, os.strerror(number))
        return answer

    def _socket(self, answer: Answer) -> socket.socket:
        return socket.socket(fileno=answer.fds[0])

    # -- start ----------------------------------------------------------------------------------------------------

    async def _start(self, helper: str, plan: Plan, files: int | None) -> None:
        """Start the helper and carry it to "ready". On any failure the caller destroys the box. `files` is a file
        system for the upper directory."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        trees: list[int] = []
        joins = self._group.procs()
        try:
            with theirs:
                self._channel = Channel(ours, self._exited, self._going)
                # Not a subprocess: vfork and exec of a small static program, about 1 ms, which nothing could shorten.
                self._maker = os.posix_spawn(  # noqa: ASYNC221
                    helper,
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
                trees = [_open_tree(source) for source in plan.sources]
            passed = trees if files is None else [*trees, files]
            fields = plan.fields(self._base, range(len(passed), len(passed) + len(joins)))
            self._channel.send(Frame.PLAN, 0, fields, [*passed, *joins])
            answer = await self._next(Frame.PID)
            self._adopt(answer.number(Key.PID) or 0)
            if not await self._borrow_ids():
                self._write_maps(trees)
            self._channel.send(Frame.MAPPED, 0, [])
            await self._next(Frame.READY)
            self._lives = True
        except OSError as error:
            where = f" at {error.filename}" if error.filename else ""
            raise StartFailed(f"the sandbox's helper could not be set up{where}: {error.strerror}") from error
        finally:
            for fd in (*trees, *joins):
                os.close(fd)

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

    def _adopt(self, pid: int) -> None:
        """PID 1 is a child of this process (CLONE_PARENT); the process that made it is done and is reaped here."""
        self._pid = pid
        self._reap_maker()
        if self._channel is not None and not self._channel.open:
            self._going()  # it was gone before it was known

    def _reap_maker(self) -> None:
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
            return False
        return True

    def _write_maps(self, trees: list[int]) -> None:
        proc = f"/proc/{self._pid}"
        if self._base is None:
            for name, value in (
                ("setgroups", "deny"),
                ("gid_map", f"0 {os.getegid()} 1"),
                ("uid_map", f"0 {os.geteuid()} 1"),
            ):
                with suppress(PermissionError):  # newgidmap may have worked where newuidmap did not
                    Path(proc, name).write_text(value)
            return
        Path(proc, "uid_map").write_text(f"0 {self._base} {RANGE}")
        Path(proc, "gid_map").write_text(f"0 {self._base} {RANGE}")
        user_namespace = os.open(f"{proc}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = [_map_ids(tree, user_namespace) for tree in trees]
        finally:
            os.close(user_namespace)
        if not all(mapped):
            self.owners_mapped = False

    # -- ends -----------------------------------------------------------------------------------------------------

    def _exited(self, answer: Answer) -> None:
        process = self._processes.pop(answer.id, None)
        if process is None or process.exit.done():
            return
        kills = self._group.oom_kills()
        oom, self._oom_seen = kills > self._oom_seen, kills
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
            self._pidfd = os.pidfd_open(self._pid)
            self._loop.add_reader(self._pidfd, self._ended)

    def _ended(self) -> None:
        """PID 1 is dead, and with it, by the kernel's rule, everything in the box."""
        self._loop.remove_reader(self._pidfd)
        status = 0
        with suppress(ChildProcessError):
            _, status = os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._pidfd, self._pid = -1, 0
        if self._asked is not None:
            death = Death(self._asked)
        elif not self._lives:
            death = Death(Ending.START_FAILED)
        elif os.WIFSIGNALED(status):
            oom = self._group.oom_kills() > self._oom_seen
            number = os.WTERMSIG(status)
            death = Death(Ending.OOM if oom else Ending.HELPER_DIED, f"sandlot-init was ended by signal {number}")
        elif os.WEXITSTATUS(status):
            death = Death(Ending.HELPER_DIED, "sandlot-init gave up")
        else:
            death = Death(Ending.LIFETIME)
        self._settle(death)

    def _settle(self, death: Death) -> None:
        """The one place where a box gives back what it holds."""
        if self._channel is not None:
            self._channel.close()
        for process in self._processes.values():
            if not process.exit.done():
                process.exit.set_result(Exit(signal=signal.SIGKILL))
        self._processes.clear()
        self._group.remove()
        if self._ids is not None and self._base is not None:
            self._ids.give_back(self._base)
            self._base = None
        if not self.death.done():
            self.death.set_result(death)

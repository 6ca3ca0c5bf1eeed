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
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sandlot.aio import deadline, shielded
from sandlot.api import Capability, Ending, SandboxSpec, Stats
from sandlot.drivers.base import Death, Exit, Spawn
from sandlot.drivers.images import Image, Images
from sandlot.drivers.native import cgroup, ids, seccomp
from sandlot.drivers.native.cgroup import BoxGroup, Cgroups, RunGroup
from sandlot.drivers.native.ids import RANGE, HostIds
from sandlot.drivers.native.plan import Host, Plan, make_plan
from sandlot.drivers.native.wire import KILL_ONLY_ITSELF, Answer, Channel, Frame, Key, Value
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, StartFailed, Unsupported

HELPER = Path(__file__).parent / "bin" / "sandlot-init"

# Which controller keeps which limit.
_CONTROLLERS = {"memory": "memory", "pids": "pids", "cpus": "cpu", "cpu_weight": "cpu"}

# A start takes about 5 ms; a host that swaps may take seconds. Past this the host is not usable.
START_SECONDS = 20.0
# Answers of the helper take well under a millisecond.
REQUEST_SECONDS = 20.0

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


class NativeDriver:
    """Boxes from namespaces. `directory` is the node's own; nothing is made before the first `create`."""

    name = "native"

    def __init__(self, directory: Path, helper: Path = HELPER, planner: Planner = make_plan) -> None:
        self._helper = helper
        self._images = Images(directory / "images")
        self._cgroups = Cgroups(directory.name, directory)
        self._ids = HostIds() if _has_root() else None
        self._started = False
        self._host = Host(root=False, stage="/tmp", pids_by_cgroup=False)
        self.planner = planner
        self._filtered = bool(seccomp.program())
        self._losses: tuple[str, ...] = ()

    async def create(self, box_id: str, spec: SandboxSpec, named: frozenset[str] = frozenset()) -> NativeBox:
        if not self._started:
            self._start()
        image = self._images.resolve(spec.image)
        for volume in spec.volumes:
            if not os.path.exists(volume.source):  # noqa: ASYNC240, PTH110  (one stat of a local path)
                raise InvalidRequest(f"the volume {volume.source} does not exist on this host")
        losses = self._check_limits(spec, named)
        group = self._cgroups.make(box_id, spec.limits)
        try:
            losses += self._check_kept(spec, named, group)
            box = NativeBox(box_id, group, self._ids, losses)
        except BaseException:
            group.remove()
            raise
        plan = self.planner(spec, image, self._host)
        try:
            async with deadline(START_SECONDS, "the start of a sandbox", "is the host out of memory?"):
                await box._start(self._helper, plan)
        except BaseException:
            await shielded(box.destroy(Ending.START_FAILED))
            raise
        return box

    async def capabilities(self) -> list[Capability]:
        from sandlot.drivers.native import checks  # it knows this module

        return await checks.probe(self)

    @property
    def controllers(self) -> dict[str, str]:
        """memory, pids, cpu → "v1" or "v2", those that this node may use."""
        return self._cgroups.controllers

    @property
    def has_root(self) -> bool:
        return self._ids is not None

    @property
    def kill_groups(self) -> bool:
        return self._cgroups.v2_kill

    @property
    def filtered(self) -> bool:
        return self._filtered

    async def sweep(self, directory: Path) -> None:
        """Remove what boxes of a dead node left behind: their cgroups. The rest went with their processes."""
        await asyncio.to_thread(cgroup.sweep, directory)

    async def close(self) -> None:
        self._cgroups.close()
        if self._ids is not None:
            self._ids.close()

    def _start(self) -> None:
        if not self._helper.exists():
            raise Unsupported(
                "this installation has no sandlot-init, so it cannot make native sandboxes",
                "install a compiler and reinstall: `apt install gcc libc6-dev`, then reinstall sandlot",
            )
        stage = next((path for path in ("/tmp", "/run", "/mnt") if Path(path).is_dir()), None)
        if stage is None:
            raise Unsupported("this host has no /tmp, /run or /mnt to put a sandbox together on", "`mkdir /tmp`")
        self._cgroups.start()
        kept = self._cgroups.controllers
        self._host = Host(root=self._ids is not None, stage=stage, pids_by_cgroup="pids" in kept)
        losses = []
        if "memory" not in kept:
            losses.append("memory is not limited: this node may not make a memory cgroup")
        if not self._filtered:
            losses.append("system calls are not filtered: this processor's calls are not known here")
        if self._ids is None:
            losses.append("one user id inside: the node is not root")
        self._losses = tuple(losses)
        self._started = True

    def _check_kept(self, spec: SandboxSpec, named: frozenset[str], group: BoxGroup) -> tuple[str, ...]:
        """The kernel may refuse a value where it takes others: a refusal if it was asked for, else a loss."""
        losses = []
        for name, controller in _CONTROLLERS.items():
            value = getattr(spec.limits, name)
            if value is None or controller not in self._cgroups.controllers or controller in group.kept:
                continue
            if name in named:
                raise Unsupported(f"the kernel does not take {value} as a limit on {name}", "ask for another value")
            losses.append(f"{name} is not limited: the kernel does not take {value}")
        return tuple(losses)

    def _check_limits(self, spec: SandboxSpec, named: frozenset[str]) -> tuple[str, ...]:
        kept = self._cgroups.controllers
        for name, controller in (("memory", "memory"), ("cpus", "cpu")):
            if name in named and controller not in kept and getattr(spec.limits, name) is not None:
                raise Unsupported(
                    f"this host cannot keep a limit on {name}: the node may not make a {controller} cgroup",
                    "run the node as root, or leave the limit out and accept the loss; see `sandlot doctor`",
                )
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if spec.limits.open_files > hard:
            raise Unsupported(
                f"a sandbox's process cannot have {spec.limits.open_files} open files: the node's own limit is {hard}",
                "raise the node's hard limit of open files (`ulimit -Hn`), and `/proc/sys/fs/nr_open` for more",
            )
        return self._losses


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

    def __init__(self, box_id: str, group: BoxGroup, ids: HostIds | None, losses: tuple[str, ...]) -> None:
        self.id = box_id
        self.losses = losses
        loop = asyncio.get_running_loop()
        self.death: asyncio.Future[Death] = loop.create_future()
        self._loop = loop
        self._group = group
        self._ids = ids
        self._base = ids.take() if ids is not None else None
        self._channel: Channel | None = None
        self._maker = 0  # the short-lived process that makes PID 1
        self._pid = 0
        self._pidfd = -1
        self._asked: Ending | None = None
        self._processes: dict[int, NativeProcess] = {}
        self._oom_seen = 0
        self._lives = False  # it has said "ready"

    # -- requests -------------------------------------------------------------------------------------------------

    async def spawn(self, what: Spawn, stdin: int, stdout: int, stderr: int) -> NativeProcess:
        if what.user and self._base is None:
            raise Unsupported(
                f"user {what.user} does not exist in this sandbox: the node is not root, so there is only user 0",
                "run the node as root, or the command as user 0",
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
            if self._pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        async with deadline(REQUEST_SECONDS, f"the end of sandbox {self.id}", "a process of it hangs in the kernel"):
            if self._pidfd < 0 and not self.death.done():
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

    async def _start(self, helper: Path, plan: Plan) -> None:
        """Start the helper and carry it to "ready". On any failure the caller destroys the box."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        trees: list[int] = []
        joins = self._group.procs()
        try:
            with theirs:
                self._channel = Channel(ours, self._exited)
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
            fields = plan.fields(self._base, range(len(trees), len(trees) + len(joins)))
            self._channel.send(Frame.PLAN, 0, fields, [*trees, *joins])
            answer = await self._next(Frame.PID)
            self._adopt(answer.number(Key.PID) or 0)
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
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._reap_maker()

    def _reap_maker(self) -> None:
        maker, self._maker = self._maker, 0
        if maker:
            with suppress(ChildProcessError):
                os.waitpid(maker, 0)

    def _write_maps(self, trees: list[int]) -> None:
        proc = f"/proc/{self._pid}"
        if self._base is None:
            uid, gid = os.geteuid(), os.getegid()
            Path(proc, "setgroups").write_text("deny")
            Path(proc, "uid_map").write_text(f"0 {uid} 1")
            Path(proc, "gid_map").write_text(f"0 {gid} 1")
            return
        Path(proc, "uid_map").write_text(f"0 {self._base} {RANGE}")
        Path(proc, "gid_map").write_text(f"0 {self._base} {RANGE}")
        user_namespace = os.open(f"{proc}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = [_map_ids(tree, user_namespace) for tree in trees]
        finally:
            os.close(user_namespace)
        if not all(mapped):
            self.losses += ("files of the image belong to nobody inside: this kernel cannot map their owners",)

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
            self._pid = self._channel.first_process or 0
        for pid in (self._maker, self._pid):
            if pid:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)  # noqa: ASYNC222  (it has exited: its end of the socket is closed)
        self._maker = 0
        self._settle(Death(Ending.START_FAILED))

    def _ended(self) -> None:
        """PID 1 is dead, and with it, by the kernel's rule, everything in the box."""
        self._loop.remove_reader(self._pidfd)
        with suppress(ChildProcessError):
            _, status = os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._asked is not None:
            death = Death(self._asked)
        elif not self._lives:
            death = Death(Ending.START_FAILED)
        elif os.WIFSIGNALED(status):
            oom = self._group.oom_kills() > self._oom_seen
            number = os.WTERMSIG(status)
            death = Death(Ending.OOM if oom else Ending.HELPER_DIED, f"sandlot-init was ended by signal {number}")
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

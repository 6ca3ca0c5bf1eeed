"""A driver without a kernel: scripted processes, files in memory, real descriptors. For every test above this layer.

It promises what `conformance.py` asks, with the same descriptors and the same errors as a native box, in microseconds
and on any machine. It isolates nothing and never starts a process. A script is a coroutine that is given a `Context`:

    async def agent(context: Context) -> int:
        await context.write(b"hello from " + context.argv[0].encode())
        return 0

    driver = FakeDriver({"agent": agent})          # beside true, false, echo, cat, env, pwd, sleep and a small sh

`fake_shell.py` says what that `sh` knows, on which `box.run("a text")` and `box.shell()` stand: a shell is one without
a terminal, which an interrupt or a timeout ends. There are no terminals.
"""

from __future__ import annotations

import asyncio
import errno
import fnmatch
import io
import os
import posixpath
import re
import signal
import socket
import stat
import tarfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

from sandlot.api import NO_CONFIG, Capability, Change, Ending, EventKind, ImageConfig, ImageInfo, SandboxSpec, Stats
from sandlot.drivers.base import NOT_KEPT, Adopted, Box, Death, Exit, Hold, Keeping, Look, Progress, Remains, Spawn
from sandlot.drivers.fake_shell import sh
from sandlot.drivers.layers import FORK, HIDDEN, check_name
from sandlot.drivers.told import Entry, Event, Hit, unpieced
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, SandboxEnded, Unsupported

T = TypeVar("T")

# What a script returns is its exit code; a negative one is a signal, as in subprocess.
Program = Callable[["Context"], Awaitable[int]]


@dataclass(frozen=True)
class Context:
    """What a script sees of its box."""

    box: FakeBox
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: int
    stdin: int
    stdout: int
    stderr: int

    async def read(self, size: int = 1 << 16) -> bytes:
        """Some bytes of standard input; b"" at its end."""
        return await _when_ready(self.stdin, lambda: os.read(self.stdin, size), write=False)

    async def write(self, data: bytes, to_stderr: bool = False) -> None:
        """All of it, as fast as the reader takes it. Raises BrokenPipeError when nobody will."""
        fd = self.stderr if to_stderr else self.stdout
        left = memoryview(data)
        while left:
            left = left[await _when_ready(fd, partial(os.write, fd, left), write=True) :]

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to 127.0.0.1:port inside, as a program in the box would make it."""
        return await asyncio.open_connection(sock=await self.box.connect(port))


async def _true(context: Context) -> int:
    return 0


async def _false(context: Context) -> int:
    return 1


async def _echo(context: Context) -> int:
    await context.write(" ".join(context.argv[1:]).encode() + b"\n")
    return 0


async def _cat(context: Context) -> int:
    if len(context.argv) == 1:
        while chunk := await context.read():
            await context.write(chunk)
        return 0
    for path in context.argv[1:]:
        try:
            fd = await context.box.open(posixpath.join(context.cwd, path), os.O_RDONLY)
        except OSError as error:
            await context.write(f"cat: {path}: {error.strerror}\n".encode(), to_stderr=True)
            return 1
        try:
            while chunk := os.read(fd, 1 << 16):
                await context.write(chunk)
        finally:
            os.close(fd)
    return 0


async def _env(context: Context) -> int:
    await context.write("".join(f"{name}={value}\n" for name, value in context.env.items()).encode())
    return 0


async def _pwd(context: Context) -> int:
    await context.write(context.cwd.encode() + b"\n")
    return 0


async def _sleep(context: Context) -> int:
    await asyncio.sleep(float(context.argv[1]))
    return 0


_PROGRAMS: dict[str, Program] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "cat": _cat,
    "env": _env,
    "pwd": _pwd,
    "sleep": _sleep,
    "sh": sh,
}


class FakeProcess:
    """A script that runs, or has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.task: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def end(self, how: Exit) -> None:
        if not self._exit.done():
            self._exit.set_result(how)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def signal(self, number: int) -> None:
        """A script heeds no signal but ends as a program without a handler does."""
        if self._exit.done():
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        self.end(Exit(signal=number))
        if self.task is not None:
            self.task.cancel()

    async def kill_tree(self) -> None:
        self.end(Exit(signal=signal.SIGKILL))
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,))

    async def hold(self, more: Hold) -> Callable[[], None]:
        """A box in memory dies with its node: nobody will come for it."""
        return lambda: None

    async def release(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class _Watcher:
    """Who listens to what happens at a path, or below it."""

    path: str
    deep: bool
    out: int
    gone: asyncio.Future[None]


class FakeBox:
    """A box in memory: each file is a memfd, each listener a socket of this host on a port of its own."""

    def __init__(
        self,
        box_id: str,
        spec: SandboxSpec,
        programs: Mapping[str, Program],
        gone: Callable[[], None],
        files: Mapping[str, bytes] | None = None,
        config: ImageConfig = NO_CONFIG,
    ) -> None:
        self.id = box_id
        self.config = config
        self.spec = spec
        self.losses: tuple[str, ...] = ("a fake box isolates nothing",)
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self._programs = programs
        self._gone = gone
        self._files: dict[str, int] = {}
        self._modes: dict[str, int] = {}  # of directories that are not 0755
        self._owners: dict[str, tuple[int, int]] = {}  # where it is not root
        self._watchers: list[_Watcher] = []
        self._fifos: dict[str, int] = {}  # by descriptors that open none of their ends
        self._directories = {"/", "/root", "/tmp", "/home", "/etc"}
        self._ports: dict[int, int] = {}  # inside → outside
        self._processes: dict[int, FakeProcess] = {}
        self._next_pid = 2
        self._silent = False
        self.paused = False
        self._below = dict(files or {})  # what the image held
        for path, data in self._below.items():
            self._directories.update(str(parent) for parent in PurePosixPath(path).parents)
            self._files[path] = os.memfd_create(posixpath.basename(path), os.MFD_CLOEXEC)
            os.pwrite(self._files[path], data, 0)

    async def spawn(self, what: Spawn, stdin: int, stdout: int, stderr: int, hold: Hold | None = None) -> FakeProcess:
        self._check_alive()
        if self.paused:
            raise Conflict("the box is paused: nothing can be started in it", "resume it first")
        process = FakeProcess(self._next_pid)
        self._next_pid += 1
        program = self._programs.get(what.argv[0])
        if what.cwd not in self._directories:
            process.end(Exit(error=errno.ENOENT, error_step="chdir"))
        elif program is None:
            known = what.argv[0] in self._files  # a file, but no script is behind it
            process.end(Exit(error=errno.EACCES if known else errno.ENOENT, error_step="exec"))
        else:
            fds = _duplicates(stdin, stdout, stderr)
            self._processes[process.pid] = process
            context = Context(self, what.argv, what.env, what.cwd, what.user, *fds)
            process.task = asyncio.get_running_loop().create_task(self._play(process, program, context))
            # Not in _play itself: a task that is cancelled before its first step runs none of its code.
            process.task.add_done_callback(partial(self._played, process, fds))
        return process

    async def listen(self, port: int, note: str | None = None) -> socket.socket:
        self._check_alive()
        if port in self._ports:
            raise Conflict(f"port {port} is taken in box {self.id}")
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self._ports[port] = listener.getsockname()[1]
        return listener

    async def connect(self, port: int) -> socket.socket:
        self._check_alive()
        connection = socket.socket()
        connection.setblocking(False)
        try:
            if port not in self._ports:
                raise ConnectionRefusedError
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._ports[port]))
        except OSError:
            connection.close()
            raise NotFound(f"nothing listens on port {port} in box {self.id}") from None
        return connection

    async def open(self, path: str, flags: int, mode: int = 0o644, user: int = 0, parents: bool = False) -> int:
        self._check_alive()
        path = posixpath.normpath(path)
        parent = posixpath.dirname(path)
        if path in self._directories:
            if flags & os.O_ACCMODE != os.O_RDONLY:
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if path == os.devnull:
            return os.open(os.devnull, flags & ~os.O_CREAT | os.O_CLOEXEC)
        if stat.S_ISFIFO(mode) and path not in self._fifos:
            self._fifos[path] = _fifo()
        if path in self._fifos:
            flags &= ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
            return os.open(f"/proc/self/fd/{self._fifos[path]}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
        if path not in self._files:
            if flags & os.O_CREAT and parents:
                while parent not in self._directories:
                    self._directories.add(parent)
                    parent = posixpath.dirname(parent)
            if not flags & os.O_CREAT or parent not in self._directories:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._files[path] = os.memfd_create(posixpath.basename(path), os.MFD_CLOEXEC)
            os.fchmod(self._files[path], mode)
            self._happened("created", path)
        # Opened anew through /proc, so that each descriptor has an offset and flags of its own.
        return os.open(f"/proc/self/fd/{self._files[path]}", (flags & ~(os.O_CREAT | os.O_EXCL)) | os.O_CLOEXEC)

    async def unpack(self, path: str, source: int, user: int = 0) -> None:
        self._check_alive()
        for name, data in await asyncio.to_thread(_read_tar, os.dup(source), path):
            if data is None:
                self._directories.update((name, *map(str, PurePosixPath(name).parents)))
                continue
            fd = await self.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, parents=True)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)

    # Files, as `base.Box` says. There are no links in memory.

    async def look(self, what: Look, out: int) -> None:
        self._check_alive()
        top = posixpath.normpath(what.path)
        self._kind(top)
        try:
            line = re.compile((what.text or "") if what.regex else re.escape(what.text or ""), re.I * what.any_case)
        except re.error as error:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(error)) from None
        told = bytearray()
        for path in sorted(
            {path for path in (*self._files, *self._directories) if _is_in(path, top)},
            key=lambda path: path.split("/") if path != "/" else [],
        ):
            below = posixpath.relpath(path, top) if path != top else ""
            parts = below.split("/") if below else []
            if what.pattern is None and parts:
                continue
            if what.pattern is not None and not _names([each for each in what.pattern.split("/") if each], parts):
                continue
            data = b"" if path in self._directories else self._data(path)
            if what.text is None:
                contents = what.contents and path in self._files
                told += self._entry(path, below, contents).pack() + (data if contents else b"")
            elif b"\0" not in data:
                for number, text in enumerate(os.fsdecode(data).removesuffix("\n").split("\n"), 1):
                    if (found := line.search(text)) is not None:
                        told += Hit(below, number, len(os.fsencode(text[: found.start()])) + 1, text).pack()
        await asyncio.to_thread(_write_all, os.dup(out), bytes(told))

    async def store(self, path: str, source: int, mode: int = 0o644, append: bool = False) -> None:
        self._check_alive()
        path = posixpath.normpath(path)
        data = unpieced(await asyncio.to_thread(_read_all, os.dup(source)))
        self._check_alive()
        if data is None or path in self._directories:
            raise _error(errno.EBADMSG if data is None else errno.EISDIR)
        self._make_parents(path)
        before = self._files.get(path)
        if append and before is not None:
            os.pwrite(before, data, os.fstat(before).st_size)
            self._happened("changed", path)
            return
        fd = os.memfd_create(posixpath.basename(path), os.MFD_CLOEXEC)
        os.fchmod(fd, mode)
        await asyncio.to_thread(_write_all, os.dup(fd), data)
        self._files[path] = fd
        if before is not None:
            os.close(before)
        self._happened("created", path)

    async def make_directory(self, path: str, mode: int = 0o755, parents: bool = False) -> None:
        self._check_alive()
        path = posixpath.normpath(path)
        if path in self._files or (path in self._directories and not parents):
            raise _error(errno.EEXIST)
        if parents:
            self._make_parents(path)
        elif posixpath.dirname(path) not in self._directories:
            raise _error(errno.ENOENT)
        if path not in self._directories:
            self._directories.add(path)
            self._modes[path] = mode
            self._happened("created", path)

    async def move(self, path: str, to: str, replace: bool = False) -> None:
        self._check_alive()
        path, to = posixpath.normpath(path), posixpath.normpath(to)
        is_directory = self._kind(path)
        if posixpath.dirname(to) not in self._directories:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), to)
        if _is_in(to, path):
            raise _error(errno.EINVAL)
        if to in self._files or to in self._directories:
            if not replace:
                raise _error(errno.EEXIST)
            if is_directory != (to in self._directories):
                raise _error(errno.ENOTDIR if is_directory else errno.EISDIR)
            await self.remove(to)
        moved = [each for each in (*self._files, *self._directories) if _is_in(each, path)]
        self._happened("deleted", path)
        for old in moved:
            new = to + old[len(path) :]
            if old in self._files:
                self._files[new] = self._files.pop(old)
            else:
                self._directories.discard(old)
                self._directories.add(new)
                if old in self._modes:
                    self._modes[new] = self._modes.pop(old)
            if old in self._owners:
                self._owners[new] = self._owners.pop(old)
        self._happened("created", to)

    async def remove(self, path: str, deep: bool = False) -> None:
        self._check_alive()
        path = posixpath.normpath(path)
        if path == "/":
            raise _error(errno.EINVAL)
        is_directory = self._kind(path)
        gone = [each for each in (*self._files, *self._directories) if _is_in(each, path)]
        if is_directory and len(gone) > 1 and not deep:
            raise _error(errno.ENOTEMPTY)
        for each in sorted(gone, reverse=True):
            self._happened("deleted", each)
            if each in self._files:
                os.close(self._files.pop(each))
            self._directories.discard(each)
            self._modes.pop(each, None)
            self._owners.pop(each, None)

    async def change_file(
        self, path: str, mode: int | None = None, user: int | None = None, group: int | None = None
    ) -> None:
        self._check_alive()
        path = posixpath.normpath(path)
        is_directory = self._kind(path)
        was = self._owners.get(path, (0, 0))
        self._owners[path] = (was[0] if user is None else user, was[1] if group is None else group)
        if mode is not None and is_directory:
            self._modes[path] = mode
        elif mode is not None:
            os.fchmod(self._files[path], mode)
        self._happened("attributes", path)

    async def watch(self, path: str, out: int, deep: bool = False) -> None:
        self._check_alive()
        path = posixpath.normpath(path)
        self._kind(path)
        watcher = _Watcher(path, deep, os.dup(out), asyncio.get_running_loop().create_future())
        os.set_blocking(watcher.out, False)  # nobody but tests listens, and they do
        self._watchers.append(watcher)
        try:
            os.write(watcher.out, Event("watching", "", path in self._directories).pack())
            await watcher.gone
            self._check_alive()
        finally:
            self._watchers.remove(watcher)
            os.close(watcher.out)

    def _happened(self, kind: EventKind, path: str) -> None:
        for watcher in self._watchers:
            top = watcher.path
            if path == top or (_is_in(path, top) and (watcher.deep or posixpath.dirname(path) == top)):
                below = posixpath.relpath(path, top) if path != top else ""
                with suppress(BlockingIOError, BrokenPipeError):
                    os.write(watcher.out, Event(kind, below, path in self._directories).pack())
            if kind == "deleted" and path == top and path in self._directories:
                _resolve(watcher.gone)

    def _kind(self, path: str) -> bool:
        """Whether it is a directory. Raises OSError: there is nothing."""
        if path not in self._directories and path not in self._files:
            raise _error(errno.ENOENT)
        return path in self._directories

    def _make_parents(self, path: str) -> None:
        for parent in map(str, PurePosixPath(path).parents):
            if parent in self._files:
                raise _error(errno.ENOTDIR)
            self._directories.add(parent)

    def _data(self, path: str) -> bytes:
        return os.pread(self._files[path], os.fstat(self._files[path]).st_size, 0)

    def _entry(self, path: str, below: str, contents: bool) -> Entry:
        user, group = self._owners.get(path, (0, 0))
        if path in self._directories:
            mode = stat.S_IFDIR | self._modes.get(path, 0o755)
            return Entry(below, mode, user, group, 2, 0, 0, 0, 0)
        what = os.fstat(self._files[path])
        return Entry(
            below, what.st_mode, user, group, 1, 0, what.st_ino, what.st_size, what.st_mtime_ns, contents=contents
        )

    async def interrupt(self, terminal: int, number: int) -> None:
        """No script stands in the foreground of a terminal."""

    async def stats(self) -> Stats:
        self._check_alive()
        sizes = [os.fstat(fd).st_size for fd in self._files.values()]
        return Stats(pids=len(self._processes), disk=sum(sizes), inodes=len(sizes))

    def files(self) -> dict[str, bytes]:
        """What its files hold now, those of its image too; not those in /dev, which no image has."""
        kept = ((path, fd) for path, fd in self._files.items() if not path.startswith("/dev/"))
        return {path: os.pread(fd, os.fstat(fd).st_size, 0) for path, fd in kept}

    async def changes(self) -> list[Change]:
        self._check_alive()
        now = self.files()
        kinds: dict[str, Literal["added", "changed"]] = {
            path: "changed" if path in self._below else "added"
            for path, data in now.items()
            if self._below.get(path) != data
        }
        return [Change(path=path, kind=kind) for path, kind in sorted(kinds.items())]

    async def pause(self) -> None:
        self._check_alive()
        self.paused = True

    async def resume(self) -> None:
        self._check_alive()
        self.paused = False

    async def destroy(self, ending: Ending = Ending.EXIT) -> Death:
        self.die(ending)
        tasks = [process.task for process in self._processes.values() if process.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        return self.death.result()

    def die(self, ending: Ending, detail: str | None = None) -> None:
        """The box is gone, as if its helper had been killed. Tests call it; the first ending counts."""
        if self.death.done():
            return
        self.death.set_result(Death(ending, detail))
        for process in self._processes.values():
            process.end(Exit(signal=signal.SIGKILL))
            if process.task is not None:
                process.task.cancel()
        for watcher in self._watchers:
            _resolve(watcher.gone)
        for fd in (*self._files.values(), *self._fifos.values()):
            os.close(fd)
        self._files.clear()
        self._fifos.clear()
        self._ports.clear()
        self._gone()

    def fall_silent(self) -> None:
        """Its helper answers no more, and its death is not known yet: what a real box goes through before `die`."""
        self._silent = True

    def _check_alive(self) -> None:
        if self._silent and not self.death.done():
            raise HostFault(f"box {self.id} does not answer")
        if self.death.done():
            raise SandboxEnded(f"box {self.id} has ended: {self.death.result().ending}")

    async def _play(self, process: FakeProcess, program: Program, context: Context) -> None:
        try:
            code = await program(context)
            process.end(Exit(code=code) if code >= 0 else Exit(signal=-code))
        except BrokenPipeError:
            process.end(Exit(signal=signal.SIGPIPE))

    def _played(self, process: FakeProcess, fds: list[int], task: asyncio.Task[None]) -> None:
        self._processes.pop(process.pid, None)
        for fd in fds:
            os.close(fd)
        if not task.cancelled() and task.exception() is not None:
            # A script that is wrong crashes as a program does; the loop reports the exception itself.
            process.end(Exit(signal=signal.SIGABRT))
            task.result()
        process.end(Exit(signal=signal.SIGKILL))


class FakeDriver:
    """Makes boxes in memory. `programs` are found by their name; `creating` is awaited before each box is made and
    may take its time or raise, as a host in trouble would."""

    name = "fake"

    def __init__(
        self,
        programs: Mapping[str, Program] | None = None,
        creating: Callable[[str, SandboxSpec], Awaitable[None]] | None = None,
    ) -> None:
        self.boxes: dict[str, FakeBox] = {}  # those alive
        self.swept: list[Path] = []
        self._programs = {**_PROGRAMS, **(programs or {})}
        self._creating = creating
        self._snapshots: dict[str, tuple[ImageInfo, dict[str, bytes]]] = {}

    async def create(
        self,
        box_id: str,
        spec: SandboxSpec,
        named: frozenset[str],
        keeping: Keeping = NOT_KEPT,
        like: Box | None = None,
    ) -> FakeBox:
        if like is None and spec.image != "host" and spec.image not in self._snapshots:
            raise NotFound(f"there is no image {spec.image}", "the image of a fake box is `host`, or a snapshot")
        _check_volumes(spec)
        if self._creating is not None:
            await self._creating(box_id, spec)
        info, files = self._snapshots.get(spec.image, (None, {}))
        config = NO_CONFIG if info is None else info.config
        if isinstance(like, FakeBox):
            files, config = like._below, like.config
        box = FakeBox(box_id, spec, self._programs, partial(self._gone, box_id), files, config)
        self.boxes[box_id] = box
        return box

    def _gone(self, box_id: str) -> None:
        self.boxes.pop(box_id, None)

    def fits(self, parked: SandboxSpec, spec: SandboxSpec, named: frozenset[str], like: Box | None = None) -> bool:
        _, files = self._snapshots.get(spec.image, (None, {}))
        same = not isinstance(like, FakeBox) or like._below == files
        return parked.image == spec.image and not spec.volumes and same

    async def claim(self, box: Box, spec: SandboxSpec, named: frozenset[str], keeping: Keeping) -> None:
        assert isinstance(box, FakeBox)
        box._check_alive()
        box.spec = spec

    async def adopt(self) -> tuple[list[Adopted], list[Remains]]:
        """A box in memory dies with its node."""
        return [], []

    async def snapshot(self, box: Box, name: str | None, config: ImageConfig | None = None) -> ImageInfo:
        assert isinstance(box, FakeBox)
        box._check_alive()
        if name in self._snapshots:
            raise Conflict(f"there is an image {name} already")
        if name is not None:
            check_name(name)
        files = box.files()
        info = ImageInfo(
            name=name or f"{FORK}{len(self._snapshots)}",
            base="host",
            created_at=time.time(),
            bytes=sum(map(len, files.values())),
            files=len(files),
            layers=1,
            config=config or box.config,
        )
        self._snapshots[info.name] = info, files
        return info

    async def images(self) -> list[ImageInfo]:
        return [info for info, _ in self._snapshots.values() if not info.name.startswith(HIDDEN)]

    async def image(self, name: str) -> ImageInfo:
        if name == "host":
            return ImageInfo(name=name, base=name, created_at=0.0)
        if name not in self._snapshots:
            raise NotFound(f"there is no image {name}", "the image of a fake box is `host`, or a snapshot")
        return self._snapshots[name][0]

    async def tag(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        check_name(name)
        found = await self.image(image)
        if name in self._snapshots and self._snapshots[name][0].kind != "built":
            raise Conflict(f"there is an image {name} already")
        made = {"name": name, "kind": "built", "created_at": time.time(), "config": config or found.config}
        info = found.model_copy(update=made)
        self._snapshots[name] = info, self._snapshots[image][1]
        return info

    async def pull(self, reference: str, progress: Progress) -> ImageInfo:
        raise _no_images(reference)

    async def import_(self, name: str, path: Path, progress: Progress) -> ImageInfo:
        raise _no_images(name)

    async def idle_images(self) -> list[ImageInfo]:
        return []

    async def forget(self, image: str) -> None:
        if image == "host":
            raise Conflict("the image of every fake box cannot be deleted")
        if self._snapshots.pop(image, None) is None:
            raise NotFound(f"there is no image {image}")

    async def prune(self) -> None:
        """Files go with the last that hold them."""

    async def export(self, image: str, out: int) -> None:
        if image not in self._snapshots:
            raise NotFound(f"there is no image {image}")
        await asyncio.to_thread(_write_tar, self._snapshots[image][1], out)

    async def sweep(self, directory: Path) -> bool:
        self.swept.append(directory)
        return True

    async def capabilities(self) -> list[Capability]:
        return [Capability(name="box", state="kept", found="boxes in memory"), *_LOSSES]

    async def close(self) -> None:
        """Nothing is held."""


_LOSSES = [Capability(name="isolation", state="loss", found="a fake box isolates nothing", fix="use the native driver")]


def _no_images(name: str) -> Unsupported:
    return Unsupported(f"a fake box has no root file system to be made from {name}", "use the native driver")


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _is_in(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _names(pattern: list[str], parts: list[str]) -> bool:
    """Whether a pattern, part by part, names a path."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _names(pattern[1:], parts) or (bool(parts) and _names(pattern, parts[1:]))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _names(pattern[1:], parts[1:])


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _write_all(fd: int, data: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(fd, "wb") as file:  # who reads may have heard enough
        file.write(data)


def _read_tar(source: int, top: str) -> list[tuple[str, bytes | None]]:
    """The files of a tar, and its directories (None). Blocks; closes the descriptor. Raises OSError."""
    found: list[tuple[str, bytes | None]] = [(posixpath.normpath(top), None)]
    with os.fdopen(source, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r|") as tar:
                for info in tar:
                    if ".." in info.name.split("/"):
                        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), info.name)
                    if not info.isdir() and not info.isreg():  # no links in memory
                        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), info.name)
                    data = tar.extractfile(info)
                    found.append((posixpath.normpath(f"{top}/{info.name}"), data.read() if data else None))
        except tarfile.TarError:
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), top) from None
        while file.read(1 << 16):
            pass
    return found


def _write_tar(files: Mapping[str, bytes], out: int) -> None:
    with os.fdopen(os.dup(out), "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _fifo() -> int:
    """A pipe that is opened through this descriptor by whoever wants one of its ends."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        return os.open(f"/proc/self/fd/{ends[0]}", os.O_PATH | os.O_CLOEXEC)
    finally:
        for end in ends:
            os.close(end)


def _duplicates(*given: int) -> list[int]:
    """Descriptors of our own, non-blocking: scripts share one thread, where a program would block by itself."""
    made: list[int] = []
    try:
        for fd in given:
            made.append(os.dup(fd))
            os.set_blocking(made[-1], False)
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made


def _check_volumes(spec: SandboxSpec) -> None:
    for volume in spec.volumes:
        if not Path(volume.source).exists():
            raise InvalidRequest(f"volume {volume.source} does not exist")


async def _when_ready(fd: int, call: Callable[[], T], *, write: bool) -> T:
    """`call()`, again once `fd` is ready if it would block. Tried first: /dev/null cannot be waited for."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return call()
        except BlockingIOError:
            ready: asyncio.Future[None] = loop.create_future()
            (loop.add_writer if write else loop.add_reader)(fd, _resolve, ready)
            try:
                await ready
            finally:
                (loop.remove_writer if write else loop.remove_reader)(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

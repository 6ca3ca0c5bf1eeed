"""What every driver must do, as checks that ship: run them over your own driver before you use it.

Each `check_…` is given a driver, makes what boxes it needs and removes them; it returns when the promise in its first
line is kept and raises AssertionError otherwise. It depends on no test framework. Programs are those of any Linux and
of the fake driver (true, false, echo, cat, env, pwd, sleep); what takes a real one says so in `needs`:

    for check in CHECKS:
        if check.needs <= {"kernel"}:          # a driver of real processes offers "kernel"; the fake one nothing
            await check.run(driver)

A driver whose boxes outlive their node offers "adoption" too: to those checks a driver is given in whose directory
another process ran `leave` with a driver of its own, and was killed when that had returned.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import secrets
import signal
import socket
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandlot.aio import deadline
from sandlot.api import Change, Ending, ImageConfig, ImageInfo, Limits, SandboxSpec, Volume
from sandlot.drivers.base import NOT_KEPT, Adopted, Box, Driver, Exit, Hold, Keeping, Look, Process, Progress, Spawn
from sandlot.drivers.told import Entry, Event, Hit, entry_at, event_at, hit_at, pieces
from sandlot.errors import BadImage, Conflict, InvalidRequest, NotFound, SandlotError, Unreachable

# Seconds that one step may take: far more than any does, so that a hang fails by name.
_STEP = 20.0
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}


@dataclass(frozen=True)
class Check:
    """One promise. `needs` ⊆ {"kernel", "adoption"}: what a driver must offer for it to make sense."""

    name: str
    run: Callable[[Driver], Awaitable[None]]
    needs: frozenset[str]


CHECKS: list[Check] = []


def _check(*needs: str) -> Callable[[Callable[[Driver], Awaitable[None]]], Callable[[Driver], Awaitable[None]]]:
    def listed(run: Callable[[Driver], Awaitable[None]]) -> Callable[[Driver], Awaitable[None]]:
        CHECKS.append(Check(getattr(run, "__name__", "check").removeprefix("check_"), run, frozenset(needs)))
        return run

    return listed


@asynccontextmanager
async def a_box(driver: Driver, spec: SandboxSpec | None = None, keeping: Keeping = NOT_KEPT) -> AsyncIterator[Box]:
    """A box for one check."""
    async with deadline(_STEP, "making a box"):
        box = await driver.create(f"sb-check{secrets.token_hex(5)}", spec or SandboxSpec(), frozenset(), keeping)
    try:
        yield box
    finally:
        async with deadline(_STEP, "destroying a box"):
            await box.destroy()


@asynccontextmanager
async def a_snapshot(driver: Driver, box: Box, named: bool = True) -> AsyncIterator[ImageInfo]:
    """An image for one check."""
    async with deadline(_STEP, "making a snapshot"):
        info = await driver.snapshot(box, f"check-{secrets.token_hex(5)}" if named else None)
    try:
        yield info
    finally:
        async with deadline(_STEP, "forgetting a snapshot"):
            with suppress(NotFound):  # the check did it
                await driver.forget(info.name)


class Started:
    """A process with pipes of its own."""

    def __init__(self, process: Process, stdin: int, stdout: int, stderr: int) -> None:
        self.process = process
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    async def done(self) -> tuple[Exit, bytes, bytes]:
        """Its exit and all its output, read until the other ends are closed."""
        reading = [asyncio.create_task(_read_to_end(fd)) for fd in (self.stdout, self.stderr)]
        async with deadline(_STEP, "the end of a process"):
            ended = await self.process.wait()
            out, err = await asyncio.gather(*reading)
        await self.process.release()
        return ended, out, err

    def close(self) -> None:
        for fd in {self.stdin, self.stdout, self.stderr} - {-1}:
            os.close(fd)
        self.stdin = self.stdout = self.stderr = -1


@asynccontextmanager
async def started(
    box: Box, *argv: str, stdin: bytes = b"", env: dict[str, str] | None = None, cwd: str = "/root", user: int = 0
) -> AsyncIterator[Started]:
    """A process of `argv` in the box, with `stdin` (at most a pipe full) written and closed."""
    (stdin_r, stdin_w), (out_r, out_w), (err_r, err_w) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    os.write(stdin_w, stdin)
    os.close(stdin_w)
    theirs = (stdin_r, out_w, err_w)
    try:
        async with deadline(_STEP, f"starting {argv[0]}"):
            process = await box.spawn(Spawn(argv, {**_ENV, **(env or {})}, cwd, user), *theirs)
        for fd in theirs:
            os.fstat(fd)  # still ours: a driver duplicates what it is given
    except BaseException:
        for fd in (out_r, err_r):
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    running = Started(process, -1, out_r, err_r)
    try:
        yield running
    finally:
        await process.kill_tree()
        await process.wait()
        await process.release()
        running.close()


async def output(box: Box, *argv: str, user: int = 0) -> str:
    """What a command prints; it must succeed."""
    async with started(box, *argv, user=user) as running:
        ended, out, err = await running.done()
    assert ended.code == 0, (argv, ended, err)
    return out.decode()


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _read_to_end(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = bytearray()
    while True:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            await _readable(fd)
            continue
        if not chunk:
            return bytes(data)
        data += chunk


async def _written(box: Box, path: str, data: bytes, mode: int = 0o644) -> None:
    fd = await box.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode, parents=True)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


async def _bytes(box: Box, path: str) -> bytes:
    fd = await box.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


@_check()
async def check_exit_codes_are_told(driver: Driver) -> None:
    """An exit code arrives as it is, as often as it is asked for."""
    async with a_box(driver) as box:
        for argv, code in ((("true",), 0), (("false",), 1)):
            async with started(box, *argv) as running:
                ended, _, _ = await running.done()
                assert (ended.code, ended.signal, ended.error) == (code, None, None), ended
                assert await running.process.wait() == ended


@_check()
async def check_output_and_input_are_the_descriptors_given(driver: Driver) -> None:
    """What a process writes arrives on the descriptors it was given, what it reads comes from them, byte for byte."""
    async with a_box(driver) as box:
        data = bytes(range(256)) * 16
        async with started(box, "cat", stdin=data) as running:
            ended, out, err = await running.done()
        assert (ended.code, out, err) == (0, data, b"")
        async with started(box, "cat", "/no/such/file") as running:
            ended, out, err = await running.done()
        assert ended.code == 1
        assert not out
        assert b"/no/such/file" in err


@_check()
async def check_environment_and_directory_are_those_asked_for(driver: Driver) -> None:
    """A process sees the environment that was asked for and nothing else, and starts in its directory."""
    async with a_box(driver) as box:
        async with started(box, "env", env={"GREETING": "häl lo\n=x"}) as running:
            _, out, _ = await running.done()
        assert "GREETING=häl lo\n=x\n" in out.decode()
        seen = {line.partition("=")[0] for line in out.decode().splitlines() if "=" in line}
        assert seen <= {"PATH", "HOME", "GREETING", "PWD", "SHLVL", "_", ""}, seen
        async with started(box, "pwd", cwd="/tmp") as running:
            _, out, _ = await running.done()
        assert out == b"/tmp\n"


@_check()
async def check_a_program_that_cannot_start_is_an_exit(driver: Driver) -> None:
    """Not found, not executable and no such directory are exits with errno and step, and leave the box usable."""
    async with a_box(driver) as box:
        async with started(box, "no-such-program") as running:
            ended, _, _ = await running.done()
        assert (ended.code, ended.error) == (None, errno.ENOENT), ended
        await _written(box, "/tmp/text", b"just text")
        async with started(box, "/tmp/text") as running:
            ended, _, _ = await running.done()
        assert (ended.code, ended.error) == (None, errno.EACCES), ended
        async with started(box, "true", cwd="/no/such/directory") as running:
            ended, _, _ = await running.done()
        assert (ended.error, ended.error_step) == (errno.ENOENT, "chdir"), ended
        assert await output(box, "echo", "still here") == "still here\n"


@_check()
async def check_kill_tree_ends_a_process(driver: Driver) -> None:
    """kill_tree ends what runs, may be called again and after the end, and spares its neighbours."""
    async with a_box(driver) as box, started(box, "sleep", "60") as neighbour:
        async with started(box, "sleep", "60") as running:
            await running.process.kill_tree()
            await running.process.kill_tree()
            ended, _, _ = await running.done()
            await running.process.kill_tree()
        assert ended.signal == signal.SIGKILL, ended
        waiting = asyncio.ensure_future(neighbour.process.wait())
        assert not (await asyncio.wait((waiting,), timeout=0.05))[0], "the neighbour was killed too"
        waiting.cancel()


@_check()
async def check_many_processes_run_at_once(driver: Driver) -> None:
    """Fifty processes of one box run side by side and none gets another's output."""
    async with a_box(driver) as box:
        said = await asyncio.gather(*(output(box, "echo", f"number {i}") for i in range(50)))
        assert said == [f"number {i}\n" for i in range(50)]


@_check()
async def check_files_are_opened_inside(driver: Driver) -> None:
    """What is written through a descriptor is what a program inside reads; missing parents are made when asked."""
    async with a_box(driver) as box:
        await _written(box, "/root/a/b/data", b"\x00\xffdata")
        assert await _bytes(box, "/root/a/b/data") == b"\x00\xffdata"
        async with started(box, "cat", "/root/a/b/data") as running:
            _, out, _ = await running.done()
        assert out == b"\x00\xffdata"
        await _written(box, "/root/a/b/data", b"new")
        assert await _bytes(box, "/root/a/b/data") == b"new"


@_check()
async def check_errno_comes_from_inside(driver: Driver) -> None:
    """A path that cannot be opened raises OSError with the errno from inside."""
    async with a_box(driver) as box:
        await _fails(box, "/root/missing", os.O_RDONLY, errno.ENOENT)
        await _fails(box, "/root/no/parent", os.O_WRONLY | os.O_CREAT, errno.ENOENT)
        await _fails(box, "/tmp", os.O_WRONLY, errno.EISDIR)


async def _fails(box: Box, path: str, flags: int, *expected: int) -> None:
    try:
        fd = await box.open(path, flags)
    except OSError as error:
        assert error.errno in expected, (path, error)
    else:
        os.close(fd)
        raise AssertionError(f"{path} was opened")


@_check()
async def check_a_listener_inside_is_served_outside(driver: Driver) -> None:
    """A connection made inside reaches whoever accepts on the listener that was handed out."""
    async with a_box(driver) as box:
        listener = await box.listen(8484)
        loop = asyncio.get_running_loop()
        try:
            client = await box.connect(8484)
            with client:
                async with deadline(_STEP, "accepting a connection from inside"):
                    accepted, _ = await loop.sock_accept(listener)
                    with accepted:
                        await loop.sock_sendall(client, b"ping")
                        assert await loop.sock_recv(accepted, 16) == b"ping"
                        await loop.sock_sendall(accepted, b"pong")
                        assert await loop.sock_recv(client, 16) == b"pong"
        finally:
            listener.close()


@_check()
async def check_a_taken_port_is_a_conflict(driver: Driver) -> None:
    """A second listener on a port is a Conflict; a port where nobody listens is NotFound to connect to."""
    async with a_box(driver) as box:
        with await box.listen(8484):
            try:
                (await box.listen(8484)).close()
                raise AssertionError("a taken port was given twice")
            except Conflict:
                pass
        try:
            (await box.connect(9)).close()
            raise AssertionError("connected to a port where nobody listens")
        except NotFound:
            pass


@_check()
async def check_boxes_are_apart(driver: Driver) -> None:
    """Two boxes share neither files nor ports."""
    async with a_box(driver) as one, a_box(driver) as other:
        await _written(one, "/tmp/mine", b"1")
        await _fails(other, "/tmp/mine", os.O_RDONLY, errno.ENOENT)
        with await one.listen(8484), await other.listen(8484):
            pass


@_check()
async def check_many_boxes_are_made_at_once(driver: Driver) -> None:
    """Twenty boxes asked for at once all come to be, each its own."""

    async def one(i: int) -> str:
        async with a_box(driver) as box:
            await _written(box, "/tmp/name", f"box {i}".encode())
            return await output(box, "cat", "/tmp/name")

    assert await asyncio.gather(*(one(i) for i in range(20))) == [f"box {i}" for i in range(20)]


@_check()
async def check_destroy_ends_everything_once(driver: Driver) -> None:
    """destroy resolves `death` with the first ending given, ends every process, and may be called again."""
    async with a_box(driver) as box:
        async with started(box, "sleep", "60") as running:
            waiting = asyncio.ensure_future(running.process.wait())
            deaths = await asyncio.gather(box.destroy(Ending.IDLE), box.destroy(Ending.KILLED))
            async with deadline(_STEP, "the end of a process of a dead box"):
                ended = await waiting
            assert ended.signal == signal.SIGKILL, ended
            assert (await running.process.wait()).signal == signal.SIGKILL
        assert [death.ending for death in deaths] == [Ending.IDLE, Ending.IDLE]
        assert box.death.done()
        assert box.death.result() == deaths[0] == await box.destroy(Ending.LIFETIME)


@_check()
async def check_death_is_known_before_the_process_ends(driver: Driver) -> None:
    """Whoever waits for a process that dies with its box finds `death` resolved: that is how the two are told apart."""
    async with a_box(driver) as box, started(box, "sleep", "60") as running:

        async def known() -> bool:
            await running.process.wait()
            return box.death.done()

        waiting = asyncio.ensure_future(known())
        await asyncio.sleep(0)
        await box.destroy()
        async with deadline(_STEP, "the end of a process of a dead box"):
            assert await waiting


@_check()
async def check_an_unknown_image_is_not_found(driver: Driver) -> None:
    """An image that does not exist is NotFound, a volume without a source InvalidRequest; nothing is made."""
    before = _children()
    for spec, expected in (
        (SandboxSpec(image="no-such-image"), NotFound),
        (SandboxSpec(volumes=(Volume(source="/no/such/source", target="/mnt/x"),)), InvalidRequest),
    ):
        try:
            box = await driver.create(f"sb-check{secrets.token_hex(5)}", spec, frozenset())
        except expected:
            continue
        await box.destroy()
        raise AssertionError(f"{spec} was made")
    assert _children() == before


@_check()
async def check_a_cancelled_create_leaves_nothing(driver: Driver) -> None:
    """A create that is cancelled at any moment leaves no process behind, and the driver goes on."""
    before = _children()
    for moment in (0.0, 0.0005, 0.001, 0.002, 0.004):
        name = f"sb-check{secrets.token_hex(5)}"
        creating = asyncio.ensure_future(driver.create(name, SandboxSpec(), frozenset()))
        await asyncio.sleep(moment)
        creating.cancel()
        await asyncio.wait((creating,), timeout=_STEP)
        assert creating.done(), "the cancelled create hangs"
        if not creating.cancelled():
            await creating.result().destroy()
    async with a_box(driver) as box:
        assert await output(box, "echo", "fine") == "fine\n"
    assert _children() == before


def _children() -> set[str]:
    """Live children of this process."""
    mine = str(os.getpid())
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended while we looked
            if parent == mine and state != "Z":
                found.add(entry.name)
    return found


@_check("kernel")
async def check_a_signal_is_told(driver: Driver) -> None:
    """A process that a signal ended says which."""
    async with a_box(driver) as box, started(box, "sh", "-c", "kill -TERM $$") as running:
        ended, _, _ = await running.done()
        assert (ended.code, ended.signal) == (None, signal.SIGTERM), ended


@_check("kernel")
async def check_kill_tree_takes_those_that_left(driver: Driver) -> None:
    """kill_tree takes children that left the process's group and session too."""
    async with a_box(driver) as box:
        async with started(box, "sh", "-c", "setsid sleep 4711 & sleep 4712 & echo ready; wait") as running:
            async with deadline(_STEP, "the start of a shell"):
                await _readable(running.stdout)
            await running.process.kill_tree()
            ended, _, _ = await running.done()  # reads to the end: the children, who held the pipes, are gone
        assert ended.signal == signal.SIGKILL, ended
        assert "471" not in await output(
            box, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 471[0-9]'; :"
        )


@_check("kernel")
async def check_background_children_live_on(driver: Driver) -> None:
    """A process's exit does not wait for its background children, and release lets them live."""
    async with a_box(driver) as box:
        (out_r, out_w) = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            command = Spawn(("sh", "-c", "sleep 4713 & echo $!"), _ENV, "/root")
            process = await box.spawn(command, null, out_w, out_w)
            async with deadline(_STEP, "the end of a shell with a child in the background"):
                ended = await process.wait()
            await process.release()
            child = os.read(out_r, 100).decode().strip()
        finally:
            for fd in (out_r, out_w, null):
                os.close(fd)
        assert ended.code == 0, ended
        assert await output(box, "sh", "-c", f"kill -0 {child} && echo alive") == "alive\n"


@_check("kernel")
async def check_processes_of_others_are_not_seen(driver: Driver) -> None:
    """A box sees its own processes only, under its own host name, and as the user that was asked for."""
    async with a_box(driver, SandboxSpec(hostname="here")) as box:
        pids = (await output(box, "sh", "-c", "ls /proc | grep -c '^[0-9]'")).strip()
        assert int(pids) < 10, pids
        assert await output(box, "uname", "-n") == "here\n"
        assert await output(box, "id", "-u") == "0\n"


@_check("kernel")
async def check_there_is_no_network(driver: Driver) -> None:
    """A box has a loopback of its own and no other interface."""
    async with a_box(driver) as box:
        names = await output(box, "sh", "-c", "tail -n +3 /proc/net/dev | cut -d: -f1")
        assert names.split() == ["lo"], names


@_check("kernel")
async def check_no_symlink_leads_out(driver: Driver) -> None:
    """A symlink made inside is followed inside: the host's file behind the same path is never opened."""
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="sandlot-check-") as secret:
        secret.write(b"secret")
        secret.flush()
        async with a_box(driver) as box:
            await output(box, "ln", "-s", secret.name, "/root/link")
            await _fails(box, "/root/link", os.O_RDONLY, errno.ENOENT)
            await output(box, "ln", "-s", f"/proc/1/root{secret.name}", "/root/link2")
            await _fails(box, "/root/link2", os.O_RDONLY, errno.ENOENT, errno.EACCES, errno.ELOOP)


def _fill(directory: Path) -> None:
    directory.chmod(0o755)
    (directory / "hello").write_text("from the host")


@_check("kernel")
async def check_volumes_are_seen(driver: Driver) -> None:
    """A volume is seen inside; a read-only one cannot be written."""
    with tempfile.TemporaryDirectory(prefix="sandlot-check-") as directory:
        _fill(Path(directory))
        spec = SandboxSpec(volumes=(Volume(source=directory, target="/mnt/data"),))
        async with a_box(driver, spec) as box:
            assert await output(box, "cat", "/mnt/data/hello") == "from the host"
            async with started(box, "sh", "-c", "echo x > /mnt/data/hello") as running:
                ended, _, err = await running.done()
            assert ended.code != 0
            assert b"Read-only" in err, err


@_check("kernel")
async def check_disk_limit_holds(driver: Driver) -> None:
    """A box cannot write more than its disk limit, and goes on."""
    spec = SandboxSpec(limits=Limits(disk=8 << 20))
    async with a_box(driver, spec) as box:
        async with started(box, "sh", "-c", "head -c 32m /dev/zero > /root/big") as running:
            ended, _, err = await running.done()
        assert ended.code != 0
        assert b"No space" in err, err
        assert await output(box, "echo", "fine") == "fine\n"


def _tar(*entries: tuple[str, bytes | None], **more: str) -> bytes:
    """Files, directories (None), and links."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o751
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
        for name, target in more.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return packed.getvalue()


async def _unpacked(box: Box, path: str, tar: bytes) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.write(write, tar)  # at most a pipe full
    os.close(write)
    try:
        async with deadline(_STEP, f"unpacking at {path}"):
            await box.unpack(path, read)
        os.fstat(read)  # still ours
    finally:
        os.close(read)


@_check()
async def check_a_tar_is_unpacked(driver: Driver) -> None:
    """A tar becomes files and directories below a path, over what is there; half a tar, no tar and `..` are errors."""
    async with a_box(driver) as box:
        await _unpacked(box, "/root/new/tree", _tar(("d", None), ("d/f", b"one"), ("g", b"two")))
        assert await output(box, "cat", "/root/new/tree/d/f", "/root/new/tree/g") == "onetwo"
        await _unpacked(box, "/root/new/tree", _tar(("g", b"three")))
        assert await output(box, "cat", "/root/new/tree/d/f", "/root/new/tree/g") == "onethree"
        whole = _tar(("f", bytes(5000)))
        for tar, number in (
            (whole[:2000], errno.EBADMSG),
            (b"x" * 2000, errno.EBADMSG),
            (_tar(("../f", b"x")), errno.EINVAL),
        ):
            try:
                await _unpacked(box, "/root/bad", tar)
            except OSError as error:
                assert error.errno == number, error
            else:
                raise AssertionError(f"{tar[:20]!r} was unpacked")


@_check("kernel")
async def check_a_tar_leads_nowhere_else(driver: Driver) -> None:
    """Modes and links are as in the tar; what goes through a link that the tar brings, is not."""
    async with a_box(driver) as box:
        await _unpacked(box, "/root/t", _tar(("d", None), ("f", b"#!/bin/sh\necho ran"), link="d/inside"))
        assert await output(box, "stat", "-c", "%a %u %N", "/root/t/d", "/root/t/f", "/root/t/link") == (
            "751 0 '/root/t/d'\n751 0 '/root/t/f'\n777 0 '/root/t/link' -> 'd/inside'\n"
        )
        assert await output(box, "/root/t/f") == "ran\n"
        through = _tar(("out/f", b"x"))
        tar = _tar(out="/etc")[:512] + through  # the link first, then a file through it
        with suppress(OSError):  # or the link cannot be made where the directory is
            await _unpacked(box, "/root/u", tar)
        await _fails(box, "/etc/f", os.O_RDONLY, errno.ENOENT)


async def _told(box: Box, what: Look) -> tuple[list[Entry], dict[str, bytes]]:
    """What a look tells: the entries, and what those hold that bring it."""
    told = await _piped(partial(box.look, what))
    entries, contents, at = [], {}, 0
    while (found := entry_at(told, at)) is not None:
        entry, at = found
        entries.append(entry)
        if entry.contents:
            contents[entry.path] = told[at : at + entry.size]
            at += entry.size
    assert at == len(told), "what is told ends with an entry"
    return entries, contents


async def _hits(box: Box, what: Look) -> list[Hit]:
    told = await _piped(partial(box.look, what))
    hits, at = [], 0
    while (found := hit_at(told, at)) is not None:
        hits.append(found[0])
        at = found[1]
    return hits


async def _piped(telling: Callable[[int], Awaitable[None]]) -> bytes:
    """All that is written to a pipe."""
    read, write = os.pipe2(os.O_CLOEXEC)
    reading = asyncio.create_task(_read_to_end(read))
    try:
        async with deadline(_STEP, "looking"):
            await telling(write)
        os.fstat(write)  # still ours
    finally:
        os.close(write)
        told = await reading
        os.close(read)
    return told


async def _store(box: Box, path: str, *data: bytes, mode: int = 0o644, append: bool = False, end: bool = True) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    parts = list(pieces(data))
    os.write(write, b"".join(parts if end else parts[:-1]))  # at most a pipe full
    os.close(write)
    try:
        async with deadline(_STEP, f"storing {path}"):
            await box.store(path, read, mode, append)
        os.fstat(read)  # still ours
    finally:
        os.close(read)


async def _fails_with(work: Awaitable[None], *expected: int) -> None:
    try:
        await work
    except OSError as error:
        assert error.errno in expected, error
    else:
        raise AssertionError(f"no error of {expected}")


@_check()
async def check_what_is_there_is_told(driver: Driver) -> None:
    """A thing, a directory, what a pattern names, what is in files: sorted, a directory before what is in it."""
    async with a_box(driver) as box:
        for name in ("b", "a/x.py", "a/deep/y.py", "a-b", "c"):
            await _written(box, f"/root/t/{name}", name.encode(), 0o640)
        (entry,), _ = await _told(box, Look("/root/t/a/x.py"))
        assert (entry.path, entry.kind, entry.size, entry.mode & 0o7777, entry.target) == ("", "file", 6, 0o640, "")
        assert entry.mtime_ns > 0
        for pattern, names in {
            "*": ["a", "a-b", "b", "c"],
            "**": ["", "a", "a/deep", "a/deep/y.py", "a/x.py", "a-b", "b", "c"],
            "**/*.py": ["a/deep/y.py", "a/x.py"],
            "a/**/**/*": ["a/deep", "a/deep/y.py", "a/x.py"],
            "*/[xyz].*": ["a/x.py"],
            "?": ["a", "b", "c"],
            "nothing/*": [],
        }.items():
            entries, _ = await _told(box, Look("/root/t", pattern))
            assert [each.path for each in entries] == names, (pattern, entries)
        entries, contents = await _told(box, Look("/root/t", "**", contents=True))
        assert len(entries) == 8
        assert contents == {name: name.encode() for name in ("a/deep/y.py", "a/x.py", "a-b", "b", "c")}
        await _fails_with(_ignore(_told(box, Look("/root/missing"))), errno.ENOENT)


async def _ignore(work: Awaitable[object]) -> None:
    await work


@_check()
async def check_text_is_found(driver: Driver) -> None:
    """Lines with a text or an expression are told with their numbers; what holds a NUL is no text."""
    async with a_box(driver) as box:
        await _written(box, "/root/t/a", b"one\ntwo needle and needle\n\nNeedle, last line")
        await _written(box, "/root/t/b", b"needle\0\n")
        await _written(box, "/root/t/c", b"no n.edle\n")
        assert await _hits(box, Look("/root/t", "**", text="needle")) == [Hit("a", 2, 5, "two needle and needle")]
        assert await _hits(box, Look("/root/t/a", text="Needle")) == [Hit("", 4, 1, "Needle, last line")]
        found = await _hits(box, Look("/root/t", "*", text="^(n|t).*e$", regex=True, any_case=True))
        assert [(hit.path, hit.line) for hit in found] == [("a", 2), ("a", 4), ("c", 1)]
        assert await _hits(box, Look("/root/t", "**/c", text="needle")) == []
        await _fails_with(_ignore(_hits(box, Look("/root/t", "**", text="(", regex=True))), errno.EINVAL)


@_check()
async def check_a_file_is_stored_whole_or_not_at_all(driver: Driver) -> None:
    """What is stored takes the place of what is there when all of it has come, parents are made, and an end that is
    missing leaves everything as it was; what is appended comes behind what is there."""
    async with a_box(driver) as box:
        await _store(box, "/root/new/er/f", b"one", b"", b" two", mode=0o600)
        assert await _bytes(box, "/root/new/er/f") == b"one two"
        fd = await box.open("/root/new/er/f", os.O_RDONLY)
        try:
            await _store(box, "/root/new/er/f", b"three", mode=0o644)
            assert os.read(fd, 100) == b"one two", "whoever reads it reads the old one to its end"
        finally:
            os.close(fd)
        assert await _bytes(box, "/root/new/er/f") == b"three"
        await _fails_with(_store(box, "/root/new/er/f", b"half", end=False), errno.EBADMSG)
        await _fails_with(_store(box, "/root/new/er/g", b"half", end=False), errno.EBADMSG)
        await _store(box, "/root/new/er/f", b" and ", b"four", append=True)
        await _store(box, "/root/new/er/h", b"made", append=True)
        entries, contents = await _told(box, Look("/root/new/er", "*", contents=True))
        assert contents == {"f": b"three and four", "h": b"made"}
        assert [entry.mode & 0o777 for entry in entries] == [0o644, 0o644]
        await _fails_with(_store(box, "/root/new", b""), errno.EISDIR)
        await _fails_with(_store(box, "/root/new/er/f/g", b""), errno.ENOTDIR)


@_check()
async def check_files_are_made_moved_and_removed(driver: Driver) -> None:
    """Directories are made with and without their parents; what is moved is there and no longer here, over something
    only when asked; a directory that is not empty goes when that was meant."""
    async with a_box(driver) as box:
        await box.make_directory("/root/a/b", 0o750, parents=True)
        await box.make_directory("/root/a/b", parents=True)
        await _fails_with(box.make_directory("/root/a/b"), errno.EEXIST)
        await _fails_with(box.make_directory("/root/x/y"), errno.ENOENT)
        await _written(box, "/root/a/b/f", b"data")
        await _written(box, "/root/g", b"other")
        await _fails_with(box.make_directory("/root/g", parents=True), errno.EEXIST)
        await _fails_with(box.move("/root/missing", "/root/h"), errno.ENOENT)
        await _fails_with(box.move("/root/g", "/root/x/g"), errno.ENOENT)
        await _fails_with(box.move("/root/g", "/root/a/b/f"), errno.EEXIST)
        await _fails_with(box.move("/root/a", "/root/a/b/c"), errno.EINVAL)
        await _fails_with(box.move("/root/g", "/root/a", True), errno.EISDIR)
        await box.move("/root/g", "/root/a/b/f", True)
        await box.move("/root/a", "/tmp/moved")  # another file system, perhaps
        entries, contents = await _told(box, Look("/tmp/moved", "**", contents=True))
        assert [entry.path for entry in entries] == ["", "b", "b/f"]
        assert entries[1].mode & 0o7777 == 0o750
        assert contents == {"b/f": b"other"}
        await _fails_with(_ignore(_told(box, Look("/root/a"))), errno.ENOENT)
        await _fails_with(box.remove("/tmp/moved"), errno.ENOTEMPTY)
        await box.remove("/tmp/moved/b/f")
        await box.remove("/tmp/moved/b")
        await _written(box, "/tmp/moved/c/d", b"")
        await box.remove("/tmp/moved", True)
        await _fails_with(box.remove("/tmp/moved", True), errno.ENOENT)
        await _fails_with(box.remove("/", True), errno.EINVAL, errno.EBUSY)


@_check()
async def check_modes_are_changed(driver: Driver) -> None:
    """A file and a directory get the mode that they are given, and keep it."""
    async with a_box(driver) as box:
        await _written(box, "/root/d/f", b"")
        await box.change_file("/root/d/f", 0o4711)
        await box.change_file("/root/d", 0o1770)
        entries, _ = await _told(box, Look("/root/d", "**"))
        assert [entry.mode & 0o7777 for entry in entries] == [0o1770, 0o4711]
        assert [(entry.user, entry.group) for entry in entries] == [(0, 0), (0, 0)]
        await _fails_with(box.change_file("/root/missing", 0o600), errno.ENOENT)


@_check()
async def check_what_happens_is_told(driver: Driver) -> None:
    """Who watches is told when it begins, then of what is made, changed and removed, and below a directory if asked;
    it ends with what is watched."""
    async with a_box(driver) as box:
        await _written(box, "/root/w/d/f", b"")
        for deep in (False, True):
            read, write = os.pipe2(os.O_CLOEXEC)
            events = _Events(read)
            watching = asyncio.create_task(box.watch("/root/w", write, deep))
            watching.add_done_callback(lambda _, write=write: os.close(write))  # type: ignore[misc]
            try:
                assert await events.next() == Event("watching", "", True)
                await _store(box, "/root/w/d/f", b"inside")
                await _store(box, "/root/w/g", b"one")
                await _store(box, "/root/w/g", b" two", append=True)
                await box.remove("/root/w/g")
                seen = [await events.next()]
                while seen[-1] != Event("deleted", "g"):
                    seen.append(await events.next())
                told = {event for event in seen if event.kind not in ("attributes", "lost")}
                within = {Event("created", "d/f")} if deep else set()
                assert told >= {Event("created", "g"), Event("changed", "g"), *within}, seen
                assert deep or not any("/" in event.path for event in seen), seen
                if deep:
                    await box.remove("/root/w", True)
                    async with deadline(_STEP, "the end of a watch"):
                        await watching
                        while (await events.next()) != Event("deleted", "", True):
                            pass
            finally:
                watching.cancel()
                await asyncio.wait((watching,))
                events.close()


class _Events:
    """What comes of a watch."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._told = b""

    async def next(self) -> Event:
        async with deadline(_STEP, "an event"):
            while (found := event_at(self._told, 0)) is None:
                with suppress(BlockingIOError):
                    self._told += os.read(self._fd, 1 << 16)
                    continue
                await _readable(self._fd)
        self._told = self._told[found[1] :]
        return found[0]

    def close(self) -> None:
        os.close(self._fd)


@_check("kernel")
async def check_links_and_special_files_are_told_as_they_are(driver: Driver) -> None:
    """A link is told as a link, and followed where it was asked for only, at the beginning; nothing else is read but
    regular files; what is stored through a link is stored where it leads."""
    async with a_box(driver) as box:
        text = "mkdir t; cd t; echo in > f; ln -s f l; ln -s /etc e; ln -s nowhere n; mkfifo p; ln f h"
        await output(box, "sh", "-c", f"cd /root; {text}")
        entries, contents = await _told(box, Look("/root/t", "**", contents=True))
        assert [(entry.path, entry.kind, entry.target) for entry in entries[1:]] == [
            ("e", "link", "/etc"),
            ("f", "file", ""),
            ("h", "file", ""),
            ("l", "link", "f"),
            ("n", "link", "nowhere"),
            ("p", "pipe", ""),
        ]
        assert contents == {"f": b"in\n", "h": b"in\n"}
        (first, second) = (entry for entry in entries if entry.path in "fh" and entry.path)
        assert (first.inode, first.links) == (second.inode, 2)
        (entry,), _ = await _told(box, Look("/root/t/l", follow=True))
        assert entry.kind == "file"
        assert [each.path for each in (await _told(box, Look("/root/t/e", "passwd", follow=True)))[0]] == ["passwd"]
        assert (await _told(box, Look("/root/t/e", "passwd")))[0] == []
        await _store(box, "/root/t/n", b"through")
        assert await output(box, "cat", "/root/t/nowhere") == "through"
        await _fails_with(_store(box, "/root/t/p", b""), errno.ENXIO)
        await _fails_with(_store(box, "/proc/self/comm", b""), errno.EOPNOTSUPP)
        await box.remove("/root/t/e")
        assert await output(box, "ls", "/etc/passwd") == "/etc/passwd\n"


@_check("kernel")
async def check_a_file_that_is_replaced_keeps_its_owner(driver: Driver) -> None:
    """A user's own file stays that user's, whoever stores to it; one is given another owner when that is asked for."""
    async with a_box(driver) as box:
        await _written(box, "/root/f", b"")
        try:
            await box.change_file("/root/f", user=1000, group=1001)
        except OSError as error:
            assert error.errno == errno.EINVAL, error  # this host lends one id
            return
        await _store(box, "/root/f", b"new")
        (entry,), _ = await _told(box, Look("/root/f"))
        assert (entry.user, entry.group, entry.size) == (1000, 1001, 3)


@_check()
async def check_files_written_are_counted(driver: Driver) -> None:
    """`stats` counts the bytes and the number of files that a box wrote, and forgets those it removed."""
    async with a_box(driver) as box:
        before = await box.stats()
        await _written(box, "/root/some/data", bytes(300_000))
        after = await box.stats()
        assert after.disk - before.disk >= 300_000, (before, after)
        assert after.inodes > before.inodes, (before, after)


@_check("kernel")
async def check_what_runs_is_counted(driver: Driver) -> None:
    """`stats` counts processes, processor time and memory, where this host counts them at all."""
    async with a_box(driver) as box:
        before = await box.stats()
        busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; head -c 20m /dev/zero > /root/big"
        async with started(box, "sleep", "600"):
            await output(box, "sh", "-c", busy)
            after = await box.stats()
        if after.pids is not None:
            assert after.pids > (before.pids or 0), (before, after)
        if after.cpu_seconds is not None:
            assert after.cpu_seconds > (before.cpu_seconds or 0), (before, after)
        if after.memory is not None:
            assert after.memory - (before.memory or 0) >= 19 << 20, (before, after)  # some of it is counted in batches
            assert after.memory_peak is None or after.memory_peak >= after.memory - (1 << 20), after


@_check()
async def check_a_snapshot_is_an_image(driver: Driver) -> None:
    """A box made from a snapshot has the files of the first as they were then, and neither sees what the other does."""
    async with a_box(driver) as box:
        await _written(box, "/root/f", b"then")
        async with a_snapshot(driver, box) as info:
            await _written(box, "/root/f", b"later")
            assert info in await driver.images(), info
            assert (info.base, info.layers) == ("host", 1), info
            async with a_box(driver, SandboxSpec(image=info.name)) as second:
                assert await _bytes(second, "/root/f") == b"then"
                await _written(second, "/root/f", b"its own")
                await _written(second, "/root/more", b"")
                async with a_snapshot(driver, second) as over, a_box(driver, SandboxSpec(image=over.name)) as third:
                    assert await _bytes(third, "/root/f") == b"its own"
            assert await _bytes(box, "/root/f") == b"later"
            await _fails(box, "/root/more", os.O_RDONLY, errno.ENOENT)


@_check()
async def check_a_snapshot_says_how_commands_run_in_it(driver: Driver) -> None:
    """The configuration given with a snapshot is its boxes', and that of what is made from them."""
    config = ImageConfig(env={"A": "b"}, workdir="/tmp")
    async with a_box(driver) as box:
        name = f"check-{secrets.token_hex(5)}"
        assert (await driver.snapshot(box, name, config)).config == config
        try:
            async with a_box(driver, SandboxSpec(image=name)) as second, a_snapshot(driver, second) as again:
                assert second.config == again.config == config
        finally:
            await driver.forget(name)


@_check()
async def check_names_of_snapshots_are_checked(driver: Driver) -> None:
    """A taken name is a Conflict, one that cannot be a name InvalidRequest; neither leaves anything."""
    async with a_box(driver) as box, a_snapshot(driver, box) as info:
        before = await driver.images()
        for name, expected in ((info.name, Conflict), ("host", InvalidRequest), ("../x", InvalidRequest)):
            try:
                await driver.snapshot(box, name)
            except expected:
                continue
            raise AssertionError(f"a snapshot was made under the name {name}")
        assert await driver.images() == before


@_check()
async def check_a_snapshot_without_a_name_is_listed_nowhere(driver: Driver) -> None:
    """A snapshot without a name can be started from, and is in no list."""
    async with a_box(driver) as box:
        await _written(box, "/root/f", b"forked")
        before = await driver.images()
        async with a_snapshot(driver, box, named=False) as info:
            await driver.prune()  # nobody stands on it yet, and it stays
            assert await driver.images() == before
            async with a_box(driver, SandboxSpec(image=info.name)) as second:
                assert await _bytes(second, "/root/f") == b"forked"


@_check()
async def check_a_forgotten_image_is_gone_for_new_boxes_only(driver: Driver) -> None:
    """A forgotten image is NotFound; boxes made from it have their files, and can be copied. `host` stays."""
    async with a_box(driver) as box:
        await _written(box, "/root/f", b"kept")
        async with a_snapshot(driver, box) as info, a_box(driver, SandboxSpec(image=info.name)) as second:
            await driver.forget(info.name)
            await driver.prune()
            assert info not in await driver.images()
            for missing in (driver.forget(info.name), _made(driver, SandboxSpec(image=info.name))):
                try:
                    await missing
                except NotFound:
                    continue
                raise AssertionError(f"the forgotten image {info.name} is there")
            assert await _bytes(second, "/root/f") == b"kept"
            async with a_snapshot(driver, second) as again, a_box(driver, SandboxSpec(image=again.name)) as third:
                assert await _bytes(third, "/root/f") == b"kept"
    try:
        await driver.forget("host")
    except Conflict:
        return
    raise AssertionError("the image host was forgotten")


async def _made(driver: Driver, spec: SandboxSpec) -> None:
    async with a_box(driver, spec):
        pass


@_check()
async def check_an_export_is_a_tar(driver: Driver) -> None:
    """An exported snapshot is a tar of what was written, and the descriptor is still the caller's; one that does not
    exist is NotFound."""
    async with a_box(driver) as box:
        await _written(box, "/root/f", b"exported")
        async with a_snapshot(driver, box) as info:
            with tempfile.TemporaryFile() as file:
                async with deadline(_STEP, "exporting a snapshot"):
                    await driver.export(info.name, file.fileno())
                file.seek(0)
                with tarfile.open(fileobj=file) as tar:
                    found = tar.extractfile("root/f")
                    assert found is not None
                    assert found.read() == b"exported"
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        await driver.export("no-such-image", null)
    except NotFound:
        return
    finally:
        os.close(null)
    raise AssertionError("an image that does not exist was exported")


@_check("kernel")
async def check_an_import_is_an_image(driver: Driver) -> None:
    """A tar of a root file system becomes an image of its files under a name that nobody else has, and is listed; what
    is no tar is BadImage, a file that is not there NotFound, and none of them leaves anything."""
    name = f"check-{secrets.token_hex(5)}"
    before = await driver.images()
    with tempfile.TemporaryDirectory() as scratch:
        tar = Path(scratch) / "root.tar"
        tar.write_bytes(_tar(("etc", None), ("etc/issue", b"imported")))
        bad = Path(scratch) / "bad.tar"
        bad.write_bytes(b"no tar" * 1000)
        for path, expected in ((bad, BadImage), (Path(scratch) / "none", NotFound)):
            await _not_done(driver.import_(name, path, Progress()), expected)
        assert await driver.images() == before
        async with deadline(_STEP, "importing an image"):
            info = await driver.import_(name, tar, Progress())
        try:
            assert info in await driver.images(), info
            async with a_box(driver, SandboxSpec(image=name)) as box:
                assert await _bytes(box, "/etc/issue") == b"imported"
            await _not_done(driver.import_(name, tar, Progress()), Conflict)
        finally:
            await driver.forget(name)
            await driver.prune()
    assert await driver.images() == before


@_check("kernel")
async def check_a_pull_that_fails_leaves_nothing(driver: Driver) -> None:
    """A registry that does not answer is Unreachable, and there is no image, not even one that nobody lists."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        reference = f"127.0.0.1:{taken.getsockname()[1]}/none:here"
    before = await driver.images()
    async with deadline(_STEP, "failing to pull"):
        await _not_done(driver.pull(reference, Progress()), Unreachable)
    assert await driver.images() == before
    await _not_done(driver.image(reference), NotFound)


async def _not_done(work: Awaitable[object], expected: type[SandlotError]) -> None:
    try:
        found = await work
    except expected:
        return
    raise AssertionError(f"{found!r} is no {expected.__name__}")


@_check()
async def check_a_tag_is_another_name(driver: Driver) -> None:
    """What was built is there under its new name as well, with a config of its own; a built image is replaced, a
    snapshot is not."""
    name = f"check-{secrets.token_hex(5)}"
    async with a_box(driver) as box:
        await _written(box, "/root/f", b"built")
        async with a_snapshot(driver, box) as info:
            await _not_done(driver.tag(info.name, info.name), Conflict)
            await _not_done(driver.tag(f"no-{name}", name), NotFound)
            await driver.tag(info.name, name)
            tagged = await driver.tag(info.name, name, ImageConfig(workdir="/tmp"))
    try:
        assert (tagged.kind, tagged.config.workdir) == ("built", "/tmp"), tagged
        async with a_box(driver, SandboxSpec(image=name)) as second:
            assert second.config == tagged.config
            assert await _bytes(second, "/root/f") == b"built"
    finally:
        await driver.forget(name)


@_check()
async def check_changes_are_told(driver: Driver) -> None:
    """What was written is added, or changed where the image had it, sorted by path; a new box has changed nothing."""
    async with a_box(driver) as box:
        assert await box.changes() == []
        await _written(box, "/tmp/b", b"1")
        await _written(box, "/root/a", b"2")
        assert await box.changes() == [Change(path="/root/a", kind="added"), Change(path="/tmp/b", kind="added")]
        async with a_snapshot(driver, box) as info, a_box(driver, SandboxSpec(image=info.name)) as second:
            assert await second.changes() == []
            await _written(second, "/root/a", b"3")
            await _written(second, "/root/c", b"4")
            assert await second.changes() == [
                Change(path="/root/a", kind="changed"),
                Change(path="/root/c", kind="added"),
            ]


@_check("kernel")
async def check_what_was_deleted_is_told(driver: Driver) -> None:
    """What the image had and the box has not is deleted; a directory is told as one."""
    async with a_box(driver) as box:
        await output(box, "sh", "-c", "mkdir /srv/d; touch /srv/d/f /srv/g")
        assert await box.changes() == [
            Change(path="/srv/d", kind="added", directory=True),
            Change(path="/srv/d/f", kind="added"),
            Change(path="/srv/g", kind="added"),
        ]
        async with a_snapshot(driver, box) as info, a_box(driver, SandboxSpec(image=info.name)) as second:
            await output(second, "sh", "-c", "rm /srv/g /srv/d/f; touch /srv/d/h")
            assert await second.changes() == [
                Change(path="/srv/d/f", kind="deleted"),
                Change(path="/srv/d/h", kind="added"),
                Change(path="/srv/g", kind="deleted"),
            ]


@_check()
async def check_a_paused_box_starts_nothing(driver: Driver) -> None:
    """In a paused box nothing can be started and files can be read and written; both calls may be made twice."""
    async with a_box(driver) as box:
        await box.resume()
        seen = [box.paused]
        await box.pause()
        await box.pause()
        seen.append(box.paused)
        try:
            await output(box, "echo", "started")
            raise AssertionError("a command was started in a paused box")
        except Conflict:
            pass
        await _written(box, "/tmp/f", b"meanwhile")
        assert await _bytes(box, "/tmp/f") == b"meanwhile"
        await box.resume()
        await box.resume()
        assert [*seen, box.paused] == [False, True, False]
        assert await output(box, "cat", "/tmp/f") == "meanwhile"


@_check()
async def check_a_paused_box_can_be_destroyed(driver: Driver) -> None:
    """destroy ends a box that stands still, and what stood still in it."""
    async with a_box(driver) as box, started(box, "sleep", "60") as running:
        await box.pause()
        async with deadline(_STEP, "the end of a paused box"):
            assert (await box.destroy(Ending.KILLED)).ending == Ending.KILLED
        assert (await running.process.wait()).signal == signal.SIGKILL


@_check("kernel")
async def check_nothing_runs_in_a_paused_box(driver: Driver) -> None:
    """What runs stands still while its box is paused, and goes on."""
    async with a_box(driver) as box:
        count = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; done"
        async with started(box, "sh", "-c", count):
            await output(box, "sh", "-c", "until [ -s /tmp/count ]; do sleep 0.01; done")
            await box.pause()
            stopped_at = await _bytes(box, "/tmp/count")
            await asyncio.sleep(0.05)
            assert await _bytes(box, "/tmp/count") == stopped_at
            await box.resume()
            await output(
                box, "sh", "-c", f'while [ "$(cat /tmp/count)" = {stopped_at.decode().strip() or 0} ]; do :; done'
            )


@_check()
async def check_a_parked_box_becomes_what_is_asked_for(driver: Driver) -> None:
    """A parked box fits what asks for no other image, files or volumes, and once claimed is a box like any."""
    parked = SandboxSpec()
    wanted = SandboxSpec(labels={"a": "b"}, env={"C": "d"}, lifetime=600.0)
    assert driver.fits(parked, wanted, frozenset())
    with tempfile.TemporaryDirectory(prefix="sandlot-check-") as directory:
        volumes = (Volume(source=directory, target="/mnt/data"),)
        for other in (SandboxSpec(image="another"), SandboxSpec(volumes=volumes)):
            assert not driver.fits(parked, other, frozenset()), other
    async with a_box(driver, parked, Keeping(parked=True)) as box:
        async with deadline(_STEP, "claiming a box"):
            await driver.claim(box, wanted, frozenset(), NOT_KEPT)
        assert await output(box, "echo", "mine") == "mine\n"
        await _written(box, "/root/f", b"1")
        assert await box.changes() == [Change(path="/root/f", kind="added")]


@_check()
async def check_a_dead_parked_box_cannot_be_claimed(driver: Driver) -> None:
    """Claiming a box that has died raises."""
    async with a_box(driver, None, Keeping(parked=True)) as box:
        await box.destroy()
        try:
            await driver.claim(box, SandboxSpec(), frozenset(), NOT_KEPT)
        except (OSError, SandlotError):
            return
        raise AssertionError("a dead box was claimed")


@_check("kernel")
async def check_a_claimed_box_has_the_lifetime_asked_for(driver: Driver) -> None:
    """The lifetime of a claimed box counts from the claim, and it ends by itself."""
    async with a_box(driver, None, Keeping(parked=True)) as box:
        await driver.claim(box, SandboxSpec(lifetime=0.3), frozenset(), NOT_KEPT)
        async with deadline(_STEP, "the end of a lifetime"):
            death = await asyncio.shield(box.death)
        assert death.ending == Ending.LIFETIME, death


@_check()
async def check_where_nothing_was_left_nothing_is_found(driver: Driver) -> None:
    """In an empty directory there is nothing to adopt, and nothing to sweep."""
    assert await driver.adopt() == ([], [])
    with tempfile.TemporaryDirectory(prefix="sandlot-check-") as directory:
        assert await driver.sweep(Path(directory))
        assert os.listdir(directory) == []  # noqa: PTH208  (the other form would be a blocking call too)


# Seconds; of the box that `leave` leaves to die.
_SHORT = 1.0


async def leave(driver: Driver) -> None:
    """Make what the checks that need "adoption" find: a box with a port and two commands, one that is parked, and one
    whose lifetime ends when there is no node. The process that calls this is to be killed, and not to end its boxes."""
    box = await driver.create("sb-left", SandboxSpec(), frozenset(), Keeping(60.0, "of the box"))
    await _written(box, "/root/f", b"left")
    listener = await box.listen(8484, "of the port")
    listener.detach()
    for argv, note in ((("echo", "said"), "of echo"), (("cat",), "of cat")):
        (stdin_r, stdin_w), (out_r, out_w) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        process = await box.spawn(Spawn(argv, _ENV, "/root"), stdin_r, out_w, out_w, Hold((stdin_w, out_r), note))
        os.close(stdin_r)
        os.close(out_w)
        if note == "of echo":
            await process.wait()  # it has ended, and that is held until somebody releases it
    await driver.create("sb-parked", SandboxSpec(), frozenset(), Keeping(60.0, "parked", parked=True))
    await driver.create("sb-short", SandboxSpec(lifetime=_SHORT), frozenset(), Keeping(60.0, "of the short one"))


@_check("adoption")
async def check_what_a_dead_node_left_is_adopted(driver: Driver) -> None:
    """adopt brings the box with its files, port and commands, the end too of what has ended; a parked box is ended, of
    one that died meanwhile it is told how."""
    await asyncio.sleep(_SHORT + 0.5)
    async with deadline(_STEP, "adopting what was left"):
        adopted, remains = await driver.adopt()
    assert [(each.note, each.death.ending) for each in remains] == [("of the short one", Ending.LIFETIME)], remains
    for each in remains:
        each.forget()
    assert [each.note for each in adopted] == ["of the box"], adopted
    box = adopted[0].box
    try:
        assert await _bytes(box, "/root/f") == b"left"
        assert await output(box, "echo", "works") == "works\n"
        await _check_held(adopted[0])
    finally:
        async with deadline(_STEP, "destroying an adopted box"):
            assert (await box.destroy(Ending.KILLED)).ending == Ending.KILLED


async def _check_held(adopted: Adopted) -> None:
    ((listener, port, note),) = adopted.listeners
    with listener:
        assert (port, note) == (8484, "of the port")
        with await adopted.box.connect(port):
            async with deadline(_STEP, "accepting a connection from inside"):
                (await asyncio.get_running_loop().sock_accept(listener))[0].close()
    runs = {note: (process, fds) for process, note, fds in adopted.runs}
    assert set(runs) == {"of echo", "of cat"}, runs
    os.write(runs["of cat"][1][0], b"typed\n")
    for note, said in (("of echo", b"said\n"), ("of cat", b"typed\n")):
        process, (stdin, out) = runs[note]
        os.close(stdin)
        async with deadline(_STEP, f"the end {note}"):
            if note == "of cat":
                await _readable(out)  # it says so once it runs again
                await process.kill_tree()
            ended = await process.wait()
            assert await _read_to_end(out) == said
        os.close(out)
        assert (ended.code, ended.signal) == ((0, None) if note == "of echo" else (None, signal.SIGKILL)), ended
        await process.release()

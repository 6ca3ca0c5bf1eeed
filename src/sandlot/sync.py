"""The blocking twin of sandbox.py: the same calls without `async`. Written by tools/make_sync.py only.

All SyncSandboxes of a process share one event loop in one background thread, which is started by the first of them and
ends, with every sandbox that is still open, when the interpreter exits. Calls may come from any thread. A process that
forks starts anew in the child: sandboxes made before belong to the parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from sandlot.api import (
    Change,
    Chunk,
    CommandInfo,
    ImageInfo,
    Info,
    Limits,
    NodeAPI,
    Profile,
    RunResult,
    ShellOutput,
    ShellResult,
    Stats,
    Target,
    Volume,
)
from sandlot.sandbox import Command, Sandbox, Shell

T = TypeVar("T")

# Seconds that ending the sandboxes which are still open may take when the interpreter exits.
_EXIT_SECONDS = 30.0


class _Background:
    """The thread and its loop; both None until they are needed."""

    lock = threading.Lock()
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop:
        with cls.lock:
            if cls.loop is None:
                cls.loop = asyncio.new_event_loop()
                cls.thread = threading.Thread(target=cls.loop.run_forever, name="sandlot", daemon=True)
                cls.thread.start()
            return cls.loop

    @classmethod
    def stop(cls) -> None:
        if cls.loop is None or cls.thread is None:
            return
        asyncio.run_coroutine_threadsafe(cls.loop.shutdown_asyncgens(), cls.loop).result(_EXIT_SECONDS)
        cls.loop.call_soon_threadsafe(cls.loop.stop)
        cls.thread.join(_EXIT_SECONDS)
        cls.loop.close()
        cls.forget()

    @classmethod
    def forget(cls) -> None:
        cls.lock = threading.Lock()
        cls.loop = cls.thread = None


atexit.register(_Background.stop)
os.register_at_fork(after_in_child=_Background.forget)


def _wait(work: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(work, _Background.running())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C while waiting: the work is given up too
        raise


_END = object()


def _iterate(items: AsyncIterator[T]) -> Iterator[T]:
    async def following() -> Any:
        return await anext(items, _END)

    async def close() -> None:
        await items.aclose()  # type: ignore[attr-defined]

    try:
        while (item := _wait(following())) is not _END:
            yield item
    finally:
        _wait(close())


class SyncSandbox:
    """One isolated Linux box: `with SyncSandbox.create() as box: print(box.run("uname").stdout)`."""

    def __init__(self, inner: Sandbox) -> None:
        """Use `create`."""
        self._inner = inner
        self.id = inner.id
        self.losses = inner.losses

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def create(
        cls,
        image: str = "host",
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        hostname: str | None = None,
        network: Literal["none", "host"] | None = None,
        profile: Profile | str | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        volumes: Sequence[Volume | Mapping[str, Any]] | None = None,
        labels: Mapping[str, str] | None = None,
        setuid: bool | None = None,
        nested: bool | None = None,
        lifetime: float | None = None,
        idle_timeout: float | None = None,
        node: NodeAPI | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> SyncSandbox:
        """A new sandbox in which a command can run. What the arguments mean: `SandboxSpec`; None is its default.

        It lives on `node` if one is given, else on the server at `url`, else in this process. A limit that is named
        in `limits` is refused (Unsupported) where the host cannot keep it; `losses` says which defaults it does not.
        """
        return cls(_wait(
            Sandbox.create(
                image,
                env=env,
                cwd=cwd,
                hostname=hostname,
                network=network,
                profile=profile,
                limits=limits,
                volumes=volumes,
                labels=labels,
                setuid=setuid,
                nested=nested,
                lifetime=lifetime,
                idle_timeout=idle_timeout,
                node=node,
                url=url,
                api_key=api_key,
            )
        ))

    @classmethod
    def attach(
        cls, sandbox_id: str, *, node: NodeAPI | None = None, url: str | None = None, api_key: str | None = None
    ) -> SyncSandbox:
        """A sandbox that exists already, by its id. Raises NotFound."""
        return cls(_wait(
            Sandbox.attach(
                sandbox_id,
                node=node,
                url=url,
                api_key=api_key,
            )
        ))

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str = b"",
        timeout: float | None = 300.0,
        user: int | None = None,
        output_cap: int | None = None,
        key: str | None = None,
    ) -> RunResult:
        """Run a command to its end. Text is run by `sh -c`; a sequence is a program and its arguments.

        A failure of the command is in the result, never an exception: `exit_code`, `signal`, `timed_out`, `oom`. Of
        each stream `output_cap` bytes are kept (None: the sandbox's `limits.output`). `timeout` is in seconds; None: as
        long as the sandbox lives. A run with a `key` is started once, however often it is asked for, and goes on when
        its caller goes away.
        """
        return _wait(
            self._inner.run(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout=timeout,
                user=user,
                output_cap=output_cap,
                key=key,
            )
        )

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str = b"",
        stdin_open: bool = False,
        timeout: float | None = None,
        user: int | None = None,
        output_cap: int | None = None,
        key: str | None = None,
    ) -> SyncCommand:
        """Start a command and leave it to itself, as `run` does it otherwise. With `stdin_open` more input comes by
        `Command.write`. It goes on when this program goes away: `command(id)` finds it again."""
        return SyncCommand(_wait(
            self._inner.start(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                stdin_open=stdin_open,
                timeout=timeout,
                user=user,
                output_cap=output_cap,
                key=key,
            )
        ))

    def commands(self) -> list[CommandInfo]:
        """Commands that were started or run with a key: those that run, and those whose result can still be had."""
        return _wait(
            self._inner.commands()
        )

    def command(self, command_id: str) -> SyncCommand:
        """One of them, by its id. Whether there is one is seen when it is asked for something."""
        return SyncCommand(_wait(
            self._inner.command(
                command_id,
            )
        ))

    def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: int | None = None
    ) -> SyncShell:
        """A bash that lives on between commands; `sh` where the image has none, and then `lacks` says what it cannot.
        A reset of the sandbox ends it."""
        return SyncShell(_wait(
            self._inner.shell(
                cwd=cwd,
                env=env,
                user=user,
            )
        ))

    def read_file(self, path: str) -> bytes:
        """The bytes of a regular file inside, up to 64 MiB. `path` is absolute."""
        return _wait(
            self._inner.read_file(
                path,
            )
        )

    def write_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Make or replace a file inside, with its missing parents; text as UTF-8. Not atomic: written in place."""
        _wait(
            self._inner.write_file(
                path,
                data,
                mode,
            )
        )

    def route(self, port: int, target: Target) -> None:
        """Let `target`, an ASGI application of this process or an Upstream, answer on 127.0.0.1:port inside.

        The sandbox needs no network for it and reaches nothing else through it. Later runs from this object find the
        address in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, with a placeholder for a key.
        """
        _wait(
            self._inner.route(
                port,
                target,
            )
        )

    def reset(self, image: str | None = None) -> None:
        """Back to its image, or to another one such as a snapshot: processes and files are gone; id, limits, labels and
        routes stay."""
        _wait(
            self._inner.reset(
                image,
            )
        )

    def snapshot(self, name: str) -> ImageInfo:
        """Make an image of its files as they are now, from which `Sandbox.create(image=name)` starts others. Raises
        Conflict when the name is taken."""
        return _wait(
            self._inner.snapshot(
                name,
            )
        )

    def fork(self, count: int = 1) -> list[SyncSandbox]:
        """So many new sandboxes like this one, with its files as they are now and none of its processes."""
        return [SyncSandbox(each) for each in _wait(
            self._inner.fork(
                count,
            )
        )]

    def diff(self) -> list[Change]:
        """What differs from its image, sorted by path."""
        return _wait(
            self._inner.diff()
        )

    def pause(self) -> None:
        """Stop every process where it is."""
        _wait(
            self._inner.pause()
        )

    def resume(self) -> None:
        """Let them go on."""
        _wait(
            self._inner.resume()
        )

    def info(self) -> Info:
        """What is known of it; after its end, why it ended."""
        return _wait(
            self._inner.info()
        )

    def stats(self) -> Stats:
        """What it uses now: memory, CPU seconds, processes, disk."""
        return _wait(
            self._inner.stats()
        )

    def close(self) -> Info:
        """End it; idempotent. On return no process of it is left."""
        return _wait(
            self._inner.close()
        )


class SyncCommand:
    """A command that runs in a sandbox by itself."""

    def __init__(self, inner: Command) -> None:
        """Use `SyncSandbox.start`."""
        self._inner = inner
        self.id = inner.id

    def wait(self) -> RunResult:
        """How it ended, once it has. Whoever waits may go away and come back."""
        return _wait(
            self._inner.wait()
        )

    def output(self, out: int = 0, err: int = 0) -> Iterator[Chunk]:
        """What it writes, as it comes, from these offsets of its two streams on, until it has ended."""
        yield from _iterate(
            self._inner.output(
                out,
                err,
            )
        )

    def write(self, data: bytes | str, *, end: bool = False) -> None:
        """More for its standard input; `end` closes it. Returns when the command's pipe has taken it. Raises Conflict
        when it takes no more."""
        _wait(
            self._inner.write(
                data,
                end=end,
            )
        )

    def signal(self, number: int) -> None:
        """Send a signal to it and its process group: 2 as ^C does, 15 to ask it to end. No error when it has ended."""
        _wait(
            self._inner.signal(
                number,
            )
        )

    def kill(self) -> None:
        """End it with its whole tree."""
        _wait(
            self._inner.kill()
        )


class SyncShell:
    """A bash in a sandbox, which keeps its directory, variables, functions, options and jobs."""

    def __init__(self, inner: Shell) -> None:
        """Use `SyncSandbox.shell`."""
        self._inner = inner
        self.id = inner.id
        self.lacks = inner.lacks

    def __enter__(self) -> SyncShell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        command: str,
        *,
        stdin: bytes | str = b"",
        timeout: float | None = 300.0,
        output_cap: int | None = None,
        queue: bool = False,
    ) -> ShellResult:
        """Run a text as if it was typed, to its end: no quoting, any number of lines.

        At its timeout it is interrupted as by ^C, then killed, and the shell goes on. `exit` and `exec` end the shell,
        and `ended` says so. Raises Conflict when another text runs, unless it may `queue`, or the shell has ended.
        """
        return _wait(
            self._inner.run(
                command,
                stdin=stdin,
                timeout=timeout,
                output_cap=output_cap,
                queue=queue,
            )
        )

    def output(self, command_id: str) -> ShellOutput:
        """What a finished command and its children in the background have written so far, by `ShellResult.id`. Raises
        NotFound: it had no such children, or that was too long ago."""
        return _wait(
            self._inner.output(
                command_id,
            )
        )

    def interrupt(self) -> bool:
        """End what runs, as ^C does, then less politely; the shell goes on. False: nothing ran."""
        return _wait(
            self._inner.interrupt()
        )

    def close(self) -> None:
        """End it with all that runs in it; idempotent."""
        _wait(
            self._inner.close()
        )

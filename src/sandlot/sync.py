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
from pathlib import Path
from typing import Any, Literal, TypeVar

from sandlot.api import (
    EVERY,
    REPLAY,
    Change,
    Chunk,
    CommandInfo,
    FileEvent,
    FileInfo,
    FilesFound,
    ImageInfo,
    Info,
    Limits,
    NodeAPI,
    Profile,
    Progress,
    RunResult,
    ShellOutput,
    ShellResult,
    State,
    Stats,
    Target,
    TerminalEnd,
    TerminalInfo,
    TextFound,
    Volume,
)
from sandlot.errors import SandlotError
from sandlot.sandbox import Command, Sandbox, Shell, Terminal

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
        key: str | None = None,
        node: NodeAPI | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> SyncSandbox:
        """A new sandbox in which a command can run. What the arguments mean: `SandboxSpec`; None is its default.

        It lives on `node` if one is given, else on the server at `url`, else in this process. A limit that is named
        in `limits` is refused (Unsupported) where the host cannot keep it; `losses` says which defaults it does not.
        With a `key` it is made once, and whoever creates it again with the same words gets it.
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
                key=key,
                node=node,
                url=url,
                api_key=api_key,
            )
        ))

    @classmethod
    def create_many(
        cls,
        count: int,
        image: str = "host",
        *,
        node: NodeAPI | None = None,
        url: str | None = None,
        api_key: str | None = None,
        **more: Any,
    ) -> list[SyncSandbox | SandlotError]:
        """So many new sandboxes at once, each as `create` makes it from the same words. In the place of one that could
        not be made is its error. With a `key` they are made once."""
        return [SyncSandbox(each) if isinstance(each, Sandbox) else each for each in _wait(
            Sandbox.create_many(
                count,
                image,
                node=node,
                url=url,
                api_key=api_key,
                **more,
            )
        )]

    @classmethod
    def find(
        cls,
        *,
        states: Sequence[State] = EVERY.states,
        labels: Mapping[str, str | None] | None = None,
        image: str | None = None,
        node: NodeAPI | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> list[Info]:
        """What is known of the sandboxes that fit, ended ones too if `states` says so, the oldest first. A label that
        is None may say anything."""
        return _wait(
            Sandbox.find(
                states=states,
                labels=labels,
                image=image,
                node=node,
                url=url,
                api_key=api_key,
            )
        )

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
        user: int | str | None = None,
        output_cap: int | None = None,
        key: str | None = None,
        kill_on_disconnect: bool = False,
    ) -> RunResult:
        """Run a command to its end. Text is run by `sh -c`; a sequence is a program and its arguments.

        A failure of the command is in the result, never an exception: `exit_code`, `signal`, `timed_out`, `oom`. Of
        each stream `output_cap` bytes are kept (None: the sandbox's `limits.output`). `timeout` is in seconds; None: as
        long as the sandbox lives. A run with a `key` is started once, however often it is asked for, and goes on when
        its caller goes away, unless it is to be killed when the last of them does (`kill_on_disconnect`).
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
                kill_on_disconnect=kill_on_disconnect,
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
        user: int | str | None = None,
        output_cap: int | None = None,
        lossless: bool = False,
        key: str | None = None,
        kill_on_disconnect: bool = False,
    ) -> SyncCommand:
        """Start a command and leave it to itself, as `run` does it otherwise. With `stdin_open` more input comes by
        `Command.write`. One that is `lossless` waits for who is slow to follow its output, and else misses what is past
        the cap. It goes on when this program goes away, and `command(id)` finds it again; with `kill_on_disconnect` it
        ends when whoever waits for it or follows it does."""
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
                lossless=lossless,
                key=key,
                kill_on_disconnect=kill_on_disconnect,
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
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: int | str | None = None
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

    def terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: int | str | None = None,
    ) -> SyncTerminal:
        """A program on a terminal of its own, for a person or for what only talks to one: a login shell, unless a
        `command` is given, as to `run`. A program that writes more than is read waits, as on any terminal. A reset of
        the sandbox ends it."""
        return SyncTerminal(_wait(
            self._inner.terminal(
                command,
                rows=rows,
                columns=columns,
                cwd=cwd,
                env=env,
                user=user,
            )
        ))

    def terminals(self) -> list[TerminalInfo]:
        """Its terminals, those whose program has ended and that nobody has closed too."""
        return _wait(
            self._inner.terminals()
        )

    def attach_terminal(self, terminal_id: str, *, replay: int = REPLAY, watch: bool = False) -> SyncTerminal:
        """Come back to a terminal: its last `replay` bytes are read first, at most 256 KiB. Who was attached before is
        told that it was taken, unless this one only `watch`es. Raises NotFound."""
        return SyncTerminal(_wait(
            self._inner.attach_terminal(
                terminal_id,
                replay=replay,
                watch=watch,
            )
        ))

    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a regular file inside, up to 64 MiB, or so many of them from an offset on. `path` is absolute,
        as all of them here. Raises NotFound, InvalidRequest."""
        return _wait(
            self._inner.read_file(
                path,
                offset,
                length,
            )
        )

    def write_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Make a file inside, with its missing parents, or replace it at once: nobody sees half of it. Text as UTF-8.
        Raises InvalidRequest (no regular file, a full disk), Conflict (a file is where a directory is to be)."""
        _wait(
            self._inner.write_file(
                path,
                data,
                mode,
            )
        )

    def append_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Add to the end of a file inside, which is made with this mode if it is missing. Raises as `write_file`."""
        _wait(
            self._inner.append_file(
                path,
                data,
                mode,
            )
        )

    def upload(self, local: str | Path, path: str, *, user: int = 0, progress: Progress | None = None) -> None:
        """Copy a file of this host to `path`, or what is in a directory of this host below `path`; of any size. What is
        made belongs to `user`. `progress` is told how many bytes have gone, and of how many. Raises NotFound (here),
        InvalidRequest, Conflict."""
        _wait(
            self._inner.upload(
                local,
                path,
                user=user,
                progress=progress,
            )
        )

    def download(self, path: str, local: str | Path, *, progress: Progress | None = None) -> None:
        """Copy a file inside to `local`, or into it if that is a directory; or what is in a directory inside below the
        directory `local`, which is made. Links are copied as links; what is written is the caller's, and never outside
        `local`. A `local` that is itself a link to a directory is refused, for an earlier download may have left it;
        links on the way to it are followed. `progress` is told how many bytes have come, and of how many where that is
        known. Raises NotFound, InvalidRequest, Conflict (such a link), HostFault (here)."""
        _wait(
            self._inner.download(
                path,
                local,
                progress=progress,
            )
        )

    def stat_file(self, path: str, follow: bool = False) -> FileInfo:
        """What is at a path: of a link the link itself, unless it is to `follow` it. Raises NotFound."""
        return _wait(
            self._inner.stat_file(
                path,
                follow,
            )
        )

    def list_files(self, path: str) -> list[FileInfo]:
        """What is in a directory, sorted by name. Raises NotFound, InvalidRequest (no directory)."""
        return _wait(
            self._inner.list_files(
                path,
            )
        )

    def glob_files(self, pattern: str, limit: int = 10_000) -> FilesFound:
        """What an absolute pattern names: `*`, `?` and `[a-z]` in names, hidden ones too, and `**` for any number of
        directories. A directory comes before what is in it, names in the order of their bytes."""
        return _wait(
            self._inner.glob_files(
                pattern,
                limit,
            )
        )

    def find_text(
        self,
        text: str,
        path: str = "/",
        *,
        names: str = "**",
        regex: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
    ) -> TextFound:
        """The lines with a text in the file `path`, or in those below it that the pattern `names` does, as `**/*.py`.
        `regex`: as `grep -E` takes it. Raises NotFound, InvalidRequest (no expression)."""
        return _wait(
            self._inner.find_text(
                text,
                path,
                names=names,
                regex=regex,
                ignore_case=ignore_case,
                limit=limit,
            )
        )

    def make_directory(self, path: str, mode: int = 0o755, parents: bool = True) -> None:
        """Make a directory. With `parents` the missing ones on the way too, and one that is there already is fine.
        Raises NotFound (its parent), Conflict (something is there)."""
        _wait(
            self._inner.make_directory(
                path,
                mode,
                parents,
            )
        )

    def move_file(self, path: str, to: str, replace: bool = False) -> None:
        """Give a file, link or directory another path, at once. Raises NotFound, Conflict (something is there, and it
        is not to be replaced, or cannot be)."""
        _wait(
            self._inner.move_file(
                path,
                to,
                replace,
            )
        )

    def remove_file(self, path: str, recursive: bool = False) -> None:
        """Remove a file, a link, an empty directory; `recursive`: one with all that is in it, unless a volume is.
        Raises NotFound, Conflict."""
        _wait(
            self._inner.remove_file(
                path,
                recursive,
            )
        )

    def change_mode(self, path: str, mode: int) -> None:
        """As chmod does; of a link, what it leads to. Raises NotFound."""
        _wait(
            self._inner.change_mode(
                path,
                mode,
            )
        )

    def change_owner(self, path: str, user: int | None = None, group: int | None = None) -> None:
        """As chown does; None: as it is. Raises NotFound, InvalidRequest (the sandbox has no such user)."""
        _wait(
            self._inner.change_owner(
                path,
                user,
                group,
            )
        )

    def watch_files(self, path: str, recursive: bool = False) -> Iterator[FileEvent]:
        """What happens to a file, or in a directory and, if asked, in those below it, as it happens. The first event is
        `watching`: from then on all is told. Ends when that directory, or the file's, is gone. Raises NotFound."""
        yield from _iterate(
            self._inner.watch_files(
                path,
                recursive,
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

    def wait(self, timeout: float | None = None) -> Info:
        """What is known of it once it has ended, whoever ended it; after `timeout` seconds as it is."""
        return _wait(
            self._inner.wait(
                timeout,
            )
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
        restart: bool = False,
        key: str | None = None,
    ) -> ShellResult:
        """Run a text as if it was typed, to its end: no quoting, any number of lines.

        At its timeout it is interrupted as by ^C, then killed, and the shell goes on. `exit` and `exec` end the shell,
        and `ended` says so: `restart` puts a new one in its place for this text. With a `key` it is run once, however
        often it is asked for, and goes on when its caller goes away. Raises Conflict when another text runs, unless it
        may `queue`, or the shell has ended.
        """
        return _wait(
            self._inner.run(
                command,
                stdin=stdin,
                timeout=timeout,
                output_cap=output_cap,
                queue=queue,
                restart=restart,
                key=key,
            )
        )

    def output(self, command_id: str) -> ShellOutput:
        """What a command has written so far, by `ShellResult.id`: one that runs, has children in the background, or has
        a key. Raises NotFound: it is none of these, or that was too long ago."""
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


class SyncTerminal:
    """A program on a terminal in a sandbox, which sees what is written here as typed."""

    def __init__(self, inner: Terminal) -> None:
        """Use `SyncSandbox.terminal`."""
        self._inner = inner
        self.id = inner.id

    @property
    def end(self) -> TerminalEnd | None:
        """Why no more comes, once all was read."""
        return self._inner.end

    def __enter__(self) -> SyncTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> bytes:
        """What comes next, as soon as there is some; b"": no more comes, and `end` says why."""
        return _wait(
            self._inner.read()
        )

    def output(self) -> Iterator[bytes]:
        """All that comes, as it comes."""
        yield from _iterate(
            self._inner.output()
        )

    def write(self, data: bytes | str) -> None:
        """As if it was typed; `"\\x03"` is ^C. Raises Conflict when the terminal takes no more from here."""
        _wait(
            self._inner.write(
                data,
            )
        )

    def resize(self, rows: int, columns: int) -> None:
        """The program is told, by SIGWINCH."""
        _wait(
            self._inner.resize(
                rows,
                columns,
            )
        )

    def wait(self) -> int:
        """Its program's exit code, once it has ended; what it writes until then is let go. Raises Conflict: somebody
        else was attached in place of this one, or the terminal was closed."""
        return _wait(
            self._inner.wait()
        )

    def detach(self) -> None:
        """Let go of it: its program goes on, and `Sandbox.attach_terminal` comes back to it."""
        _wait(
            self._inner.detach()
        )

    def close(self) -> None:
        """End it with all that runs on it; idempotent."""
        _wait(
            self._inner.close()
        )

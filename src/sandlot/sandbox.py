"""What users hold: a Sandbox, wherever its node is.

It owns one sandbox's id and the node's address, and adds nothing to what the node does except words: shell text for an
argument list, keyword arguments for a spec. Without a node or a URL it uses a node of this process, which is made on
first use, shared by all sandboxes of an event loop, and closed when that loop ends: nothing has to be started or
stopped. The blocking twin in `sync.py` is generated from this file by `tools/make_sync.py`.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sandlot.aio import shielded
from sandlot.api import (
    EVERY,
    REPLAY,
    Change,
    Chunk,
    CommandInfo,
    FileEvent,
    FileInfo,
    FilesFound,
    Filter,
    ImageInfo,
    Info,
    Limits,
    Made,
    NodeAPI,
    Profile,
    Progress,
    Quota,
    Run,
    RunResult,
    SandboxSpec,
    ShellInfo,
    ShellOutput,
    ShellResult,
    ShellRun,
    ShellSpec,
    State,
    Stats,
    Target,
    TerminalEnd,
    TerminalInfo,
    TerminalLink,
    TerminalSpec,
    TextFound,
    Volume,
    Warm,
)
from sandlot.errors import Conflict, SandlotError, from_wire, invalid
from sandlot.local import receive_file, receive_tree, refuse_link, send, streamed


class Sandbox:
    """One isolated Linux box: `async with await Sandbox.create() as box: print((await box.run("uname")).stdout)`."""

    def __init__(self, node: NodeAPI, info: Info) -> None:
        """A sandbox that `node` made already. `Sandbox.create` makes a new one."""
        self.id = info.id
        self.losses = info.losses
        self._node = node
        self._routed_env: dict[str, str] = {}

    @classmethod
    async def create(
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
    ) -> Sandbox:
        """A new sandbox in which a command can run. What the arguments mean: `SandboxSpec`; None is its default.

        It lives on `node` if one is given, else on the server at `url`, else in this process. A limit that is named
        in `limits` is refused (Unsupported) where the host cannot keep it; `losses` says which defaults it does not.
        With a `key` it is made once, and whoever creates it again with the same words gets it.
        """
        asked = {
            "image": image,
            "env": env,
            "cwd": cwd,
            "hostname": hostname,
            "network": network,
            "profile": profile,
            "limits": limits,
            "volumes": volumes,
            "labels": labels,
            "setuid": setuid,
            "nested": nested,
            "lifetime": lifetime,
            "idle_timeout": idle_timeout,
            "key": key,
        }
        spec = _spec(**asked)
        if node is None:
            node = await _node_of_this_loop(url, api_key)
        return cls(node, await node.create(spec))

    @classmethod
    async def create_many(
        cls,
        count: int,
        image: str = "host",
        *,
        node: NodeAPI | None = None,
        url: str | None = None,
        api_key: str | None = None,
        **more: Any,
    ) -> list[Sandbox | SandlotError]:
        """So many new sandboxes at once, each as `create` makes it from the same words. In the place of one that could
        not be made is its error. With a `key` they are made once."""
        spec = _spec(image=image, **more)
        if node is None:
            node = await _node_of_this_loop(url, api_key)
        return [_made(node, each) for each in await node.create_many(spec, count)]

    @classmethod
    async def find(
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
        try:
            wanted = Filter(states=tuple(states), labels=dict(labels or {}), image=image)
        except ValidationError as error:
            raise invalid(error) from None
        if node is None:
            node = await _node_of_this_loop(url, api_key)
        page = await node.page(wanted, limit=1000)
        found = [*page.sandboxes]
        while page.next is not None:
            page = await node.page(wanted, page.next, limit=1000)
            found += page.sandboxes
        return found

    @classmethod
    async def attach(
        cls, sandbox_id: str, *, node: NodeAPI | None = None, url: str | None = None, api_key: str | None = None
    ) -> Sandbox:
        """A sandbox that exists already, by its id. Raises NotFound."""
        if node is None:
            node = await _node_of_this_loop(url, api_key)
        return cls(node, await node.info(sandbox_id))

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
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
        run = _run(
            command,
            cwd=cwd,
            env={**self._routed_env, **(env or {})},
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            timeout=timeout,
            user=user,
            output_cap=output_cap,
            key=key,
            kill_on_disconnect=kill_on_disconnect,
        )
        return await self._node.run(self.id, run)

    async def start(
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
    ) -> Command:
        """Start a command and leave it to itself, as `run` does it otherwise. With `stdin_open` more input comes by
        `Command.write`. One that is `lossless` waits for who is slow to follow its output, and else misses what is past
        the cap. It goes on when this program goes away, and `command(id)` finds it again; with `kill_on_disconnect` it
        ends when whoever waits for it or follows it does."""
        run = _run(
            command,
            cwd=cwd,
            env={**self._routed_env, **(env or {})},
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            stdin_open=stdin_open,
            timeout=timeout,
            user=user,
            output_cap=output_cap,
            lossless=lossless,
            key=key,
            kill_on_disconnect=kill_on_disconnect,
        )
        return Command(self._node, self.id, (await self._node.launch(self.id, run)).id)

    async def commands(self) -> list[CommandInfo]:
        """Commands that were started or run with a key: those that run, and those whose result can still be had."""
        return await self._node.commands(self.id)

    async def command(self, command_id: str) -> Command:
        """One of them, by its id. Whether there is one is seen when it is asked for something."""
        return Command(self._node, self.id, command_id)

    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: int | str | None = None
    ) -> Shell:
        """A bash that lives on between commands; `sh` where the image has none, and then `lacks` says what it cannot.
        A reset of the sandbox ends it."""
        try:
            spec = ShellSpec(cwd=cwd, env={**self._routed_env, **(env or {})}, user=user)
        except ValidationError as error:
            raise invalid(error) from None
        return Shell(self._node, self.id, await self._node.open_shell(self.id, spec))

    async def terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: int | str | None = None,
    ) -> Terminal:
        """A program on a terminal of its own, for a person or for what only talks to one: a login shell, unless a
        `command` is given, as to `run`. A program that writes more than is read waits, as on any terminal. A reset of
        the sandbox ends it."""
        argv = ("sh", "-c", command) if isinstance(command, str) else command
        try:
            spec = TerminalSpec(
                command=None if argv is None else tuple(argv),
                rows=rows,
                columns=columns,
                cwd=cwd,
                env={**self._routed_env, **(env or {})},
                user=user,
            )
        except ValidationError as error:
            raise invalid(error) from None
        info = await self._node.open_terminal(self.id, spec)
        try:
            return await self.attach_terminal(info.id)
        except BaseException:
            await shielded(self._node.close_terminal(self.id, info.id))
            raise

    async def terminals(self) -> list[TerminalInfo]:
        """Its terminals, those whose program has ended and that nobody has closed too."""
        return await self._node.terminals(self.id)

    async def attach_terminal(self, terminal_id: str, *, replay: int = REPLAY, watch: bool = False) -> Terminal:
        """Come back to a terminal: its last `replay` bytes are read first, at most 256 KiB. Who was attached before is
        told that it was taken, unless this one only `watch`es. Raises NotFound."""
        link = await self._node.attach_terminal(self.id, terminal_id, replay=replay, watch=watch)
        return Terminal(self._node, self.id, terminal_id, link)

    async def read_file(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a regular file inside, up to 64 MiB, or so many of them from an offset on. `path` is absolute,
        as all of them here. Raises NotFound, InvalidRequest."""
        return await self._node.read_file(self.id, path, offset, length)

    async def write_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Make a file inside, with its missing parents, or replace it at once: nobody sees half of it. Text as UTF-8.
        Raises InvalidRequest (no regular file, a full disk), Conflict (a file is where a directory is to be)."""
        await self._node.write_file(self.id, path, data.encode() if isinstance(data, str) else data, mode)

    async def append_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Add to the end of a file inside, which is made with this mode if it is missing. Raises as `write_file`."""
        await self._node.write_file(self.id, path, data.encode() if isinstance(data, str) else data, mode, True)

    async def upload(self, local: str | Path, path: str, *, user: int = 0, progress: Progress | None = None) -> None:
        """Copy a file of this host to `path`, or what is in a directory of this host below `path`; of any size. What is
        made belongs to `user`. `progress` is told how many bytes have gone, and of how many. Raises NotFound (here),
        InvalidRequest, Conflict."""
        sent = await asyncio.to_thread(send, Path(local))
        chunks = _counted(streamed(sent.chunks), sent.size, progress)
        if sent.mode is None:
            await self._node.upload(self.id, path, chunks, user)
            return
        path = posixpath.join(path, Path(local).name) if path.endswith("/") else path
        await self._node.write_file(self.id, path, chunks, sent.mode)
        if user:
            await self._node.change_file(self.id, path, user=user, group=user)

    async def download(self, path: str, local: str | Path, *, progress: Progress | None = None) -> None:
        """Copy a file inside to `local`, or into it if that is a directory; or what is in a directory inside below the
        directory `local`, which is made. Links are copied as links; what is written is the caller's, and never outside
        `local`. A `local` that is itself a link to a directory is refused, for an earlier download may have left it;
        links on the way to it are followed. `progress` is told how many bytes have come, and of how many where that is
        known. Raises NotFound, InvalidRequest, Conflict (such a link), HostFault (here)."""
        target = Path(local)
        if (await self._node.stat_file(self.id, path, True)).kind == "directory":
            await receive_tree(_counted(self._node.download(self.id, path), None, progress), target)
            return
        if await asyncio.to_thread(target.is_dir):
            refuse_link(target)
            target = target / posixpath.basename(path)
        async with self._node.open_file(self.id, path) as file:
            await receive_file(_counted(file.chunks(), file.size, progress), target)

    async def stat_file(self, path: str, follow: bool = False) -> FileInfo:
        """What is at a path: of a link the link itself, unless it is to `follow` it. Raises NotFound."""
        return await self._node.stat_file(self.id, path, follow)

    async def list_files(self, path: str) -> list[FileInfo]:
        """What is in a directory, sorted by name. Raises NotFound, InvalidRequest (no directory)."""
        return await self._node.list_files(self.id, path)

    async def glob_files(self, pattern: str, limit: int = 10_000) -> FilesFound:
        """What an absolute pattern names: `*`, `?` and `[a-z]` in names, hidden ones too, and `**` for any number of
        directories. A directory comes before what is in it, names in the order of their bytes."""
        return await self._node.glob_files(self.id, pattern, limit)

    async def find_text(
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
        return await self._node.find_text(
            self.id, text, path, names=names, regex=regex, ignore_case=ignore_case, limit=limit
        )

    async def make_directory(self, path: str, mode: int = 0o755, parents: bool = True) -> None:
        """Make a directory. With `parents` the missing ones on the way too, and one that is there already is fine.
        Raises NotFound (its parent), Conflict (something is there)."""
        await self._node.make_directory(self.id, path, mode, parents)

    async def move_file(self, path: str, to: str, replace: bool = False) -> None:
        """Give a file, link or directory another path, at once. Raises NotFound, Conflict (something is there, and it
        is not to be replaced, or cannot be)."""
        await self._node.move_file(self.id, path, to, replace)

    async def remove_file(self, path: str, recursive: bool = False) -> None:
        """Remove a file, a link, an empty directory; `recursive`: one with all that is in it, unless a volume is.
        Raises NotFound, Conflict."""
        await self._node.remove_file(self.id, path, recursive)

    async def change_mode(self, path: str, mode: int) -> None:
        """As chmod does; of a link, what it leads to. Raises NotFound."""
        await self._node.change_file(self.id, path, mode)

    async def change_owner(self, path: str, user: int | None = None, group: int | None = None) -> None:
        """As chown does; None: as it is. Raises NotFound, InvalidRequest (the sandbox has no such user)."""
        await self._node.change_file(self.id, path, None, user, group)

    async def watch_files(self, path: str, recursive: bool = False) -> AsyncIterator[FileEvent]:
        """What happens to a file, or in a directory and, if asked, in those below it, as it happens. The first event is
        `watching`: from then on all is told. Ends when that directory, or the file's, is gone. Raises NotFound."""
        async with aclosing(self._node.watch_files(self.id, path, recursive)) as events:
            async for event in events:
                yield event

    async def route(self, port: int, target: Target) -> None:
        """Let `target`, an ASGI application of this process or an Upstream, answer on 127.0.0.1:port inside.

        The sandbox needs no network for it and reaches nothing else through it. Later runs from this object find the
        address in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, with a placeholder for a key.
        """
        await self._node.route(self.id, port, target)
        base = f"http://127.0.0.1:{port}"
        self._routed_env |= {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": "sandlot",
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": "sandlot",
        }

    async def reset(self, image: str | None = None) -> None:
        """Back to its image, or to another one such as a snapshot: processes and files are gone; id, limits, labels and
        routes stay."""
        self.losses = (await self._node.reset(self.id, image)).losses

    async def snapshot(self, name: str) -> ImageInfo:
        """Make an image of its files as they are now, from which `Sandbox.create(image=name)` starts others. Raises
        Conflict when the name is taken."""
        return await self._node.snapshot(self.id, name)

    async def fork(self, count: int = 1) -> list[Sandbox]:
        """So many new sandboxes like this one, with its files as they are now and none of its processes."""
        return [Sandbox(self._node, info) for info in await self._node.fork(self.id, count)]

    async def diff(self) -> list[Change]:
        """What differs from its image, sorted by path."""
        return await self._node.diff(self.id)

    async def pause(self) -> None:
        """Stop every process where it is."""
        await self._node.pause(self.id)

    async def resume(self) -> None:
        """Let them go on."""
        await self._node.resume(self.id)

    async def info(self) -> Info:
        """What is known of it; after its end, why it ended."""
        return await self._node.info(self.id)

    async def stats(self) -> Stats:
        """What it uses now: memory, CPU seconds, processes, disk."""
        return await self._node.stats(self.id)

    async def close(self) -> Info:
        """End it; idempotent. On return no process of it is left."""
        return await self._node.destroy(self.id)

    async def wait(self, timeout: float | None = None) -> Info:
        """What is known of it once it has ended, whoever ended it; after `timeout` seconds as it is."""
        return await self._node.wait_ended(self.id, timeout)


def _spec(**asked: Any) -> SandboxSpec:
    try:
        return SandboxSpec.model_validate({name: value for name, value in asked.items() if value is not None})
    except ValidationError as error:
        raise invalid(error) from None


def _made(node: NodeAPI, made: Made) -> Sandbox | SandlotError:
    if made.sandbox is not None:
        return Sandbox(node, made.sandbox)
    return from_wire({"error": None if made.error is None else made.error.model_dump()}, 500)


async def _counted(chunks: AsyncIterator[bytes], total: int | None, progress: Progress | None) -> AsyncIterator[bytes]:
    done = 0
    async for chunk in chunks:
        yield chunk
        done += len(chunk)
        if progress is not None:
            progress(done, total)


def _run(command: str | Sequence[str], **more: Any) -> Run:
    try:
        return Run(argv=("sh", "-c", command) if isinstance(command, str) else tuple(command), **more)
    except ValidationError as error:
        raise invalid(error) from None


class Command:
    """A command that runs in a sandbox by itself: `command = await box.start("make -j8")`."""

    def __init__(self, node: NodeAPI, sandbox_id: str, command_id: str) -> None:
        """Use `Sandbox.start`."""
        self.id = command_id
        self._node = node
        self._sandbox_id = sandbox_id

    async def wait(self) -> RunResult:
        """How it ended, once it has. Whoever waits may go away and come back."""
        return await self._node.wait(self._sandbox_id, self.id)

    async def output(self, out: int = 0, err: int = 0) -> AsyncIterator[Chunk]:
        """What it writes, as it comes, from these offsets of its two streams on, until it has ended."""
        async with aclosing(self._node.follow(self._sandbox_id, self.id, out, err)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write(self, data: bytes | str, *, end: bool = False) -> None:
        """More for its standard input; `end` closes it. Returns when the command's pipe has taken it. Raises Conflict
        when it takes no more."""
        await self._node.write_stdin(self._sandbox_id, self.id, data.encode() if isinstance(data, str) else data, end)

    async def signal(self, number: int) -> None:
        """Send a signal to it and its process group: 2 as ^C does, 15 to ask it to end. No error when it has ended."""
        await self._node.signal(self._sandbox_id, self.id, number)

    async def kill(self) -> None:
        """End it with its whole tree."""
        await self._node.signal(self._sandbox_id, self.id, 9)


class Shell:
    """A bash in a sandbox, which keeps its directory, variables, functions, options and jobs:

    `shell = await box.shell(); await shell.run("cd /src"); print((await shell.run("pwd")).stdout)`
    """

    def __init__(self, node: NodeAPI, sandbox_id: str, info: ShellInfo) -> None:
        """Use `Sandbox.shell`."""
        self.id = info.id
        self.lacks = info.lacks
        self._node = node
        self._sandbox_id = sandbox_id

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
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
        try:
            run = ShellRun(
                command=command,
                stdin=stdin.encode() if isinstance(stdin, str) else stdin,
                timeout=timeout,
                output_cap=output_cap,
                queue=queue,
                restart=restart,
                key=key,
            )
        except ValidationError as error:
            raise invalid(error) from None
        return await self._node.run_in_shell(self._sandbox_id, self.id, run)

    async def output(self, command_id: str) -> ShellOutput:
        """What a command has written so far, by `ShellResult.id`: one that runs, has children in the background, or has
        a key. Raises NotFound: it is none of these, or that was too long ago."""
        return await self._node.shell_output(self._sandbox_id, self.id, command_id)

    async def interrupt(self) -> bool:
        """End what runs, as ^C does, then less politely; the shell goes on. False: nothing ran."""
        return await self._node.interrupt_shell(self._sandbox_id, self.id)

    async def close(self) -> None:
        """End it with all that runs in it; idempotent."""
        await self._node.close_shell(self._sandbox_id, self.id)


class Terminal:
    """A program on a terminal in a sandbox, which sees what is written here as typed:

    `terminal = await box.terminal("python3"); await terminal.write("1+1\n"); print(await terminal.read())`
    """

    def __init__(self, node: NodeAPI, sandbox_id: str, terminal_id: str, link: TerminalLink) -> None:
        """Use `Sandbox.terminal`."""
        self.id = terminal_id
        self._node = node
        self._sandbox_id = sandbox_id
        self._link = link

    @property
    def end(self) -> TerminalEnd | None:
        """Why no more comes, once all was read."""
        return self._link.end

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def read(self) -> bytes:
        """What comes next, as soon as there is some; b"": no more comes, and `end` says why."""
        return await self._link.read()

    async def output(self) -> AsyncIterator[bytes]:
        """All that comes, as it comes."""
        while data := await self._link.read():
            yield data

    async def write(self, data: bytes | str) -> None:
        """As if it was typed; `"\\x03"` is ^C. Raises Conflict when the terminal takes no more from here."""
        await self._link.write(data.encode() if isinstance(data, str) else data)

    async def resize(self, rows: int, columns: int) -> None:
        """The program is told, by SIGWINCH."""
        await self._link.resize(rows, columns)

    async def wait(self) -> int:
        """Its program's exit code, once it has ended; what it writes until then is let go. Raises Conflict: somebody
        else was attached in place of this one, or the terminal was closed."""
        while await self._link.read():
            pass
        if self.end is None or self.end.exit_code is None:
            raise Conflict(f"terminal {self.id} is not attached here any more", "`Sandbox.attach_terminal` comes back")
        return self.end.exit_code

    async def detach(self) -> None:
        """Let go of it: its program goes on, and `Sandbox.attach_terminal` comes back to it."""
        await self._link.close()

    async def close(self) -> None:
        """End it with all that runs on it; idempotent."""
        await self._link.close()
        await self._node.close_terminal(self._sandbox_id, self.id)


async def open_node(
    url: str | None = None,
    api_key: str | None = None,
    state_dir: Path | None = None,
    *,
    name: str | None = None,
    orphan_grace: float = 0.0,
    warm: Sequence[Warm] = (),
    registries: Sequence[str] | None = None,
    quota_of: Callable[[str], Quota | None] = lambda tenant: None,
    reachable: Callable[[], Sequence[str] | None] = lambda: None,
) -> NodeAPI:
    """A node to make sandboxes on, which the caller closes: of this process, started, or the server at `url`. The last
    six are of a node of this process: see `local_node`."""
    if url is not None:
        from sandlot.client import HttpNode

        return HttpNode(url, api_key)
    from sandlot.node.node import local_node  # the one place above the node that knows it

    node = local_node(
        state_dir,
        name=name,
        orphan_grace=orphan_grace,
        warm=warm,
        registries=registries,
        quota_of=quota_of,
        reachable=reachable,
    )
    await node.start()
    return node


_Key = tuple[str | None, str | None]
_Shared = dict[_Key, "asyncio.Task[tuple[NodeAPI, AsyncIterator[None]]]"]
_shared: dict[asyncio.AbstractEventLoop, _Shared] = {}


async def _node_of_this_loop(url: str | None, api_key: str | None) -> NodeAPI:
    """The node that sandboxes without one of their own share."""
    loop = asyncio.get_running_loop()
    opened = _shared.setdefault(loop, {})
    key = (url, api_key)
    task = opened.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = opened[key] = loop.create_task(_open_shared(url, api_key))
    node, _ = await asyncio.shield(task)  # a caller who gives up does not take it from the others
    return node


async def _open_shared(url: str | None, api_key: str | None) -> tuple[NodeAPI, AsyncIterator[None]]:
    node = await open_node(url, api_key)
    keeper = _close_with_the_loop(node)
    await anext(keeper)
    return node, keeper


async def _close_with_the_loop(node: NodeAPI) -> AsyncIterator[None]:
    """A loop that ends (`asyncio.run` does it) closes the generators that are still open: the only hook it offers."""
    try:
        yield
    finally:
        _shared.pop(asyncio.get_running_loop(), None)
        await shielded(node.close())

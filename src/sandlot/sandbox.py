"""What users hold: a Sandbox, wherever its node is.

It owns one sandbox's id and the node's address, and adds nothing to what the node does except words: shell text for an
argument list, keyword arguments for a spec. Without a node or a URL it uses a node of this process, which is made on
first use, shared by all sandboxes of an event loop, and closed when that loop ends: nothing has to be started or
stopped. The blocking twin in `sync.py` is generated from this file by `tools/make_sync.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from sandlot.aio import shielded
from sandlot.api import (
    Change,
    Chunk,
    CommandInfo,
    ImageInfo,
    Info,
    Limits,
    NodeAPI,
    Profile,
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
    Volume,
    Warm,
)
from sandlot.errors import invalid


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
        node: NodeAPI | None = None,
        url: str | None = None,
        api_key: str | None = None,
    ) -> Sandbox:
        """A new sandbox in which a command can run. What the arguments mean: `SandboxSpec`; None is its default.

        It lives on `node` if one is given, else on the server at `url`, else in this process. A limit that is named
        in `limits` is refused (Unsupported) where the host cannot keep it; `losses` says which defaults it does not.
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
        }
        try:
            spec = SandboxSpec.model_validate({name: value for name, value in asked.items() if value is not None})
        except ValidationError as error:
            raise invalid(error) from None
        if node is None:
            node = await _node_of_this_loop(url, api_key)
        return cls(node, await node.create(spec))

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
        run = _run(
            command,
            cwd=cwd,
            env={**self._routed_env, **(env or {})},
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            timeout=timeout,
            user=user,
            output_cap=output_cap,
            key=key,
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
        user: int | None = None,
        output_cap: int | None = None,
        key: str | None = None,
    ) -> Command:
        """Start a command and leave it to itself, as `run` does it otherwise. With `stdin_open` more input comes by
        `Command.write`. It goes on when this program goes away: `command(id)` finds it again."""
        run = _run(
            command,
            cwd=cwd,
            env={**self._routed_env, **(env or {})},
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            stdin_open=stdin_open,
            timeout=timeout,
            user=user,
            output_cap=output_cap,
            key=key,
        )
        return Command(self._node, self.id, (await self._node.launch(self.id, run)).id)

    async def commands(self) -> list[CommandInfo]:
        """Commands that were started or run with a key: those that run, and those whose result can still be had."""
        return await self._node.commands(self.id)

    async def command(self, command_id: str) -> Command:
        """One of them, by its id. Whether there is one is seen when it is asked for something."""
        return Command(self._node, self.id, command_id)

    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: int | None = None
    ) -> Shell:
        """A bash that lives on between commands; `sh` where the image has none, and then `lacks` says what it cannot.
        A reset of the sandbox ends it."""
        try:
            spec = ShellSpec(cwd=cwd, env={**self._routed_env, **(env or {})}, user=user)
        except ValidationError as error:
            raise invalid(error) from None
        return Shell(self._node, self.id, await self._node.open_shell(self.id, spec))

    async def read_file(self, path: str) -> bytes:
        """The bytes of a regular file inside, up to 64 MiB. `path` is absolute."""
        return await self._node.read_file(self.id, path)

    async def write_file(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Make or replace a file inside, with its missing parents; text as UTF-8. Not atomic: written in place."""
        await self._node.write_file(self.id, path, data.encode() if isinstance(data, str) else data, mode)

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
        async for chunk in self._node.follow(self._sandbox_id, self.id, out, err):
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
    ) -> ShellResult:
        """Run a text as if it was typed, to its end: no quoting, any number of lines.

        At its timeout it is interrupted as by ^C, then killed, and the shell goes on. `exit` and `exec` end the shell,
        and `ended` says so. Raises Conflict when another text runs, unless it may `queue`, or the shell has ended.
        """
        try:
            run = ShellRun(
                command=command,
                stdin=stdin.encode() if isinstance(stdin, str) else stdin,
                timeout=timeout,
                output_cap=output_cap,
                queue=queue,
            )
        except ValidationError as error:
            raise invalid(error) from None
        return await self._node.run_in_shell(self._sandbox_id, self.id, run)

    async def output(self, command_id: str) -> ShellOutput:
        """What a finished command and its children in the background have written so far, by `ShellResult.id`. Raises
        NotFound: it had no such children, or that was too long ago."""
        return await self._node.shell_output(self._sandbox_id, self.id, command_id)

    async def interrupt(self) -> bool:
        """End what runs, as ^C does, then less politely; the shell goes on. False: nothing ran."""
        return await self._node.interrupt_shell(self._sandbox_id, self.id)

    async def close(self) -> None:
        """End it with all that runs in it; idempotent."""
        await self._node.close_shell(self._sandbox_id, self.id)


async def open_node(
    url: str | None = None,
    api_key: str | None = None,
    state_dir: Path | None = None,
    *,
    name: str | None = None,
    orphan_grace: float = 0.0,
    warm: Sequence[Warm] = (),
    registries: Sequence[str] | None = None,
) -> NodeAPI:
    """A node to make sandboxes on, which the caller closes: of this process, started, or the server at `url`. The last
    four are of a node of this process: see `local_node`."""
    if url is not None:
        from sandlot.client import HttpNode

        return HttpNode(url, api_key)
    from sandlot.node.node import local_node  # the one place above the node that knows it

    node = local_node(state_dir, name=name, orphan_grace=orphan_grace, warm=warm, registries=registries)
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

"""The sandboxes of a server, from `sandlot create` to `sandlot rm`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal

import typer

from sandlot.aio import deadline
from sandlot.api import EVERY, Ending, Info
from sandlot.cli import completion, foreground, interrupt, options, say
from sandlot.errors import DeadlineExceeded, InvalidRequest, SandlotError
from sandlot.sandbox import Sandbox

Labels = Annotated[
    list[str] | None,
    typer.Option("--label", "-l", metavar="NAME[=VALUE]", help="Only those with this label. May be repeated."),
]


def create(
    image: Annotated[str, typer.Argument(metavar="[IMAGE]", help="`host`, a snapshot, `debian:12`, …")] = "host",
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="To find it by. May be repeated.")
    ] = None,
    env: options.Env = None,
    limit: options.Limit = None,
    volume: options.Volume = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Working directory of its commands.")] = None,
    lifetime: Annotated[float | None, typer.Option(help="Seconds until it ends by itself.")] = None,
    idle_timeout: Annotated[float | None, typer.Option(help="Seconds without work until it ends.")] = None,
    network: Annotated[
        Literal["none", "host"], typer.Option(help="`host` is the server's own network, if it allows that.")
    ] = "none",
    profile: Annotated[
        Literal["strict", "default", "debug"], typer.Option(help="How much of the kernel it sees.")
    ] = "default",
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Make a sandbox on a server and print its id. It lives until `sandlot rm`, or as its times say."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            await options.fetched(node, image)
            box = await Sandbox.create(
                image,
                labels=options.pairs("--label", label),
                env=options.environment(env),
                limits=options.pairs("--limit", limit),
                volumes=options.volumes(volume),
                cwd=cwd,
                lifetime=lifetime,
                idle_timeout=idle_timeout,
                network=network,
                profile=profile,
                node=node,
            )
            if json:
                say.data((await box.info()).model_dump())
            else:
                say.out(box.id)
        return 0

    return interrupt.run(work())


def ls(
    label: Labels = None,
    everyone: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended in the last hour too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Show the sandboxes of a server that run or are paused, the oldest first."""

    async def work() -> int:
        states = (*EVERY.states, "ended") if everyone else EVERY.states
        async with options.server(url, api_key) as node:
            found = await Sandbox.find(states=states, labels=options.labels(label), node=node)
        if json:
            say.data([each.model_dump() for each in found])
        elif quiet:
            for each in found:
                say.out(each.id)
        else:
            say.table(("id", "image", "state", "age", "labels"), [_row(each) for each in found])
        return 0

    return interrupt.run(work())


def _row(info: Info) -> tuple[str, ...]:
    labels = " ".join(f"{name}={value}" for name, value in info.labels.items())
    state = info.state if info.ending is None else f"{info.state} ({info.ending.value})"
    return info.id, info.image, state, _age(time.time() - info.created_at), labels


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def rm(
    sandboxes: Annotated[
        list[str] | None, typer.Argument(metavar="[ID…]", help="Their ids.", autocompletion=completion.sandboxes)
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="All of the server's.")] = False,
    label: Labels = None,
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """End sandboxes. When this returns, no process of them is left."""
    labels = options.labels(label)
    if bool(sandboxes) + everyone + bool(labels) != 1:
        raise InvalidRequest("say which sandboxes: by their ids, by `--label NAME=VALUE`, or `--all`", "`sandlot ls`")

    async def work() -> int:
        async with options.server(url, api_key) as node:
            ids = sandboxes or [each.id for each in await Sandbox.find(labels=labels, node=node)]
            return await _each("removed", ids, lambda each: node.destroy(each, Ending.KILLED), json)

    return interrupt.run(work())


def pause(
    sandboxes: options.Ids, url: options.Server = None, api_key: options.Key = None, json: options.Json = False
) -> int:
    """Stop every process of sandboxes where it is."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            return await _each("paused", sandboxes, node.pause, json)

    return interrupt.run(work())


def resume(
    sandboxes: options.Ids, url: options.Server = None, api_key: options.Key = None, json: options.Json = False
) -> int:
    """Let paused sandboxes go on."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            return await _each("resumed", sandboxes, node.resume, json)

    return interrupt.run(work())


def reset(
    sandbox: options.Id,
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE]", help="Another image than its own.")] = None,
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Take a sandbox back to its image, or to another one: its processes and files are gone, its id stays."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            if image is not None:
                await options.fetched(node, image)
            return await _each("reset", [sandbox], lambda each: node.reset(each, image), json)

    return interrupt.run(work())


def wait(
    sandbox: options.Id,
    command: Annotated[
        str | None, typer.Argument(metavar="[COMMAND]", help="What `sandlot exec -d` printed: wait for this only.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most.")] = None,
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Wait until a sandbox has ended and print how, or until a command in it has and exit with its status."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            if command is not None:
                async with deadline(timeout, f"command {command} of sandbox {sandbox}"):
                    result = await node.wait(sandbox, command)
                return foreground.said(result, sandbox, json)
            box = await Sandbox.attach(sandbox, node=node)  # a server that is not there at first is not waited for
            info = await box.wait(timeout)
        if info.ending is None:
            raise DeadlineExceeded(f"sandbox {sandbox} did not end within {timeout:g} s")
        if json:
            say.data(info.model_dump())
        else:
            say.out(info.ending.value + (f": {info.detail}" if info.detail else ""))
        return 0

    return interrupt.run(work())


async def _each(what: str, ids: Sequence[str], work: Callable[[str], Awaitable[Info]], json: bool) -> int:
    """Do it with each, at once. What fails of one does not keep the others; the status is the first one's."""
    results = await asyncio.gather(*(work(each) for each in ids), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    if json:
        say.data([result.model_dump() for result in results if isinstance(result, Info)])
    for sandbox, result in zip(ids, results, strict=True):
        if isinstance(result, Info) and not json:
            say.note(f"{what} {sandbox}")
    for failure in failed:
        if not isinstance(failure, SandlotError) or len(ids) == 1:
            raise failure
        say.error(failure.message, failure.hint)
    return say.status(failed[0]) if failed and isinstance(failed[0], SandlotError) else 0


def snapshot(
    sandbox: options.Id,
    name: Annotated[str, typer.Argument(help="Of the new image.")],
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Make an image of a sandbox's files as they are now, for `sandlot create NAME`."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            made = await node.snapshot(sandbox, name)
        if json:
            say.data(made.model_dump())
        else:
            say.note(f"made {made.name}: {made.bytes / 1e6:.1f} MB, {made.files} files over {made.base}")
        return 0

    return interrupt.run(work())


def fork(
    sandbox: options.Id,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")] = 1,
    url: options.Server = None,
    api_key: options.Key = None,
    json: options.Json = False,
) -> int:
    """Make sandboxes like this one, with its files and none of its processes, and print their ids."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            made = await node.fork(sandbox, count)
        if json:
            say.data([each.model_dump() for each in made])
        else:
            for each in made:
                say.out(each.id)
        return 0

    return interrupt.run(work())


def diff(
    sandbox: options.Id, url: options.Server = None, api_key: options.Key = None, json: options.Json = False
) -> int:
    """Show what differs from a sandbox's image: A was added, C changed, D deleted."""

    async def work() -> int:
        async with options.server(url, api_key) as node:
            found = await node.diff(sandbox)
        if json:
            say.data([each.model_dump() for each in found])
        else:
            say.changes(found)
        return 0

    return interrupt.run(work())

"""`sandlot image build`: an image from a recipe or a Dockerfile, on this host or a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sandlot.api import ImageInfo
from sandlot.build import dockerfile, recipe
from sandlot.build.builder import STEP_SECONDS, Options, Progress
from sandlot.build.builder import build as carry_out
from sandlot.build.context import Context
from sandlot.build.steps import Build
from sandlot.cli import interrupt, say
from sandlot.errors import InvalidRequest
from sandlot.sandbox import open_node

# Letters of a step's text that its line shows.
_SHOWN = 72


def build(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recipe (`*.toml`) or a Dockerfile.")],
    name: Annotated[str | None, typer.Option(help="What the image is called; without one as the recipe says.")] = None,
    context: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files to copy are; without one where FILE is.")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of an ARG in the Dockerfile. May be repeated.")
    ] = None,
    network: Annotated[
        Literal["none", "host"],
        typer.Option(help="`host` gives commands this machine's network, its loopback too; the image gets none."),
    ] = "none",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do every step again.")] = False,
    memory: Annotated[str | None, typer.Option(help="Memory limit of a step, such as 4G.")] = None,
    disk: Annotated[
        str | None,
        typer.Option(help="Limit on the files that a step writes: 16G where they are on disk, else in memory, 1G."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one command may take.")] = STEP_SECONDS,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what each command wrote, when it is done.")
    ] = False,
    url: Annotated[str | None, typer.Option(envvar="SANDLOT_URL", help="A server; without one, this host.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the nodes of this host keep their images.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Build an image, each step in a sandbox of its own.

    A step that was done before, with the same steps before it and the same files, is not done again.
    """
    reader = recipe.read if file.suffix == ".toml" else dockerfile.read
    what = reader(file, dict(_pair(word) for word in build_arg or ()))
    called = name or what.name
    if called is None:
        raise InvalidRequest(f"{file} does not say what the image is called", f"`sandlot image build {file} --name …`")
    limits = {"memory": memory, "disk": disk}
    options = Options(
        network=network,
        cache=not no_cache,
        limits={limit: value for limit, value in limits.items() if value is not None},
        timeout=timeout,
    )
    done: list[Progress] = []

    def told(progress: Progress) -> None:
        if progress.seconds is not None:
            done.append(progress)
        _say(progress, verbose)

    begun = time.monotonic()
    files = Context(context or file.parent, file)
    made = interrupt.run(_build(what, called, files, options, told, url, api_key, state_dir))
    if json:
        steps = [
            {"where": each.step.where, "text": each.step.text, "cached": each.cached, "seconds": each.seconds}
            for each in done
        ]
        say.data({**made.model_dump(), "steps": steps})
    else:
        say.note(f"built {made.name}: {made.bytes / 1e6:.1f} MB over {made.base} in {time.monotonic() - begun:.1f} s")
    return 0


async def _build(
    what: Build,
    name: str,
    context: Context,
    options: Options,
    told: Any,
    url: str | None,
    api_key: str | None,
    state_dir: Path | None,
) -> ImageInfo:
    node = await open_node(url, api_key, state_dir)
    try:
        return await carry_out(node, what, name, context, options, told)
    finally:
        await node.close()


def _say(progress: Progress, verbose: bool) -> None:
    text = progress.step.text
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    line = f"[{progress.number}/{progress.total}] {shown}"
    if progress.seconds is None:
        say.begun(line)
    else:
        say.done(f"{line}  {'cached' if progress.cached else f'{progress.seconds:.1f} s'}")
        if verbose and progress.output:
            say.note(progress.output.rstrip())


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise InvalidRequest(f"--build-arg {word} has no value", "write it as `--build-arg NAME=VALUE`")
    return name, value

"""`sandlot run`: one command in a fresh sandbox."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sandlot.api import RunResult
from sandlot.cli import interrupt, say
from sandlot.errors import InvalidRequest
from sandlot.sandbox import Sandbox, open_node

# What is kept of each stream of the command (bytes): all of it, for any output a person wants to see.
_OUTPUT_CAP = 64 << 20


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="A program and its arguments, after `--`.")],
    image: Annotated[str, typer.Option(help="Image of the sandbox.")] = "host",
    url: Annotated[
        str | None, typer.Option(envvar="SANDLOT_URL", help="A server to use; without one it runs in this process.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SANDLOT_API_KEY", help="The server's key.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit, such as 512M.")] = None,
    pids: Annotated[int | None, typer.Option(help="Limit on processes and threads.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU seconds per second.")] = None,
    disk: Annotated[str | None, typer.Option(help="Limit on the files it writes, such as 1G.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="May be repeated.")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume",
            "-v",
            metavar="HOST:INSIDE[:rw]",
            help="Show a host directory inside, read-only; of a server only what its --allow-volumes names.",
        ),
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(help="Working directory; without one the image's, else /root, or / for another user.")
    ] = None,
    user: Annotated[int | None, typer.Option(help="Numeric user inside; without one the image's, else 0.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until the command is killed.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the node of this process keeps its directory.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Give it this command's standard input.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the output.")] = False,
) -> int:
    """Run a command in a fresh sandbox, print its output and exit with its status.

    The status is the command's own; 128 + the signal that ended it; 127 if there is no such program. Ctrl-C or SIGTERM
    ends the sandbox first, and then exits with 130 or 143.
    """
    limits = {"memory": memory, "pids": pids, "cpus": cpus, "disk": disk}
    named = {name: value for name, value in limits.items() if value is not None}
    given = sys.stdin.buffer.read() if stdin else b""

    async def work() -> tuple[str, RunResult]:
        node = await open_node(url, api_key, state_dir)
        try:
            environment = dict(_pair(text) for text in env or ())
            volumes = [_volume(text) for text in volume or ()]
            box = await Sandbox.create(image, env=environment, limits=named, volumes=volumes, node=node)
            async with box:
                result = await box.run(
                    command, cwd=cwd, user=user, stdin=given, timeout=timeout, output_cap=_OUTPUT_CAP
                )
            return box.id, result
        finally:
            await node.close()

    sandbox_id, result = interrupt.run(work())
    if json:
        fields = result.model_dump(exclude={"out", "err"})
        cut = result.out.truncated or result.err.truncated
        say.data({**fields, "stdout": result.stdout, "stderr": result.stderr, "truncated": cut, "sandbox": sandbox_id})
        return result.exit_code
    for stream, output in ((sys.stdout.buffer, result.out), (sys.stderr.buffer, result.err)):
        stream.write(output.data)
        stream.flush()
        if output.truncated:
            say.note(f"({output.total - len(output.data)} bytes in the middle were left out)")
    if result.timed_out:
        say.note(f"(killed: it ran longer than {timeout:g} s)")
    if result.oom:
        say.note("(the kernel killed it for memory: a higher `--memory` may help)")
    return result.exit_code


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        if name not in os.environ:
            raise InvalidRequest(f"--env {text}: there is no such variable here", "write it as `--env NAME=VALUE`")
        value = os.environ[name]
    return name, value


def _volume(text: str) -> dict[str, Any]:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw"):
        raise InvalidRequest(f"--volume {text} is not HOST:INSIDE or HOST:INSIDE:rw")
    return {"source": os.path.abspath(source), "target": target, "read_only": mode != "rw"}  # noqa: PTH100

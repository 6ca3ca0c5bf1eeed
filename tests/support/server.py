"""A real `sandlot serve` that can be killed and started again on the same address and state directory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandlot.client import HttpNode

SANDLOT = (sys.executable, "-c", "from sandlot.cli.main import main; main()")


class Server:
    """`async with Server(directory) as server:`; `server.node()` is a client of it."""

    def __init__(self, state: Path, *words: str) -> None:
        self.state = state
        self._words = words
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def node(self) -> HttpNode:
        from sandlot.client import HttpNode

        return HttpNode(self.url)

    async def start(self) -> None:
        words = (*SANDLOT, "serve", "--port", str(self.port), "--state-dir", str(self.state), *self._words)
        self.process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            line = await self.process.stdout.readline()
        assert line.startswith(b"listening"), line

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                await self.process.wait()

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def records(state: Path) -> Iterator[dict[str, Any]]:
    """What the nodes of this state directory wrote down of each box, dead or alive."""
    from sandlot.drivers.native import keep

    for directory in state.glob("node-*/boxes"):
        with suppress(FileNotFoundError):  # of a node that ends just now
            for record in keep.records(directory):
                if facts := record.facts():
                    yield facts


def first_processes(state: Path) -> list[int]:
    """PID 1 of every box that the nodes of this state directory have a record of, dead or alive."""
    return [record["pid"] for record in records(state)]


def owners(state: Path) -> list[str]:
    """Whose the boxes are that live and are not parked: a sandbox's id for each box."""
    live = (record for record in records(state) if not record["parked"] and alive(record["pid"]))
    return [json.loads(record["note"])["id"] for record in live]


def leftovers(state: Path) -> list[str]:
    """What a stopped server must not leave: directories, cgroups, processes that are named after its nodes."""
    left = [str(path) for path in state.glob("node-*")]
    return left + cgroups(_known.get(state, set()))


def cgroups(nodes: set[str]) -> list[str]:
    """Cgroups named after these nodes, and those below them. Walked and not globbed: others vanish meanwhile."""
    wanted = {f"sandlot-{node}" for node in nodes}
    return [at for at, _, _ in os.walk("/sys/fs/cgroup") if not wanted.isdisjoint(at.split("/"))]


_known: dict[Path, set[str]] = {}


def note_nodes(state: Path) -> None:
    """Remember the names of nodes that live now, to look for what they leave."""
    _known.setdefault(state, set()).update(path.name for path in state.glob("node-*"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def until_gone(pid: int) -> None:
    """Of a process that is nobody's child here: a descriptor of it tells its end."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(watch, gone.set)
    try:
        async with asyncio.timeout(20):
            await gone.wait()
    finally:
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)

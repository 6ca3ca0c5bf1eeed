"""How to get a box on this host: the two protocols that a driver implements.

A driver makes boxes and knows nothing of ids that users see, of deadlines, of output caps or of who asks: that is
`node/node.py`. All drivers must pass `drivers/conformance.py`.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandlot.api import Capability, Ending, SandboxSpec, Stats


@dataclass(frozen=True, slots=True)
class Spawn:
    """A process to start in a box. `argv[0]` is looked up in PATH of `env`, inside the box."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: int = 0


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Exactly one of `code`, `signal`, `error` says it.

    `error` is the errno with which the program could not be started (ENOENT: not found, in PATH or its cwd).
    """

    code: int | None = None
    signal: int | None = None
    error: int | None = None
    error_step: str = ""  # which step failed: "chdir", "exec", …
    cpu_seconds: float = 0.0
    oom: bool = False  # the kernel killed something of this process's tree for memory


@dataclass(frozen=True, slots=True)
class Death:
    """Why a box is gone, as far as the driver can tell."""

    ending: Ending
    detail: str | None = None


class Process(Protocol):
    """A process that runs in a box."""

    pid: int  # as seen inside the box

    async def wait(self) -> Exit:
        """How it ended. Returns at once if it has; if the box dies first, Exit(signal=9)."""
        ...

    async def kill_tree(self) -> None:
        """SIGKILL it and all its descendants, those that left its group or session too. Idempotent."""
        ...

    async def release(self) -> None:
        """Let go of what the driver keeps for it; its background children live on. Idempotent, after wait()."""
        ...


class Box(Protocol):
    """One live box."""

    losses: tuple[str, ...]  # defaults that are not kept, a sentence each
    death: asyncio.Future[Death]  # resolves once, when the box is gone for whatever reason

    async def spawn(self, what: Spawn, stdin: int, stdout: int, stderr: int) -> Process:
        """Start a process on these descriptors. They are duplicated: the caller still owns and closes its own.
        A program that cannot be started is an Exit with `error`, not an exception."""
        ...

    async def listen(self, port: int) -> socket.socket:
        """A non-blocking TCP listener on 127.0.0.1:port inside. Raises Conflict when taken. The caller owns it."""
        ...

    async def connect(self, port: int) -> socket.socket:
        """A connection to 127.0.0.1:port inside. Raises NotFound when nothing listens. The caller owns it."""
        ...

    async def open(self, path: str, flags: int, mode: int = 0o644, user: int = 0, parents: bool = False) -> int:
        """A descriptor of a path as `user` sees it inside, so that no symlink leads out. `parents` makes missing
        directories. Raises OSError with the errno from inside. The caller owns it."""
        ...

    async def stats(self) -> Stats:
        """What it uses now."""
        ...

    async def destroy(self, ending: Ending = Ending.EXIT) -> Death:
        """End it. On return no process of it is left. Idempotent; the first ending given is the one that counts."""
        ...


class Driver(Protocol):
    """Makes boxes."""

    name: str

    async def create(self, box_id: str, spec: SandboxSpec, named: frozenset[str]) -> Box:
        """A box in which a process can start. `named` holds the fields of `spec.limits` that the user set by name,
        for which a loss is a refusal. Raises NotFound (image), Unsupported, StartFailed, InvalidRequest (volume)."""
        ...

    async def sweep(self, directory: Path) -> None:
        """Remove what the boxes of a dead node left behind, processes, cgroups and mounts, going by what that node's
        driver recorded in `directory`. The caller holds that directory's lock and removes it afterwards."""
        ...

    async def capabilities(self) -> list[Capability]: ...

    async def close(self) -> None:
        """Let go of what the driver itself holds (not of boxes)."""
        ...

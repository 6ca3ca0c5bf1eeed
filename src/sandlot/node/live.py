"""What a node knows of one running sandbox: its box, its timers, its routes, the commands in it, and the notes of them
that a node after this one reads. Values and their text; whatever is done with them is done in `node.py`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sandlot import asgi
from sandlot.api import PATH, Info, Run, SandboxSpec, ShellSpec, Target, TerminalSpec
from sandlot.drivers.base import Box, Process
from sandlot.node.keyed import KeyedRuns
from sandlot.node.streams import Input, Stream
from sandlot.node.users import Person

if TYPE_CHECKING:
    from sandlot.node.shell import Shell
    from sandlot.node.terminal import Terminal


def clock() -> float:
    """Seconds of a clock that every process of this host shares and nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class About:
    """What the result of a run will need, here or in a node that adopts its box."""

    key: str | None
    what: str  # a fingerprint of the run, where it has a key
    argv0: str
    cwd: str
    started_at: float  # of `clock`
    timeout: float | None
    cap: int
    dies_alone: bool = False
    lossless: bool = False

    @classmethod
    def read(cls, text: str) -> About:
        return cls(*json.loads(text))

    def write(self) -> str:
        """At most 500 bytes: of them the key, each of whose 100 letters may be an escaped one, takes 200."""
        words = (self.key, self.what, _cut(self.argv0), _cut(self.cwd), self.started_at, self.timeout, self.cap)
        more = (int(self.dies_alone), int(self.lossless))
        return json.dumps(words + more * any(more), separators=(",", ":"))


def _cut(word: str) -> str:
    """As much of it as is a hundred bytes of JSON: it only says what could not be started."""
    word = word[:100]
    while len(json.dumps(word)) > 102:
        word = word[:-1]
    return word


@dataclass(slots=True)
class Command:
    """A process that was started for a run. `file`, of a run with a key that may be told by another node, is a memory
    file for all of the result but its output: what is measured once cannot be measured again."""

    box: Box
    process: Process
    out: Stream
    err: Stream
    about: About
    file: int = -1
    feed: Input | None = None  # what its standard input is fed by
    outcome: dict[str, Any] = field(init=False)  # those fields of the result that are known

    def __post_init__(self) -> None:
        text = os.pread(self.file, 4096, 0) if self.file >= 0 else b""
        self.outcome = json.loads(text) if text else {"timed_out": False}

    @property
    def is_over(self) -> bool:
        """Whether its result is known, and may have been told."""
        return "exit_code" in self.outcome

    def learn(self, **outcome: object) -> None:
        """More of the result. The text only grows, so that it is never half an old one."""
        self.outcome |= outcome
        if self.file >= 0:
            os.pwrite(self.file, json.dumps(self.outcome).encode(), 0)

    def close(self) -> None:
        self.out.close()
        self.err.close()
        if self.feed is not None:
            self.feed.close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


@dataclass(slots=True)
class Route:
    """A port inside and who answers on it."""

    port: int
    target: Target
    served: asgi.Served


@dataclass(frozen=True, slots=True)
class Note:
    """What a node writes down of a sandbox for the one after it."""

    id: str
    spec: SandboxSpec
    named: frozenset[str]
    created_at: float
    generation: int
    what: str = ""  # a fingerprint of the create, where it had a key

    @classmethod
    def read(cls, text: str) -> Note | None:
        """None when another version wrote it."""
        try:
            found = json.loads(text)
            spec = SandboxSpec.model_validate(found["spec"])
            named, what = frozenset(found["named"]), found.get("what", "")
            return cls(found["id"], spec, named, found["created_at"], found["generation"], what)
        except (ValueError, KeyError, TypeError):
            return None

    def write(self) -> str:
        return json.dumps(
            {
                "id": self.id,
                "spec": self.spec.model_dump(mode="json"),
                "named": sorted(self.named),
                "created_at": self.created_at,
                "generation": self.generation,
                "what": self.what,
            }
        )


class Live:
    """A running sandbox."""

    __slots__ = (
        "box",
        "busy",
        "changing",
        "connections",
        "created_at",
        "ending",
        "env",
        "generation",
        "id",
        "idle_timer",
        "keyed",
        "last_used",
        "lifetime_timer",
        "named",
        "over",
        "routes",
        "shells",
        "spec",
        "terminals",
        "watches",
        "what",
    )

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        named: frozenset[str],
        box: Box,
        created_at: float,
        generation: int = 0,
        what: str = "",
    ) -> None:
        self.id = sandbox_id
        self.what = what  # as in its note
        self.over: asyncio.Future[None] | None = None  # resolves at its end; None: nobody waits for that
        self.named = named  # limits that were asked for by name
        self.generation = generation  # how many boxes it had before this one
        self.changing = asyncio.Lock()  # reset, snapshot, fork, pause: one at a time
        self.keyed = KeyedRuns()
        self.spec = spec
        self.created_at = created_at
        self.take(box)
        self.ending = False  # somebody is seeing to its end
        self.busy = 0  # calls in progress: while there are any it is not idle
        self.last_used = time.monotonic()
        self.idle_timer: asyncio.TimerHandle | None = None
        self.lifetime_timer: asyncio.TimerHandle | None = None
        self.routes: list[Route] = []
        self.connections: asgi.Room | None = None  # of all its routes together; None: it never had one
        self.shells: dict[str, Shell] = {}
        self.watches = 0  # how many listen to what happens to its files
        self.terminals: dict[str, Terminal] = {}

    def take(self, box: Box) -> None:
        """Its box from now on."""
        self.box = box
        self.env = {"PATH": PATH, "LANG": "C.UTF-8", **box.config.env, **self.spec.env}

    def place(self, run: Run | ShellSpec | TerminalSpec, person: Person | None) -> tuple[int, str, dict[str, str]]:
        """Who runs it, where, and in what environment: as it says itself (`person` is whom it names), else the sandbox,
        else the image."""
        config = self.box.config
        user = person.number if person is not None else config.user or 0
        home = "/root" if user == 0 else "/"  # which is closed to all but its owner
        if person is not None and person.home is not None:
            home = person.home
        elif user == config.user and config.home is not None:
            home = config.home
        cwd = run.cwd or self.spec.cwd or config.workdir or ("/root" if user == 0 else "/")
        return user, cwd, {"HOME": home, **self.env, **run.env}

    def __enter__(self) -> Live:
        self.busy += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.busy -= 1
        self.last_used = time.monotonic()

    def info(self) -> Info:
        return Info(
            id=self.id,
            image=self.spec.image,
            state="paused" if self.box.paused else "running",
            created_at=self.created_at,
            labels=self.spec.labels,
            losses=self.box.losses,
            tenant=self.spec.tenant,
        )

    def note(self, spec: SandboxSpec, generation: int) -> str:
        """What a node that adopts its box must know."""
        return Note(self.id, spec, self.named, self.created_at, generation, self.what).write()

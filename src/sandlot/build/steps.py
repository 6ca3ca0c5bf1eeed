"""What a build consists of: values that recipe and Dockerfile both become, and `builder.py` carries out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from sandlot.api import ImageConfig


@dataclass(frozen=True, slots=True)
class Run:
    """A command in a box. `args` are added to its environment, and are not kept."""

    argv: tuple[str, ...]
    args: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of the context. A target that ends with `/` is a directory; a relative one is below the workdir. `add`: no
    source may be an archive, for who wrote ADD expects what is in it."""

    sources: tuple[str, ...]
    target: str
    user: str | None = None
    mode: int | None = None
    add: bool = False


@dataclass(frozen=True, slots=True)
class Workdir:
    """Where what follows is, and commands of the image are; made if it is missing."""

    path: str


@dataclass(frozen=True, slots=True)
class User:
    """As whom what follows is run, and commands of the image are: a name that the image knows, or a number."""

    name: str


@dataclass(frozen=True, slots=True)
class Configure:
    """What the image says of commands and makes no file. None: as it was."""

    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    shell: tuple[str, ...] | None = None

    def over(self, config: ImageConfig) -> ImageConfig:
        changes = {
            "env": {**config.env, **self.env},
            "labels": {**config.labels, **self.labels},
            "entrypoint": config.entrypoint if self.entrypoint is None else self.entrypoint,
            "cmd": config.cmd if self.cmd is None else self.cmd,
            "shell": config.shell if self.shell is None else self.shell,
        }
        return config.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Step:
    """One of them, and how a person finds and knows it."""

    where: str  # `Dockerfile:7`
    text: str  # on one line
    do: Run | Copy | Workdir | User | Configure

    def identity(self) -> str:
        """Equal for steps that do the same, wherever they stand."""
        return json.dumps([type(self.do).__name__, dataclasses.asdict(self.do)], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Build:
    """A file that was read. `steps` is asked with what the base image says of commands."""

    base: str
    where: str  # the base is named: `Dockerfile:1`
    steps: Callable[[ImageConfig], tuple[Step, ...]]
    name: str | None = None

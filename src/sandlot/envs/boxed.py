"""A task in a sandbox: files, a command that works on them, and a grade once it has ended.

Owns the words of such an environment and how one is found by name. It never starts a sandbox: `rl/rollout/agent.py`
does, and anybody may who holds a `Sandbox`. The answer key is a task's `secret`; nothing here or there copies it into
a box, and `grade` runs after the command has ended.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from sandlot.api import RunResult, Volume
from sandlot.errors import RecipeError

if TYPE_CHECKING:
    from sandlot.sandbox import Sandbox

Answer = Callable[[list[dict[str, Any]]], str]  # a dialogue in OpenAI's shape → the assistant's next text


@dataclass(frozen=True)
class BoxTask:
    """One task. `files` maps absolute paths inside to contents; `argv` is the agent, run in `cwd` with `env` added to
    the sandbox's, for at most `timeout` seconds. `secret` is the answer key and stays outside."""

    id: str
    seed: int
    files: dict[str, bytes]
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = field(default_factory=dict)
    timeout: float = 300.0
    secret: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """What an attempt was worth, and the environment's own numbers about it."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class BoxedEnv(Protocol):
    """Tasks that are worked on in a box. May also have `demonstrator(task, seed) -> Answer`: a scripted policy."""

    volumes: tuple[Volume, ...]  # what every box of it sees of the host: the agent program, read-only

    def task(self, split: str, index: int) -> BoxTask:
        """The task of that number, always the same one. The splits "train", "heldout" and "demos" share no task."""
        ...

    async def grade(self, task: BoxTask, box: Sandbox, result: RunResult) -> Grade:
        """Judge what the agent left behind. Called once, after it has ended, with the box still there."""
        ...


def load_env(spec: str, relative_to: Path | str = ".", **options: Any) -> BoxedEnv:
    """The environment that `spec` names: `path/to/file.py:Class`, relative to the recipe's folder, or
    `package.module:Class`. `options` are its constructor's arguments. Raises RecipeError."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise RecipeError(f"{spec!r} names no environment", "write FILE.py:Class or package.module:Class")
    module = _file(Path(relative_to, place), spec) if place.endswith(".py") else _module(place, spec)
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        found = [key for key, value in vars(module).items() if isinstance(value, type) and hasattr(value, "grade")]
        raise RecipeError(f"{place} has no class {name}", f"it has {', '.join(found)}" if found else None)
    missing = [part for part in ("task", "grade") if not callable(getattr(kind, part, None))]
    if missing:
        raise RecipeError(f"{spec} is not an environment: it has no {' and no '.join(missing)}")
    try:
        return cast(BoxedEnv, kind(**options))
    except TypeError as error:
        raise RecipeError(f"{spec} does not take these options: {error}") from error


def _file(path: Path, spec: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise RecipeError(f"{spec}: there is no file {path}", "the path is relative to the recipe's folder")
    # A name of its own: two recipes may each have a task.py, and neither may hide an installed package.
    name = f"sandlot_env_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise RecipeError(f"{spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses in it look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RecipeError(f"{spec}: {path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(f"{spec}: {name} cannot be imported: {error}") from error

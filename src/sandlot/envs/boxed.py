"""A task in a sandbox: files, a command that works on them, and a grade once it has ended.

Owns the words of such an environment and how one is found by name. It never starts a sandbox: `rl/rollout/agent.py`
does, and anybody may who holds a `Sandbox`. The answer key is a task's `secret`; nothing here or there copies it into
a box, and `grade` runs after the command has ended.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sandlot.api import RunResult, Volume
from sandlot.config import unknown
from sandlot.errors import RecipeError

if TYPE_CHECKING:
    from sandlot.sandbox import Sandbox

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

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
    return cast(BoxedEnv, kind(**_checked(kind, spec, options)))


def _checked(kind: type, spec: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as the constructor's own annotations want them. Raises RecipeError."""
    takes = inspect.signature(kind).parameters
    hints = get_type_hints(vars(kind).get("__init__", kind))
    if missing := [n for n, p in takes.items() if p.default is p.empty and p.kind not in _MANY and n not in options]:
        raise RecipeError(
            f"{spec} needs the option `env.options.{missing[0]}`", f"set it: `env.options.{missing[0]}=…`"
        )
    checked = {}
    for name, value in options.items():
        if name not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            raise unknown("key", f"env.options.{name}", name, takes)
        try:
            checked[name] = TypeAdapter(hints.get(name, Any)).validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            default = takes[name].default
            raise RecipeError(
                f"`env.options.{name}` is {value!r}: {said[:1].lower() + said[1:]}",
                f"by default `env.options.{name}={default}`" if default is not takes[name].empty else None,
            ) from None
    return checked


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

"""Reading configuration: TOML and dotted overrides into checked, frozen models.

Promises: reading changes nothing (no environment variable, no path, no clock); an unknown key fails with the nearest
known one; every fault names the key as the user wrote it. The sentence under a field is its documentation.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from sandlot.errors import RecipeError

Toml = dict[str, Any]


class Config(BaseModel):
    """A frozen section of a configuration. Subclasses document each field by a sentence under it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


C = TypeVar("C", bound=BaseModel)


def load_toml(path: Path) -> Toml:
    """The tables of a TOML file. Raises RecipeError when there is none or it is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"there is no file {path}", _beside(path.parent)) from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder, not a file", _beside(path)) from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}", "give the path of a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}", 'text needs quotes there: `name = "demo"`') from None


def _beside(folder: Path) -> str:
    near = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    listing = ", ".join(f"`{path}`" for path in near[:5])
    return f"in {folder} there is {listing}" if near else "give the path of a TOML file"


def override(tables: Toml, assignments: Iterable[str]) -> Toml:
    """`tables` with `a.b=value` applied, each value read as TOML, or as a string where it is none.

    A list element is reached by its number or by its `name`: `phase.1.lr=1e-3`, `phase.rl.lr=1e-3`.
    """
    changed: Toml = _copy(tables)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"`{assignment}` is not of the form key=value", "write for example `seed=1`")
        _set(changed, key.strip().split("."), _value(text), assignment)
    return changed


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tables: Any, keys: list[str], value: Any, assignment: str) -> None:
    here = tables
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(here, list):
            names = [str(e.get("name", i)) if isinstance(e, dict) else str(i) for i, e in enumerate(here)]
            index = names.index(key) if key in names else int(key) if key.isdecimal() else -1
            if not 0 <= index < len(here):
                raise RecipeError(f"`{assignment}`: there is no `{key}`", "there is " + ", ".join(names))
            if last:
                here[index] = value
            else:
                here = here[index]
        elif last:
            here[key] = value
        else:
            # A section given by its bare name, `engine = "local"`, becomes a table when an option of it is set.
            if isinstance(here.get(key), str):
                here[key] = {"name": here[key]}
            here = here.setdefault(key, {})
            if not isinstance(here, dict | list):
                raise RecipeError(f"`{assignment}`: `{key}` is a value, not a section", f"write `{key}=…`")


def check(model: type[C], values: Mapping[str, Any], where: str) -> C:
    """`values` as a `model`. Raises RecipeError naming the first faulty key under `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        dotted = ".".join(([where] if where else []) + path)
        if first["type"] == "extra_forbidden":
            raise unknown("key", dotted, path[-1], _fields(model, first["loc"][:-1])) from None
        said = first["msg"].removeprefix("Value error, ")
        said = said[:1].lower() + said[1:]
        if first["type"] in ("model_type", "dict_type"):
            said = "it is a section, with keys of its own"
        shown = f"`{dotted}` is {first['input']!r}: {said}" if path else f"{where}: {said}"
        raise RecipeError(shown, _hint(model, first["loc"], dotted)) from None


def _hint(model: type[BaseModel], path: tuple[int | str, ...], dotted: str) -> str | None:
    """What the key at `path` takes: the keys of a section, else its own sentence and its default."""
    if keys := _fields(model, path):
        return f"set one of its keys: {', '.join(f'`{dotted}.{key}`' if dotted else f'`{key}`' for key in keys)}"
    owner = _section(model, path[:-1])
    field = None if owner is None or not path else owner.model_fields.get(str(path[-1]))
    if field is None:
        return None
    default = "" if field.is_required() or field.default is None else f"; by default `{dotted}={field.default}`"
    return f"`{path[-1]}`: {(field.description or 'see the reference').rstrip('.')}{default}"


def unknown(kind: str, shown: str, word: str, known: Iterable[str]) -> RecipeError:
    """The error for a word that is not one of `known`: what was meant, or what there is."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    listing = "there is " + ", ".join(choices) if choices else "it takes none"
    return RecipeError(f"unknown {kind} `{shown}`", f"did you mean `{near[0]}`? {listing}" if near else listing)


def _fields(model: type[BaseModel], path: Iterable[int | str]) -> list[str]:
    """The keys that the model at `path` inside `model` takes."""
    found = _section(model, path)
    return [] if found is None else list(found.model_fields)


def _section(model: type[BaseModel], path: Iterable[int | str]) -> type[BaseModel] | None:
    """The model at `path` inside `model`; None where a value stands."""
    here: Any = model
    for part in path:
        if isinstance(part, str) and isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[part].annotation if part in here.model_fields else None
        candidates = [here, *get_args(here)]
        here = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), here)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def locate(entry: str, relative_to: Path | None = None) -> Any:
    """The object that `package.module:Name` or `path/to/file.py:Name` names; a path is relative to `relative_to`.

    Raises RecipeError when there is no such file, module or name.
    """
    module_name, colon, name = entry.rpartition(":")
    if not colon or not module_name or not name:
        raise RecipeError(f"`{entry}` does not name an object", "write `package.module:Name` or `path/to/file.py:Name`")
    if module_name.endswith(".py"):
        path = (relative_to or Path()) / module_name
        if not path.is_file():
            raise RecipeError(f"`{entry}`: there is no file {path}", "the path is relative to the recipe's folder")
        # Named after its path, so that two recipes may both have a task.py.
        spec = importlib.util.spec_from_file_location(
            "sandlot_recipe_" + path.resolve().as_posix().encode().hex(), path
        )
        if spec is None or spec.loader is None:
            raise RecipeError(f"`{entry}`: {path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # somebody's file, which may raise anything
            raise RecipeError(f"`{entry}`: {path} cannot be loaded: {type(error).__name__}: {error}") from error
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise RecipeError(f"`{entry}`: {error}", "is the package installed where sandlot runs?") from error
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise unknown("name", f"{module_name}:{name}", name, public)
    return getattr(module, name)

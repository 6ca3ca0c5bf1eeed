"""The one checked model of a recipe file.

A recipe holds only what differs from the defaults; here stand the defaults, and the sentence under a field is its
documentation. Each section that names a part (`algorithm`, `engine`, `trainer`) is checked with that part's own
Config, found through its table of import strings; unknown keys, unknown names and parts that cannot work together fail
here, before anything starts. Reading a recipe imports no torch and changes nothing.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field

from sandlot.api import Limits
from sandlot.config import Config, Toml, check, load_toml, locate, override, unknown
from sandlot.envs.boxed import BoxedEnv, load_env
from sandlot.errors import RecipeError
from sandlot.rl.algos import ALGORITHMS
from sandlot.rl.algos.base import Algorithm
from sandlot.rl.engines import ENGINES
from sandlot.rl.train.backend import BACKENDS, Optimization, Settings

DEFAULTS = {"engine": "local", "trainer": "single"}
Named = dict[str, Any]  # a part by name with its options: {"name": "grpo", "clip_low": 0.2}; the bare name will do


class EnvSection(Config):
    """The tasks."""

    name: str
    """`path/to/file.py:Class`, relative to the recipe's folder, or `package.module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""


class ModelSection(Config):
    """The policy that a run starts from: exactly one of `path` and `build`."""

    path: str | None = None
    """A Hugging Face folder."""
    build: str | None = None
    """`path/to/file.py:function`, called once with (folder, seed, **options); writes such a folder."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `build`."""


class SandboxSection(Config):
    """The boxes."""

    image: str = "host"
    """Image of every box."""
    limits: Limits | None = None
    """Limits named here are refused where the host cannot keep them; None: the defaults, as far as it can."""


class RolloutSection(Config):
    """How episodes are run."""

    max_running: int = Field(default=16, ge=1)
    """Boxes alive at once."""
    max_tokens: int = Field(default=64, ge=1)
    """Tokens in one answer of the model."""
    max_calls: int = Field(default=64, ge=1)
    """Answers in one episode; what the agent asks beyond them is refused."""
    patience: float = Field(default=600.0, gt=0)
    """Seconds without a finished group, or for one call of engine or trainer, after which the run stops and says what
    it waited for."""


class EvaluationSection(Config):
    """What a policy is worth: its success on tasks that are never trained on."""

    tasks: int = Field(default=200, ge=1)
    """Held-out tasks, the same ones at every evaluation; sampled at temperature 1."""


class PhaseBase(Optimization):
    """A stretch of training with one algorithm."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """What reports call it: its result is `success_NAME`."""
    algorithm: Named
    """A name from the table or `package.module:Class`, alone or with options: `{ name = "grpo", clip_high = 0.3 }`."""
    needs_success: float = Field(default=0.0, ge=0, le=1)
    """Held-out success below which the phase is not started: there would be nothing for it to lift."""

    @property
    def optimization(self) -> Optimization:
        """Its own part of it, for the trainer."""
        return Optimization(**{name: getattr(self, name) for name in Optimization.model_fields})


class DemonstrationPhase(PhaseBase):
    """Learns from scripted answers, given in real boxes by the environment's demonstrator."""

    demonstrations: int = Field(default=600, ge=1)
    """Episodes to collect, once."""
    epochs: int = Field(default=10, ge=1)
    """Times that each is learned from."""
    batch: int = Field(default=16, ge=1)
    """Demonstrations in a batch."""


class RolloutPhase(PhaseBase):
    """Learns from the policy's own attempts."""

    steps: int = Field(default=30, ge=1)
    """Batches to learn from."""
    groups: int = Field(default=16, ge=1)
    """Tasks in a batch."""
    group_size: int = Field(default=8, ge=1)
    """Attempts at each task, which are compared with each other."""
    max_staleness: int | None = Field(default=None, ge=0)
    """As the recipe's own, for this phase; None: the recipe's."""


Phase = DemonstrationPhase | RolloutPhase


class Recipe(Config):
    """A whole run."""

    name: str = "run"
    """What the run is called; the default run folder is `runs/NAME-1`, or the next number that is free."""
    folder: str = "."
    """Where file names in the recipe start from: the recipe file's own folder."""
    run_dir: str | None = None
    """The run folder; None: the next free one."""
    seed: int = Field(default=0, ge=0)
    """Of everything: first weights, tasks, sampling, order of batches."""
    max_staleness: int = Field(default=1, ge=0)
    """Policy versions that an episode may be older than its batch. 0: sampling and learning take turns."""
    checkpoint_seconds: float = Field(default=5.0, ge=0)
    """A kill costs at most this much of the run, and one step. 0: a checkpoint after each step."""
    env: EnvSection
    model: ModelSection
    sandbox: SandboxSection = SandboxSection()
    engine: Named = Field(default_factory=lambda: {"name": DEFAULTS["engine"]})
    """A name from the table, alone or with options: `{ name = "local", max_rows = 64 }`."""
    trainer: Named = Field(default_factory=lambda: {"name": DEFAULTS["trainer"]})
    """A name from the table, alone or with options: `{ name = "single", micro_batch_tokens = 512 }`."""
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    phase: tuple[Phase, ...] = Field(min_length=1)
    """What is learned, in this order."""

    def staleness(self, phase: RolloutPhase) -> int:
        """`max_staleness` in this phase."""
        return self.max_staleness if phase.max_staleness is None else phase.max_staleness

    def algorithm(self, phase: Phase) -> Algorithm:
        """A phase's algorithm, made."""
        kind = _part("algorithm", ALGORITHMS, phase.algorithm["name"], Path(self.folder), _ALGORITHM)
        config = check(kind.Config, _options(phase.algorithm), f"phase.{phase.name}.algorithm")
        moved = isinstance(phase, RolloutPhase) and (phase.minibatches > 1 or self.staleness(phase) > 0)
        made: Algorithm = kind(config, off_policy=moved)
        return made

    def environment(self) -> BoxedEnv:
        """The environment, made."""
        return load_env(self.env.name, relative_to=Path(self.folder), **self.env.options)

    def engine_config(self) -> tuple[str, Config]:
        """Import string of the engine's class, and its checked options."""
        name, folder = str(self.engine["name"]), Path(self.folder)
        found = _part("engine", ENGINES, name, folder, _ENGINE)
        return _entry(ENGINES, name, folder), check(found.Config, _options(self.engine), "engine")

    def trainer_settings(self) -> tuple[str, Settings]:
        """Import string of the trainer's class, and its checked options. Not imported here: it loads torch."""
        name = str(self.trainer["name"])
        if name not in BACKENDS and ":" not in name:
            raise unknown("trainer", name, name, BACKENDS)
        return _entry(BACKENDS, name, Path(self.folder)), check(Settings, _options(self.trainer), "trainer")

    def to_toml(self) -> str:
        """The whole recipe, defaults included (but for limits), as a file that runs again."""
        values = _without_none(self.model_dump(mode="json"))
        if self.sandbox.limits is not None:
            # Only those that were named: a limit that stands in a recipe is refused where the host cannot keep it.
            values["sandbox"]["limits"] = self.sandbox.limits.model_dump(mode="json", exclude_unset=True)
        return "# The resolved recipe of this run. It can be run again: `sandlot train FILE run_dir=ANOTHER`\n" + (
            tomli_w.dumps(values)
        )

    def key(self) -> str:
        """A hash of all that decides the result: not of where the run folder is, nor of when a phase is not started."""
        apart: Any = {"run_dir": True, "folder": True, "checkpoint_seconds": True}
        values = self.model_dump_json(exclude={**apart, "phase": {"__all__": {"needs_success"}}})
        return hashlib.sha256(values.encode()).hexdigest()[:16]


def load_recipe(path: Path, assignments: Iterable[str] = ()) -> Recipe:
    """The checked recipe in a file, with `key=value` changes. Raises RecipeError."""
    tables = override(load_toml(path), assignments)
    tables.setdefault("folder", str(path.resolve().parent))
    tables.setdefault("name", path.stem)
    return make_recipe(tables)


def resume_command(run: Path, url: str | None = None, *changes: str) -> str:
    """The command that goes on with the run in a folder, whatever it was started with: by its own resolved recipe."""
    words = ["sandlot", "train", f"{run}/recipe.toml", f"run_dir={run}", *changes, "--resume"]
    return shlex.join([*words, *(["--url", url] if url else [])])


def make_recipe(tables: Toml) -> Recipe:
    """The checked recipe of these tables. Raises RecipeError."""
    tables = dict(tables)
    folder = Path(str(tables.get("folder", ".")))
    raw = tables.pop("phase", None)
    if not isinstance(raw, list) or not raw:
        raise RecipeError("the recipe has no phase", 'add one: `[[phase]]`, `name = "rl"`, `algorithm = "grpo"`')
    for number, one in enumerate(raw):
        if not isinstance(one, dict):
            raise RecipeError(
                f"`phase.{number}` is {one!r}: it is a section, with keys of its own",
                f"set one of its keys: `phase.{number}.lr=1e-3`",
            )
    for part in DEFAULTS:
        if part in tables:
            tables[part] = _named(tables[part], part, default=DEFAULTS[part])
    # Its own keys first: a fault in `seed` should not be hidden behind one in a phase.
    check(_WithoutPhases, tables, "")
    recipe = check(Recipe, {**tables, "phase": [_phase(one, i, folder) for i, one in enumerate(raw)]}, "")
    return _fit(recipe)


class _WithoutPhases(Recipe):
    phase: tuple[Phase, ...] = ()


def _phase(raw: Mapping[str, Any], number: int, folder: Path) -> Phase:
    where = f"phase.{raw.get('name', number)}"
    if "algorithm" not in raw:
        raise RecipeError(f"`{where}` names no algorithm", "there is " + ", ".join(sorted(ALGORITHMS)))
    algorithm = _named(raw["algorithm"], f"{where}.algorithm")
    kind = _part("algorithm", ALGORITHMS, algorithm["name"], folder, _ALGORITHM)
    resolved = check(kind.Config, _options(algorithm), f"{where}.algorithm")
    learns: Literal["rollouts", "demonstrations"] = kind.learns_from
    kinds: list[Any] = [RolloutPhase, DemonstrationPhase]
    model, other = kinds if learns == "rollouts" else reversed(kinds)
    for key in raw:
        if key not in model.model_fields and key in other.model_fields:
            raise RecipeError(
                f"`{where}.{key}` means nothing here: {algorithm['name']} learns from {learns}",
                f"leave it out; such a phase takes {', '.join(sorted(model.model_fields))}",
            )
    named = {"name": algorithm["name"], **resolved.model_dump()}
    found: Phase = check(model, {**raw, "algorithm": named}, where)
    if isinstance(found, RolloutPhase) and found.group_size < kind.least_group:
        raise RecipeError(
            f"`{where}.group_size` is {found.group_size}: {algorithm['name']} compares at least {kind.least_group}",
            f"set `{where}.group_size={max(8, kind.least_group)}`",
        )
    parts = found.groups if isinstance(found, RolloutPhase) else found.batch
    if found.minibatches > parts:
        raise RecipeError(
            f"`{where}.minibatches` is {found.minibatches}, and a batch has only {parts} groups to share among them",
            "lower it, or make the batch larger",
        )
    if isinstance(found, DemonstrationPhase) and found.batch > found.demonstrations:
        raise RecipeError(
            f"`{where}.batch` is {found.batch}, more than the {found.demonstrations} demonstrations there are",
            f"lower it, or raise `{where}.demonstrations`",
        )
    return found


def _fit(recipe: Recipe) -> Recipe:
    """The recipe, if its parts can work together, with every part's options spelled out."""
    names = [phase.name for phase in recipe.phase]
    if twice := [name for name in names if names.count(name) > 1 or name == "start"]:
        raise RecipeError(f"the phase name `{twice[0]}` is taken", "results are told apart by it: choose another")
    if (recipe.model.path is None) == (recipe.model.build is None):
        raise RecipeError("`model` needs exactly one of `path` and `build`", "leave the other out")
    if recipe.model.path is not None and not (Path(recipe.folder) / recipe.model.path / "config.json").is_file():
        raise RecipeError(
            f"`model.path` is {recipe.model.path}: there is no config.json in it", "it must be a Hugging Face folder"
        )
    if recipe.model.build is not None and not (Path(recipe.folder) / recipe.model.build.partition(":")[0]).is_file():
        # Only looked at: it imports torch, which is for the trainer's process.
        raise RecipeError(
            f"`model.build` is {recipe.model.build}: there is no such file in {recipe.folder}",
            "write `path/to/file.py:function`, relative to the recipe's folder",
        )
    env = recipe.environment()
    for phase in recipe.phase:
        if isinstance(phase, DemonstrationPhase) and not hasattr(env, "demonstrator"):
            raise RecipeError(
                f"phase `{phase.name}` needs demonstrations, and {recipe.env.name} has no `demonstrator`",
                "give the environment one, or leave the phase out",
            )
        if isinstance(phase, RolloutPhase) and recipe.rollout.max_running < phase.group_size:
            raise RecipeError(
                f"`rollout.max_running` is {recipe.rollout.max_running}, less than one group of {phase.group_size}",
                f"raise it: `rollout.max_running={phase.group_size}`",
            )
    _, engine = recipe.engine_config()
    _, trainer = recipe.trainer_settings()
    return recipe.model_copy(
        update={
            "engine": {"name": recipe.engine["name"], **engine.model_dump()},
            "trainer": {"name": recipe.trainer["name"], **trainer.model_dump()},
        }
    )


def _named(value: Any, where: str, default: str | None = None) -> Named:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and default is not None:
        value = {"name": default, **value}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return dict(value)
    named = f'`{where} = {{ name = "{default or "grpo"}" }}`'
    raise RecipeError(f"`{where}` is {value!r}: it must be a name, or a table with a `name`", f"for example {named}")


def _options(part: Named) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "name"}


# What a class must have to be one. Looked at here, because an import string may name anything.
_ALGORITHM = ("Config", "learns_from", "least_group", "score", "advantages")
_ENGINE = ("Config", "generate", "update")


def _part(kind: str, table: Mapping[str, str], name: str, folder: Path, needs: tuple[str, ...]) -> Any:
    if name not in table and ":" not in name:
        raise unknown(kind, name, name, table)
    found = locate(table.get(name, name), folder)
    if missing := [need for need in needs if not hasattr(found, need)]:
        raise RecipeError(
            f"`{name}` is not an {kind}: it has no `{missing[0]}`", "there is " + ", ".join(sorted(table))
        )
    return found


def _entry(table: Mapping[str, str], name: str, folder: Path) -> str:
    """The import string of a part; a file's path made absolute, for another process to find."""
    entry = table.get(name, name)
    module, _, attribute = entry.rpartition(":")
    return f"{(folder / module).resolve()}:{attribute}" if module.endswith(".py") else entry


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value

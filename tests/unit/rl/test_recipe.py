"""Promises:
1. The demo's recipe is valid, and its resolved copy is the same recipe again.
2. Unknown keys, algorithms, engines and trainers, and parts that cannot work together, are refused with a hint before
   anything starts.
3. An algorithm may be named by import string, in the recipe's own folder.
4. The key tells recipes apart by what decides the result, not by where they run.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sandlot.errors import RecipeError
from sandlot.rl.recipe import DemonstrationPhase, Recipe, RolloutPhase, load_recipe, make_recipe

DEMO = Path(__file__).parents[3] / "recipes" / "find" / "demo.toml"


def demo(*changes: str) -> Recipe:
    return load_recipe(DEMO, changes)


def test_the_resolved_copy_is_the_same_recipe_again() -> None:
    recipe = demo("seed=2", "phase.rl.lr=1e-3", "sandbox.limits.memory=64M")
    assert make_recipe(tomllib.loads(recipe.to_toml())) == recipe
    warm, rl = recipe.phase
    assert isinstance(warm, DemonstrationPhase) and isinstance(rl, RolloutPhase)
    assert rl.lr == 1e-3
    assert rl.algorithm["clip_low"] == 0.2  # defaults are spelled out
    assert recipe.engine["name"] == "local" and recipe.engine["max_rows"] == 64


def test_only_limits_that_were_named_are_named_in_the_resolved_copy() -> None:
    recipe = make_recipe(tomllib.loads(demo("sandbox.limits.pids=100").to_toml()))
    assert recipe.sandbox.limits is not None
    assert recipe.sandbox.limits.model_fields_set == {"pids"}
    assert make_recipe(tomllib.loads(demo().to_toml())).sandbox.limits is None


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        ("sede=1", "unknown key `sede`", "did you mean `seed`?"),
        ("phase.rl.group_sise=4", r"unknown key `phase\.rl\.group_sise`", "did you mean `group_size`?"),
        ("phase.rl.algorithm=gpro", "unknown algorithm `gpro`", "did you mean `grpo`? there is grpo, sft"),
        ("phase.rl.algorithm.clip_hi=1", r"unknown key `phase\.rl\.algorithm\.clip_hi`", "clip_high"),
        ("engine=vlm", "unknown engine `vlm`", "there is local"),
        ("engine.max_row=1", r"unknown key `engine\.max_row`", "max_rows"),
        ("trainer=fsdp3", "unknown trainer `fsdp3`", "there is single"),
        ("phase.warm.max_staleness=1", "learns from demonstrations", "leave it out"),
        ("phase.rl.epochs=1", "learns from rollouts", "leave it out"),
        ("phase.rl.group_size=1", "grpo compares at least 2", "group_size=8"),
        ("phase.rl.groups=0", "greater than or equal to 1", ""),
        ("phase.warm.batch=0", "greater than or equal to 1", ""),
        ("phase.warm.batch=601", "more than the 600 demonstrations", ""),
        ("phase.rl.minibatches=17", "only 16 groups", "lower it"),
        ("rollout.max_running=4", "less than one group of 8", "max_running=8"),
        ("max_staleness=-1", "greater than or equal to 0", ""),
        ("phase.rl.name=warm", "is taken", "choose another"),
        ("model.path=x", "exactly one of", ""),
        ("model.build=modle.py:build", "no such file", "relative to the recipe"),
        ("env.name=task.py:Fnd", "Fnd", "Find"),
        ("phase=[]", "no phase", "add one"),
        ("phase.rl.algorithm={}", "must be a name", "for example"),
        ("phase.rl.algorithm=json:dumps", "is not an algorithm: it has no `Config`", "there is grpo, sft"),
        ("engine=json:dumps", "is not an engine: it has no `Config`", "there is local"),
        ("phase.rl=3", r"`phase\.1` is 3: it is a section", "lr=1e-3"),
        ("seed=abc", "`seed` is 'abc': input should be a valid integer", "by default `seed=0`"),
        ("rollout=5", "`rollout` is 5: it is a section", "`rollout.max_running`"),
        ("seed.x=1", "x", ""),
        ("env.options.turn=3", r"unknown key `env\.options\.turn`", "did you mean `turns`?"),
        ("env.options.turns=x", r"`env\.options\.turns` is 'x': input should be a valid integer", "turns=4"),
        ("env.options.turns=0", "turns is 0", "turns=4"),
        ("env.options=3", r"`env\.options` is 3: it is a section", ""),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(change: str, said: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        demo(change)
    assert caught.value.hint and hint in caught.value.hint


def test_an_algorithm_of_ones_own_is_named_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from sandlot.rl.algos.grpo import Grpo\nclass Mine(Grpo):\n    name = 'mine'\n")
    recipe = demo(f"folder={DEMO.parent}", f"phase.rl.algorithm={tmp_path}/mine.py:Mine")
    assert recipe.algorithm(recipe.phase[1]).name == "mine"


def test_the_algorithm_knows_whether_the_policy_moves() -> None:
    def needs(*changes: str) -> frozenset[str]:
        recipe = demo(*changes)
        return recipe.algorithm(recipe.phase[1]).needs

    assert needs("phase.rl.minibatches=1", "max_staleness=0") == frozenset()
    assert needs("phase.rl.minibatches=2", "max_staleness=0") == {"old"}
    assert needs("phase.rl.minibatches=1", "max_staleness=1") == {"old"}


def test_the_key_is_of_what_decides_the_result() -> None:
    assert demo().key() == demo("run_dir=elsewhere", "checkpoint_seconds=1").key()
    assert demo().key() == demo("phase.rl.needs_success=0").key()
    assert demo().key() != demo("seed=1").key()
    assert demo().key() != demo("phase.rl.lr=1e-3").key()

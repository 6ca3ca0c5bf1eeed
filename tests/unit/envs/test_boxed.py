"""Promises:
1. An environment is found by file and class, relative to the recipe, or by module and class; options reach it.
2. A name that leads nowhere is an error that says what is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.envs.boxed import load_env
from sandlot.errors import RecipeError

GOOD = """
from dataclasses import dataclass

@dataclass
class Good:
    size: int = 1
    volumes: tuple = ()
    def task(self, split, index): ...
    async def grade(self, task, box, result): ...

class Bare:
    pass
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "broken.py").write_text("1 / 0")
    return tmp_path


def test_an_environment_is_found_in_a_file_and_takes_options(recipe: Path) -> None:
    env = load_env("good.py:Good", recipe, size=3)
    assert env.size == 3  # type: ignore[attr-defined]
    assert type(load_env("good.py:Good", recipe)) is type(env)  # loaded once


def test_two_recipes_may_each_have_a_file_of_that_name(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "good.py").write_text(GOOD)
    assert type(load_env("good.py:Good", recipe)) is not type(load_env("good.py:Good", other))


def test_an_environment_is_found_in_a_module(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="no class Nothing"):
        load_env("sandlot.envs.boxed:Nothing")


@pytest.mark.parametrize(
    ("spec", "said", "hint"),
    [
        ("good.py", "names no environment", "FILE.py:Class"),
        ("missing.py:Good", "there is no file", "relative to"),
        ("broken.py:Good", "ZeroDivisionError", None),
        ("good.py:Goood", "no class Goood", "Good"),
        ("good.py:Bare", "no task and no grade", None),
        ("no.such.module:Good", "cannot be imported", None),
    ],
)
def test_a_name_that_leads_nowhere_says_what_is_there(recipe: Path, spec: str, said: str, hint: str | None) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        load_env(spec, recipe)
    assert hint is None or hint in (caught.value.hint or "")


def test_options_that_an_environment_does_not_take_are_an_error(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="colour"):
        load_env("good.py:Good", recipe, colour="red")

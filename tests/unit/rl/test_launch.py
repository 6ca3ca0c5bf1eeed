"""Promises:
1. A run folder belongs to one process at a time; another one is told so, with what to do.
2. A folder holds a run once its recipe is in it: that is not overwritten.
3. The command that goes on with a run is one that a shell takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.errors import Conflict
from sandlot.rl.launch import held, run_folder
from sandlot.rl.recipe import load_recipe, resume_command

DEMO = Path(__file__).parents[3] / "recipes" / "find" / "demo.toml"


def test_a_run_folder_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(Conflict, match="is being worked on by another process") as caught, held(tmp_path):
            pass
        assert "another folder" in (caught.value.hint or "")
    with held(tmp_path):
        pass


def test_a_folder_holds_a_run_once_its_recipe_is_in_it(tmp_path: Path) -> None:
    recipe = load_recipe(DEMO, [f"run_dir={tmp_path}/run"])
    run = run_folder(recipe, resume=False)
    assert run_folder(recipe, resume=False) == run  # one that never began is not in the way
    (run / "recipe.toml").write_text(recipe.to_toml())
    with pytest.raises(Conflict, match="already holds a run") as caught:
        run_folder(recipe, resume=False)
    assert resume_command(tmp_path / "run") in (caught.value.hint or "")
    assert run_folder(recipe, resume=True) == run


def test_the_command_to_go_on_survives_a_shell() -> None:
    assert resume_command(Path("/a b")) == "sandlot train '/a b/recipe.toml' 'run_dir=/a b' --resume"

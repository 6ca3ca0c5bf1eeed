"""Promises:
1. A key that is not known fails, naming it as it was written and the nearest known one.
2. `a.b=value` changes tables and list elements, by number or name, and never what was read.
3. A file or an object that is not there is said with what there is.
4. Reading a configuration imports nothing heavy.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandlot.config import Config, check, load_toml, locate, override
from sandlot.errors import RecipeError


class Inner(Config):
    rate: float = 1.0


class Outer(Config):
    seed: int = 0
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(RecipeError, match=r"unknown key `top\.sede`") as caught:
        check(Outer, {"sede": 1}, "top")
    assert caught.value.hint == "did you mean `seed`? there is inner, many, seed"
    with pytest.raises(RecipeError, match=r"unknown key `inner\.rat`") as caught:
        check(Outer, {"inner": {"rat": 1}}, "")
    assert "did you mean `rate`?" in (caught.value.hint or "")
    with pytest.raises(RecipeError, match=r"unknown key `many\.0\.x`") as caught:
        check(Outer, {"many": [{"x": 1}]}, "")
    assert caught.value.hint == "there is rate"


def test_a_wrong_value_is_named_with_its_key() -> None:
    with pytest.raises(RecipeError, match=r"`inner\.rate` is 'fast': input should be a valid number"):
        check(Outer, {"inner": {"rate": "fast"}}, "")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("seed=3", {"seed": 3}),
        ("inner.rate=1e-3", {"inner": {"rate": 1e-3}}),
        ("name=word", {"name": "word"}),
        ("on=true", {"on": True}),
        ("list=[1, 2]", {"list": [1, 2]}),
        ("empty=", {"empty": ""}),
        ("equation=a=b", {"equation": "a=b"}),
        ("phase.1.lr=2", {"phase": [{"name": "a"}, {"name": "b", "lr": 2}]}),
        ("phase.b.lr=2", {"phase": [{"name": "a"}, {"name": "b", "lr": 2}]}),
        ("engine.rows=2", {"engine": {"name": "local", "rows": 2}}),
    ],
)
def test_an_override_sets_a_key(assignment: str, expected: dict[str, object]) -> None:
    tables = {"phase": [{"name": "a"}, {"name": "b"}], "engine": "local"}
    before = repr(tables)
    assert override(tables, [assignment]) == {**tables, **expected}
    assert repr(tables) == before


@pytest.mark.parametrize(
    ("assignment", "said"), [("seed", "key=value"), ("phase.c.lr=1", "there is no `c`"), ("seed.x=1", "is a value")]
)
def test_an_override_that_cannot_be_is_said(assignment: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        override({"phase": [{"name": "a"}], "seed": 1}, [assignment])


def test_a_missing_file_is_said_with_the_ones_beside_it(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("seed = 1")
    with pytest.raises(RecipeError, match="there is no file") as caught:
        load_toml(tmp_path / "dmo.toml")
    assert "demo.toml" in (caught.value.hint or "")
    (tmp_path / "demo.toml").write_text("seed = ")
    with pytest.raises(RecipeError, match="is not TOML"):
        load_toml(tmp_path / "demo.toml")


def test_an_object_is_found_by_file_or_module(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def build(): return 7\n")
    assert locate("a.py:build", tmp_path)() == 7
    assert locate("sandlot.config:locate") is locate
    for entry, said in [
        ("a.py:biuld", "unknown name"),
        ("b.py:build", "there is no file"),
        ("nowhere.at.all:x", "No module named"),
        ("build", "does not name an object"),
    ]:
        with pytest.raises(RecipeError, match=said):
            locate(entry, tmp_path)


def test_reading_a_recipe_imports_no_torch() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "find" / "demo.toml"
    code = f"""
import sys; from pathlib import Path
from sandlot.rl.recipe import load_recipe
load_recipe(Path({str(recipe)!r}))
print(*(name for name in ("torch", "transformers", "uvicorn", "matplotlib") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("")
    with pytest.raises(RecipeError, match="is a folder, not a file") as caught:
        load_toml(tmp_path)
    assert "demo.toml" in (caught.value.hint or "")


def test_a_file_that_breaks_while_it_is_loaded_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1 / 0\n")
    with pytest.raises(RecipeError, match=r"mine\.py cannot be loaded: ZeroDivisionError"):
        locate("mine.py:Mine", tmp_path)

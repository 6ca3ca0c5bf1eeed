"""Promises of reading an image's recipe:

1. Its keys become steps in one order, whatever their order in the file.
2. An unknown key, a wrong value and a build argument are errors that name the file and say what there is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandlot.api import NO_CONFIG
from sandlot.build.recipe import read
from sandlot.build.steps import Configure, Copy, Run, User, Workdir
from sandlot.errors import RecipeError

WHOLE = """
user = 1000
commands = ["make", "make install"]
files = { "src" = "/srv/src", "a.txt" = "." }
workdir = "/srv"
env = { A = "1" }
base = "base"
name = "solver"
entrypoint = ["/x"]
labels = { a = "b" }
"""


def test_keys_become_steps_in_one_order(tmp_path: Path) -> None:
    file = tmp_path / "solver.toml"
    file.write_text(WHOLE)
    build = read(file, {})
    assert build.where == "solver.toml: base"
    assert (build.base, build.name) == ("base", "solver")
    steps = build.steps(NO_CONFIG)
    assert [step.do for step in steps] == [
        Configure(env={"A": "1"}),
        Workdir("/srv"),
        Copy(("src",), "/srv/src"),
        Copy(("a.txt",), "."),
        Run(("/bin/sh", "-c", "make")),
        Run(("/bin/sh", "-c", "make install")),
        User("1000"),
        Configure({}, {"a": "b"}, ("/x",), ()),
    ]
    assert [step.where for step in steps][4:6] == ["solver.toml: commands.0", "solver.toml: commands.1"]
    file.write_text("")
    assert read(file, {}).base == "host"


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ('comands = ["x"]', "unknown key `{}.comands`", "did you mean `commands`"),
        ('commands = "x"', "`{}.commands` is 'x'", "run one after another"),
        ('workdir = "srv"', "`{}.workdir` is 'srv'", "absolute path"),
        ("env = { A = 1 }", "`{}.env.A` is 1", ""),
        ("base = ", "{} is not TOML", "quotes"),
    ],
)
def test_a_wrong_key_is_an_error_with_a_suggestion(tmp_path: Path, text: str, said: str, hint: str) -> None:
    file = tmp_path / "solver.toml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read(file, {})
    assert said.format(file) in caught.value.message
    assert hint in (caught.value.hint or "").lower()


def test_a_recipe_takes_no_build_arguments(tmp_path: Path) -> None:
    file = tmp_path / "solver.toml"
    file.write_text("")
    with pytest.raises(RecipeError, match="takes no build arguments"):
        read(file, {"A": "1"})

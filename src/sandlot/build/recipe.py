"""A build as a small TOML file: what is in the image, in an order that is always the same.

    base = "host"                                   # what it starts from
    name = "solver"
    env = { LANG = "C.UTF-8" }                      # 1. for the commands below, and for those of the image
    workdir = "/srv"                                # 2. made if it is missing
    files = { "solver.py" = "/srv/" }               # 3. from the folder of this file
    commands = ["python3 -m compileall /srv"]       # 4. by `sh -c`, as root
    user = 1000                                     # 5. of the image's commands
    cmd = ["python3", "solver.py"]

Who needs another order writes a Dockerfile. Unknown keys fail; reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from sandlot.build.steps import Build, Configure, Copy, Run, Step, User, Workdir
from sandlot.config import Config, check, load_toml
from sandlot.errors import RecipeError


class ImageRecipe(Config):
    """The keys of the file."""

    base: str = "host"
    """The image that it starts from."""
    name: str | None = None
    """What the image is called; `--name` says otherwise."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the commands below, and of those of the image."""
    workdir: str | None = Field(default=None, pattern=r"^/")
    """Absolute path inside where commands run; made if it is missing."""
    files: dict[str, str] = Field(default_factory=dict)
    """What is copied: a path or pattern beside the recipe = a path inside. Of a folder, what is in it."""
    commands: list[str] = Field(default_factory=list)
    """Run one after another by `sh -c`, as root; the first that fails ends the build."""
    user: str | int | None = None
    """As whom commands of the image run: a number, or a name that it knows."""
    entrypoint: list[str] = Field(default_factory=list)
    """Kept for who asks."""
    cmd: list[str] = Field(default_factory=list)
    """Kept for who asks."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Kept for who asks."""


def read(path: Path, args: Mapping[str, str]) -> Build:
    """The build in a TOML file. Raises RecipeError."""
    recipe = check(ImageRecipe, load_toml(path), str(path))
    if args:
        raise RecipeError(f"{path}: a recipe takes no build arguments", "leave out `--build-arg`, or use a Dockerfile")
    steps = tuple(_steps(recipe, path.name))
    return Build(recipe.base, f"{path.name}: base", lambda _: steps, recipe.name)


def _steps(recipe: ImageRecipe, file: str) -> Iterator[Step]:
    if recipe.env:
        yield Step(f"{file}: env", f"env {' '.join(recipe.env)}", Configure(env=recipe.env))
    if recipe.workdir is not None:
        yield Step(f"{file}: workdir", f"workdir {recipe.workdir}", Workdir(recipe.workdir))
    for source, target in recipe.files.items():
        yield Step(f"{file}: files", f"copy {source} to {target}", Copy((source,), target))
    for number, command in enumerate(recipe.commands):
        yield Step(f"{file}: commands.{number}", f"run {' '.join(command.split())}", Run(("/bin/sh", "-c", command)))
    if recipe.user is not None:
        yield Step(f"{file}: user", f"user {recipe.user}", User(str(recipe.user)))
    if recipe.entrypoint or recipe.cmd or recipe.labels:
        cmd = tuple(recipe.cmd) if recipe.cmd or recipe.entrypoint else None  # an entrypoint's arguments are its own
        entrypoint = tuple(recipe.entrypoint) if recipe.entrypoint else None
        yield Step(f"{file}", "entrypoint, cmd, labels", Configure({}, recipe.labels, entrypoint, cmd))

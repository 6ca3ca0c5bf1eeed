"""`sandlot show`: a training run's table and curve again, from its folder."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from sandlot.cli import say
from sandlot.errors import NotFound

HEIGHT, WIDTH = 8, 60


def show(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show a training run: its table and its curve."""
    file = run / "run.json"
    if not file.is_file():
        if (run / "recipe.toml").is_file():
            raise NotFound(
                f"the run in {run} has not ended",
                f"it is running, or was killed; then go on: `sandlot train {run}/recipe.toml run_dir={run} --resume`",
            )
        raise NotFound(f"there is no run in {run}", "give the folder that `sandlot train` named")
    result = jsonlib.loads(file.read_text())
    if json:
        say.data(result)
        return 0
    say.out(table(result))
    if result["curve"]:
        say.out("")
        say.out(curve([success for _, success in result["curve"]]))
    return 0


def table(result: dict[str, Any]) -> str:
    """A run's result, a line each."""
    names = {"success_start": "random start"}
    lines = [("held-out success", "")]
    for key, value in result.items():
        if key.startswith("success_") and value is not None:
            lines.append((f"  {names.get(key, 'after ' + key.removeprefix('success_'))}", f"{value:.3f}"))
    endings = ", ".join(f"{count} {name}" for name, count in result["endings"].items() if count)
    minutes, seconds = divmod(round(result["seconds"]), 60)
    lines += [
        ("time", f"{minutes} min {seconds:02} s"),
        ("episodes", f"{result['episodes']}: {endings}"),
        ("drift", f"{result['drift']}"),
        ("run folder", result["run_dir"]),
    ]
    if result["status"] != "done":
        lines.append(("status", f"{result['status']}; go on with `--resume`"))
    return "\n".join(f"{name:<20}{value}".rstrip() for name, value in lines)


def curve(values: Sequence[float]) -> str:
    """Success over training steps, from 0 to 1, as text."""
    columns = min(WIDTH, len(values))
    bounds = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    heights = [round(mean * HEIGHT * 8) for mean in means]
    rows = []
    for row in range(HEIGHT - 1, -1, -1):
        cells = "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, height - row * 8))] for height in heights)
        label = {HEIGHT - 1: "1.0", HEIGHT // 2 - 1: "0.5", 0: "0.0"}.get(row, "")
        rows.append(f"{label:>4} │{cells}")
    return "\n".join([*rows, f"     └{'─' * columns}", f"      training success, {len(values)} steps"])

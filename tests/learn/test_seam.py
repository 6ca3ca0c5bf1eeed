"""Promise: the same recipe file, by its hash, runs with boxes of this process and with boxes of a server in another
process, learns alike, and either side counts the same boxes.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandlot.client import HttpNode

RECIPES = Path(__file__).parents[2] / "recipes"
# Sampling and learning in turns: what is learned then depends on no clock.
RECIPE = f"""
folder = "{RECIPES}/find"
max_staleness = 0
env = {{ name = "task.py:Find" }}
model = {{ build = "model.py:build", options = {{ hidden = 32, layers = 1 }} }}
rollout = {{ max_running = 8, max_tokens = 4 }}
evaluation = {{ tasks = 8 }}

[[phase]]
name = "warm"
algorithm = "sft"
demonstrations = 20
epochs = 2

[[phase]]
name = "rl"
algorithm = "grpo"
steps = 2
groups = 4
group_size = 4
"""
SANDLOT = (sys.executable, "-c", "from sandlot.cli.main import main; main()")


@pytest.fixture
def server(native_reason: str | None) -> Iterator[str]:
    """The URL of a real `sandlot serve` that may show boxes the recipes."""
    if native_reason:
        pytest.skip(f"no native boxes here: {native_reason}")
    words = (*SANDLOT, "serve", "--port", "0", "--allow-volumes", str(RECIPES))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)


def trained(recipe: Path, *words: str) -> dict[str, object]:
    command = (*SANDLOT, "train", str(recipe), "--json", *words)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, object] = json.loads(ended.stdout)
    return result


def endings(result: dict[str, object]) -> dict[str, int]:
    found = result["endings"]
    assert isinstance(found, dict)
    return found


def test_the_same_recipe_runs_here_and_against_a_server(server: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    here = trained(recipe, f"run_dir={tmp_path}/here")
    there = trained(recipe, f"run_dir={tmp_path}/there", "--url", server)
    assert here["recipe"] == there["recipe"]
    assert endings(here)["ok"] == endings(there)["ok"]
    assert here["success_warm"] == there["success_warm"]
    assert here["drift"] == there["drift"] == 0

    async def counts() -> dict[str, int]:
        node = HttpNode(server)
        found = await node.counts()
        await node.close()
        return found

    boxes = asyncio.run(counts())
    episodes = there["episodes"]
    assert isinstance(episodes, int)
    assert boxes["created"] == episodes + 1  # one to see that boxes work
    assert boxes["running"] == 0
    assert boxes["exit"] + boxes["killed"] == boxes["created"]
    assert boxes["killed"] == endings(there)["cancelled_surplus"]

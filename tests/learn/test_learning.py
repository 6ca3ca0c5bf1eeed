"""In real boxes, on CPU, in about a minute. Promises:
1. Reward rises: held-out success after RL is far above that after the warm start, sampled ahead of the trainer by up to
   one version.
2. Drift is 0: every sample is, token by token, what the engine's own log says that it read and sampled.
3. Dispatcher, gateway and node count the same episodes and boxes, each for itself; nothing is left of them.
4. Control: with shuffled rewards it rises by less than half as much, sampling and learning in turns.
5. Control: a tensor that is damaged at publication stops the run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import TrainingFault
from sandlot.node.ledger import default_state_dir
from sandlot.rl import loop
from sandlot.rl.launch import launch, open_boxes, open_parts, run_folder
from sandlot.rl.recipe import Recipe, make_recipe
from sandlot.rl.report import Report
from sandlot.rl.types import Episode

HERE = Path(__file__).parent
FIND = HERE.parents[1] / "recipes" / "find"
WARM = {"name": "warm", "algorithm": "sft", "demonstrations": 300, "epochs": 22, "lr": 1e-3, "warmup": 10}
RL = {"name": "rl", "steps": 7, "groups": 8, "group_size": 8, "minibatches": 4, "lr": 5e-4, "warmup": 1}


def recipe(run: Path, phase: dict[str, Any], tasks: int = 40, **more: Any) -> Recipe:
    return make_recipe(
        {
            "folder": str(FIND),
            "run_dir": str(run),
            "env": {"name": "task.py:Find", "options": {"shots_good": 0.4}},
            "model": {"build": "model.py:build"},
            "rollout": {"max_running": 16, "max_tokens": 8},
            "evaluation": {"tasks": tasks},
            "phase": [phase],
            **more,
        }
    )


@pytest.fixture(scope="module")
def warm(native_reason: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, float]]:
    """The checkpoint after a warm start, and its held-out success."""
    if native_reason:
        pytest.skip(f"no native boxes here: {native_reason}")
    run = tmp_path_factory.mktemp("warm") / "run"
    result = asyncio.run(launch(recipe(run, WARM)))
    assert result["success_start"] < 0.1
    yield run / "checkpoint", result["success_warm"]


class Seen:
    """A watcher that keeps the episodes."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def started(self, report: Report) -> None: ...
    def stage(self, name: str, total: int, unit: str) -> None: ...
    def episode(self, episode: Episode) -> None:
        self.episodes.append(episode)

    def step(self, line: dict[str, Any]) -> None: ...
    def evaluated(self, name: str, success: float) -> None: ...


RISE: list[float] = []  # of the real run, for its control


async def test_reward_rises_and_everything_adds_up(warm: tuple[Path, float], tmp_path: Path) -> None:
    model, before = warm
    chosen = recipe(
        tmp_path / "run",
        {**RL, "algorithm": "grpo"},
        model={"path": str(model)},
        engine={"name": "local", "keep_log": True},
        max_staleness=1,
    )
    run, seen = run_folder(chosen, resume=False), Seen()
    report = Report(run, "test", seen)
    others = children()
    async with open_boxes(chosen) as boxed, open_parts(chosen, run, report, boxed) as parts:
        await loop.train(parts, loop.Position())
        log = await parts.engine.take_log()  # type: ignore[attr-defined]
        boxes = await parts.node.counts()
        opened, outcomes = parts.gateway.counts, parts.gateway.outcomes
        left = children() - others
        node = next(e for e in seen.episodes if e.samples).transcript["box"].removeprefix("sb-")[:6]
        places = list(default_state_dir().glob(f"node-{node}"))
        assert left and places
    after, counts = report.counts.success["rl"], report.counts
    report.finish("done", {"evaluations": ["start", "rl"]})

    # 1
    print(f"held-out success {before:.2f} -> {after:.2f}")
    assert after >= before + 0.2 and after >= 0.7, (before, after)
    RISE.append(after - before)
    # 2
    assert counts.drift == 0
    said: dict[str, list[tuple[list[int], list[int]]]] = {}
    for episode, read, sampled in log:
        said.setdefault(episode, []).append((read, sampled))
    whole = [episode for episode in seen.episodes if episode.samples]
    assert len(whole) > 400
    for one in whole:
        (sample,) = one.samples
        tokens = sample.tokens.tolist()
        at = 0
        learned = []
        for read, sampled in said[one.id]:
            assert tokens[: len(read)] == read and len(read) >= at
            at = len(read) + len(sampled)
            assert tokens[len(read) : at] == sampled
            learned += range(len(read), at)
        assert at == len(tokens)
        assert sample.mask.nonzero()[0].tolist() == learned
    # 3
    assert counts.endings["ok"] == len(whole)
    assert counts.endings["failed"] == counts.endings["timed_out"] == 0
    assert sum(counts.endings.values()) == counts.episodes == len(seen.episodes)
    # An episode that was cancelled before its first step opened nothing; and one box was made to see that boxes work.
    assert opened["opened"] <= counts.episodes <= opened["opened"] + counts.endings["cancelled_surplus"]
    assert opened["opened"] == opened["closed"] == sum(outcomes.values()) and not outcomes["failed"]
    cancelled = opened["opened"] - counts.endings["ok"]
    assert len(whole) <= outcomes["answered"] <= len(whole) + cancelled
    # A box may end as `exit` under an episode that is cancelled after its agent has ended.
    assert boxes["created"] == opened["opened"] + 1 == boxes["exit"] + boxes["killed"]
    assert boxes["killed"] <= cancelled and boxes["running"] == 0
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert not [place for place in places if place.exists()]


async def test_shuffled_rewards_do_not_rise(warm: tuple[Path, float], tmp_path: Path) -> None:
    if not RISE:
        pytest.skip("it is compared with the run of the test above")
    model, before = warm
    phase = {**RL, "steps": 6, "algorithm": f"{HERE}/shuffled.py:Shuffled"}
    result = await launch(recipe(tmp_path / "run", phase, model={"path": str(model)}, max_staleness=0))
    print(f"held-out success {before:.2f} -> {result['success_rl']:.2f}")
    assert result["success_rl"] - before < RISE[0] / 2, (before, result["success_rl"], RISE)


async def test_a_damaged_tensor_stops_the_run(warm: tuple[Path, float], tmp_path: Path) -> None:
    model, _ = warm
    phase = {**RL, "algorithm": "grpo", "groups": 2, "group_size": 4, "minibatches": 1, "steps": 20}
    engine = f"{HERE}/damaging.py:Damaging"
    with pytest.raises(TrainingFault, match=r"weights of version 3 are not the trainer's"):
        await launch(recipe(tmp_path / "run", phase, tasks=8, model={"path": str(model)}, engine=engine))
    assert '"status": "failed"' in (tmp_path / "run" / "run.json").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3  # one evaluation, two steps


def children() -> set[int]:
    """Processes that this one has started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found

"""What a run says of itself: metric names with their reducer, and the files of the run folder.

    recipe.toml      the resolved recipe; can be run again        metrics.jsonl   one line a step and one an evaluation
    episodes/*.jsonl dialogue, tokens, commands, outputs          curve.png       success over episodes
    run.json         the result: `Summary`                        checkpoint/     see train/checkpoint.py
    model/           the weights it started from                  logs/           what the parts' processes said
    weights/         on their way to the engine                   lock            held by the process that runs it

Promises: each episode is counted once, by its ending, and written once; a line is whole or absent. It never words
anything for a terminal: a `Watcher` (cli/train.py) is told the numbers.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from sandlot.errors import HostFault
from sandlot.rl.train.checkpoint import not_written, write
from sandlot.rl.types import Episode, EpisodeEnding

Reducer = Literal["mean", "sum", "max", "last"]

# Every number of a step's line: how several observations become one, and what it is.
METRICS: dict[str, tuple[Reducer, str]] = {
    "success": ("mean", "mean reward of the episodes that were sampled for training"),
    "episodes": ("sum", "episodes that came out since the last step, whatever their ending"),
    "episode_seconds": ("mean", "from an episode's start to its end, box and grade included"),
    "episodes_per_second": ("last", "episodes that came out, by wall time since the last step"),
    "tokens_per_second": ("last", "tokens that the policy sampled, by wall time since the last step"),
    "boxes": ("last", "boxes alive at the end of the step"),
    "answers": ("mean", "answers of the model in an episode"),
    "staleness_mean": ("mean", "policy versions between a group's oldest token and its batch"),
    "staleness_max": ("max", "the largest of them"),
    "dropped": ("last", "groups so far that the algorithm learned nothing from"),
    "swept": ("last", "groups so far that were too old when a batch was cut"),
    "loss": ("mean", "what the surrogate minimises, a learned token"),
    "entropy": ("mean", "of the policy where it chose a token, in nats"),
    "clipped": ("mean", "share of learned tokens beyond the clip"),
    "engine_gap": ("mean", "absolute difference of the trainer's and the engine's log-probabilities, a learned token"),
    "grad_norm": ("mean", "before it is clipped"),
    "lr": ("last", "learning rate"),
    "probe_gap": ("max", "largest difference of engine and trainer on the probe after a publication"),
    "wait_seconds": ("sum", "the trainer's wait for a batch"),
    "train_seconds": ("sum", "learning from it"),
    "publish_seconds": ("sum", "bringing the weights to the engine, check included"),
    "checkpoint_seconds": ("sum", "writing a checkpoint"),
}

_REDUCE: dict[Reducer, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": lambda values: float(sum(values)),
    "max": lambda values: float(max(values)),
    "last": lambda values: float(values[-1]),
}

Line = dict[str, Any]


class Watcher(Protocol):
    """Who is told how a run goes. Calls return at once."""

    def started(self, report: Report) -> None: ...
    def stage(self, name: str, total: int, unit: str) -> None:
        """Something with a countable end begins: `total` episodes or steps."""
        ...

    def episode(self, episode: Episode) -> None: ...
    def step(self, line: Line) -> None: ...
    def evaluated(self, name: str, success: float) -> None: ...


@dataclass(slots=True)
class Counts:
    """What goes on counting after a resume."""

    episodes: int = 0
    endings: dict[str, int] = field(default_factory=lambda: {ending.value: 0 for ending in EpisodeEnding})
    drift: int = 0
    seconds: float = 0.0  # of earlier starts of this run
    lines: int = 0  # of metrics.jsonl
    written: dict[str, int] = field(default_factory=dict)  # file of episodes → its bytes
    success: dict[str, float] = field(default_factory=dict)  # evaluation's name → result
    curve: list[tuple[int, float]] = field(default_factory=list)  # episodes so far, success of a training step
    marks: list[tuple[int, str, float]] = field(default_factory=list)  # episodes so far, evaluation, result


class Report:
    """The record of one run in its folder. `boxes` says how many boxes are alive now."""

    def __init__(self, run: Path, title: str, watcher: Watcher | None = None, counts: Counts | None = None) -> None:
        self.run = run
        self.title = title
        self.counts = counts or Counts()
        self.boxes: Callable[[], int] = lambda: 0
        self.tokens = 0  # sampled in this start of the run
        self._watcher = watcher
        self._began = time.monotonic()
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._last = (time.monotonic(), self.counts.episodes, 0)
        # What a killed run did after its last checkpoint is done again, and must not be told twice.
        file = run / "metrics.jsonl"
        kept = file.read_bytes().splitlines(keepends=True)[: self.counts.lines] if file.exists() else []
        write(file, b"".join(kept))
        for told in (run / "episodes").glob("*.jsonl"):
            os.truncate(told, min(told.stat().st_size, self.counts.written.get(told.stem, 0)))
        self._metrics = file.open("ab")
        self._episodes: dict[str, IO[bytes]] = {}
        self._stage = "start"
        if watcher:
            watcher.started(self)

    @property
    def seconds(self) -> float:
        """How long the run has been going, earlier starts included."""
        return self.counts.seconds + time.monotonic() - self._began

    def stage(self, name: str, total: int, unit: str) -> None:
        """What begins now: the name of its episodes' file, and how much there is to do."""
        self._stage = name
        self._seen.clear()  # what the stage before left over is not of this one's first step
        self._last = (time.monotonic(), self.counts.episodes, self.tokens)
        if self._watcher:
            self._watcher.stage(name, total, unit)

    def episode(self, episode: Episode) -> None:
        """Count an episode that came out, and write it down."""
        self.counts.episodes += 1
        self.counts.endings[episode.ending.value] += 1
        self.counts.drift += int(episode.transcript.get("drift", 0))
        self.tokens += sum(int(sample.mask.sum()) for sample in episode.samples)
        self.observe(episodes=1.0)
        if episode.reward is not None:
            calls = episode.transcript.get("calls", ())
            self.observe(success=episode.reward, episode_seconds=episode.seconds, answers=float(len(calls)))
        if self._stage not in self._episodes:
            folder = self.run / "episodes"
            folder.mkdir(exist_ok=True)
            self._episodes[self._stage] = (folder / f"{self._stage}.jsonl").open("ab", buffering=1 << 16)
        transcript = episode.transcript or {"episode": episode.id, "ending": episode.ending.value}
        _append(self._episodes[self._stage], transcript)
        if self._watcher:
            self._watcher.episode(episode)

    def observe(self, **values: float) -> None:
        """Numbers of the step that is under way; the names are those of METRICS."""
        for name, value in values.items():
            if name in METRICS:
                self._seen[name].append(value)

    def step(self, phase: str, step: int, version: int) -> Line:
        """The step is over: reduce what was observed, and write its line."""
        now, (then, episodes, tokens) = time.monotonic(), self._last
        self._last = (now, self.counts.episodes, self.tokens)
        seconds = max(1e-9, now - then)
        self.observe(
            episodes_per_second=(self.counts.episodes - episodes) / seconds,
            tokens_per_second=(self.tokens - tokens) / seconds,
            boxes=float(self.boxes()),
        )
        reduced = {name: round(_REDUCE[METRICS[name][0]](values), 6) for name, values in sorted(self._seen.items())}
        self._seen.clear()
        line: Line = {"phase": phase, "step": step, "version": version, "seconds": round(self.seconds, 3), **reduced}
        self._write(line)
        if "success" in line:
            self.counts.curve.append((self.counts.episodes, line["success"]))
        if self._watcher:
            self._watcher.step(line)
        return line

    def evaluated(self, name: str, success: float, tasks: int) -> None:
        """An evaluation is over."""
        self.counts.success[name] = success
        self.counts.marks.append((self.counts.episodes, name, success))
        self._write({"evaluation": name, "success": success, "tasks": tasks, "seconds": round(self.seconds, 3)})
        if self._watcher:
            self._watcher.evaluated(name, success)

    def state(self) -> dict[str, Any]:
        """The counts, for a checkpoint: `Counts(**state)` gives them back. What they count is on disk then."""
        for name, file in self._episodes.items():
            _flush(file)
            self.counts.written[name] = file.tell()
        return {name: getattr(self.counts, name) for name in Counts.__slots__} | {"seconds": round(self.seconds, 3)}

    def finish(self, status: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Write run.json and the curve, close the files; what is in run.json. `facts` go into it too, but for its
        "evaluations": the names that it has a `success_NAME` for. Raises HostFault, after doing what can be done."""
        fault: HostFault | None = None
        for file in [self._metrics, *self._episodes.values()]:
            try:
                file.close()
            except OSError as error:
                fault = not_written(file.name, error)
        counts = self.counts
        summary: dict[str, Any] = {
            "status": status,
            **{f"success_{name}": counts.success.get(name) for name in facts["evaluations"]},
            "seconds": round(self.seconds, 2),
            "episodes": counts.episodes,
            "endings": counts.endings,
            "drift": counts.drift,
            "run_dir": str(self.run),
            **{name: fact for name, fact in facts.items() if name != "evaluations"},
            "curve": [list(point) for point in counts.curve],
            "marks": [list(mark) for mark in counts.marks],
        }
        write(self.run / "run.json", (json.dumps(summary, indent=1) + "\n").encode())
        if status == "done":
            write(self.run / "curve.png", draw(self.title, counts.curve, counts.marks))
        if fault is not None:
            raise fault
        return summary

    def close(self) -> None:
        """Close the files of a run that never began. Nothing tells of it."""
        self._metrics.close()

    def _write(self, line: Line) -> None:
        _append(self._metrics, line)
        _flush(self._metrics)
        self.counts.lines += 1


def _append(file: IO[bytes], line: Line) -> None:
    try:
        file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise not_written(file.name, error) from error


def _flush(file: IO[bytes]) -> None:
    try:
        file.flush()
    except OSError as error:
        raise not_written(file.name, error) from error


def draw(title: str, curve: Sequence[tuple[int, float]], marks: Sequence[tuple[int, str, float]]) -> bytes:
    """Success over episodes as a PNG: steps that learned from attempts as a line, evaluations as points with their
    names. Demonstrations take part in the count of episodes only."""
    from matplotlib.figure import Figure  # not pyplot: no window system is asked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([x for x, _ in curve], [y for _, y in curve], color="tab:blue", label="training tasks, a step")
    axes.plot([x for x, *_ in marks], [y for *_, y in marks], "o", color="tab:orange", label="held-out tasks")
    last = max([*(x for x, _ in curve), *(x for x, *_ in marks)], default=1)
    for x, name, y in marks:
        # To the left, where the line that follows an evaluation is not; only the first has no room there.
        left = x > 0.15 * last
        axes.annotate(
            f"{name} {y:.3f}",
            (x, y),
            textcoords="offset points",
            xytext=(-7, -16 if y > 0.5 else -4) if left else (7, 6),
            ha="right" if left else "left",
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1},
        )
    axes.set(title=title, xlabel="episodes", ylabel="success", ylim=(-0.05, 1.05))
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    return picture.getvalue()

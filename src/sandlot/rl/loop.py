"""The training loop: the only file that calls both rollout and train.

Values move one way, and nobody calls back:

    feed.batch() → trainer.annotate(needs) → algorithm.advantages → trainer.step → publish → feed.advance → checkpoint

It promises that the engine samples from the trainer's very weights whenever a feed is open, that a phase is not started
where there is nothing to lift, and that a run which is killed goes on from its last checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sandlot.aio import shielded
from sandlot.errors import TrainingFault
from sandlot.rl.algos.base import with_annotations
from sandlot.rl.recipe import Phase, resume_command
from sandlot.rl.report import Report
from sandlot.rl.train.backend import Objective

if TYPE_CHECKING:
    from sandlot.rl.launch import Parts


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` batches of phase number `phase` are learned, its policy is at `version`."""

    phase: int = 0
    step: int = 0
    version: int = 0
    feed: Any = None  # the feed's own state
    unused: Any = None  # finished episodes that no batch has used


async def train(parts: Parts, at: Position) -> None:
    """Run a recipe's phases from `at` on."""
    recipe, report, trainer, publisher = parts.recipe, parts.report, parts.trainer, parts.publisher
    await publisher.publish(at.version)
    if "start" not in report.counts.success:
        await parts.evaluate("start")
    for number, phase in enumerate(recipe.phase):
        if number < at.phase:
            continue
        goes_on = at if number == at.phase and at.step else None
        where = goes_on or Position(phase=number)
        if goes_on is None:
            _gate(phase, report)
        algorithm = recipe.algorithm(phase)
        feed = await parts.feed(phase, algorithm, goes_on)
        try:
            objective = Objective(algorithm.surrogate, algorithm.loss, phase.optimization, feed.steps)
            await trainer.begin(objective, str(parts.checkpoints.latest()) if goes_on else None)
            saved_at = time.monotonic()
            while where.step < feed.steps:
                began = time.monotonic()
                batch = await feed.batch()
                waited = time.monotonic()
                if algorithm.needs:
                    batch = with_annotations(batch, await trainer.annotate(batch.samples, algorithm.needs))
                batch = replace(batch, samples=algorithm.advantages(batch))
                result = await trainer.step(batch)
                trained = time.monotonic()
                where = replace(where, step=where.step + 1, version=where.version + 1)
                if feed.live:
                    report.observe(probe_gap=await publisher.publish(where.version))
                    feed.advance(where.version)
                report.observe(
                    **batch.metrics,
                    **result.metrics,
                    wait_seconds=waited - began,
                    train_seconds=trained - waited,
                    publish_seconds=time.monotonic() - trained,
                )
                report.step(phase.name, where.step, where.version)
                if time.monotonic() - saved_at >= recipe.checkpoint_seconds:
                    saving = time.monotonic()
                    await _save(parts, replace(where, feed=feed.state(), unused=feed.unused()))
                    saved_at = time.monotonic()
                    report.observe(checkpoint_seconds=saved_at - saving)  # in the next step's line
        finally:
            await shielded(feed.close())
        await publisher.publish(0)  # what the next phase starts from
        await parts.evaluate(phase.name)
        await _save(parts, Position(phase=number + 1))


async def _save(parts: Parts, at: Position) -> None:
    where = {name: value for name, value in vars(at).items() if name != "unused"}
    await parts.checkpoints.save(parts.trainer, {"at": where, "report": parts.report.state()}, at.unused)


def _gate(phase: Phase, report: Report) -> None:
    """Raise TrainingFault where the policy solves too little for the phase to start from."""
    name, success = list(report.counts.success.items())[-1]
    if success < phase.needs_success:
        raise TrainingFault(
            f"phase `{phase.name}` was not started: held-out success after `{name}` is {success:.2f}, "
            f"and it needs {phase.needs_success:g}; reinforcement lifts what is there, it does not invent it",
            "warm up longer (demonstrations, epochs), or go on anyway: "
            f"`{resume_command(report.run, None, f'phase.{phase.name}.needs_success=0')}`",
        )

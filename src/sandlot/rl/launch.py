"""The parts of a run, wired once: node, engine, trainer, gateway, as processes of this machine.

Owns their lifetimes: whatever happens, feeds, engine and trainer processes and the node end, in this order, and with
the node every box. The run itself is `loop.py`. `launch` is what `sandlot train` calls.

    this process    asyncio: node or HttpNode, gateway, dispatcher, sink, loop
    engine          one process with the policy that answers          ┐ weights travel from the second to the first
    trainer         one process with the policy that learns           ┘ as a safetensors file in the run folder
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandlot.aio import shielded
from sandlot.api import NodeAPI
from sandlot.envs.boxed import BoxedEnv
from sandlot.errors import Conflict, HostFault, NotFound, RecipeError
from sandlot.gateway.engine import Engine, Sampling
from sandlot.gateway.render import Renderer, load_tokenizer
from sandlot.gateway.server import Gateway
from sandlot.rl import evaluate, loop
from sandlot.rl.algos.base import Algorithm
from sandlot.rl.engines.scripted import ScriptedEngine
from sandlot.rl.feed import Demonstrations, Feed, Rollouts
from sandlot.rl.process import Child
from sandlot.rl.recipe import DemonstrationPhase, Phase, Recipe, RolloutPhase, load_recipe, resume_command
from sandlot.rl.report import Counts, Report, Watcher
from sandlot.rl.rollout.agent import BoxRunner, Deadlines
from sandlot.rl.rollout.dispatcher import Dispatcher, rollout_all
from sandlot.rl.rollout.sink import Sink
from sandlot.rl.rollout.source import Source
from sandlot.rl.train.backend import Trainer
from sandlot.rl.train.checkpoint import Checkpoints, not_written, write
from sandlot.rl.train.publish import Publisher
from sandlot.rl.types import Group, Sample
from sandlot.sandbox import Sandbox, open_node


@dataclass
class Parts:
    """What a run consists of."""

    recipe: Recipe
    run: Path
    report: Report
    env: BoxedEnv
    node: NodeAPI
    engine: Engine
    trainer: Trainer
    publisher: Publisher
    checkpoints: Checkpoints
    gateway: Gateway  # answered by the policy
    demonstrated: Gateway  # answered by the environment's demonstrator
    script: ScriptedEngine

    def runner(self, stage: str, demonstrations: bool = False) -> BoxRunner:
        """Runs episodes of one stage of the run, answered by the policy or by the demonstrator."""
        rollout, sandbox = self.recipe.rollout, self.recipe.sandbox
        return BoxRunner(
            self.env,
            self.node,
            self.demonstrated if demonstrations else self.gateway,
            Sampling(temperature=1.0, max_tokens=rollout.max_tokens),
            name=f"{stage}/",
            max_calls=rollout.max_calls,
            image=sandbox.image,
            limits=sandbox.limits,
            script=self.script if demonstrations else None,
        )

    async def evaluate(self, stage: str) -> float:
        """Held-out success of the policy as it is now, into the report."""
        tasks = Source(self.env, "heldout", self.recipe.seed).take(self.recipe.evaluation.tasks)
        self.report.stage(f"evaluation_{stage}", len(tasks), "episodes")
        runner = self.runner(f"evaluation_{stage}")
        found = await evaluate.success(tasks, runner.run, self.recipe.rollout.max_running, self.report.episode)
        self.report.evaluated(stage, found, len(tasks))
        return found

    async def feed(self, phase: Phase, algorithm: Algorithm, at: loop.Position | None) -> Feed:
        """Where the phase's batches come from; `at`: where to go on in it."""
        saved = None if at is None else (at.feed, at.unused)
        if isinstance(phase, DemonstrationPhase):
            samples: list[Sample] = at.unused if at is not None else await self._demonstrate(phase, algorithm)
            feed: Feed = Demonstrations(samples, phase.epochs, phase.batch, self.recipe.seed, saved)
        else:
            feed = self._rollouts(phase, algorithm, 0 if at is None else at.version, saved)
        self.report.stage(phase.name, feed.steps, "steps")
        return feed

    def _rollouts(self, phase: RolloutPhase, algorithm: Algorithm, version: int, saved: tuple[Any, Any] | None) -> Feed:
        staleness = self.recipe.staleness(phase)
        sink = Sink(
            algorithm.score,
            batch_groups=phase.groups,
            max_staleness=staleness,
            version=version,
            patience=self.recipe.rollout.patience,
        )
        dispatcher = Dispatcher(
            Source(self.env, "train", self.recipe.seed),
            self.runner(phase.name).run,
            sink,
            group_size=phase.group_size,
            batch_groups=phase.groups,
            max_running=self.recipe.rollout.max_running,
            max_staleness=staleness,
            version=version,
            on_episode=self.report.episode,
        )
        return Rollouts(dispatcher, sink, phase.steps, saved)

    async def _demonstrate(self, phase: DemonstrationPhase, algorithm: Algorithm) -> list[Sample]:
        tasks = Source(self.env, "demos", self.recipe.seed).take(phase.demonstrations)
        self.report.stage(f"{phase.name}_demonstrations", len(tasks), "episodes")
        runner = self.runner(f"{phase.name}_demonstrations", demonstrations=True)
        episodes = await rollout_all(tasks, runner.run, self.recipe.rollout.max_running, self.report.episode)
        whole = [episode for episode in episodes if episode.reward is not None]
        samples = [sample for episode in whole for sample in algorithm.score(Group(episode.task, [episode]))]
        if not samples:
            raise RecipeError(
                f"phase {phase.name}: none of {len(episodes)} demonstrations can be learned from",
                f"look at {self.run}/episodes, or lower the algorithm's demands",
            )
        return samples


@asynccontextmanager
async def open_boxes(recipe: Recipe, url: str | None = None, api_key: str | None = None) -> AsyncIterator[NodeAPI]:
    """A node that has made one of the recipe's boxes already: an unknown image, or a host that cannot make boxes, ends
    a run here, before it has left anything behind."""
    node = await open_node(url, api_key)
    try:
        volumes, sandbox = recipe.environment().volumes, recipe.sandbox
        trial = await Sandbox.create(
            sandbox.image, limits=sandbox.limits, volumes=volumes, lifetime=Deadlines().create, node=node
        )
        await trial.close()
        yield node
    finally:
        await shielded(node.close())


@asynccontextmanager
async def open_parts(recipe: Recipe, run: Path, report: Report, node: NodeAPI) -> AsyncIterator[Parts]:
    """Start everything else. Raises what a part raises that cannot start; the others have then ended again."""
    env = recipe.environment()
    checkpoints = Checkpoints(run)
    engine_entry, engine_config = recipe.engine_config()
    trainer_entry, settings = recipe.trainer_settings()
    async with AsyncExitStack() as opened:
        logs = run / "logs"
        logs.mkdir(exist_ok=True)
        children: list[Child] = []
        for name, entry, threads in (
            ("trainer", trainer_entry, settings.threads),
            ("engine", engine_entry, getattr(engine_config, "threads", 1)),
        ):
            log, patience = logs / f"{name}.log", recipe.rollout.patience
            child = await Child.start(name, log, threads, _preload(name, entry), patience)
            opened.push_async_callback(_close, child)
            children.append(child)
        learner, answerer = children
        model = checkpoints.latest() or await _model(recipe, run, learner)
        trainer, engine = await asyncio.gather(
            learner.make(trainer_entry, str(model), settings, recipe.seed),
            answerer.make(engine_entry, str(model), engine_config),
        )
        tokenizer = load_tokenizer(model)
        renderer = Renderer(tokenizer)
        described = json.loads((model / "config.json").read_text())
        script = ScriptedEngine(tokenizer)
        context = described.get("max_position_embeddings")
        parts = Parts(
            recipe=recipe,
            run=run,
            report=report,
            env=env,
            node=node,
            engine=engine,
            trainer=trainer,
            publisher=Publisher(trainer, engine, run / "weights", described["vocab_size"]),
            checkpoints=checkpoints,
            gateway=Gateway(engine, renderer, context=context),
            demonstrated=Gateway(script, renderer, context=context),
            script=script,
        )
        report.boxes = lambda: len(parts.gateway.sessions) + len(parts.demonstrated.sessions)
        yield parts


async def _close(child: Child) -> None:
    await shielded(child.close())


def _preload(name: str, entry: str) -> str:
    """What a child imports while its parent goes on: torch takes seconds."""
    module = entry.partition(":")[0]
    if module.endswith(".py"):
        return ""
    return module if name == "trainer" else "transformers.models.auto.modeling_auto"


async def _model(recipe: Recipe, run: Path, learner: Child) -> Path:
    """The folder of the weights that the run starts from."""
    if recipe.model.path is not None:
        return (Path(recipe.folder) / recipe.model.path).resolve()
    folder, partial = run / "model", run / "model.partial"
    if not (run / "recipe.toml").is_file():  # a start that failed may have left those of another recipe
        shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        entry = str((Path(recipe.folder) / str(recipe.model.build).partition(":")[0]).resolve())
        name = str(recipe.model.build).partition(":")[2]
        try:
            await learner.function(f"{entry}:{name}", partial, recipe.seed, **recipe.model.options)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # what is left of one that failed
    return folder


# --- the run folder ------------------------------------------------------------------------------------------------


def run_folder(recipe: Recipe, resume: bool) -> Path:
    """The folder of this run, made if need be. A folder holds a run from the moment that there is a recipe.toml in it.
    Raises Conflict when it holds another run, NotFound when there is nothing to resume, RecipeError when what is there
    came from another recipe."""
    if recipe.run_dir is None:
        if resume:
            raise NotFound("which run is to be resumed?", "name its folder: `run_dir=PATH --resume`")
        number = 1
        while (run := Path("runs") / f"{recipe.name}-{number}").exists():
            number += 1
    else:
        run = Path(recipe.run_dir)
    kept = run / "recipe.toml"
    if resume:
        if not kept.is_file():
            raise NotFound(f"there is no run in {run}", "start it first: leave `--resume` out")
        before = load_recipe(kept)
        if before.key() != recipe.key():
            changed = [name for name in Recipe.model_fields if getattr(before, name) != getattr(recipe, name)]
            changed = [name for name in changed if name not in ("run_dir", "folder", "checkpoint_seconds")]
            raise RecipeError(
                f"{run} was started with another recipe: {', '.join(changed)} differ",
                f"resume it with its own: `{resume_command(run)}`",
            )
    elif kept.exists():
        raise Conflict(
            f"{run} already holds a run",
            f"go on with it: `{resume_command(run)}`; or choose another folder: `run_dir={run}-2`; or remove it",
        )
    run.mkdir(parents=True, exist_ok=True)
    return run.resolve()


@contextmanager
def held(run: Path) -> Iterator[None]:
    """The run folder, for this process alone; the kernel lets go of it however the process ends. Raises Conflict."""
    with (run / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"the run in {run} is being worked on by another process",
                f"wait for it or end it (`fuser {run}/lock` names it); or choose another folder: `run_dir={run}-2`",
            ) from None
        yield


async def launch(
    recipe: Recipe,
    *,
    url: str | None = None,
    api_key: str | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Run a recipe to its end; the content of run.json. However it ends, boxes and processes are gone by then."""
    try:
        async with open_boxes(recipe, url, api_key) as node:
            run = run_folder(recipe, resume)
            with held(run):
                if not resume:
                    run_folder(recipe, resume)  # it may have been taken before it was ours
                return await _run(recipe, run, node, watcher)
    except OSError as error:
        raise not_written(error.filename or recipe.run_dir or "runs", error) from error


async def _run(recipe: Recipe, run: Path, node: NodeAPI, watcher: Watcher | None) -> dict[str, Any]:
    saved = Checkpoints(run).read()
    at = loop.Position() if saved is None else loop.Position(**saved[0]["at"], unused=saved[1])
    report = Report(run, recipe.name, watcher, None if saved is None else Counts(**saved[0]["report"]))
    names = dict.fromkeys(["start", "warm", "rl", *(phase.name for phase in recipe.phase)])
    facts = {"evaluations": list(names), "seed": recipe.seed, "recipe": recipe.key()}
    kept = run / "recipe.toml"
    status = "failed"
    try:
        async with open_parts(recipe, run, report, node) as parts:
            if not kept.exists():
                write(kept, recipe.to_toml().encode())
            await loop.train(parts, at)
        status = "done"
    except asyncio.CancelledError:
        status = "interrupted"
        raise
    finally:
        if kept.exists():
            try:
                summary = report.finish(status, facts)
            except HostFault:  # a full disk, say: the checkpoint is whole, and why the run ended is on its way already
                if status == "done":
                    raise
        else:
            report.close()  # it never began, and leaves nothing that would be in the way of the next try
    return summary

"""One episode: a command in a box, its model behind the gateway, a grade at the end.

Owns the life of an episode's box and gateway session: both end with the episode, whatever happens in between, and each
phase has a deadline. The box of an agent that ended by itself ends as `exit`, one that was cut short as `killed`. It
promises an `Episode` for whatever goes wrong; only a cancellation is raised, after the box is gone. The answer key
stays here, outside the box. It never decides which episode runs, nor what its reward is worth.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from sandlot.aio import deadline, shielded
from sandlot.api import Ending, Limits, NodeAPI, RunResult
from sandlot.envs.boxed import Answer, BoxedEnv, BoxTask
from sandlot.errors import RecipeError, SandlotError
from sandlot.gateway.engine import ChatMessage, Sampling
from sandlot.gateway.server import Gateway, Session
from sandlot.gateway.trace import TracePath
from sandlot.rl.types import Episode, EpisodeEnding, Sample, Task
from sandlot.sandbox import Sandbox

# Where the model answers inside the box. A program that an agent starts is unlikely to want this port.
MODEL_PORT = 47011


@dataclass(frozen=True)
class Deadlines:
    """Seconds for each phase around the agent's own run, whose time is the task's `timeout`."""

    create: float = 120.0  # many start at once on a small machine
    files: float = 60.0
    run: float = 30.0  # beyond the task's own timeout, by which the node has ended the agent
    grade: float = 60.0
    teardown: float = 60.0

    @property
    def whole(self) -> float:
        """All of them: how long an episode may take, beside the agent's own run."""
        return self.create + self.files + self.run + self.grade + self.teardown


class Scripted(Protocol):
    """An engine that takes orders: what says an episode's part."""

    def assign(self, episode: str, script: Callable[[list[ChatMessage]], str] | None) -> None: ...


class BoxRunner:
    """Runs episodes of `env` in boxes of `node`, answered through `gateway`.

    `name` begins the ids of its episodes, so that phases of a run can be told apart. `max_calls` and `max_tokens` bound
    an episode's use of the model. With `script` the environment's demonstrator answers instead of a policy: it is then
    the very engine behind `gateway`.
    """

    def __init__(
        self,
        env: BoxedEnv,
        node: NodeAPI,
        gateway: Gateway,
        sampling: Sampling,
        *,
        name: str = "",
        max_calls: int | None = None,
        max_tokens: int | None = None,
        image: str = "host",
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        script: Scripted | None = None,
    ) -> None:
        if script is not None and not hasattr(env, "demonstrator"):
            raise RecipeError(f"the environment {type(env).__name__} has no demonstrator")
        self._env = env
        self._node = node
        self._gateway = gateway
        self._sampling = sampling
        self._name = name
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._image = image
        self._limits = limits
        self._deadlines = deadlines or Deadlines()
        self._script = script
        self._attempts: Counter[str] = Counter()

    async def run(self, task: Task, member: int) -> Episode:
        """One attempt. Raises nothing but CancelledError."""
        sampling = replace(self._sampling, seed=task.seed + member)
        session = self._gateway.open(self._id(task, member), sampling, self._max_calls, self._max_tokens)
        episode = Episode(session.episode, task, member, EpisodeEnding.FAILED)
        # What people see of it later. It is filled in as things happen: a failure shows how far it came.
        episode.transcript = {"episode": episode.id, "task": task.id, **task.data, "member": member, "phases": {}}
        episode.transcript["seed"] = sampling.seed
        began = time.monotonic()
        try:
            await self._attempt(episode, session)
        except asyncio.CancelledError:
            await session.close()
            raise
        except Exception as error:  # the top of an episode: whatever broke, it is this episode's failure, and is said
            episode.ending, episode.reward, episode.samples = EpisodeEnding.FAILED, None, []
            episode.detail = str(error) if isinstance(error, SandlotError) else f"{type(error).__name__}: {error}"
        episode.seconds = time.monotonic() - began
        _describe(episode, session)
        await session.close()
        return episode

    async def _attempt(self, episode: Episode, session: Session) -> None:
        what = self._env.task(episode.task.data["split"], episode.task.data["index"])
        demonstrator: Callable[[BoxTask, int], Answer] | None = getattr(self._env, "demonstrator", None)
        if self._script is not None and demonstrator is not None:
            self._script.assign(episode.id, demonstrator(what, episode.task.seed + episode.member))
        # Not cancelled with the episode: a box that has begun is made, counted and destroyed like every other.
        creating = asyncio.ensure_future(self._create(episode, what))
        end = Ending.KILLED  # until its agent has ended by itself
        try:
            async with _phase(episode, "create", self._deadlines.create):
                box = await asyncio.shield(creating)
            episode.transcript["box"] = box.id
            async with _phase(episode, "files", self._deadlines.files):
                writing = (box.write_file(path, data) for path, data in what.files.items())
                # The route also puts the model's address into the environment of what runs later.
                await asyncio.gather(box.route(MODEL_PORT, session.handler), *writing)
            async with _phase(episode, "run", what.timeout + self._deadlines.run):
                result = await box.run(what.argv, cwd=what.cwd, env=what.env, timeout=what.timeout)
            end = Ending.KILLED if result.timed_out else Ending.EXIT
            await session.close()  # nothing that outlived the agent can ask any more
            episode.transcript["agent"] = _seen(what, result)
            episode.ending, episode.detail = _came_out(result, session)
            if episode.ending is EpisodeEnding.OK:
                async with _phase(episode, "grade", self._deadlines.grade):
                    grade = await self._env.grade(what, box, result)
                episode.reward, episode.metrics = grade.reward, dict(grade.metrics)
                episode.samples = [_sample(path) for path in session.trace.paths()]
        finally:
            if self._script is not None:
                self._script.assign(episode.id, None)
            await shielded(self._take_down(creating, episode, end))

    async def _create(self, episode: Episode, what: BoxTask) -> Sandbox:
        return await Sandbox.create(
            image=self._image,
            volumes=self._env.volumes,
            labels={"episode": episode.id},
            node=self._node,
            limits=self._limits,
            # On a server it outlives a trainer that is killed: not for longer than an episode may take.
            lifetime=self._deadlines.whole + what.timeout,
        )

    async def _take_down(self, creating: asyncio.Task[Sandbox], episode: Episode, end: Ending) -> None:
        try:
            async with deadline(self._deadlines.teardown, f"the end of the box of episode {episode.id}"):
                await asyncio.wait((creating,))
                if not creating.cancelled() and creating.exception() is None:
                    await self._node.destroy(creating.result().id, end)
        finally:
            creating.cancel()  # past the deadline; nothing otherwise

    def _id(self, task: Task, member: int) -> str:
        """Unique in this gateway: a second attempt at the same seat, after a failure or in a later round, says so."""
        name = f"{self._name}{task.id}.{member}"
        self._attempts[name] += 1
        return name if self._attempts[name] == 1 else f"{name}.{self._attempts[name]}"


@asynccontextmanager
async def _phase(episode: Episode, name: str, seconds: float) -> AsyncIterator[None]:
    """A deadline that says which phase of which episode it was, and the seconds it took, in the transcript."""
    began = time.monotonic()
    try:
        async with deadline(seconds, f"phase {name!r} of episode {episode.id}"):
            yield
    finally:
        episode.transcript["phases"][name] = round(time.monotonic() - began, 4)


def _came_out(result: RunResult, session: Session) -> tuple[EpisodeEnding, str | None]:
    """The ending, before the grade, and a sentence if it is not ok. An agent's own failure is graded like any other
    outcome; what it could not help is not."""
    said = result.stderr.strip()[-300:]
    if session.fault is not None:
        return EpisodeEnding.FAILED, f"the model gateway failed: {session.fault.message}"
    if result.timed_out:
        return EpisodeEnding.TIMED_OUT, f"the agent was still running after {result.seconds:.1f} s"
    if result.exit_code != 0 and not session.trace.calls:
        return EpisodeEnding.FAILED, f"the agent ended with status {result.exit_code} before it asked anything: {said}"
    return EpisodeEnding.OK, None


def _sample(path: TracePath) -> Sample:
    return Sample(
        tokens=np.asarray(path.tokens, dtype=np.int64),
        mask=np.asarray(path.mask, dtype=np.bool_),
        logprobs=np.asarray(path.logprobs, dtype=np.float32),
        versions=np.asarray(path.versions, dtype=np.int64),
    )


def _seen(what: BoxTask, result: RunResult) -> dict[str, Any]:
    return {
        "argv": list(what.argv),
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "seconds": round(result.seconds, 4),
        "cpu_seconds": round(result.cpu_seconds, 4),
    }


def _describe(episode: Episode, session: Session) -> None:
    """The dialogue and how it came out, into the transcript. Everything in it can be written as JSON."""
    trace = session.trace
    episode.transcript |= {
        "ending": episode.ending.value,
        "reward": episode.reward,
        "detail": episode.detail,
        "seconds": round(episode.seconds, 4),
        "metrics": episode.metrics,
        "drift": trace.drift,
        "forks": trace.forks,
        "messages": trace.messages,
        "calls": [
            {
                "prompt_tokens": call.prompt,
                "text": call.text,
                "tokens": call.generation.tokens,
                "logprobs": [round(logprob, 4) for logprob in call.generation.logprobs],
                "versions": call.generation.versions,
                "finish": call.generation.finish,
            }
            for call in trace.calls
        ],
    }

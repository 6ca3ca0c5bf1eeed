"""Promises:
1. A real agent in a real box without a network is answered through the gateway and graded from outside; its samples are
   exactly what the engine read and said.
2. Dispatcher, node ledger and gateway count endings independently, and agree, for each of the five.
3. Whatever goes wrong is an episode with an ending and a sentence, and the box and the session are gone: a box that
   cannot be made, an agent that does not start or does not end, a broken engine, a broken grader.
4. A cancelled episode raises CancelledError only after its box is gone, even while the box is being made.
5. The transcript can be written as JSON and shows dialogue, commands, their output, tokens and versions.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import NodeAPI, SandboxSpec
from sandlot.drivers.fake import Context, FakeDriver, Program
from sandlot.envs.boxed import BoxTask, Grade
from sandlot.errors import RecipeError, StartFailed, TrainingFault
from sandlot.gateway.engine import Generation, Question, Sampling
from sandlot.gateway.render import FileTokenizer, Renderer
from sandlot.gateway.server import Gateway
from sandlot.node.node import Node
from sandlot.rl.engines.scripted import ScriptedEngine
from sandlot.rl.rollout.agent import MODEL_PORT, BoxRunner, Deadlines
from sandlot.rl.rollout.dispatcher import Dispatcher, rollout_all
from sandlot.rl.rollout.sink import Sink
from sandlot.rl.rollout.source import Source
from sandlot.rl.types import Episode, EpisodeEnding, Task
from sandlot.sandbox import open_node

TASK = Task("t", 7, {"split": "train", "index": 0})


class Small:
    """An environment whose agent is a script of the fake driver."""

    volumes = ()

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self.grading: Callable[[], Grade] = lambda: Grade(0.5, {"seen": 1.0})

    def task(self, split: str, index: int) -> BoxTask:
        return BoxTask("t", 7, {"/task/a": b"1"}, ("agent",), "/task", {"TASK": "find w7"}, self.timeout, {"key": "f3"})

    async def grade(self, task: BoxTask, box: Any, result: Any) -> Grade:
        return self.grading()


async def ask(context: Context) -> bytes:
    """One call to the model, as an agent in the box makes it."""
    reader, writer = await context.connect(MODEL_PORT)
    body = json.dumps({"messages": [{"role": "user", "content": context.env["TASK"]}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


async def polite(context: Context) -> int:
    assert context.env["OPENAI_BASE_URL"] == f"http://127.0.0.1:{MODEL_PORT}/v1"
    return 0 if b"200 OK" in await ask(context) else 1


class Stage:
    """A node of fake boxes, a gateway on a scripted engine, and a runner."""

    def __init__(self, tokenizer: FileTokenizer, node: Node, driver: FakeDriver, env: Small) -> None:
        self.engine = ScriptedEngine(tokenizer, lambda messages: "submit f3", keep_log=True)
        self.gateway = Gateway(self.engine, Renderer(tokenizer))
        self.node, self.driver, self.env = node, driver, env
        self.runner = BoxRunner(env, node, self.gateway, Sampling(max_tokens=16))

    async def over(self) -> dict[str, int]:
        """Nothing is left; how the boxes ended."""
        assert not self.driver.boxes
        assert not self.gateway.sessions
        counts = await self.node.counts()
        assert counts.pop("running") == 0
        assert counts.pop("created") == self.gateway.counts["opened"] == self.gateway.counts["closed"]
        return {ending: count for ending, count in counts.items() if count}


@pytest.fixture
def stage(tokenizer: FileTokenizer, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def open_stage(agent: Program, env: Small | None = None, creating: Any = None) -> AsyncIterator[Stage]:
        driver = FakeDriver({"agent": agent}, creating)
        async with Node(driver, tmp_path) as node:
            yield Stage(tokenizer, node, driver, env or Small())

    return open_stage


async def test_an_episode_is_answered_graded_and_over(stage: Any) -> None:
    async with stage(polite) as here:
        episode = await here.runner.run(TASK, 3)
        assert (episode.ending, episode.reward, episode.metrics) == (EpisodeEnding.OK, 0.5, {"seen": 1.0})
        (sample,) = episode.samples
        ((name, read, said),) = await here.engine.take_log()
        assert (name, sample.tokens.tolist()) == (episode.id, read + said)
        assert sample.mask.tolist() == [False] * len(read) + [True] * len(said)
        assert sample.oldest == 0
        shown = json.loads(json.dumps(episode.transcript))
        assert [message["content"] for message in shown["messages"]] == ["find w7", "submit f3"]
        assert (shown["seed"], shown["member"], shown["reward"], shown["drift"]) == (10, 3, 0.5, 0)
        assert shown["agent"]["exit_code"] == 0 and set(shown["phases"]) == {"create", "files", "run", "grade"}
        assert shown["calls"][0]["tokens"] == said
        assert await here.over() == {"exit": 1}
        assert here.gateway.outcomes == {"answered": 1}


async def test_each_attempt_has_an_id_of_its_own(stage: Any) -> None:
    async with stage(polite) as here:
        episodes = await asyncio.gather(*(here.runner.run(TASK, member) for member in (0, 0, 1)))
        assert sorted(episode.id for episode in episodes) == ["t.0", "t.0.2", "t.1"]


async def broken_start(context: Context) -> int:
    await context.write(b"no such module", to_stderr=True)
    return 3


async def endless(context: Context) -> int:
    await ask(context)
    await asyncio.Event().wait()
    return 0


async def failed(
    stage: Any, agent: Program, ending: EpisodeEnding, outcome: str, **more: Any
) -> tuple[Episode, dict[str, int]]:
    """The one episode of that agent, and how its box ended; `outcome` is what its gateway saw of it."""
    async with stage(agent, **more) as here:
        episode = await here.runner.run(TASK, 0)
        assert (episode.ending, episode.reward, episode.samples) == (ending, None, [])
        assert here.gateway.outcomes == {outcome: 1}
        assert episode.transcript["detail"] == episode.detail
        json.dumps(episode.transcript)
        return episode, await here.over()


async def test_an_agent_that_does_not_start_is_a_failure_that_says_why(stage: Any) -> None:
    episode, _ = await failed(stage, broken_start, EpisodeEnding.FAILED, "silent")
    assert episode.detail == "the agent ended with status 3 before it asked anything: no such module"


async def test_an_agent_that_does_not_end_timed_out(stage: Any) -> None:
    episode, _ = await failed(stage, endless, EpisodeEnding.TIMED_OUT, "answered", env=Small(timeout=0.2))
    assert "still running after 0." in (episode.detail or "")


async def test_a_box_that_cannot_be_made_is_a_failure_that_says_why(stage: Any) -> None:
    async def refuse(box_id: str, spec: SandboxSpec) -> None:
        raise StartFailed("no space left for the root")

    episode, boxes = await failed(stage, polite, EpisodeEnding.FAILED, "silent", creating=refuse)
    assert episode.detail == "no space left for the root"
    assert boxes == {"start_failed": 1}


async def test_a_broken_grader_is_a_failure_that_says_why(stage: Any) -> None:
    env = Small()
    env.grading = lambda: Grade(1 / 0)
    episode, _ = await failed(stage, polite, EpisodeEnding.FAILED, "answered", env=env)
    assert episode.detail == "ZeroDivisionError: division by zero"


async def test_a_broken_engine_is_a_failure_that_says_why(stage: Any) -> None:
    def broken(messages: Any) -> str:
        raise TrainingFault("the engine died")

    async with stage(polite) as here:
        here.engine.assign("t.0", broken)
        episode = await here.runner.run(TASK, 0)
        assert (episode.ending, episode.detail) == (EpisodeEnding.FAILED, "the model gateway failed: the engine died")
        assert await here.over() == {"exit": 1}


async def test_a_box_that_dies_under_its_agent_is_a_failure(stage: Any) -> None:
    from sandlot.api import Ending

    async def killed(context: Context) -> int:
        await ask(context)
        context.box.die(Ending.HELPER_DIED)
        return 0

    episode, boxes = await failed(stage, killed, EpisodeEnding.FAILED, "answered")
    assert "ended" in (episode.detail or "")
    assert boxes == {"helper_died": 1}


async def test_a_slow_creation_ends_at_its_deadline(stage: Any) -> None:
    async def slow(box_id: str, spec: SandboxSpec) -> None:
        await asyncio.sleep(0.3)

    async with stage(polite, creating=slow) as here:
        runner = BoxRunner(here.env, here.node, here.gateway, Sampling(), deadlines=Deadlines(create=0.05))
        episode = await runner.run(TASK, 0)
        assert episode.detail == "phase 'create' of episode t.0 did not finish within 0.05 s"
        assert await here.over() == {"killed": 1}


async def test_a_cancelled_episode_is_over_when_it_says_so(stage: Any) -> None:
    async with stage(endless) as here:
        running = asyncio.ensure_future(here.runner.run(TASK, 0))
        while not here.gateway.counts["calls"]:  # noqa: ASYNC110 - the test waits for another task's progress
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await here.over() == {"killed": 1}
        assert here.gateway.outcomes == {"answered": 1}


async def test_an_episode_that_is_cancelled_while_its_box_is_made_leaves_none(stage: Any) -> None:
    making = asyncio.Event()

    async def slow(box_id: str, spec: SandboxSpec) -> None:
        making.set()
        await asyncio.sleep(0.05)

    async with stage(polite, creating=slow) as here:
        running = asyncio.ensure_future(here.runner.run(TASK, 0))
        await making.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await here.over() == {"killed": 1}


async def test_a_box_lives_no_longer_than_its_episode_may(stage: Any) -> None:
    asked: list[SandboxSpec] = []

    async def seen(box_id: str, spec: SandboxSpec) -> None:
        asked.append(spec)

    async with stage(polite, creating=seen) as here:
        times = Deadlines(create=1, files=2, run=3, grade=4, teardown=5)
        await BoxRunner(here.env, here.node, here.gateway, Sampling(), deadlines=times).run(TASK, 0)
        assert asked[0].lifetime == 15 + here.env.timeout


class Mixed(Small):
    """Tasks in turn: one that is solved, one whose agent breaks, one that is answered too late, one that never is."""

    def task(self, split: str, index: int) -> BoxTask:
        kind = ("good", "broken", "late", "held")[index % 4]
        timeout = 0.2 if kind == "late" else 60.0
        return BoxTask(f"{kind}-{index}", index, {"/task/a": b"1"}, ("agent",), "/task", {"TASK": kind}, timeout, {})


async def by_its_task(context: Context) -> int:
    if context.env["TASK"] == "broken":
        return await broken_start(context)
    await ask(context)
    return 0


class Holding(ScriptedEngine):
    """Answers the good task only; counts the questions it holds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.holding: Counter[str] = Counter()

    async def generate(self, question: Question) -> Generation:
        what = question.messages[0]["content"]
        if what == "good":
            return await super().generate(question)
        self.holding[what] += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.holding[what] -= 1
        raise AssertionError


async def test_dispatcher_ledger_and_gateway_agree_on_each_of_the_five_endings(
    stage: Any, tokenizer: FileTokenizer
) -> None:
    async with stage(by_its_task, env=Mixed()) as here:
        here.gateway.engine = engine = Holding(tokenizer, lambda messages: "submit f3")
        sink = Sink(lambda group: group.episodes[0].samples, batch_groups=8, max_staleness=0)
        options = {"group_size": 1, "batch_groups": 8, "max_running": 8, "max_staleness": 0}
        dispatcher = Dispatcher(Source(here.env, "train", 0), here.runner.run, sink, **options)
        dispatcher.start()

        async def only_held_ones_are_left() -> None:
            async with asyncio.timeout(20):
                while not 0 < dispatcher.running == engine.holding["held"]:  # noqa: ASYNC110 - another task's progress
                    await asyncio.sleep(0.01)

        await only_held_ones_are_left()
        sink.advance(1)
        dispatcher.advance(1)
        await only_held_ones_are_left()
        await dispatcher.stop()

        counts = dispatcher.counts
        assert all(counts.values()), counts
        cancelled = counts[EpisodeEnding.CANCELLED_STALE] + counts[EpisodeEnding.CANCELLED_SURPLUS]
        cut = counts[EpisodeEnding.TIMED_OUT] + cancelled
        ok, broken = counts[EpisodeEnding.OK], counts[EpisodeEnding.FAILED]
        assert here.gateway.outcomes == {"answered": ok, "silent": broken, "cut": cut}
        assert await here.over() == {"exit": ok + broken, "killed": cut}
        assert dispatcher.admitted == ok + broken + cut == here.gateway.counts["opened"]


def test_an_environment_without_a_demonstrator_cannot_demonstrate(tokenizer: FileTokenizer) -> None:
    engine = ScriptedEngine(tokenizer)
    with pytest.raises(RecipeError, match="Small has no demonstrator"):
        BoxRunner(Small(), None, Gateway(engine, Renderer(tokenizer)), Sampling(), script=engine)  # type: ignore[arg-type]


@pytest.fixture
async def native(native_reason: str | None, tmp_path: Path) -> AsyncIterator[NodeAPI]:
    if native_reason:
        pytest.skip(native_reason)
    node = await open_node(state_dir=tmp_path)
    yield node
    await node.close()


async def test_demonstrations_are_real_episodes_in_real_boxes(
    native: NodeAPI, find: Any, tokenizer: FileTokenizer
) -> None:
    engine = ScriptedEngine(tokenizer, keep_log=True)
    gateway = Gateway(engine, Renderer(tokenizer))
    env = type(find)(shots_good=0.5)
    runner = BoxRunner(env, native, gateway, Sampling(max_tokens=16), name="demo-", script=engine)
    tasks = Source(env, "demos", 0).take(24)
    out: list[Episode] = []
    episodes = await rollout_all(tasks, runner.run, 4, out.append)
    assert {episode.ending for episode in episodes} == {EpisodeEnding.OK}, [episode.detail for episode in episodes]
    assert 0.3 < sum(episode.reward or 0.0 for episode in episodes) / 24 < 0.95
    asked: dict[str, list[int]] = {}
    for name, read, said in await engine.take_log():
        asked[name] = read + said
    for episode in episodes:
        (sample,) = episode.samples
        assert sample.tokens.tolist() == asked[episode.id]
        assert episode.transcript["drift"] == episode.transcript["forks"] == 0
        told = [message["content"] for message in episode.transcript["messages"]]
        task = env.task("demos", episode.task.data["index"])
        looked = told[1] != f"submit {episode.transcript['agent']['stdout'].strip()}"
        assert told[0] == task.env["TASK"]
        if looked:
            assert told[2] != "(empty)"
        if told[1].startswith("grep"):
            assert episode.reward == 1.0
            assert told[2].startswith(f"{task.secret['file']}:")
    counts = await native.counts()
    assert gateway.outcomes == Counter(answered=24)
    assert (counts["created"], counts["exit"], counts["running"]) == (24, 24, 0)
    again = await runner.run(tasks[0], 0)
    assert again.transcript["messages"] == episodes[0].transcript["messages"]  # any episode can be run again alone

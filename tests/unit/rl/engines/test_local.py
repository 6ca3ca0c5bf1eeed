"""Promises:
1. A row's tokens depend on its seed alone, whatever else is in the batch and whenever it joined.
2. A log-probability is the one that the trainer gives the same token, to 1e-5; with temperature and top_p, that of the
   distribution that was sampled from.
3. Tokens are sampled as often as they are likely.
4. Weights change between two tokens: what is in flight goes on, and each token carries the version that made it.
5. A call that is cancelled leaves; a closed or broken engine answers nobody and hangs nobody.
6. The log holds what was read and sampled.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandlot.errors import InvalidRequest, TrainingFault
from sandlot.gateway.engine import Generation, Question, Sampling
from sandlot.rl.engines.local import LocalEngine
from sandlot.rl.train.backend import Settings
from sandlot.rl.train.single import SingleTrainer

Start = Callable[..., LocalEngine]


@pytest.fixture
async def start(tiny: Path) -> AsyncIterator[Start]:
    started = []

    def engine(folder: Path = tiny, **options: Any) -> LocalEngine:
        started.append(LocalEngine(str(folder), LocalEngine.Config(**options)))
        return started[-1]

    yield engine
    for one in started:
        await one.close()


def prompt(seed: int) -> list[int]:
    chance = np.random.default_rng(seed)
    return chance.integers(5, 40, chance.integers(1, 30)).tolist()


def ask(engine: LocalEngine, seed: int, **sampling: Any) -> asyncio.Task[Generation]:
    settings = Sampling(**{"max_tokens": 12, "seed": seed, **sampling})
    return asyncio.ensure_future(engine.generate(Question(prompt(seed), [], settings, f"e{seed}")))


async def test_a_rows_tokens_depend_on_its_seed_alone(start: Start) -> None:
    alone = start()
    expected = [(await ask(alone, seed)).tokens for seed in range(24)]
    assert len({tuple(tokens) for tokens in expected}) > 20
    crowded = start(max_rows=7)
    tasks = []
    for seed in range(24):
        tasks.append(ask(crowded, seed))
        for _ in range(seed % 5):  # they join at different tokens
            await asyncio.sleep(0.001)
    assert [(await task).tokens for task in tasks] == expected


async def test_logprobs_are_the_trainers(start: Start, tiny: Path) -> None:
    engine, trainer = start(), SingleTrainer(str(tiny), Settings())
    answers = await asyncio.gather(*(ask(engine, seed) for seed in range(30)))
    for seed, answer in enumerate(answers):
        before = prompt(seed)
        whole = trainer.logprobs([before + answer.tokens])[0]
        assert np.allclose(answer.logprobs, whole[len(before) - 1 :], atol=1e-5)
        assert (await engine.logprobs([before + answer.tokens]))[0] == pytest.approx(whole, abs=1e-5)
        assert answer.versions == [0] * len(answer.tokens)
        assert (answer.finish == "stop") == (answer.tokens[-1] == 4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.6)])
async def test_tokens_are_sampled_as_often_as_they_are_likely(start: Start, temperature: float, top_p: float) -> None:
    engine, count = start(max_rows=256), 4000
    question = [Question([5, 9], [], Sampling(temperature, top_p, 1, seed)) for seed in range(count)]
    answers = await asyncio.gather(*map(engine.generate, question))
    seen = Counter(answer.tokens[0] for answer in answers)
    likely = {answer.tokens[0]: float(np.exp(answer.logprobs[0])) for answer in answers}
    assert sum(likely.values()) == pytest.approx(1.0, abs=0.02)
    for token, share in likely.items():
        assert abs(seen[token] / count - share) < 4 * np.sqrt(share / count) + 1e-3


async def test_temperature_0_takes_the_likeliest(start: Start) -> None:
    engine = start()
    one, two = await asyncio.gather(ask(engine, 1, temperature=0), ask(engine, 1, temperature=0, max_tokens=12))
    assert one.tokens == two.tokens
    assert one.logprobs == [0.0] * len(one.tokens)


async def test_weights_change_between_two_tokens(start: Start, another: Path) -> None:
    engine = start()
    tasks = [ask(engine, seed, max_tokens=400) for seed in range(40)]
    await asyncio.sleep(0.02)
    await engine.update(str(another / "model.safetensors"), 5)
    assert await engine.version() == 5
    answers = [await task for task in tasks]
    assert all(a.versions == sorted(a.versions) and set(a.versions) <= {0, 5} for a in answers)
    assert any(set(a.versions) == {0, 5} for a in answers)
    trainer = SingleTrainer(str(another), Settings())
    later = await ask(engine, 3)
    assert later.logprobs == pytest.approx(
        trainer.logprobs([prompt(3) + later.tokens])[0][len(prompt(3)) - 1 :], abs=1e-5
    )


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(start: Start, tiny: Path, tmp_path: Path) -> None:
    engine = start()
    before = (await ask(engine, 1)).tokens
    shutil.copy(tiny / "model.safetensors", tmp_path / "cut.safetensors")
    with (tmp_path / "cut.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(TrainingFault, match="cannot be taken"):
        await engine.update(str(tmp_path / "cut.safetensors"), 1)
    with pytest.raises(TrainingFault, match="cannot be taken"):
        await engine.update(str(tmp_path / "none.safetensors"), 1)
    assert await engine.version() == 0
    assert (await ask(engine, 1)).tokens == before


async def test_a_cancelled_call_leaves(start: Start) -> None:
    engine = start()
    tasks = [ask(engine, seed, max_tokens=400) for seed in range(8)]
    await asyncio.sleep(0.01)
    for task in tasks[:7]:
        task.cancel()
    await asyncio.gather(*tasks[:7], return_exceptions=True)
    assert (await engine.stats()).running == 1
    assert (await tasks[7]).tokens == (await ask(start(), 7, max_tokens=400)).tokens


async def test_a_closed_engine_hangs_nobody(start: Start, tiny: Path) -> None:
    engine = LocalEngine(str(tiny), LocalEngine.Config())
    waiting = [ask(engine, seed, max_tokens=400) for seed in range(20)]
    await asyncio.sleep(0.01)
    await engine.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(end, TrainingFault) and "closed" in str(end) for end in ends)
    with pytest.raises(TrainingFault):
        await ask(engine, 1)
    with pytest.raises(TrainingFault):
        await engine.update("x", 1)


async def test_an_engine_that_closes_in_the_middle_of_an_update_answers_it(tiny: Path) -> None:
    engine = LocalEngine(str(tiny), LocalEngine.Config())
    update = asyncio.ensure_future(engine.update(str(tiny / "model.safetensors"), 1))
    for _ in range(3):
        await asyncio.sleep(0)  # the engine has begun to load them
    await engine.close()
    with pytest.raises(TrainingFault, match="closed"):
        await asyncio.wait_for(update, 5)


async def test_what_cannot_be_answered_is_refused(start: Start) -> None:
    engine = start()
    for question in (
        Question([], [], Sampling()),
        Question([5] * 512, [], Sampling()),
        Question([5], [], Sampling(stop=("x",))),
    ):
        with pytest.raises(InvalidRequest):
            await engine.generate(question)


async def test_the_log_holds_what_was_read_and_sampled(start: Start) -> None:
    engine = start(keep_log=True)
    answers = await asyncio.gather(*(ask(engine, seed) for seed in range(5)))
    log = {episode: (read, said) for episode, read, said in await engine.take_log()}
    assert log == {f"e{seed}": (prompt(seed), answer.tokens) for seed, answer in enumerate(answers)}
    assert await engine.take_log() == []
    stats = await engine.stats()
    assert (stats.calls, stats.sampled_tokens) == (5, sum(len(answer.tokens) for answer in answers))

"""Promises:
1. A script answers its own episode; the default answers the others; nobody is an error, not a hang.
2. An answer ends with the end-of-turn token unless its length cut it, and carries the version of that moment.
3. The log holds what was read and said, once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandlot.errors import TrainingFault
from sandlot.gateway.engine import Question, Sampling
from sandlot.gateway.render import FileTokenizer
from sandlot.rl.engines.scripted import ScriptedEngine

QUESTION = Question([1, 2], [{"role": "user", "content": "find w7"}], Sampling(max_tokens=8), "a")


async def test_each_episode_is_answered_by_its_own_script(tokenizer: FileTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda messages: "ls")
    engine.assign("a", lambda messages: f"grep {messages[0]['content'].split()[1]} *")
    assert tokenizer.decode((await engine.generate(QUESTION)).tokens) == "grep w7 *"
    assert tokenizer.decode((await engine.generate(replace(QUESTION, episode="b"))).tokens) == "ls"
    engine.assign("a", None)
    assert tokenizer.decode((await engine.generate(QUESTION)).tokens) == "ls"
    with pytest.raises(TrainingFault, match="no script answers episode 'a'"):
        await ScriptedEngine(tokenizer).generate(QUESTION)


async def test_an_answer_ends_its_turn_unless_it_was_cut(tokenizer: FileTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda messages: "grep w7 *")
    whole = await engine.generate(QUESTION)
    assert (whole.tokens[-1], whole.finish) == (tokenizer.end_of_turn, "stop")
    await engine.update("", 3)
    cut = await engine.generate(replace(QUESTION, sampling=Sampling(max_tokens=3)))
    assert (cut.tokens, cut.finish) == (whole.tokens[:3], "length")
    assert (cut.versions, await engine.version()) == ([3, 3, 3], 3)


async def test_the_log_holds_what_was_read_and_said_once(tokenizer: FileTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, lambda messages: "ls", keep_log=True)
    said = (await engine.generate(QUESTION)).tokens
    assert await engine.take_log() == [("a", [1, 2], said)]
    assert await engine.take_log() == []
    assert (await engine.stats()).calls == 1

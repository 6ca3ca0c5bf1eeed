"""Promises:
1. A path is the concatenation of what the engine read and sampled, masked where it sampled.
2. What a client repeats of the dialogue is not rendered again; a new turn adds its own tokens only.
3. Rewritten history is a fork with a path of its own; a changed copy of our own answer counts as drift.
4. The same question asked again is a fork from the same prompt.
"""

from __future__ import annotations

from itertools import chain

from sandlot.gateway.engine import ChatMessage, Generation
from sandlot.gateway.render import FileTokenizer, Renderer
from sandlot.gateway.trace import Trace


class Dialogue:
    """A trace, and the engine that would answer it."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self.tokenizer = tokenizer
        self.trace = Trace(Renderer(tokenizer))
        self.read: list[list[int]] = []
        self.said: list[list[int]] = []

    def turn(self, messages: list[ChatMessage], text: str, version: int = 0, cut: bool = False) -> list[ChatMessage]:
        """Ask `messages`, be answered `text`; the dialogue so far."""
        prompt = self.trace.prompt(messages)
        tokens = self.tokenizer.encode(text) + ([] if cut else [self.tokenizer.end_of_turn])
        self.read.append(prompt.ids())
        self.said.append(tokens)
        generation = Generation(tokens, [-0.5] * len(tokens), [version] * len(tokens), "length" if cut else "stop")
        answer = self.trace.commit(prompt, generation, text)
        return [*messages, answer.message]


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def test_a_path_is_the_concatenation_of_what_was_read_and_sampled(tokenizer: FileTokenizer) -> None:
    dialogue = Dialogue(tokenizer)
    told = dialogue.turn([user("find w7")], "grep w7 *", version=3)
    told = dialogue.turn([*told, user("f3:w7 w1")], "submit f3", version=4)
    (path,) = dialogue.trace.paths()
    assert path.tokens == dialogue.read[1] + dialogue.said[1]
    assert path.tokens[: len(dialogue.read[0] + dialogue.said[0])] == dialogue.read[0] + dialogue.said[0]
    assert [token for token, sampled in zip(path.tokens, path.mask, strict=True) if sampled] == list(
        chain(*dialogue.said)
    )
    assert [version for version in path.versions if version >= 0] == [3] * 4 + [4] * 3
    assert all((logprob == -0.5) == sampled for logprob, sampled in zip(path.logprobs, path.mask, strict=True))
    assert (dialogue.trace.drift, dialogue.trace.forks) == (0, 0)
    assert dialogue.trace.messages == told
    assert [call.prompt for call in dialogue.trace.calls] == [len(read) for read in dialogue.read]


def test_an_answer_that_was_cut_short_keeps_its_tokens_and_is_ended_unmasked(tokenizer: FileTokenizer) -> None:
    dialogue = Dialogue(tokenizer)
    told = dialogue.turn([user("find w7")], "grep w7", cut=True)
    dialogue.turn([*told, user("(empty)")], "submit f3")
    (path,) = dialogue.trace.paths()
    ends = [sampled for token, sampled in zip(path.tokens, path.mask, strict=True) if token == tokenizer.end_of_turn]
    assert ends == [False, False, False, True]  # the question's, the cut answer's, the next question's, the answer's


def test_a_tokenization_that_no_encoder_would_give_is_kept(tokenizer: FileTokenizer) -> None:
    dialogue = Dialogue(tokenizer)
    odd = [*tokenizer.encode("w1"), 1, 0, tokenizer.end_of_turn]  # unknown and padding tokens, as a raw policy samples
    prompt = dialogue.trace.prompt([user("find w7")])
    text = tokenizer.decode(odd)
    answer = dialogue.trace.commit(prompt, Generation(odd, [0.0] * 4, [0] * 4, "stop"), text)
    dialogue.turn([user("find w7"), answer.message, user("(empty)")], "ls")
    (path,) = dialogue.trace.paths()
    assert path.tokens[len(prompt.ids()) :][:4] == odd
    assert dialogue.trace.drift == 0


def test_rewritten_history_is_a_fork_and_a_changed_answer_is_drift(tokenizer: FileTokenizer) -> None:
    dialogue = Dialogue(tokenizer)
    told = dialogue.turn([user("find w7")], "ls")
    dialogue.turn([*told, user("f0 f1")], "submit f0")
    changed = [told[0], {"role": "assistant", "content": "ls ls"}, user("f0 f1")]
    told = dialogue.turn(changed, "cat f1")
    assert (dialogue.trace.drift, dialogue.trace.forks) == (1, 1)
    dialogue.turn([*told, user("w1")], "submit f1")  # the fork goes on as a dialogue of its own
    assert (dialogue.trace.drift, dialogue.trace.forks) == (1, 1)
    dialogue.turn([user("find w8")], "ls")  # a history that was thrown away is a fork, and nobody's drift
    assert (dialogue.trace.drift, dialogue.trace.forks) == (1, 2)
    first, second, third = dialogue.trace.paths()
    assert first.tokens == dialogue.read[1] + dialogue.said[1]
    assert second.tokens == dialogue.read[3] + dialogue.said[3]
    assert third.tokens == dialogue.read[4] + dialogue.said[4]
    assert sum(first.mask) == len(list(chain(*dialogue.said[:2])))
    assert sum(second.mask) == len(list(chain(*dialogue.said[2:4])))  # the rewritten turn was never sampled


def test_the_same_question_asked_again_forks_at_its_prompt(tokenizer: FileTokenizer) -> None:
    dialogue = Dialogue(tokenizer)
    told = dialogue.turn([user("find w7")], "ls")
    dialogue.turn([user("find w7")], "cat f1")
    dialogue.turn([*told, user("f0")], "submit f0")
    assert dialogue.read[0] == dialogue.read[1]
    assert dialogue.trace.forks == 2  # asked again; then the earlier of the two was continued
    assert dialogue.trace.drift == 0
    assert len(dialogue.trace.paths()) == 2


def test_a_dialogue_of_a_thousand_turns_is_recorded(tokenizer: FileTokenizer) -> None:
    dialogue = Dialogue(tokenizer)
    told = [user("find w7")]
    for _ in range(1000):
        told = [*dialogue.turn(told, "ls"), user("f0")]
    (path,) = dialogue.trace.paths()
    assert path.tokens == dialogue.read[-1] + dialogue.said[-1]
    assert dialogue.trace.forks == 0


def test_nothing_asked_is_no_path(tokenizer: FileTokenizer) -> None:
    trace = Trace(Renderer(tokenizer))
    trace.prompt([user("find w7")])
    assert (trace.paths(), trace.messages) == ([], [])

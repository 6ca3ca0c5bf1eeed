"""The token graph of one episode: what the engine read and sampled, in the order of the dialogue, forks included.

Owns the record. Nodes alternate: a *prompt* holds the messages that a client added and the tokens they were rendered
to; an *answer* holds the one message that was sampled and its tokens, log-probabilities and policy versions. A request
is matched against the graph message by message; what it adds becomes a new prompt node, and a history that was
rewritten is a fork where it differs. A path from the root to an answer is exactly what the engine read and sampled for
that answer, so a path is a sample. The graph never encodes a text and never changes a token.

    root ── prompt [system, find w7] ── answer [grep w7 *] ── prompt [f3:w7 …] ── answer [submit f3]
                                     └─ answer [ls]        (the same question asked again: a fork)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sandlot.gateway.engine import ChatMessage, Generation
from sandlot.gateway.render import Renderer


@dataclass(slots=True, eq=False)
class Answer:
    """A sampled message, as the client was told it. The root is an empty one."""

    parent: Prompt | None
    message: ChatMessage
    generation: Generation
    prompts: list[Prompt] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Prompt:
    """Messages that a client added, and the tokens they add: up to the point where the model answers."""

    parent: Answer
    messages: list[ChatMessage]
    tokens: list[int]
    answers: list[Answer] = field(default_factory=list)

    def ids(self) -> list[int]:
        """What the engine is to continue: every token from the root to here."""
        ids: list[int] = []
        for node in _path(self):
            ids += node.tokens if isinstance(node, Prompt) else node.generation.tokens
        return ids


@dataclass(frozen=True, slots=True)
class TracePath:
    """One sample: `tokens` with, aligned to them, `mask` (True: sampled), `logprobs` (0.0 where not) and `versions`
    (-1 where not).  Example: [5, 9, 7, 2], [F, F, T, T], [0, 0, -.4, -.1], [-1, -1, 4, 4]."""

    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True, slots=True)
class Call:
    """One question and its answer, for people and for checks: `prompt` counts the tokens that the engine read."""

    prompt: int
    text: str
    generation: Generation


class Trace:
    """The record of one episode. `drift` counts the copies of our own answers that came back changed: 0 unless the
    client rewrites what the model said. `forks` counts answers that do not continue the latest one."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._root = Answer(None, {}, Generation([], [], [], "stop"))
        self._latest = self._root
        self.calls: list[Call] = []
        self.drift = 0
        self.forks = 0

    def prompt(self, messages: list[ChatMessage]) -> Prompt:
        """Where `messages` stand in the graph: a prompt that is there already, or one that `commit` will add to it.
        Raises Refusal when they cannot be rendered."""
        boundary, at = _deepest(self._root, messages)
        added = messages[at:]
        for known in boundary.prompts:
            if known.messages == added:
                return known
            asked = len(known.messages)
            if added[:asked] == known.messages and added[asked]["role"] == "assistant":
                self.drift += 1  # our question, then an answer in our place that we never gave
        if boundary is self._root:
            return Prompt(boundary, added, self._renderer.prompt(added))
        return Prompt(boundary, added, self._renderer.bridge(boundary.generation.tokens, added))

    def commit(self, prompt: Prompt, generation: Generation, text: str) -> Answer:
        """Record what was sampled for `prompt`; `text` is what the client is told."""
        for known in prompt.parent.prompts:
            if known.messages == prompt.messages:
                prompt = known  # two identical requests that ran side by side
                break
        else:
            prompt.parent.prompts.append(prompt)
        self.forks += bool(prompt.answers or prompt.parent is not self._latest)
        answer = Answer(prompt, {"role": "assistant", "content": text}, generation)
        prompt.answers.append(answer)
        self.calls.append(Call(len(prompt.ids()), text, generation))
        self._latest = answer
        return answer

    @property
    def messages(self) -> list[ChatMessage]:
        """The dialogue that the latest answer belongs to."""
        told: list[ChatMessage] = []
        for node in _path(self._latest):
            told += node.messages if isinstance(node, Prompt) else [node.message]
        return told

    def paths(self) -> list[TracePath]:
        """One sample for each answer that none continues, in the order of the graph."""
        return [_sample(leaf) for leaf in _leaves(self._root) if leaf is not self._root]


def _path(node: Prompt | Answer) -> list[Prompt | Answer]:
    """The nodes from the first prompt to `node`, the root left out."""
    path: list[Prompt | Answer] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _deepest(root: Answer, messages: list[ChatMessage]) -> tuple[Answer, int]:
    """The answer farthest down the graph whose dialogue is a prefix of `messages`, and that prefix's length. Of equal
    answers to one question the latest counts."""
    best, reached = root, 0
    ways = [(root, 0)]
    while ways:
        here, at = ways.pop()
        if at > reached:
            best, reached = here, at
        for prompt in here.prompts:
            end = at + len(prompt.messages)
            if end + 1 < len(messages) and messages[at:end] == prompt.messages:
                ways += [(answer, end + 1) for answer in prompt.answers if answer.message == messages[end]]
    return best, reached


def _leaves(root: Answer) -> Iterator[Answer]:
    """The answers that none continues, in the order of the graph."""
    ways = [root]
    while ways:
        answer = ways.pop()
        below = [child for prompt in answer.prompts for child in prompt.answers]
        if not below:
            yield answer
        ways += reversed(below)


def _sample(leaf: Answer) -> TracePath:
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for node in _path(leaf):
        if isinstance(node, Prompt):
            count = len(node.tokens)
            tokens += node.tokens
            mask += [False] * count
            logprobs += [0.0] * count
            versions += [-1] * count
        else:
            tokens += node.generation.tokens
            mask += [True] * len(node.generation.tokens)
            logprobs += node.generation.logprobs
            versions += node.generation.versions
    return TracePath(tokens, mask, logprobs, versions)

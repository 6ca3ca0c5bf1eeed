"""Messages to tokens, so that what a model sampled is never encoded again.

Owns two renderings: the prompt that opens a dialogue, and the *bridge*, the tokens between one sampled answer and the
next: the rest of the template's ending of an answer, the new messages, and the opening of the next answer. A dialogue's
tokens are prompt + sampled + bridge + sampled + …, each part encoded once. Never imports transformers or torch: a
tokenizer is a `tokenizers` file and a Jinja template, and both load in a fraction of the time without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sandlot.errors import InvalidRequest, NotFound
from sandlot.gateway.engine import ChatMessage, Refusal

# Two turns stand for the dialogue so far when a bridge is rendered, and only what follows the second is looked at:
# templates may word earlier turns differently once there are later ones (Qwen3's drop the thinking).
ANSWERED = "sandlot-stand-in"
STAND_IN: list[ChatMessage] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWERED}]


class Tokenizer(Protocol):
    """Text to tokens and back, and messages to text."""

    end_of_turn: int  # the token that ends an answer

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written in `text` become themselves, none is added."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text, without special tokens."""
        ...

    def render(self, messages: list[ChatMessage], add_generation_prompt: bool) -> str:
        """The dialogue as one text, by the model's chat template."""
        ...


class FileTokenizer:
    """A Hugging Face folder: tokenizer.json, its chat template, and the special tokens that the template names."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Encoder

        for needed in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / needed).is_file():
                raise NotFound(f"{folder} holds no {needed}", "save one there with `tokenizer.save_pretrained(FOLDER)`")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self._encoder = Encoder.from_file(str(folder / "tokenizer.json"))
        specials = {
            name: _content(config[name]) for name in ("bos_token", "eos_token", "pad_token") if config.get(name)
        }
        if "eos_token" not in specials:
            raise InvalidRequest(f"{folder}/tokenizer_config.json names no eos_token, which ends an answer")
        end = self._encoder.token_to_id(specials["eos_token"])
        if end is None:
            raise InvalidRequest(f"{folder}: the eos_token {specials['eos_token']!r} is not in the vocabulary")
        self.end_of_turn: int = end
        self._template = _template(folder, config)
        self._specials = specials

    def encode(self, text: str) -> list[int]:
        if not text.isascii():  # JSON can spell half of a surrogate pair, which no encoder takes
            text = text.encode("utf-8", "replace").decode()
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._encoder.decode(ids, skip_special_tokens=True)
        return text

    def render(self, messages: list[ChatMessage], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._template(messages=messages, add_generation_prompt=add_generation_prompt, **self._specials)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program and messages are its input: it may trip over them in any of these ways.
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer in a Hugging Face folder. Raises NotFound, InvalidRequest."""
    return FileTokenizer(Path(folder))


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _template(folder: Path, config: dict[str, Any]) -> Callable[..., str]:
    # The environment in which transformers evaluates templates: models' templates rely on each of these settings.
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    beside = folder / "chat_template.jinja"
    source = beside.read_text() if beside.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise InvalidRequest(f"{folder} has no chat template", "put one into chat_template.jinja")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source).render
    except TemplateError as error:
        raise InvalidRequest(f"the chat template in {folder} is broken: {error}") from error


class Renderer:
    """Renders for one tokenizer. Raises InvalidRequest when its template does not end an answer with its end-of-turn
    token, for then nobody could say where an answer ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        tail = self._after_stand_in([], False)
        for end in range(1, len(tail) + 1):
            if tokenizer.encode(tail[:end])[-1:] == [tokenizer.end_of_turn]:
                self._closing = tail[:end]
                return
        raise InvalidRequest("the chat template does not end an answer with the tokenizer's eos_token")

    def prompt(self, messages: list[ChatMessage]) -> list[int]:
        """The tokens that open a dialogue, up to where the model answers. Raises Refusal."""
        try:
            return self.tokenizer.encode(self.tokenizer.render(messages, True))
        except InvalidRequest as error:
            raise Refusal(400, "invalid_request_error", error.message) from error

    def bridge(self, sampled: Sequence[int], messages: list[ChatMessage]) -> list[int]:
        """The tokens that follow `sampled`, a whole answer, up to where the model answers `messages`. An answer that
        was cut short by its length is ended here: that token was not sampled and is not learned. Raises Refusal."""
        try:
            tail = self._after_stand_in(messages, True)
        except InvalidRequest as error:
            raise Refusal(400, "invalid_request_error", error.message) from error
        ended = bool(sampled) and sampled[-1] == self.tokenizer.end_of_turn
        return self.tokenizer.encode(tail[len(self._closing) :] if ended else tail)

    def text(self, sampled: Sequence[int]) -> str:
        """What the client is told that the model said."""
        return self.tokenizer.decode(list(sampled))

    def pieces(self, sampled: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return [self.tokenizer.decode([token]) for token in sampled]

    def _after_stand_in(self, messages: list[ChatMessage], add_generation_prompt: bool) -> str:
        """What the template writes after the text of an answer when `messages` follow it."""
        text = self.tokenizer.render([*STAND_IN, *messages], add_generation_prompt)
        _, found, tail = text.partition(ANSWERED)
        if not found:
            raise InvalidRequest("the chat template leaves out what the assistant said")
        return tail

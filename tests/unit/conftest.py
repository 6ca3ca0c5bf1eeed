"""What tests of several parts share: the find task, a word-level tokenizer for it, and listeners that answer."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import AsgiApp
from sandlot.envs.boxed import load_env
from sandlot.gateway.render import FileTokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "find"

# One line a message; the answer's end is a token of its own, and a blank follows it.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}<|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIALS = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def write_tokenizer(folder: Path, words: list[str], template: str = TEMPLATE) -> Path:
    """A Hugging Face folder with a word-level tokenizer."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    encoder = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIALS, *words])}, unk_token="<unk>"))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(":", behavior="isolated")]
    )
    encoder.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    encoder.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "pad_token": {"content": "<pad>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder() -> Callable[..., Path]:
    """Writes a word-level tokenizer into a folder: (folder, words, template)."""
    return write_tokenizer


@pytest.fixture(scope="session")
def find() -> Any:
    """The find task, as its recipe names it."""
    return load_env("task.py:Find", RECIPE)


@pytest.fixture(scope="session")
def tokenizer(find: Any, tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """A word-level tokenizer of the find task's vocabulary."""
    words = sys.modules[type(find).__module__].vocabulary()
    return FileTokenizer(write_tokenizer(tmp_path_factory.mktemp("words"), words))


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[AsgiApp], Awaitable[str]]]:
    """Answers real HTTP with an application; gives the base URL."""
    from sandlot import asgi

    served = []

    async def start(app: AsgiApp) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        served.append(await asgi.serve(listener, app))
        return f"http://127.0.0.1:{port}"

    yield start
    for one in served:
        one.close()

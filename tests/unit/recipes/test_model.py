"""Promises:
1. The find policy's tokenizer knows every word of the task, and no word is the unknown one.
2. The gateway can render with its chat template, and what it bridges is what the template writes.
3. The same seed gives the same weights; another seed others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sandlot.config import locate
from sandlot.gateway.render import Renderer, load_tokenizer

FIND = Path(__file__).parents[3] / "recipes" / "find"
BUILD = locate("model.py:build", FIND)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    BUILD(made, 0, hidden=32, layers=1)
    return made


def test_the_tokenizer_knows_every_word_of_the_task(folder: Path, find: Any) -> None:
    tokenizer = load_tokenizer(folder)
    words = sys.modules[type(find).__module__].vocabulary()
    ids = tokenizer.encode(" ".join(words))
    assert len(set(ids)) == len(words) and 1 not in ids  # 1: <unk>
    assert tokenizer.decode(tokenizer.encode("grep w7 *")) == "grep w7 *"
    assert tokenizer.encode("f3:w12 w7\n") == tokenizer.encode("f3 : w12 w7")


def test_the_gateway_bridges_as_the_template_writes(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    asked: list[dict[str, Any]] = [{"role": "user", "content": "find w7"}]
    told = [*asked, {"role": "assistant", "content": "grep w7 *"}, {"role": "user", "content": "f3:w7 w1"}]
    said = [*tokenizer.encode("grep w7 *"), tokenizer.end_of_turn]
    bridged = renderer.prompt(asked) + said + renderer.bridge(said, told[2:])
    assert bridged == tokenizer.encode(tokenizer.render(told, True))


def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    for seed, same in ((0, True), (1, False)):
        other = tmp_path / str(seed)
        other.mkdir()
        BUILD(other, seed, hidden=32, layers=1)
        assert ((other / "model.safetensors").read_bytes() == weights) is same

"""Promises:
1. Prompt, sampled tokens and bridge together are what the chat template makes of the whole dialogue.
2. An answer cut short by its length is ended by the bridge.
3. A template that words earlier turns differently later on (as thinking models' do) is bridged all the same.
4. A folder that cannot work is refused with what is missing; a template's own refusal is the client's error.
5. Loading a tokenizer imports neither torch nor transformers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandlot.errors import InvalidRequest, NotFound
from sandlot.gateway.engine import Refusal
from sandlot.gateway.render import FileTokenizer, Renderer, load_tokenizer

# As in conftest.py: one line a message, a blank after its end.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}<|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
Write = Callable[..., Path]

ASKED = [{"role": "user", "content": "find w7"}]
SAID = {"role": "assistant", "content": "grep w7 *"}
SEEN = {"role": "user", "content": "f3:w1 w7\n"}


def test_prompt_sampled_and_bridge_are_the_whole_dialogue(tokenizer: FileTokenizer) -> None:
    renderer = Renderer(tokenizer)
    sampled = [*tokenizer.encode("grep w7 *"), tokenizer.end_of_turn]
    tokens = renderer.prompt(ASKED) + sampled + renderer.bridge(sampled, [SEEN])
    assert tokens == tokenizer.encode(tokenizer.render([*ASKED, SAID, SEEN], True))
    assert renderer.text(sampled) == "grep w7 *"
    assert renderer.pieces(sampled) == ["grep", "w7", "*", ""]


def test_an_answer_cut_short_is_ended_by_the_bridge(tokenizer: FileTokenizer) -> None:
    renderer = Renderer(tokenizer)
    sampled = tokenizer.encode("grep w7 *")
    tokens = renderer.prompt(ASKED) + sampled + renderer.bridge(sampled, [SEEN])
    assert tokens == tokenizer.encode(tokenizer.render([*ASKED, SAID, SEEN], True))


def test_a_template_that_words_the_last_answer_differently_is_bridged(tokenizer_folder: Write, tmp_path: Path) -> None:
    words = ["find", "grep", "w7", "*", "f3", ":", "w1", "think"]
    thinking = TEMPLATE.replace(
        "{{ m.content }}", "{{ 'think ' if loop.last and m.role == 'assistant' }}{{ m.content }}"
    )
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, words, thinking))
    sampled = [*tokenizer.encode("think grep w7 *"), tokenizer.end_of_turn]
    bridge = Renderer(tokenizer).bridge(sampled, [SEEN])
    assert bridge == tokenizer.encode("<|user|> f3:w1 w7 <|end|> <|assistant|>")


def test_a_bridge_holds_what_a_template_writes_after_the_end_of_an_answer(
    tokenizer_folder: Write, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, ["w7"], TEMPLATE.replace("<|end|> ", "<|end|> w7 ")))
    sampled = [*tokenizer.encode("w7 w7"), tokenizer.end_of_turn]
    assert tokenizer.decode(Renderer(tokenizer).bridge(sampled, [{"role": "user", "content": "w7"}])) == "w7 w7 w7"


def test_what_a_template_refuses_is_the_clients_error(tokenizer_folder: Write, tmp_path: Path) -> None:
    picky = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    renderer = Renderer(load_tokenizer(tokenizer_folder(tmp_path, ["w7"], picky)))
    with pytest.raises(Refusal, match="no tools") as caught:
        renderer.prompt([{"role": "tool", "content": "w7"}])
    assert caught.value.status == 400


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE.replace("<|end|>", ""), "eos_token"),
        ("{% for m in messages %}<|end|>{% endfor %}", "leaves out"),
        ("{% for m in messages %}", "broken"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_once(
    tokenizer_folder: Write, tmp_path: Path, template: str, said: str
) -> None:
    tokenizer_folder(tmp_path, ["w7"], template)
    with pytest.raises(InvalidRequest, match=said):
        Renderer(load_tokenizer(tmp_path))


def test_a_template_beside_the_config_counts(tokenizer_folder: Write, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path, ["w7"], "unused")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert load_tokenizer(tmp_path).render(ASKED, False) == "<|user|> find w7<|end|> "


def test_loading_a_tokenizer_imports_neither_torch_nor_transformers(tokenizer_folder: Write, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path, ["w7"])
    program = (
        "import sys; from sandlot.gateway.render import Renderer, load_tokenizer; "
        f"Renderer(load_tokenizer({str(tmp_path)!r})); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

"""Promises:
1. The gradient is the same for any micro-batch size and any order of the samples, to 1e-5.
2. Leaving samples without an advantage out of the computation changes nothing.
3. Packed log-probabilities equal those of each sequence alone.
4. A loss that is not a number raises TrainingFault naming the step, and the weights are what they were.
5. A trainer that goes on from `save` takes the very step that it would have taken.
6. What `save` writes is a folder that transformers loads.
7. A model with tied embeddings is refused.
8. On a full disk a file is whole or absent, and the HostFault names it.
9. It has every method of the protocol.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sandlot.errors import HostFault, TrainingFault
from sandlot.rl.train.backend import Objective, Optimization, Settings, Trainer
from sandlot.rl.train.single import SingleTrainer
from sandlot.rl.types import Batch, Sample

Make = Callable[..., list[Sample]]
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "importance_cap": 2.0}


def trainer(folder: Path, micro: int = 512, **optimization: Any) -> SingleTrainer:
    made = SingleTrainer(str(folder), Settings(micro_batch_tokens=micro))
    made.begin(Objective("clip", CLIP, Optimization(**{"lr": 1e-2, "warmup": 0, **optimization}), steps=10))
    return made


def batch(samples: list[Sample]) -> Batch:
    return Batch(samples, [(i, i + 1) for i in range(len(samples))], version=0)


def gradient(made: SingleTrainer, samples: list[Sample]) -> torch.Tensor:
    made._model.zero_grad()
    made.gradient(samples)
    return torch.cat([p.grad.flatten() for p in made._model.parameters()])


def some(samples: Make, count: int = 24) -> list[Sample]:
    return samples(count, advantages=lambda chance, _: chance.normal(), old=lambda chance, _: -chance.random())


def test_the_gradient_does_not_depend_on_packing(tiny: Path, samples: Make) -> None:
    given = some(samples)
    whole = gradient(trainer(tiny, 100_000), given)
    assert whole.abs().max() > 1e-3
    for micro in (1, 30, 77, 512):
        assert torch.allclose(gradient(trainer(tiny, micro), given), whole, atol=1e-5)
    order = np.random.default_rng(3).permutation(len(given))
    assert torch.allclose(gradient(trainer(tiny, 77), [given[i] for i in order]), whole, atol=1e-5)


def test_samples_that_cannot_move_anything_are_only_counted(tiny: Path, samples: Make) -> None:
    given = samples(20, advantages=lambda _, index: float(index % 3 == 0), old=lambda chance, _: -chance.random())
    made = trainer(tiny)
    short = gradient(made, given)
    # The same with a number so small that nothing is left out and nothing is changed.
    for sample in given:
        sample.streams["advantages"][sample.mask & (sample.streams["advantages"] == 0)] = 1e-30
    assert torch.allclose(gradient(made, given), short, atol=1e-6)


def test_packed_logprobs_are_those_of_each_sequence_alone(tiny: Path) -> None:
    chance = np.random.default_rng(0)
    sequences = [chance.integers(5, 40, n).tolist() for n in (2, 9, 30, 4, 17)]
    made = trainer(tiny, 40)
    found = made.logprobs(sequences)
    for sequence, values in zip(sequences, found, strict=True):
        with torch.no_grad():
            logits = made._model(input_ids=torch.tensor([sequence])).logits[0, :-1]
        alone = torch.log_softmax(logits, -1).gather(-1, torch.tensor(sequence)[1:, None])[:, 0]
        assert np.allclose(values, alone.numpy(), atol=1e-5)


def test_annotate_is_aligned_to_the_tokens(tiny: Path, samples: Make) -> None:
    given = samples(6)
    made = trainer(tiny)
    for sample, stream in zip(given, made.annotate(given, frozenset({"old"})), strict=True):
        whole = np.array([0.0, *made.logprobs([sample.tokens.tolist()])[0]])
        mask = sample.mask.copy()
        mask[0] = False
        assert np.allclose(stream["old"], np.where(mask, whole, 0), atol=1e-5)


def test_a_loss_that_is_no_number_stops_before_the_weights_move(tiny: Path, samples: Make) -> None:
    given = samples(4, advantages=lambda *_: float("nan"), old=lambda *_: -1.0)
    made = trainer(tiny)
    before = [p.clone() for p in made._model.parameters()]
    with pytest.raises(TrainingFault, match="step 1: the loss is nan"):
        made.step(batch(given))
    assert all(torch.equal(a, b) for a, b in zip(before, made._model.parameters(), strict=True))


def test_it_goes_on_from_what_it_saved(tiny: Path, samples: Make, tmp_path: Path) -> None:
    first, second, third = (some(samples, n) for n in (10, 12, 14))
    one = trainer(tiny, minibatches=2)
    one.step(batch(first))
    one.step(batch(second))
    one.save(str(tmp_path))
    expected = one.step(batch(third)).metrics

    other = SingleTrainer(str(tmp_path), Settings())
    other.begin(Objective("clip", CLIP, Optimization(lr=1e-2, warmup=0, minibatches=2), steps=10), str(tmp_path))
    assert other.step(batch(third)).metrics == pytest.approx(expected, abs=1e-6)
    for a, b in zip(one._model.parameters(), other._model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_what_it_saves_is_loaded_by_transformers(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer(tiny).save(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    original = AutoModelForCausalLM.from_pretrained(tiny)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path).encode("grep w7 *") == AutoTokenizer.from_pretrained(tiny).encode(
        "grep w7 *"
    )


def test_the_learning_rate_rises_and_falls(tiny: Path, samples: Make) -> None:
    made = trainer(tiny, warmup=2, lr=1e-3)
    rates = [made.step(batch(some(samples, 2))).metrics["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.5e-3, 0.9e-3, 0.8e-3, 0.7e-3])


def test_tied_embeddings_are_refused(tiny: Path, tmp_path: Path) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(tiny, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(TrainingFault, match="ties its embeddings"):
        SingleTrainer(str(tied), Settings())


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt"])
def test_a_full_disk_is_named_with_the_file(
    tiny: Path, samples: Make, tmp_path: Path, full_disk: Any, name: str
) -> None:
    made = trainer(tiny)
    made.step(batch(some(samples, 2)))
    weights = (tiny / "model.safetensors").stat().st_size
    made._beside = {}
    room = (
        weights // 2 if name == "model.safetensors" else weights * 3 // 2
    )  # the optimizer's state is twice the weights
    with full_disk(room), pytest.raises(HostFault, match=rf"could not write .*/{name}: File too large") as caught:
        made.save(str(tmp_path))
    assert "--resume" in (caught.value.hint or "")
    assert name not in [file.name.removesuffix(".partial") for file in tmp_path.iterdir()]


def test_it_has_every_method_of_the_protocol() -> None:
    for name, method in inspect.getmembers(Trainer, inspect.isfunction):
        if not name.startswith("_"):
            assert list(inspect.signature(getattr(SingleTrainer, name)).parameters) == list(
                inspect.signature(method).parameters
            ), name

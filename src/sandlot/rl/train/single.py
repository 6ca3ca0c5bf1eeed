"""The trainer backend in one process: a transformers causal model, AdamW, packed micro-batches.

Promises: the gradient of an optimizer step is the same for any micro-batch size and packing order (to float rounding),
because losses are summed and divided by the step's own totals; a loss or gradient that is not a number raises
TrainingFault and leaves the weights as they were before that optimizer step. It never talks to an engine.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sandlot.errors import TrainingFault
from sandlot.rl.train.backend import Objective, Settings, StepResult
from sandlot.rl.train.checkpoint import write
from sandlot.rl.train.loss import SURROGATES, Terms
from sandlot.rl.train.pack import Pack, minibatches, pack, totals, unpack
from sandlot.rl.types import Batch, FloatArray, Sample


class SingleTrainer:
    """See `backend.Trainer`; its methods are plain functions, for a worker thread of the trainer's process."""

    def __init__(self, model: str, settings: Settings, seed: int = 0) -> None:
        torch.set_num_threads(settings.threads)
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # Config and tokenizer, for `save`: the folder itself may be replaced meanwhile.
        self._beside = {file.name: file.read_bytes() for file in Path(model).iterdir() if _small(file)}
        self._settings = settings
        self._seed = seed
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        )
        if self._model.config.tie_word_embeddings:
            # One file tensor for two uses: engines reload such weights wrongly and silently.
            raise TrainingFault(
                f"the model in {model} ties its embeddings",
                "build it with tie_word_embeddings=False (or untie a ready one) before training",
            )
        self._model.train()
        self._objective: Objective | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._steps = 0  # batches learned from in this phase

    # --- a phase -----------------------------------------------------------------------------------------------------

    def begin(self, objective: Objective, folder: str | None = None) -> None:
        chosen = objective.optimization
        self._objective = objective
        self._steps = 0
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=chosen.lr, betas=(0.9, chosen.beta2), weight_decay=chosen.weight_decay
        )
        if folder is not None:
            kept = torch.load(f"{folder}/trainer.pt", weights_only=True)
            self._optimizer.load_state_dict(kept["optimizer"])
            self._steps = kept["steps"]
            torch.set_rng_state(kept["rng"])

    def annotate(self, samples: list[Sample], needs: frozenset[str]) -> list[dict[str, FloatArray]]:
        if unknown := needs - {"old"}:
            raise TrainingFault(f"the `single` backend cannot compute {', '.join(sorted(unknown))}")
        return [{"old": values} for values in self._logprobs(samples)] if needs else [{} for _ in samples]

    def step(self, batch: Batch) -> StepResult:
        objective, optimizer = self._running()
        settings = objective.optimization
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * self._schedule(objective)
        sums: dict[str, float] = {}
        norms: list[float] = []
        parts = minibatches(batch.groups, settings.minibatches, seed=self._seed * 1_000_003 + self._steps)
        for part in parts:
            optimizer.zero_grad(set_to_none=True)
            for name, value in self.gradient([batch.samples[i] for i in part]).items():
                sums[name] = sums.get(name, 0.0) + value / len(parts)
            norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.clip_grad))
            if not np.isfinite(norm) or not np.isfinite(sums["loss"]):
                raise TrainingFault(
                    f"step {self._steps + 1}: the loss is {sums['loss']}, the gradient's norm {norm}",
                    "lower `lr`, or look at the batch's rewards and advantages; the last checkpoint is good",
                )
            norms.append(norm)
            optimizer.step()
        self._steps += 1
        return StepResult({**sums, "grad_norm": float(np.mean(norms)), "lr": optimizer.param_groups[0]["lr"]})

    def gradient(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the gradient of these samples' mean loss to the parameters; means over their learned tokens."""
        objective, _ = self._running()
        count = max(1, totals(samples).tokens)
        surrogate = SURROGATES[objective.surrogate]
        sums = {"loss": 0.0, "entropy": 0.0, "engine_gap": 0.0, "clipped": 0.0}
        moving = [i for i, s in enumerate(samples) if "advantages" not in s.streams or s.streams["advantages"].any()]
        for one in pack(samples, self._settings.micro_batch_tokens, only=moving):
            new, entropy = self._forward(one)
            engine = torch.from_numpy(one.streams["logprobs"])
            old = torch.from_numpy(one.streams["old"]) if "old" in one.streams else new.detach()
            advantages = torch.from_numpy(one.streams["advantages"]) if "advantages" in one.streams else None
            loss = surrogate(Terms(new, engine, old, advantages, objective.loss)).sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                sums["loss"] += float(loss)
                sums["entropy"] += float(entropy.sum()) / count
                sums["engine_gap"] += float((old - engine).abs().sum()) / count
                if "clip_high" in objective.loss:
                    ratio = (new - old).exp()
                    outside = (ratio > 1 + objective.loss["clip_high"]) | (ratio < 1 - objective.loss["clip_low"])
                    sums["clipped"] += float(outside.sum()) / count
        return sums

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        whole = [np.array(s, dtype=np.int64) for s in sequences]
        samples = [
            Sample(
                tokens=tokens,
                mask=np.ones(len(tokens), dtype=np.bool_),
                logprobs=np.zeros(len(tokens), dtype=np.float32),
                versions=np.zeros(len(tokens), dtype=np.int64),
            )
            for tokens in whole
        ]
        return [[float(v) for v in values[1:]] for values in self._logprobs(samples)]

    # --- weights on disk ---------------------------------------------------------------------------------------------

    def export(self, path: str) -> None:
        # Through a buffer: writing themselves, safetensors and torch say of a full disk only that something went wrong.
        weights = {name: value.contiguous() for name, value in self._model.state_dict().items()}
        write(Path(path), to_bytes(weights, metadata={"format": "pt"}))

    def save(self, folder: str) -> None:
        for name, content in self._beside.items():
            write(Path(folder, name), content)
        self.export(f"{folder}/model.safetensors")
        optimizer = self._optimizer.state_dict() if self._optimizer is not None else None
        buffer = io.BytesIO()
        torch.save({"optimizer": optimizer, "steps": self._steps, "rng": torch.get_rng_state()}, buffer)
        write(Path(folder, "trainer.pt"), buffer.getvalue())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _running(self) -> tuple[Objective, torch.optim.AdamW]:
        if self._objective is None or self._optimizer is None:
            raise TrainingFault("a step was asked for before a phase had begun")
        return self._objective, self._optimizer

    def _schedule(self, objective: Objective) -> float:
        settings = objective.optimization
        rise = min(1.0, (self._steps + 1) / settings.warmup) if settings.warmup else 1.0
        done = min(1.0, self._steps / max(1, objective.steps))
        return rise * (1.0 - (1.0 - settings.decay_to) * done)

    def _logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        packs = pack(samples, self._settings.micro_batch_tokens)
        with torch.no_grad():
            values = [self._forward(one)[0].numpy() for one in packs]
        return list(unpack(packs, values, samples))

    def _forward(self, one: Pack) -> tuple[Tensor, Tensor]:
        """Log-probabilities of a pack's labels, and the entropy where each was chosen; both [M]."""
        sequences = torch.from_numpy(one.sequences)
        # An explicit block-diagonal causal mask: what a library guesses from positions alone may change under us.
        seen = (sequences[:, None] == sequences[None, :]).tril_()
        logits = self._model(
            input_ids=torch.from_numpy(one.tokens)[None],
            position_ids=torch.from_numpy(one.positions)[None],
            attention_mask=seen[None, None],
            logits_to_keep=torch.from_numpy(one.predictors),
            use_cache=False,
        ).logits[0]
        everything = torch.log_softmax(logits.float(), dim=-1)
        chosen = everything.gather(-1, torch.from_numpy(one.labels)[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(everything.exp() * everything).sum(-1)
        return chosen, entropy


def _small(file: Path) -> bool:
    """Whether it is one of a model folder's descriptions: JSON or a template."""
    return file.suffix in (".json", ".jinja", ".txt", ".model") and not {"safetensors", "state"} & set(
        file.name.split(".")
    )

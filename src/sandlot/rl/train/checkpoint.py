"""Checkpoints: one folder that is always whole.

`checkpoint/` in the run folder holds what `transformers` loads (config, tokenizer, model.safetensors), beside it the
trainer's own state, `state.json` (phase, step, version, cursors, counters) and `unused.pickle` (finished episodes that
no batch has used). A new one is written beside it and takes its place by renaming; whatever moment a run is killed at,
`latest` finds a whole one. Files are not synced: a run survives its own death; a power cut may cost the newest.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

from sandlot.rl.train.backend import Trainer


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoint"
        self._new = run / "checkpoint.new"
        self._old = run / "checkpoint.old"

    async def save(self, trainer: Trainer, state: dict[str, Any], unused: Any) -> None:
        """Write one and put it in place. `state` is JSON; `unused` anything that can be pickled."""
        text, kept = json.dumps(state, indent=1), pickle.dumps(unused)  # now, not when the thread comes to it
        await asyncio.to_thread(_empty, self._new)
        await trainer.save(str(self._new))
        await asyncio.to_thread(self._place, text, kept)

    def latest(self) -> Path | None:
        """The newest whole checkpoint; None when there is none yet."""
        # Between the two renames of `_place` there is no `checkpoint`, and both others are whole.
        for folder in (self.folder, self._old):
            if (folder / "state.json").is_file():
                return folder
        return None

    def read(self) -> tuple[dict[str, Any], Any] | None:
        """`state` and `unused` of the newest; None when there is none."""
        folder = self.latest()
        if folder is None:
            return None
        with (folder / "unused.pickle").open("rb") as file:
            return json.loads((folder / "state.json").read_text()), pickle.load(file)

    def _place(self, text: str, unused: bytes) -> None:
        (self._new / "unused.pickle").write_bytes(unused)
        (self._new / "state.json").write_text(text)
        shutil.rmtree(self._old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self._old)
        self._new.rename(self.folder)
        shutil.rmtree(self._old, ignore_errors=True)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

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
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandlot.errors import HostFault
from sandlot.rl.train.backend import Trainer


def write(file: Path, content: bytes) -> None:
    """Write a file so that it is there whole, or not at all. Raises HostFault naming it."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise not_written(file, error) from error


def not_written(file: Path | str, error: OSError) -> HostFault:
    """What it is when a file of a run folder cannot be written."""
    hint = "free some space, then go on with `--resume`; or choose another `run_dir`"
    return HostFault(f"could not write {file}: {error.strerror or error}", hint)


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoint"
        self._new = run / "checkpoint.new"
        self._old = run / "checkpoint.old"

    async def save(self, trainer: Trainer, state: dict[str, Any], unused: Any) -> None:
        """Write one and put it in place. `state` is JSON; `unused` anything that can be pickled. Raises HostFault; the
        one before is then still there."""
        text, kept = json.dumps(state, indent=1), pickle.dumps(unused)  # now, not when the thread comes to it
        try:
            await asyncio.to_thread(_empty, self._new)
            await trainer.save(str(self._new))
            await asyncio.to_thread(self._place, text, kept)
        except Exception:  # a full disk, say: half a checkpoint is of no use, and its space may be what is missing
            await asyncio.to_thread(shutil.rmtree, self._new, True)
            raise

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
        write(self._new / "unused.pickle", unused)
        write(self._new / "state.json", text.encode())
        shutil.rmtree(self._old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self._old)
        self._new.rename(self.folder)
        shutil.rmtree(self._old, ignore_errors=True)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

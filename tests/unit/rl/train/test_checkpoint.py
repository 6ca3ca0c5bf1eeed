"""Promises:
1. What was saved last is what is read, and transformers loads the folder.
2. Whatever moment a run is killed at, a whole checkpoint is found.
3. A disk that is full leaves the one before, and nothing of the new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandlot.errors import HostFault
from sandlot.rl.train.checkpoint import Checkpoints


class Trainer:
    """Writes its number."""

    def __init__(self) -> None:
        self.number = 0

    async def save(self, folder: str) -> None:
        self.number += 1
        Path(folder, "model.safetensors").write_text(str(self.number))


async def test_the_newest_is_read(tmp_path: Path) -> None:
    checkpoints, trainer = Checkpoints(tmp_path), Trainer()
    assert checkpoints.read() is None
    assert checkpoints.latest() is None
    for step in (1, 2, 3):
        await checkpoints.save(trainer, {"step": step}, ["unused", step])  # type: ignore[arg-type]
    assert checkpoints.read() == ({"step": 3}, ["unused", 3])
    assert (tmp_path / "checkpoint" / "model.safetensors").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


async def test_a_full_disk_leaves_the_one_before(tmp_path: Path, full_disk: Any) -> None:
    checkpoints, trainer = Checkpoints(tmp_path), Trainer()
    await checkpoints.save(trainer, {"step": 1}, None)  # type: ignore[arg-type]
    with full_disk(1000), pytest.raises(HostFault, match=r"could not write .*/unused\.pickle: File too large"):
        await checkpoints.save(trainer, {"step": 2}, b"x" * 2000)  # type: ignore[arg-type]
    assert checkpoints.read() == ({"step": 1}, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


async def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    moments = ["mkdir", "save", "write_bytes", "write_text", "rename 1", "rename 2", "rmtree"]
    for moment in moments:
        run = tmp_path / moment.replace(" ", "-")
        run.mkdir()
        checkpoints, trainer = Checkpoints(run), Trainer()
        await checkpoints.save(trainer, {"step": 1}, None)  # type: ignore[arg-type]
        stop_at(run, moment)
        found: Any = Checkpoints(run).read()
        assert found is not None, moment
        assert found[0]["step"] in (1, 2), moment
        assert Checkpoints(run).latest() is not None
        # and the next save goes through
        await Checkpoints(run).save(trainer, {"step": 5}, None)  # type: ignore[arg-type]
        assert Checkpoints(run).read() == ({"step": 5}, None), moment


def stop_at(run: Path, moment: str) -> None:
    """The folder as a kill at this moment of the second save leaves it: the steps of `Checkpoints`, one by one."""
    new, here, old = run / "checkpoint.new", run / "checkpoint", run / "checkpoint.old"
    new.mkdir()
    if moment == "mkdir":
        return
    (new / "model.safetensors").write_text("2")
    if moment == "save":
        return
    (new / "unused.pickle").write_bytes(b"\x80\x04N.")
    if moment == "write_bytes":
        return
    (new / "state.json").write_text('{"step": 2}')
    if moment == "write_text":
        return
    here.rename(old)
    if moment == "rename 1":
        return
    new.rename(here)
    if moment == "rename 2":
        return
    (old / "state.json").unlink()

"""What tests of the trainer share: a tiny model of the find task's words, and samples made by hand."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from sandlot.config import locate
from sandlot.rl.types import Sample

FIND = Path(__file__).parents[3] / "recipes" / "find"


def build(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    locate("model.py:build", FIND)(folder, seed, hidden=32, layers=2)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of two layers."""
    import torch

    torch.set_num_threads(1)
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return build(tmp_path_factory.mktemp("models") / "another", seed=1)


@pytest.fixture(scope="session")
def samples() -> Callable[..., list[Sample]]:
    """(count, seed, **streams): samples of different lengths, with the streams named by a function of the sample."""

    def make(count: int, seed: int = 0, **streams: Callable[[np.random.Generator, int], float]) -> list[Sample]:
        chance = np.random.default_rng(seed)
        made = []
        for index in range(count):
            length = int(chance.integers(3, 24))
            mask = chance.random(length) < 0.4
            mask[-1] = True
            logprobs = np.where(mask, -chance.random(length) * 3, 0).astype(np.float32)
            values = {
                name: np.where(mask, value(chance, index), 0).astype(np.float32) for name, value in streams.items()
            }
            versions = np.where(mask, 0, -1).astype(np.int64)
            made.append(Sample(chance.integers(5, 42, length), mask, logprobs, versions, values))
        return made

    return make


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """Files cannot grow beyond `size` bytes meanwhile: to who writes, a full disk under another errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def full_disk() -> Callable[[int], object]:
    """A context in which files stay under a number of bytes."""
    return no_room

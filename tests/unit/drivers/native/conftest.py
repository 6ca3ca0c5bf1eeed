from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot.drivers.native.driver import NativeDriver
from tests.support.native import Boxes


@pytest.fixture
async def boxes(tmp_path: Path) -> AsyncIterator[Boxes]:
    directory = tmp_path / f"test{os.getpid()}"
    directory.mkdir()
    maker = Boxes(NativeDriver(directory))
    yield maker
    for box in maker.made:
        await box.destroy()
    await maker.driver.close()

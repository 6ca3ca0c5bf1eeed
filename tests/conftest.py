"""What all tests share: whether this host can make native boxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandlot.api import SandboxSpec
from sandlot.errors import SandlotError


@pytest.fixture(scope="session")
def native_reason(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """None where native boxes can be made, else why not, as the driver says it. Found by making one."""
    from sandlot.drivers.native.driver import NativeDriver

    async def one_box(directory: Path) -> None:
        driver = NativeDriver(directory)
        box = await driver.create("sb-probe", SandboxSpec(), frozenset())
        await box.destroy()
        await driver.close()

    try:
        asyncio.run(one_box(tmp_path_factory.mktemp("node")))
    except SandlotError as error:
        return str(error)
    return None

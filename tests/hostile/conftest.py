from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot.drivers.native.box import NativeDriver
from sandlot.node.node import local_node
from tests.support.hostile import Arena, host_state


@pytest.fixture
async def arena(tmp_path: Path) -> AsyncIterator[Arena]:
    """Boxes that end with the test; afterwards the host must look as it did before."""
    node = local_node(tmp_path / "state")
    await node.start()
    assert isinstance(node.driver, NativeDriver)
    made = Arena(node, node.driver)
    await (await made.box()).close()  # what the driver opens once is not a leak
    made.kept.clear()
    before = host_state(node.driver)
    yield made
    for box in made.kept:
        await box.close()
    after = host_state(node.driver)
    await node.close()
    assert after == before

"""Print what this host keeps of each promise, as `GET /v1/capabilities` says it: JSON, a list."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from sandlot.drivers.native.driver import NativeDriver
from sandlot.node.ledger import NodeDirectory


async def main() -> None:
    with tempfile.TemporaryDirectory() as state:
        directory = NodeDirectory.claim(Path(state))
        driver = NativeDriver(directory.path)
        lines = await driver.capabilities()
        await driver.close()
    print(json.dumps([line.model_dump() for line in lines], indent=1))


asyncio.run(main())

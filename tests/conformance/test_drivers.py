"""Promises, kept by every driver that ships:

1. Each check of `drivers/conformance.py` passes over the fake driver, except those that need a kernel.
2. Each passes over the native driver, those of adoption after a node was killed, on a host that can make native boxes;
   on another one the reason is said.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from sandlot.drivers.conformance import CHECKS, Check
from sandlot.drivers.fake import FakeDriver
from sandlot.node.ledger import NodeDirectory


@pytest.mark.parametrize("check", [check for check in CHECKS if not check.needs], ids=lambda check: check.name)
async def test_fake(check: Check) -> None:
    driver = FakeDriver()
    await asyncio.wait_for(check.run(driver), 60)
    assert not driver.boxes
    await driver.close()


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.needs <= {"kernel"}], ids=lambda check: check.name
)
async def test_native(check: Check, native_reason: str | None, tmp_path: Path) -> None:
    if native_reason:
        pytest.skip(native_reason)
    from sandlot.drivers.native.driver import NativeDriver

    directory = NodeDirectory.claim(tmp_path)
    driver = NativeDriver(directory.path)
    await asyncio.wait_for(check.run(driver), 60)
    await driver.close()
    directory.remove()


LEAVE = """
import asyncio, sys
from pathlib import Path
from sandlot.drivers.conformance import leave
from sandlot.drivers.native.driver import NativeDriver

async def main():
    await leave(NativeDriver(Path(sys.argv[1])))
    print("left", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if "adoption" in check.needs], ids=lambda check: check.name
)
async def test_native_after_a_node_was_killed(check: Check, native_reason: str | None, tmp_path: Path) -> None:
    if native_reason:
        pytest.skip(native_reason)
    from sandlot.drivers.native.driver import NativeDriver

    directory = NodeDirectory.claim(tmp_path)
    words = (sys.executable, "-c", LEAVE, str(directory.path))
    node = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert node.stdout is not None
    assert await asyncio.wait_for(node.stdout.readline(), 60) == b"left\n"
    node.kill()
    await node.wait()
    driver = NativeDriver(directory.path)
    await asyncio.wait_for(check.run(driver), 60)
    await driver.close()
    directory.remove()

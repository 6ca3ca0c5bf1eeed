"""What must hold on a kernel that refuses user namespaces: doctor finds it by trying and prints the fix, and a sandbox
is refused clearly, leaving nothing. Run in the guests of run.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandlot.api import SandboxSpec
from sandlot.drivers.native.checks import probe
from sandlot.drivers.native.driver import NativeDriver
from sandlot.errors import StartFailed


async def test_it_is_found_by_trying_and_the_fix_is_named(tmp_path: Path) -> None:
    driver = NativeDriver(tmp_path)
    _, sandboxes = await probe(driver)
    assert sandboxes.state == "impossible"
    assert "namespaces" in sandboxes.found
    assert "sysctl -w user.max_user_namespaces" in str(sandboxes.fix)
    await driver.close()


async def test_a_sandbox_is_refused_clearly_and_leaves_nothing(tmp_path: Path) -> None:
    driver = NativeDriver(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartFailed, match="no namespaces left") as refused:
        await driver.create("box", SandboxSpec())
    assert "doctor" in str(refused.value.hint)
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    await driver.close()

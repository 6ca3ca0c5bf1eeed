"""What must hold on a kernel that cannot make a sandbox: doctor finds it by trying and prints the fix, and a sandbox is
refused clearly, leaving nothing. Run in the guests of run.py, which say what it is that is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandlot.api import SandboxSpec
from sandlot.drivers.native.checks import probe
from sandlot.drivers.native.driver import NativeDriver
from sandlot.errors import StartFailed

# Why it fails: what is said about it, and what mends it.
WAYS = {
    "namespaces": ("no namespaces left", "sysctl -w user.max_user_namespaces"),
    "overlay": ("lets no user namespace mount an overlay", "permit_mounts_in_userns=1"),
    "owners": ("owner is nobody inside", "run the node as an ordinary user"),
}
FOUND, FIX = WAYS[os.environ.get("SANDLOT_REFUSED", "namespaces")]


async def test_it_is_found_by_trying_and_the_fix_is_named(tmp_path: Path) -> None:
    driver = NativeDriver(tmp_path)
    _, sandboxes = await probe(driver)
    assert sandboxes.state == "impossible"
    assert FOUND in sandboxes.found
    assert FIX in str(sandboxes.fix)
    await driver.close()


async def test_a_sandbox_is_refused_clearly_and_leaves_nothing(tmp_path: Path) -> None:
    driver = NativeDriver(tmp_path)
    left = []
    for _ in range(3):
        with pytest.raises(StartFailed, match=FOUND) as refused:
            await driver.create("box", SandboxSpec())
        assert "doctor" in str(refused.value.hint)
        assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
        left.append(len(os.listdir("/proc/self/fd")))
    assert left[0] == left[1] == left[2]  # with the first the driver opens what it keeps
    await driver.close()

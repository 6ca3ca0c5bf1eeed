"""The arena of each attack, and the row that each attack × this host makes in the table of what holds where.

A row says "contained", "named loss" or "refused", and equals what `GET /v1/capabilities` says: a file whose promise is
kept must have all its tests pass, none skipped for want of it. `SANDLOT_HOSTILE_ROWS=FILE` writes the rows as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Capability, Limits, SandboxSpec
from sandlot.drivers.native.driver import NativeDriver
from sandlot.drivers.native.promises import LIMITED_BY
from sandlot.errors import Unsupported
from sandlot.node.ledger import NodeDirectory
from sandlot.node.node import Node
from tests.support.hostile import CGROUPS, Arena, host_state

ROWS = pytest.StashKey[dict[str, dict[str, Any]]]()


def _excused() -> set[str]:
    """Promises that this host may call a loss, by another way to look at it than the driver's: where none of these is
    the case, an attack must be tried."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    writable = [line for line in lines if line[3].split(",")[0] == "rw"]
    unified = [point for _, point, kind, *_ in writable if kind == "cgroup2"]
    controlled = {word for _, _, kind, words, *_ in writable if kind == "cgroup" for word in words.split(",")}
    v2 = {word for point in unified for word in Path(point, "cgroup.controllers").read_text().split()}
    major, minor = (int(number) for number in re.findall(r"\d+", platform.release())[:2])
    root, hidden = os.geteuid() == 0, CGROUPS == "none"
    loop = Path("/dev/loop-control").exists() and shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin") is not None
    no_rights = {
        "memory limit": "memory" not in controlled | v2,
        "cpu limit": "cpu" not in controlled | v2,
        "pids limit": "pids" not in controlled | v2,
        "socket memory": "memory" not in v2,
        "standing still": not unified or (major, minor) < (5, 14),
    }
    of_age = {
        "image directories": (major, minor) < (6, 6),
        "file owners": not root or (major, minor) < (5, 19),
        "user ids": not root,
        "kernel objects": not root,
        "disk beyond memory": not root or not loop,
        "system call filter": platform.machine() not in ("x86_64", "aarch64"),
    }
    cgroups = {name for name, missing in no_rights.items() if missing or hidden or not root}
    return cgroups | {name for name, excused in of_age.items() if excused}


def make_node(state: Path) -> Node:
    directory = NodeDirectory.claim(state)
    driver = NativeDriver(directory.path)
    if CGROUPS == "none":
        driver.cgroups.hidden = True
    return Node(driver, directory=directory)


async def look() -> dict[str, Capability]:
    with tempfile.TemporaryDirectory() as state:
        async with make_node(Path(state)) as node:
            return {line.name: line for line in await node.capabilities()}


@pytest.fixture(scope="session")
def promises() -> dict[str, Capability]:
    """What this host says that it keeps."""
    return asyncio.run(look())


async def at_rest(node: Node) -> None:
    """What it does in the background, as removing what nobody stands on, has descriptors of its own."""
    async with asyncio.timeout(30):
        while node._tasks:
            await asyncio.wait(node._tasks)


@pytest.fixture
async def arena(tmp_path: Path, promises: dict[str, Capability]) -> AsyncIterator[Arena]:
    """Boxes that end with the test; afterwards the host must look as it did before."""
    node = make_node(tmp_path / "state")
    await node.start()
    assert isinstance(node.driver, NativeDriver)
    made = Arena(node, node.driver, promises)
    await (await made.box()).close()  # what the driver opens once is not a leak
    made.kept.clear()
    await at_rest(node)
    before = host_state(node.driver, made.namespaces)
    yield made
    for box in made.kept:
        await box.close()
    await at_rest(node)
    after = host_state(node.driver, made.namespaces)
    await node.close()
    assert after == before


@pytest.fixture
def nosuid(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, as SECURITY.md asks for."""
    path = tmp_path / "nosuid"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nosuid,nodev", "sandlot-test", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(autouse=True)
async def needs(request: pytest.FixtureRequest, promises: dict[str, Capability], tmp_path: Path) -> None:
    """Skip an attack on a promise that this host does not keep, having shown that the loss is named, and that a limit
    which belongs to it is refused when it is asked for."""
    marker = request.node.get_closest_marker("promise")
    promise = marker.args[0] if marker else request.module.PROMISE
    line = promises[promise]
    if line.state == "kept" or (marker and marker.kwargs.get("anyway")):
        return
    assert promise in _excused(), f"{promise} is called a loss ({line.found}), and there is no reason for it to be one"
    async with make_node(tmp_path / "state") as node:
        info = await node.create(SandboxSpec())
        assert f"{promise}: {line.found}" in info.losses
        for name, (_, limited) in LIMITED_BY.items():
            if limited == promise:
                value = {"memory": 1 << 30, "cpus": 0.5, "cpu_weight": 50, "pids": 50}[name]
                try:
                    info = await node.create(SandboxSpec(limits=Limits.model_validate({name: value})))
                except Unsupported:
                    continue
                # Or it is kept after all, at the price of another default.
                assert not any(loss.startswith(f"{promise}: ") for loss in info.losses)
    pytest.skip(f"named loss: {promise}: {line.found}")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = getattr(item, "module", None)
        words = (module.__doc__ or "") if module else ""
        if module and Path(module.__file__).parent == Path(__file__).parent:
            assert "Attack:" in words, f"{module.__file__} does not say what it tries"
            assert "Must hold:" in words, f"{module.__file__} does not say what must hold"
            assert hasattr(module, "PROMISE"), f"{module.__file__} does not name its promise"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    module = getattr(item, "module", None)
    if module is None or not hasattr(module, "PROMISE") or item.get_closest_marker("control"):
        return
    marker = item.get_closest_marker("promise")
    promise = marker.args[0] if marker else module.PROMISE
    name = Path(module.__file__).stem.removeprefix("test_").replace("_", " ")
    name += "" if promise == module.PROMISE else f": {promise}"
    rows = item.config.stash[ROWS]
    row = rows.setdefault(name, {"promise": promise, "passed": 0, "failed": 0, "losses": []})
    if report.failed:
        row["failed"] += 1
    elif report.when == "call" and report.passed:
        row["passed"] += 1
    elif report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason.startswith("named loss: "):
            row["losses"].append(reason.removeprefix("named loss: "))


def verdict(row: dict[str, Any]) -> str:
    if row["failed"]:
        return "NOT CONTAINED"
    if row["losses"]:
        return "named loss"
    return "contained" if row["passed"] else "not tried"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    for row in rows.values():
        row["verdict"] = verdict(row)
    terminalreporter.section("attacks")
    for name, row in rows.items():
        lost = f" ({row['losses'][0]})" if row["losses"] else ""
        terminalreporter.write_line(f"{row['verdict']:14} {name:32} {row['promise']}{lost}")
    if target := os.environ.get("SANDLOT_HOSTILE_ROWS"):
        Path(target).write_text(json.dumps(rows, indent=1) + "\n")

"""Attack: take every CPU: busy processes and threads, at the best priority that one can get.

Must hold: quota and weight are set for every process of the box, its CPU seconds keep to the quota, no priority can be
made better, and a neighbour's commands complete meanwhile. (What the storm costs a neighbour: bench/neighbour.py.)
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from sandlot.api import Limits
from sandlot.drivers.native.box import NativeBox
from sandlot.drivers.native.cgroup import mounts
from tests.support.hostile import Arena, into_timeout, no_priority_limits, seen_from_outside

PROMISE = "cpu limit"

# Four processes, each busy for a second of the clock.
STORM = """
import os, time
end = time.monotonic() + 1
for _ in range(4):
    if os.fork() == 0:
        while time.monotonic() < end: pass
        os._exit(0)
for _ in range(4): os.wait()
"""
ENDLESS = "echo ready; for _ in 1 2 3 4; do while :; do :; done & done; wait"
FASTER = """
import os
def better(what):
    try: what()
    except OSError as error: print(type(error).__name__, end=" ")
    else: print("better", end=" ")
better(lambda: os.setpriority(os.PRIO_PROCESS, 0, -1))
better(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)))
"""


def settings(pid: int, kind: str, names: tuple[str, ...]) -> dict[str, str]:
    """What the cpu cgroup of a process of the host says; in v2 a run has one of its own, below the box's."""
    v2, v1 = mounts()
    root = Path(v1["cpu"] if kind == "v1" else v2 or "")
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("cpu" in controllers.split(",")) if kind == "v1" else controllers == "":
            own = root / path.strip("/")
            box = own.parent.parent if own.name.startswith("run-") else own  # it is box/runs/run-N
            return {name: (box / name).read_text().strip() for name in names}
    raise AssertionError(f"{pid} is in no cpu cgroup")


async def test_quota_and_weight_are_set_for_what_runs_in_the_box(arena: Arena) -> None:
    box = await arena.box(limits=Limits(cpus=0.5, cpu_weight=10))
    mark = f"storm_{box.id}"
    kind = arena.driver.facts.controllers["cpu"]
    if kind == "v1":
        expected = {"cpu.shares": "102", "cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    else:
        expected = {"cpu.weight": "10", "cpu.max": "50000 100000"}
    async with arena.holding("if os.fork() == 0: signal.pause()\nhold('two')", mark, box=box):
        pids = seen_from_outside(mark)
        found = [settings(pid, kind, tuple(expected)) for pid in pids]
    assert len(pids) == 2
    assert found == [expected, expected]


async def test_the_least_quota_is_what_was_asked_for(arena: Arena) -> None:
    with pytest.raises(ValidationError, match="cpus"):
        Limits(cpus=0.009)
    box = await arena.box(limits=Limits(cpus=0.01))
    kind = arena.driver.facts.controllers["cpu"]
    quota, expected = ("cpu.cfs_quota_us", "1000") if kind == "v1" else ("cpu.max", "1000 100000")
    # Its first process, which is there already: any other takes a hundred times as long as usual to start.
    first = arena.node._live[box.id].box
    assert isinstance(first, NativeBox)
    assert settings(first._pid, kind, (quota,)) == {quota: expected}


async def test_a_storm_keeps_to_its_quota(arena: Arena) -> None:
    result = await arena.python(STORM, limits=Limits(cpus=0.25))
    assert 0 < result.cpu_seconds < 0.25 * result.seconds + 0.3  # a period's slice of each CPU may be overdrawn


@pytest.mark.control
async def test_control_without_a_quota_the_same_storm_takes_more(arena: Arena) -> None:
    boxes = await arena.box(limits=Limits(cpus=0.1)), await arena.box()
    limited, free = await asyncio.gather(*(arena.python(STORM, box=box) for box in boxes))
    assert limited.cpu_seconds / limited.seconds < free.cpu_seconds / free.seconds


@pytest.mark.promise("cpu limit", anyway=True)
async def test_a_neighbour_completes_meanwhile(arena: Arena) -> None:
    box, neighbour = await arena.box(), await arena.box()
    storm = asyncio.create_task(into_timeout(box, ENDLESS))
    while not storm.done():
        assert (await neighbour.run("echo lives")).stdout == "lives\n"
    assert (await storm).timed_out


@pytest.mark.promise("privileges")
async def test_no_priority_gets_better(arena: Arena) -> None:
    assert (await arena.python(FASTER)).stdout == "PermissionError PermissionError "


@pytest.fixture
def node_that_may() -> Iterator[None]:
    """This process, with the right to real time and to better priorities, as some hosts give it to their services."""
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)}
    try:
        for kind, (_, hard) in before.items():
            resource.setrlimit(kind, (max(40, hard), max(40, hard)))
    except (ValueError, OSError):
        pytest.skip("needs CAP_SYS_RESOURCE")
    yield
    for kind, limits in before.items():
        resource.setrlimit(kind, limits)


@pytest.mark.promise("privileges")
@pytest.mark.usefixtures("node_that_may")
async def test_what_the_node_may_is_not_handed_on(arena: Arena) -> None:
    assert (await arena.python(FASTER)).stdout == "PermissionError PermissionError "


@pytest.mark.control
@pytest.mark.promise("privileges")
@pytest.mark.usefixtures("node_that_may")
async def test_control_inherited_it_would_be(arena: Arena) -> None:
    assert "better" in (await arena.python(FASTER, without=no_priority_limits)).stdout


@pytest.mark.control
@pytest.mark.promise("privileges")
async def test_control_what_may_only_get_worse_does(arena: Arena) -> None:
    slower = FASTER.replace("0, -1)", "0, 1)").replace("SCHED_RR, os.sched_param(1)", "SCHED_IDLE, os.sched_param(0)")
    assert (await arena.python(slower)).stdout == "better better "

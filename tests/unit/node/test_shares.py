"""Promises of a tenant's share of a node:

1. What a quota says is what it may have at once, of boxes, CPUs and memory; others are not held up by it.
2. What is counted is what lives and what is on its way: after failures, ends, forks, resets, and in the next node.
3. Where there is a quota, a sandbox has a limit of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Quota, SandboxSpec
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import InvalidRequest, QuotaExceeded, StartFailed
from sandlot.node.node import Node, local_node

QUOTA = Quota(boxes=3, cpus=1.5, memory=1 << 30)


def spec(
    tenant: str | None = "acme", memory: str | None = "100M", cpus: float | None = 0.1, **more: Any
) -> SandboxSpec:
    limits = {"memory": memory, "cpus": cpus}
    return SandboxSpec.model_validate({"tenant": tenant, "limits": limits, **more})


async def making(box_id: str, asked: SandboxSpec) -> None:
    if asked.labels.get("be") == "broken":
        raise StartFailed("mount /proc: not permitted")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    def quota_of(tenant: str) -> Quota | None:
        return QUOTA if tenant == "acme" else None

    async with Node(FakeDriver(creating=making), tmp_path, quota_of=quota_of) as node:
        yield node


async def test_a_quota_is_what_a_tenant_may_have_at_once(node: Node) -> None:
    boxes = [(await node.create(spec())).id for _ in range(3)]
    with pytest.raises(QuotaExceeded, match="tenant acme has 3 of 3 sandboxes in use, and asks for 1 more") as refused:
        await node.create(spec())
    assert refused.value.retry_after is None
    for other in ("other", None):
        await node.create(spec(other, memory="1T", cpus=900))
    await node.destroy(boxes.pop())
    with pytest.raises(QuotaExceeded, match=r"0\.195312 of 1 GiB of memory"):
        await node.create(spec(memory="900M"))
    with pytest.raises(QuotaExceeded, match=r"0\.2 of 1\.5 CPUs in use, and asks for 1\.4 more"):
        await node.create(spec(cpus=1.4))
    await node.create(spec(cpus=1.3, memory="824M"))  # exactly as much as is left
    with pytest.raises(QuotaExceeded):
        await node.create(spec(cpus=0.01, memory="8M"))


async def test_what_is_counted_is_what_lives(node: Node) -> None:
    for _ in range(5):
        with pytest.raises(StartFailed):
            await node.create(spec(labels={"be": "broken"}))
    many = await node.create_many(spec(), 10)
    assert sorted(each.error.code if each.error else "" for each in many) == [""] * 3 + ["quota"] * 7
    boxes = [each.sandbox.id for each in many if each.sandbox is not None]
    with pytest.raises(QuotaExceeded):
        await node.fork(boxes[0])
    await node.destroy(boxes[1])
    with pytest.raises(QuotaExceeded):
        await node.fork(boxes[0], 2)  # all or none
    (fork,) = await node.fork(boxes[0], 1)
    await node.snapshot(boxes[0], "mine")
    for image in (None, "mine"):
        await node.reset(boxes[0], image)
    for box in (boxes[0], boxes[2], fork.id):
        await node.destroy(box)
        await node.destroy(box)
    assert node._shares._used == {}
    asking = asyncio.ensure_future(node.create(spec(lifetime=0.05)))
    await node.wait_ended((await asking).id)
    assert node._shares._used == {}


async def test_at_once_no_more_come_through_than_there_is_room_for(node: Node) -> None:
    outcomes = await asyncio.gather(
        *(node.create(spec(key=f"k{n}" if n % 2 else None)) for n in range(20)), return_exceptions=True
    )
    assert sum(isinstance(each, QuotaExceeded) for each in outcomes) == 17
    (again, *_) = [n for n in range(1, 20, 2) if not isinstance(outcomes[n], BaseException)] or [None]
    if again is not None:  # what was made already takes no more room
        assert await node.create(spec(key=f"k{again}")) == outcomes[again]


async def test_where_there_is_a_quota_a_sandbox_has_a_limit(node: Node) -> None:
    for missing in ("cpus", "memory"):
        with pytest.raises(InvalidRequest, match=f"quota of {missing}") as refused:
            await node.create(spec(**{missing: None}))
        assert f"limits.{missing}" in (refused.value.hint or "")


async def test_the_next_node_counts_what_it_finds(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from sandlot.api import SandboxSpec
from sandlot.node.node import local_node

async def main():
    async with local_node(Path(sys.argv[1]), name="test", orphan_grace=60) as node:
        boxes = [(await node.create(SandboxSpec(tenant="acme"))).id for _ in range(2)]
        await node.destroy(boxes.pop())
        await node.fork(boxes[0])
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    import sys

    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    async with asyncio.timeout(60):
        await killed.wait()
    async with local_node(tmp_path, name="test", orphan_grace=60, quota_of=lambda tenant: Quota(boxes=3)) as node:
        assert {info.tenant for info in await node.list()} == {"acme"}
        third = await node.create(SandboxSpec(tenant="acme"))
        with pytest.raises(QuotaExceeded, match="3 of 3"):
            await node.create(SandboxSpec(tenant="acme"))
        await node.destroy(third.id)
        for info in await node.list():
            await node.destroy(info.id)
        assert node._shares._used == {}

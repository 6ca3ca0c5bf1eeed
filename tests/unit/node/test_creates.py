"""Promises of how sandboxes are asked for, listed and waited for:

1. A create with a key is made once, however often and by however many it is asked for, by the next node too; another
   spec under the key is a conflict, one that failed is as if it had not been asked for, and one that ended says so.
2. One that nobody came for, because its caller went away, is ended; one that somebody came for stays.
3. Many are made at once; one that cannot be made costs the others nothing; who gives up leaves none.
4. Lists are filtered, ended ones included; pages in a row show each exactly once, whatever comes and goes.
5. Who waits for an end is told of it at once, or at their timeout how it is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Ending, Filter, Info, Limits, Page, SandboxSpec, Upstream
from sandlot.drivers.base import Adopted, Remains
from sandlot.drivers.fake import FakeBox, FakeDriver
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, StartFailed
from sandlot.node import creates, ledger
from sandlot.node.ledger import NodeDirectory
from sandlot.node.live import Note
from sandlot.node.node import Node, local_node
from tests.support.server import Server


class Creating:
    """What happens while a box is made."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.broken = False

    async def __call__(self, box_id: str, spec: SandboxSpec) -> None:
        self.begun.append(box_id)
        self.entered.set()
        if spec.labels.get("be") == "slow":
            await self.go_on.wait()
        if self.broken or spec.labels.get("be") == "broken":
            raise StartFailed("mount /proc: not permitted")


@pytest.fixture
async def creating() -> Creating:
    return Creating()


@pytest.fixture
async def node(tmp_path: Path, creating: Creating) -> AsyncIterator[Node]:
    async with Node(FakeDriver(creating=creating), tmp_path) as node:
        yield node
        counts = await node.counts()
        assert counts["created"] == counts["running"] + sum(counts[ending] for ending in Ending)


def keyed(key: str = "k", **fields: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"key": key, **fields})


async def test_a_create_with_a_key_is_made_once(node: Node, creating: Creating) -> None:
    slow = keyed(labels={"be": "slow"})
    asking = [asyncio.ensure_future(node.create(slow)) for _ in range(5)]
    await creating.entered.wait()
    creating.go_on.set()
    assert len({info.id for info in await asyncio.gather(*asking)}) == 1
    assert await node.create(slow) == asking[0].result()
    assert (await node.counts())["created"] == 1
    for other in ({"labels": {"be": "quick"}}, {"limits": {"memory": Limits().memory}, "labels": {"be": "slow"}}):
        with pytest.raises(Conflict, match="another sandbox was made with the key k"):
            await node.create(keyed(**other))  # a limit that is named means more than the same one by default
    assert (await node.create(keyed("other", labels={"be": "slow"}))).id != asking[0].result().id


async def test_a_reset_and_a_fork_leave_the_key_where_it_was(node: Node) -> None:
    info = await node.create(keyed())
    await node.snapshot(info.id, "other")
    await node.reset(info.id, "other")
    assert (await node.create(keyed())).id == info.id
    (fork,) = await node.fork(info.id)
    assert (await node.create(keyed())).id == info.id != fork.id


async def test_one_that_ended_says_so_and_one_that_failed_is_made_anew(node: Node, creating: Creating) -> None:
    info = await node.create(keyed())
    await node.destroy(info.id)
    with pytest.raises(SandboxEnded, match="was closed by its owner"):
        await node.create(keyed())
    creating.broken = True
    with pytest.raises(StartFailed):
        await node.create(keyed("again"))
    creating.broken = False
    assert (await node.create(keyed("again"))).state == "running"


async def test_one_that_died_before_anybody_heard_of_it_is_made_anew(tmp_path: Path) -> None:
    class Dying(FakeDriver):
        async def create(self, *words: Any) -> FakeBox:
            box = await super().create(*words)
            box.die(Ending.OOM)
            return box

    async with Node(Dying(), tmp_path) as node:
        for count in (1, 2):
            with pytest.raises(SandboxEnded, match="ran out of memory"):
                await node.create(keyed())
            assert (await node.counts())["oom"] == count
        assert not node._creates._creates and not node._creates._keys


async def test_one_that_nobody_came_for_is_ended(
    node: Node, creating: Creating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creates, "AWAY_SECONDS", 0.2)
    slow = keyed(labels={"be": "slow"})
    for comes_back in (True, False):
        spec = slow.model_copy(update={"key": f"{comes_back}"})
        creating.entered.clear()
        creating.go_on.clear()
        asking = asyncio.ensure_future(node.create(spec))
        await creating.entered.wait()
        asking.cancel()
        await asyncio.wait((asking,))
        creating.go_on.set()
        if comes_back:
            info = await node.create(spec)
            await asyncio.sleep(0.4)
            assert (await node.info(info.id)).state == "running"
        else:
            await asyncio.sleep(0.1)
            (made,) = {each.id for each in await node.list()} - {info.id}
            assert (await asyncio.wait_for(node.wait_ended(made), 5)).ending == "killed"
            assert (await node.create(spec)).id != made  # nobody has heard of that one


async def test_one_that_is_still_being_made_when_nobody_came_is_given_up(
    node: Node, creating: Creating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creates, "AWAY_SECONDS", 0.05)
    asking = asyncio.ensure_future(node.create(keyed(labels={"be": "slow"})))
    await creating.entered.wait()
    asking.cancel()
    await asyncio.wait((asking,))
    async with asyncio.timeout(5):
        while (await node.counts())["start_failed"] == 0:  # noqa: ASYNC110  (nobody is told of it)
            await asyncio.sleep(0.01)
    assert await node.list() == []


async def test_many_are_made_at_once(node: Node, creating: Creating) -> None:
    made = await node.create_many(SandboxSpec(labels={"n": "1"}), 70)
    assert len({each.sandbox.id for each in made if each.sandbox is not None}) == 70
    broken = await node.create_many(SandboxSpec(labels={"be": "broken"}), 2)
    assert [(each.sandbox, each.error and each.error.code) for each in broken] == [(None, "start_failed")] * 2
    for count in (0, 1001):
        with pytest.raises(InvalidRequest, match="1 to 1000"):
            await node.create_many(SandboxSpec(), count)
    again = [await node.create_many(keyed(), 3) for _ in range(2)]
    assert again[0] == again[1]
    assert len(await node.list()) == 73


async def test_who_gives_up_many_leaves_none(node: Node, creating: Creating) -> None:
    quick = len(await node.create_many(SandboxSpec(), 2))
    asking = asyncio.ensure_future(node.create_many(SandboxSpec(labels={"be": "slow"}), 40))
    await creating.entered.wait()
    await asyncio.sleep(0)
    asking.cancel()
    creating.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(await node.list()) == quick


async def every(node: Node, wanted: Filter, limit: int, between: Callable[[], Awaitable[object]]) -> list[str]:
    ids: list[str] = []
    page: Page = await node.page(wanted, None, limit)
    ids += [info.id for info in page.sandboxes]
    while page.next is not None:
        await between()
        page = await node.page(wanted, page.next, limit)
        ids += [info.id for info in page.sandboxes]
    return ids


async def test_lists_are_filtered(node: Node) -> None:
    one = await node.create(SandboxSpec(labels={"a": "1", "b": "x"}))
    two = await node.create(SandboxSpec(labels={"a": "2"}))
    await node.snapshot(two.id, "other")
    three = await node.create(SandboxSpec(image="other", labels={"a": "1"}))
    four = await node.create(SandboxSpec(labels={"a": "1"}))
    await node.pause(two.id)
    await node.destroy(four.id)

    async def ids(**wanted: object) -> list[str]:
        return [info.id for info in (await node.page(Filter.model_validate(wanted))).sandboxes]

    assert await ids() == [one.id, two.id, three.id]
    assert await ids(labels={"a": "1"}) == [one.id, three.id]
    assert await ids(labels={"a": None, "b": "x"}) == [one.id]
    assert await ids(labels={"c": None}) == []
    assert await ids(image="other") == [three.id]
    assert await ids(states=["paused"]) == [two.id]
    assert await ids(states=["ended"], labels={"a": "1"}) == [four.id]
    assert await ids(states=["ended", "running"]) == [one.id, three.id, four.id]
    for cursor in ("x", "1~", "nan~sb-1", "1e9~sb-1", ""):
        with pytest.raises(InvalidRequest, match="is not a cursor"):
            await node.page(cursor=cursor)


@pytest.mark.parametrize("at_once", [2, 250])
async def test_pages_in_a_row_show_each_once_whatever_comes_and_goes(
    node: Node, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_LOOKED_AT", at_once)
    made = [(await node.create(SandboxSpec())).id for _ in range(20)]
    gone: list[str] = []

    async def change() -> None:
        await node.create(SandboxSpec())
        if len(gone) < 5:
            gone.append(made[len(gone) * 4])
            await node.destroy(gone[-1])

    seen = await every(node, Filter(states=("running",)), 3, change)
    assert len(seen) == len(set(seen))
    assert set(made) - set(gone) <= set(seen)
    everything = await every(node, Filter(states=("running", "ended")), 3, change)
    assert len(everything) == len(set(everything)) and set(made) <= set(everything)
    assert everything == sorted(everything, key=everything.index)
    ended = await every(node, Filter(states=("ended",)), 3, change)
    assert set(ended) == set(gone) and len(ended) == len(gone)


async def test_who_waits_for_an_end_is_told_of_it_at_once(node: Node) -> None:
    info = await node.create(SandboxSpec(lifetime=60))
    waiting = [asyncio.ensure_future(node.wait_ended(info.id)) for _ in range(3)]
    assert (await node.wait_ended(info.id, 0.05)).state == "running"
    waiting[2].cancel()
    await node.snapshot(info.id, "same")
    await node.reset(info.id, "same")  # another box, the same sandbox
    await node.destroy(info.id, Ending.PREEMPTED)
    began = time.monotonic()
    for ended in await asyncio.gather(*waiting[:2]):
        assert (ended.state, ended.ending) == ("ended", "preempted")
    assert await node.wait_ended(info.id) == waiting[0].result()
    assert time.monotonic() - began < 1
    with pytest.raises(NotFound):
        await node.wait_ended("sb-never")


async def test_one_that_dies_while_a_node_takes_it_over_is_made_anew_if_nobody_had_heard_of_it(tmp_path: Path) -> None:
    class Adopting(FakeDriver):
        async def adopt(self) -> tuple[list[Adopted], list[Remains]]:
            spec = keyed()
            box = await self.create("sb-before", spec, frozenset())
            box.die(Ending.OOM)
            listener = socket.create_server(("127.0.0.1", 0))
            route = listener, 80, Upstream(url="http://127.0.0.1:9").model_dump_json()
            note = Note(box.id, spec, frozenset(), time.time(), 0, creates.fingerprint(spec, frozenset())).write()
            return [Adopted(box, note, [], [], [route])], []

    before = ledger.Ledger(tmp_path)
    before.begin(Info(id="sb-before", image="host", state="running", created_at=time.time()), "k", "what")
    before.close()
    directory = NodeDirectory(tmp_path, os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
    async with Node(Adopting(), directory=directory) as node:
        assert (await node.info("sb-before")).ending == "oom"
        assert (await node.create(keyed())).state == "running"


# Over real boxes, which the next node finds.


async def test_the_next_node_knows_what_was_made_by_which_key(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)

    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    async with Server(state, "--orphan-grace", "60") as server:
        node = server.node()
        kept, ended = await node.create(keyed("kept", labels={"a": "b"})), await node.create(keyed("ended"))
        await node.destroy(ended.id)
        await node.create_many(keyed("many"), 2)
        many = sorted(info.id for info in await node.list())
        await server.kill()
        await server.start()
        assert (await node.create(keyed("kept", labels={"a": "b"}))).id == kept.id
        with pytest.raises(Conflict):
            await node.create(keyed("kept", labels={"a": "c"}))
        with pytest.raises(SandboxEnded):
            await node.create(keyed("ended"))
        await node.create_many(keyed("many"), 2)
        assert sorted(info.id for info in await node.list()) == many
        page = await node.page(Filter(states=("ended",)))
        assert [info.id for info in page.sandboxes] == [ended.id]
        await node.close()


# It is made, and before anybody is told of it its node is killed.
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from sandlot.api import SandboxSpec
from sandlot.node.ledger import NodeDirectory
from sandlot.node.live import Note
from sandlot.node.node import local_node

def die(sandbox_id):
    print(sandbox_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with local_node(Path(sys.argv[1]), name="test", orphan_grace=60) as node:
        node._creates._tell = die
        await node.create(SandboxSpec(key="k"))

asyncio.run(main())
"""


@pytest.mark.parametrize("comes_back", [True, False])
async def test_one_of_which_its_killed_node_told_nobody_is_got_by_who_asks_again_or_ended(
    comes_back: bool, tmp_path: Path, native_reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    monkeypatch.setattr(creates, "AWAY_SECONDS", 1.0)
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await program.communicate()
    made = said.decode().strip()
    async with local_node(tmp_path, name="test", orphan_grace=60) as node:
        if comes_back:
            assert (await node.create(keyed())).id == made
        info = await node.wait_ended(made, 20 if not comes_back else 2)
        assert info.state == ("running" if comes_back else "ended")
        assert info.ending == (None if comes_back else "killed")

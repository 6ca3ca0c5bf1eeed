"""Promises of creates, lists and waits over HTTP:

1. Who lost the answer to a create asks again by its key and gets the same sandbox; `HttpNode` does so by itself, when
   its server is killed meanwhile too.
2. A create that is given up leaves nothing, unless somebody else may ask for it by the same key.
3. A list tells in `Link` where it goes on; filters are words of the query.
4. Whoever waits for an end is answered when it comes, or at their timeout.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sandlot import asgi
from sandlot.api import Filter, SandboxSpec
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, StartFailed, Unreachable, Unsupported
from sandlot.node import creates
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox
from sandlot.server.app import create_app
from tests.support.server import Server


class Gate:
    """What happens while a box is made."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, box_id: str, spec: SandboxSpec) -> None:
        self.entered.set()
        if spec.labels.get("be") == "slow":
            await self.go_on.wait()
        if spec.labels.get("be") == "broken":
            raise StartFailed("mount /proc: not permitted", "`sandlot doctor`")


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def local(tmp_path: Path, gate: Gate) -> AsyncIterator[Node]:
    async with Node(FakeDriver(creating=gate), tmp_path) as node:
        yield node


@pytest.fixture
async def url(local: Node) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    served = await asgi.serve(listener, create_app(local))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    served.close()


@pytest.fixture
async def remote(url: str) -> AsyncIterator[HttpNode]:
    node = HttpNode(url)
    yield node
    await node.close()


async def test_who_lost_the_answer_asks_again(local: Node, url: str, gate: Gate) -> None:
    spec = {"key": "k", "labels": {"be": "slow"}}
    async with httpx2.AsyncClient(base_url=url) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await client.post("/v1/sandboxes", json=spec, timeout=0.2)
        gate.go_on.set()
        made = await client.post("/v1/sandboxes", json=spec)
        assert made.status_code == 201
        assert (await client.post("/v1/sandboxes", json=spec)).json() == made.json()
        other = await client.post("/v1/sandboxes", json={"key": "k"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
        for key in ("", "with blank", "ä", "x" * 101):
            assert (await client.post("/v1/sandboxes", json={"key": key})).status_code == 400
    assert (await local.counts())["created"] == 1


class Breaking:
    """Between a client and its server: the first answers are cut off when they come."""

    def __init__(self, port: int, times: int) -> None:
        self._port = port
        self._left = times

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection("127.0.0.1", self._port)

        async def ask() -> None:
            while piece := await reader.read(1 << 16):
                here.write(piece)

        asking = asyncio.ensure_future(ask())
        while piece := await there.read(1 << 16):
            if self._left:
                self._left -= 1
                break
            writer.write(piece)
        asking.cancel()
        for each in (writer, here):
            each.close()


async def test_a_create_whose_answer_was_lost_is_asked_for_again(local: Node, url: str) -> None:
    breaking = Breaking(int(url.rpartition(":")[2]), 2)
    server = await asyncio.start_server(breaking.pass_on, "127.0.0.1", 0)
    node = HttpNode(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    info = await node.create(SandboxSpec(labels={"a": "b"}))
    assert [each.id for each in await local.list()] == [info.id]
    breaking._left = 1
    assert len(await node.create_many(SandboxSpec(), 5)) == 5
    assert len(await local.list()) == 6
    await node.close()
    server.close()


async def test_no_server_at_all_is_said_at_once() -> None:
    node = HttpNode("http://127.0.0.1:9")
    async with asyncio.timeout(5):
        with pytest.raises(Unreachable, match="no server answers"):
            await node.create(SandboxSpec())
    await node.close()


async def test_a_create_that_is_given_up_leaves_nothing(
    local: Node, remote: HttpNode, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creates, "AWAY_SECONDS", 0.2)
    slow = SandboxSpec(labels={"be": "slow"})
    for ask in (lambda: remote.create(slow), lambda: remote.create_many(slow, 3)):
        gate.entered.clear()
        gate.go_on.clear()
        asking = asyncio.ensure_future(ask())  # type: ignore[no-untyped-call]
        await gate.entered.wait()
        await asyncio.sleep(0.05)
        asking.cancel()
        gate.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await local.list() == []
    gate.go_on.clear()
    keyed = slow.model_copy(update={"key": "shared"})
    one, other = (asyncio.ensure_future(remote.create(keyed)) for _ in range(2))
    await asyncio.sleep(0.1)
    one.cancel()
    gate.go_on.set()
    info = await other
    await asyncio.sleep(0.4)
    assert (await local.info(info.id)).state == "running"


async def test_a_server_that_is_killed_during_creates_leaves_none_unanswered(
    tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    async with Server(state, "--orphan-grace", "60") as server:
        node = server.node()
        for after in (0.0, 0.02, 0.05):
            asking = [asyncio.ensure_future(node.create(SandboxSpec(labels={"n": str(n)}))) for n in range(8)]
            await asyncio.sleep(after)
            if not after:
                await node.list()  # it is there, and has heard of them
            await server.kill()
            await server.start()
            made = [info.id for info in await asyncio.gather(*asking)]
            assert sorted(made) == sorted(info.id for info in await node.list())
            await asyncio.gather(*(node.destroy(each) for each in made))
        await node.close()


async def test_many_are_answered_one_by_one(remote: HttpNode, url: str) -> None:
    made = await Sandbox.create_many(3, labels={"a": "b"}, node=remote)
    assert len({box.id for box in made if isinstance(box, Sandbox)}) == 3
    assert [info.id for info in await Sandbox.find(labels={"a": "b"}, node=remote)] == sorted(
        (box.id for box in made if isinstance(box, Sandbox)),
        key=[info.id for info in await remote.list()].index,
    )
    (broken,) = await Sandbox.create_many(1, labels={"be": "broken"}, node=remote)
    assert isinstance(broken, StartFailed)
    assert (str(broken), broken.hint) == ("mount /proc: not permitted", "`sandlot doctor`")
    with pytest.raises(InvalidRequest):
        await remote.create_many(SandboxSpec(), 1001)
    with pytest.raises(Unsupported):
        await remote.create_many(SandboxSpec(network="host"), 2)
    with pytest.raises(InvalidRequest, match="nmae"):
        await Sandbox.create_many(2, nmae="x", node=remote)


async def test_a_list_tells_where_it_goes_on(local: Node, remote: HttpNode, url: str) -> None:
    made = [(await local.create(SandboxSpec(labels={"n": str(n % 2), "odd name": "a=b&c"}))).id for n in range(7)]
    async with httpx2.AsyncClient(base_url=url) as client:
        query: Any = {"limit": 2, "label": ["n=0", "odd name=a=b&c"], "state": ["running", "ended"]}
        seen: list[str] = []
        answer = await client.get("/v1/sandboxes", params=query)
        while True:
            seen += [info["id"] for info in answer.json()]
            if "next" not in answer.links:
                break
            answer = await client.get(answer.links["next"]["url"])
        assert seen == made[::2]
        for wrong in ({"limit": 0}, {"limit": 1001}, {"cursor": "nothing"}, {"state": "asleep"}):
            assert (await client.get("/v1/sandboxes", params=wrong)).status_code == 400
    page = await remote.page(Filter(labels={"odd name": None}), limit=3)
    assert [info.id for info in page.sandboxes] == made[:3]
    assert page == await local.page(Filter(labels={"odd name": None}), limit=3)
    assert [info.id for info in await remote.list()] == made


async def test_whoever_waits_for_an_end_is_answered_when_it_comes(local: Node, remote: HttpNode) -> None:
    box = await Sandbox.create(node=remote)
    assert (await box.wait(0.1)).state == "running"
    waiting = asyncio.ensure_future(box.wait())
    await asyncio.sleep(0.1)
    await local.destroy(box.id)
    ended = await asyncio.wait_for(waiting, 5)
    assert (ended.state, ended.ending) == ("ended", "exit")
    assert await box.wait() == ended
    with pytest.raises(NotFound):
        await remote.wait_ended("sb-never")
    with pytest.raises(SandboxEnded):
        await box.run("true")


async def test_another_spec_under_a_key_is_a_conflict(remote: HttpNode) -> None:
    box = await Sandbox.create(key="mine", node=remote)
    assert (await Sandbox.create(key="mine", node=remote)).id == box.id
    with pytest.raises(Conflict, match="key mine"):
        await Sandbox.create(key="mine", env={"A": "b"}, node=remote)

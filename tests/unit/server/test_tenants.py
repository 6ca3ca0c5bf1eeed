"""Promises of tenants who share a server:

1. Another tenant's sandbox is as if it were not there, in every route there is; lists do not show it.
2. Names of images are each tenant's own; those of registries are everybody's, and no tenant changes them.
3. What its sandboxes and images are called, and what errors say of them, is what it called them itself.
4. The same keys of creates lead different tenants to different sandboxes.
5. The operator sees all; what is about the whole server is the operator's.
6. Whose a sandbox is stays, through forks, resets and a killed server.
"""

from __future__ import annotations

import io
import re
import socket
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import WebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from sandlot import asgi
from sandlot.api import STEP, Filter, NodeAPI, Quota, Run, SandboxSpec
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Forbidden, InvalidRequest, NotFound, SandlotError
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox
from sandlot.server import v1
from sandlot.server.app import create_app
from sandlot.server.keys import Keys, Scope
from sandlot.server.tenants import TenantNode
from tests.support.server import Server


class Place:
    """A server with the keys of two tenants and of the operator."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = url
        self._words = {
            name: keys.create(tenant, Scope.RUN, Quota(), None)[1]
            for name, tenant in (("acme", "acme"), ("evil", "evil"), ("operator", None))
        }
        self.nodes = {name: HttpNode(url, words) for name, words in self._words.items()}
        self.acme, self.evil, self.operator = self.nodes.values()

    async def socket(self, who: str, path: str) -> tuple[int, str, str]:
        """Status, words and id with which a WebSocket is refused."""
        headers = {"authorization": f"Bearer {self._words[who]}"}
        with pytest.raises(InvalidStatus) as refused:
            await connect(self.url.replace("http", "ws", 1) + path, additional_headers=headers, proxy=None)
        answer = refused.value.response
        return answer.status_code, (answer.body or b"").decode(), answer.headers["x-request-id"]

    def client(self, who: str) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, headers={"authorization": f"Bearer {self._words[who]}"})


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path / "nodes") as node:
        yield node


@pytest.fixture
async def place(tmp_path: Path, local: Node) -> AsyncIterator[Place]:
    keys = Keys(tmp_path / "keys.json")
    listener = socket.create_server(("127.0.0.1", 0))
    served = await asgi.serve(listener, create_app(local, keys=keys), websockets=True)
    place = Place(f"http://127.0.0.1:{listener.getsockname()[1]}", keys)
    yield place
    for node in place.nodes.values():
        await node.close()
    served.close()


def routes(node: Node) -> list[tuple[str, str]]:
    """Every method and path that there is."""
    paths = create_app(node).openapi()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods] + sockets()


def sockets() -> list[tuple[str, str]]:
    """The same of WebSockets, which the document has no words for."""
    return [("WEBSOCKET", route.path) for route in v1.router.routes if isinstance(route, WebSocketRoute)]


async def test_another_tenants_sandbox_is_not_there(place: Place, local: Node) -> None:
    mine = await place.acme.create(SandboxSpec(labels={"a": "b"}))
    ended = await place.acme.create(SandboxSpec())
    await place.acme.destroy(ended.id)
    looked_at = 0
    async with place.client("evil") as evil:
        for sandbox_id in (mine.id, ended.id):
            never = f"sb-{'0' * len(mine.id.removeprefix('sb-'))}"
            for method, template in routes(local):
                if "{sandbox_id}" not in template:
                    continue
                answers = []
                for each in (sandbox_id, never):
                    path = re.sub(r"\{\w+\}", "1", template.replace("{sandbox_id}", each))
                    if method == "WEBSOCKET":
                        status, text, answer_id = await place.socket("evil", path)
                    else:
                        answer = await evil.request(method, path, params={"path": "/etc/passwd"}, json={})
                        status, text, answer_id = answer.status_code, answer.text, answer.headers["x-request-id"]
                    assert answer_id in text
                    answers.append((status, text.replace(each, "").replace(answer_id, "")))
                assert answers[0] == answers[1], f"{method} {template} tells that there is one"
                assert answers[0][0] == 404, f"{method} {template}: {answers[0]}"
                looked_at += 1
        assert looked_at >= 50
        assert (await evil.get("/v1/sandboxes", params={"state": ["running", "ended"]})).json() == []
    assert await place.evil.list() == []
    with pytest.raises(Forbidden, match="tenant evil"):
        await place.evil.page(Filter(tenant="acme"))
    info = await local.info(mine.id)
    assert (info.state, info.tenant) == ("running", "acme")
    assert [each.id for each in await place.acme.list()] == [mine.id]


# What is about no sandbox in particular: of each it was decided what a tenant sees. A new one fails here until it is.
DECIDED = {
    "POST /v1/sandboxes",  # makes its own
    "POST /v1/sandboxes/batch",
    "GET /v1/sandboxes",  # shows its own
    "GET /v1/images",  # its own, and those of registries
    "GET /v1/images/{name}",
    "PUT /v1/images/{name}",
    "DELETE /v1/images/{name}",
    "GET /v1/images/{name}/tar",
    "POST /v1/images/{image}/tag",
    "POST /v1/images/pull",  # of registries, for everybody
    "POST /v1/images/prune",  # the operator's
    "GET /v1/ledger",
    "GET /v1/pools",
    "GET /v1/capabilities",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",  # the operator's
}


def test_of_every_route_it_is_decided_what_a_tenant_sees(local: Node) -> None:
    others = {f"{method} {path}" for method, path in routes(local) if "{sandbox_id}" not in path}
    assert others == DECIDED
    assert sockets()


async def test_of_every_method_it_is_decided_what_a_tenant_gets(place: Place, local: Node) -> None:
    mine = TenantNode(local, "acme")
    for name in vars(NodeAPI):
        assert name.startswith("_") or name == "close" or callable(getattr(mine, name))
    local.of_tomorrow = local.pools  # type: ignore[attr-defined]
    assert not hasattr(mine, "of_tomorrow")
    with pytest.raises(Forbidden, match="every tenant's"):
        await place.acme.pools()
    assert await place.operator.pools() == []


async def test_every_error_is_in_a_tenants_own_words_and_names_its_request(place: Place) -> None:
    box = (await place.acme.create(SandboxSpec())).id
    await place.acme.write_file(box, "/root/f", b"abc")
    async with place.client("acme") as client:
        client.headers["x-request-id"] = "mine"
        beyond = {"range": "bytes=10-"}
        for answer, status in (
            (await client.get(f"/v1/sandboxes/{box}/files", params={"path": "/root/f"}, headers=beyond), 416),
            (await client.get("/v1/sandboxes/"), 404),
            (await client.get("/v1/nothing"), 404),
            (await client.put("/v1/sandboxes"), 405),
            (await client.post("/v1/sandboxes", json={"image": "nosuch"}), 404),
        ):
            assert answer.status_code == status
            assert answer.json()["error"]["request_id"] == "mine"
            assert "t-acme" not in answer.text
        made = await client.post("/v1/sandboxes/batch", json={"spec": {"image": "nosuch"}, "count": 1})
        assert "no image nosuch" in made.json()[0]["error"]["message"]
        assert "t-acme" not in made.text


async def test_names_of_images_are_each_tenants_own(place: Place, local: Node) -> None:
    boxes = {}
    for name, node in (("acme", place.acme), ("evil", place.evil)):
        boxes[name] = (await node.create(SandboxSpec())).id
        await node.write_file(boxes[name], "/root/whose", name.encode())
        made = await node.snapshot(boxes[name], "solved")
        assert (made.name, made.base) == ("solved", "host")
        assert [image.name for image in await node.images()] == ["solved"]
        await node.snapshot(boxes[name], STEP + "0" * 32)
        assert (await node.tag_image(STEP + "0" * 32, "built")).name == "built"
    for name, node in (("acme", place.acme), ("evil", place.evil)):
        for image in ("solved", "built", STEP + "0" * 32):
            made_from = await node.create(SandboxSpec(image=image))
            assert (await node.read_file(made_from.id, "/root/whose")).decode() == name
        await node.reset(boxes[name], "solved")
        assert (await node.read_file(boxes[name], "/root/whose")).decode() == name
        info = await node.info(boxes[name])
        assert info.image == "solved"
        found = await node.page(Filter(image="solved"))
        assert boxes[name] in [each.id for each in found.sandboxes]
        (fork,) = await node.fork(boxes[name])
        assert (await node.read_file(fork.id, "/root/whose")).decode() == name
        assert fork.tenant == name
        exported = b"".join([chunk async for chunk in node.export_image("solved")])
        with tarfile.open(fileobj=io.BytesIO(exported)) as tar:
            assert tar.extractfile("root/whose").read().decode() == name  # type: ignore[union-attr]
    await place.evil.delete_image("solved")
    assert {image.name for image in await place.acme.images()} == {"solved", "built"}
    for seek in ("solved", "acme..solved", "t-acme..solved"):
        with pytest.raises(NotFound) as told:
            await place.evil.create(SandboxSpec(image=seek))
        assert "t-evil" not in told.value.message
        with pytest.raises(NotFound):
            await place.evil.delete_image(seek)
    names = {image.name for image in await place.operator.images()}
    assert {"t-acme..solved", "t-acme..built", "t-evil..built"} <= names


async def test_images_of_registries_are_everybodys_and_no_tenant_changes_them(
    place: Place, local: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await local.create(SandboxSpec())
    info = await local.snapshot(box.id, "shared")
    driver: Any = local.driver
    driver._snapshots["ours/base:1"] = (info.model_copy(update={"name": "ours/base:1"}), driver._snapshots["shared"][1])
    assert [image.name for image in await place.acme.images()] == ["ours/base:1"]  # and not the operator's own
    assert (await place.acme.create(SandboxSpec(image="ours/base:1"))).image == "ours/base:1"
    for call in (
        lambda: place.acme.delete_image("ours/base:1"),
        lambda: place.acme.prune_images(),
        lambda: place.acme.counts(),
    ):
        with pytest.raises(Forbidden):
            await call()
    mine = await place.acme.create(SandboxSpec())
    for name in ("ours/base:1", "debian:12", "host", "", "fork-1", "../x", "step-x"):
        with pytest.raises(InvalidRequest, match="name"):
            await place.acme.snapshot(mine.id, name)
    await place.operator.delete_image("ours/base:1")
    assert (await place.operator.counts())["created"] >= 2


async def test_the_same_key_leads_each_tenant_to_its_own(place: Place) -> None:
    made = [(await node.create(SandboxSpec(key="k"))).id for node in (place.acme, place.evil, place.operator)]
    assert len(set(made)) == 3
    again = [(await node.create(SandboxSpec(key="k"))).id for node in (place.acme, place.evil, place.operator)]
    assert again == made
    with pytest.raises(InvalidRequest, match="tenant evil, not of acme"):
        await place.evil.create(SandboxSpec(tenant="acme"))
    assert (await place.operator.create(SandboxSpec(tenant="acme"))).tenant == "acme"
    assert len(await place.acme.list()) == 2
    many = await Sandbox.create_many(2, node=place.evil)
    assert not any(isinstance(each, SandlotError) for each in many)
    assert len(await place.evil.list()) == 3
    assert len(await place.operator.list()) == 6
    assert len((await place.operator.page(Filter(tenant="evil"))).sandboxes) == 3


async def test_whose_a_sandbox_is_stays_when_its_server_is_killed(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    async with Server(state, "--orphan-grace", "60") as server:
        place = Place(server.url, Keys(state / "keys.json"))
        mine = await place.acme.create(SandboxSpec(key="k"))
        await place.acme.reset(mine.id)
        (fork,) = await place.acme.fork(mine.id)
        ended = await place.acme.create(SandboxSpec())
        await place.acme.destroy(ended.id)
        await server.kill()
        await server.start()
        for box in (mine.id, fork.id, ended.id):
            assert (await place.acme.info(box)).tenant == "acme"
            with pytest.raises(NotFound):
                await place.evil.info(box)
        assert (await place.acme.create(SandboxSpec(key="k"))).id == mine.id
        assert (await place.acme.run(fork.id, Run(argv=("echo", "mine")))).stdout == "mine\n"
        for node in place.nodes.values():
            await node.close()

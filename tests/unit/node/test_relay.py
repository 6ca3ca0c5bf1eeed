"""Promises of a relay, between a box and a real upstream server:

1. Method, path, query, headers and body arrive as the box sent them; the answer comes back as the upstream gave it.
2. The upstream's headers are added and win over the box's; the box never sees them and cannot choose the host.
3. Both ways are streamed: a byte arrives before the next one is written.
4. When the box hangs up, the upstream's call is dropped.
5. An upstream that does not answer is a 502 that says so.
6. Where strangers are let in, a tenant's route leads to nobody who is neither public nor named by who runs the server:
   what counts is the address that is connected to. The operator's own, and a server without keys, are as they were.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot import asgi
from sandlot.api import Quota, SandboxSpec, Upstream
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeBox, FakeDriver
from sandlot.errors import Forbidden
from sandlot.node.node import Node
from sandlot.server.keys import Keys, Scope
from tests.support.server import Server

PORT = 8484


class Model:
    """An upstream: /echo says what it was asked, /slow streams on demand."""

    def __init__(self) -> None:
        self.next = asyncio.Event()
        self.dropped = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/base/slow":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            waiting = asyncio.ensure_future(self.next.wait())
            await receive()
            gone = asyncio.ensure_future(receive())
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.dropped.set()
            await send({"type": "http.response.body", "body": b"second"})
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        said = {
            "method": scope["method"],
            "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
            "body": len(body),
        }
        answer = json.dumps(said).encode()
        length = str(len(answer)).encode()
        headers = [
            (b"content-length", length),
            (b"x-model", b"yes"),
            (b"set-cookie", b"who=me"),
            (b"retry-after", b"7"),
        ]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture
async def model() -> AsyncIterator[tuple[Model, str]]:
    model = Model()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = await asgi.serve(listener, model)
    yield model, f"http://127.0.0.1:{port}/base"
    served.close()


@pytest.fixture
async def box(tmp_path: Path, model: tuple[Model, str]) -> AsyncIterator[FakeBox]:
    driver = FakeDriver()
    async with Node(driver, tmp_path) as node:
        sandbox_id = (await node.create(SandboxSpec())).id
        upstream = Upstream(url=model[1], headers={"Authorization": "Bearer the-real-key"})
        await node.route(sandbox_id, PORT, upstream)
        yield driver.boxes[sandbox_id]


async def ask(box: FakeBox, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to one raw request."""
    reader, writer = await asyncio.open_connection(sock=await box.connect(PORT))
    writer.write(request)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head, body


async def test_a_request_arrives_as_it_was_sent(box: FakeBox) -> None:
    body = b"x" * 300_000
    head, answer = await ask(
        box,
        b"POST /v1/chat%2Fx?a=1&b=%20 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nX-Own: kept\r\n"
        b"Authorization: Bearer sandlot\r\nContent-Length: 300000\r\n\r\n" + body,
    )
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"x-model: yes" in head
    assert b"retry-after: 7" in head
    assert b"the-real-key" not in head
    said = json.loads(answer)
    assert (said["method"], said["path"], said["query"]) == ("POST", "/base/v1/chat%2Fx", "a=1&b=%20")
    assert said["body"] == 300_000
    assert said["headers"]["x-own"] == "kept"
    assert said["headers"]["authorization"] == "Bearer the-real-key"


async def test_a_body_without_a_length_is_relayed(box: FakeBox) -> None:
    _, answer = await ask(
        box,
        b"PUT /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n",
    )
    assert json.loads(answer)["body"] == 7


@pytest.mark.parametrize("target", [b"http://elsewhere.example/x", b"//elsewhere.example/x"])
async def test_the_box_cannot_choose_the_host(box: FakeBox, model: tuple[Model, str], target: bytes) -> None:
    head, answer = await ask(
        box, b"GET " + target + b" HTTP/1.1\r\nHost: elsewhere.example\r\nConnection: close\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 429 ")
    said = json.loads(answer)
    assert said["headers"]["host"] == model[1].split("/")[2]
    assert said["path"].startswith("/base/")


@pytest.mark.parametrize("target", [b"/../x", b"/a/%2e%2e/%2E./x", b"/./../x"])
async def test_the_box_cannot_leave_the_upstream_s_path(box: FakeBox, target: bytes) -> None:
    head, _ = await ask(box, b"GET " + target + b" HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")


async def test_nothing_is_added_and_no_cookie_is_carried_over(box: FakeBox) -> None:
    for _ in range(2):
        _, answer = await ask(box, b"GET /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert set(json.loads(answer)["headers"]) == {"host", "authorization"}


async def test_an_answer_is_streamed(box: FakeBox, model: tuple[Model, str]) -> None:
    reader, writer = await asyncio.open_connection(sock=await box.connect(PORT))
    writer.write(b"GET /slow HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(10):
        await reader.readuntil(b"first")
        model[0].next.set()
        assert b"second" in await reader.read()
    writer.close()


async def test_a_box_that_hangs_up_drops_the_call(box: FakeBox, model: tuple[Model, str]) -> None:
    reader, writer = await asyncio.open_connection(sock=await box.connect(PORT))
    writer.write(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
    async with asyncio.timeout(10):
        await reader.readuntil(b"first")
        writer.close()
        await model[0].dropped.wait()


async def test_an_upstream_that_is_not_there_is_a_502(tmp_path: Path) -> None:
    driver = FakeDriver()
    async with Node(driver, tmp_path) as node:
        sandbox_id = (await node.create(SandboxSpec())).id
        await node.route(sandbox_id, PORT, Upstream(url="http://127.0.0.1:9"))
        head, body = await ask(
            driver.boxes[sandbox_id], b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        )
    assert head.startswith(b"HTTP/1.1 502 ")
    assert "did not answer" in json.loads(body)["error"]["message"]


GET = b"GET /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


async def test_a_tenant_s_route_leads_to_nobody_who_is_not_public(tmp_path: Path, model: tuple[Model, str]) -> None:
    port = model[1].split(":")[-1].split("/")[0]
    named: list[str] | None = []
    driver = FakeDriver()
    async with Node(driver, tmp_path, reachable=lambda: named) as node:
        theirs = (await node.create(SandboxSpec(tenant="acme"))).id
        for host in (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "169.254.169.254",
            "0.0.0.0",
            "2130706433",
            "[::ffff:10.0.0.1]",
        ):
            with pytest.raises(Forbidden, match="not public") as refused:
                await node.route(theirs, PORT, Upstream(url=f"http://{host}:{port}/base"))
            assert f"--allow-route {host}:{port}`" in str(refused.value.hint)
        own = (await node.create(SandboxSpec())).id
        await node.route(own, PORT, Upstream(url=model[1]))
        assert (await ask(driver.boxes[own], GET))[0].startswith(b"HTTP/1.1 429 ")  # the control
        named = [f"127.0.0.1:{port}"]
        await node.route(theirs, PORT, Upstream(url=model[1]))
        assert (await ask(driver.boxes[theirs], GET))[0].startswith(b"HTTP/1.1 429 ")
        named = ["127.0.0.1:1"]  # the same host, and another port
        with pytest.raises(Forbidden):
            await node.route(theirs, PORT + 1, Upstream(url=model[1]))


async def test_a_name_that_means_another_address_later_gains_nothing(
    tmp_path: Path, model: tuple[Model, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = model[1].split(":")[-1].split("/")[0]
    loop, asked = asyncio.get_running_loop(), list[str]()
    real = loop.getaddrinfo

    async def getaddrinfo(host: Any, *words: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name != "turns.example":
            return await real(host, *words, **more)
        asked.append(name)  # public when it is looked at, this machine from then on
        return await real("1.1.1.1" if len(asked) == 1 else "127.0.0.1", *words, **more)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    driver = FakeDriver()
    async with Node(driver, tmp_path, reachable=list) as node:
        theirs = (await node.create(SandboxSpec(tenant="acme"))).id
        await node.route(theirs, PORT, Upstream(url=f"http://turns.example:{port}/base"))
        head, body = await ask(driver.boxes[theirs], GET)
    assert asked
    assert head.startswith(b"HTTP/1.1 403 ")
    assert "127.0.0.1" in json.loads(body)["error"]["message"]


async def test_who_runs_a_server_says_where_tenants_routes_may_lead(
    tmp_path: Path, model: tuple[Model, str], native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    address = model[1].split("/")[2]
    for words, status in (((), 403), (("--allow-route", address), 200)):
        state = tmp_path / str(status)
        state.mkdir(mode=0o700)
        async with Server(state, *words) as server:
            nobody = server.node()
            free = (await nobody.create(SandboxSpec())).id
            await nobody.route(free, PORT, Upstream(url=model[1]))  # there are no keys yet
            await nobody.close()
            key = Keys(state / "keys.json").create("acme", Scope.RUN, Quota(), None)[1]
            acme = HttpNode(server.url, key)
            theirs = (await acme.create(SandboxSpec())).id
            if status == 403:
                with pytest.raises(Forbidden, match="not public"):
                    await acme.route(theirs, PORT, Upstream(url=model[1]))
            else:
                await acme.route(theirs, PORT, Upstream(url=model[1]))
            await acme.close()

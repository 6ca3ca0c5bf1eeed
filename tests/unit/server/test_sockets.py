"""Promises of WebSockets to the server, spoken to as any program or web page would:

1. They are guarded as every request is: with a key nobody is let in without it, without one no web page is, whatever it
   connects to; who is refused is told why.
2. What cannot be attached to is told as an error with its status; words that are none as an error on the socket.
3. They take room as other connections do, and give it back.
4. They are told of as every request is: an id, which the answer and the log have; a number; a server that stops knows
   of them, and lets no more in.
5. A key that is revoked types no more from then on; one that only looks may watch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from fastapi import FastAPI
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from sandlot import asgi
from sandlot.api import MOST_FRAME_BYTES, Quota, SandboxSpec, TerminalSpec
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Forbidden, NotFound, Unreachable
from sandlot.node.node import Node, local_node
from sandlot.server.app import Unauthorized, create_app
from sandlot.server.keys import Keys, Scope
from sandlot.server.logs import LOGGER

Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serving() -> AsyncIterator[Serve]:
    """Serves a node; gives the address without a scheme."""
    served = []

    async def start(
        node: Node, key: str | None = None, room: asgi.Room | None = None, app: FastAPI | None = None
    ) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        served.append(await asgi.serve(listener, app or create_app(node, key), room=room, websockets=True))
        return f"127.0.0.1:{port}"

    yield start
    for each in served:
        each.close()


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


@pytest.fixture
async def native(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node:
        yield node


async def refusal(url: str, **headers: str) -> tuple[int, str]:
    """The status and the error's code with which a WebSocket is refused."""
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, additional_headers=headers, proxy=None)
    body = json.loads(refused.value.response.body or b"")
    assert {"code", "message", "hint", "request_id"} == set(body["error"])
    assert body["error"]["request_id"] == refused.value.response.headers["x-request-id"]
    return refused.value.response.status_code, body["error"]["code"]


async def open_terminal(node: Node, *command: str) -> str:
    """Its path."""
    box = (await node.create(SandboxSpec())).id
    terminal = await node.open_terminal(box, TerminalSpec(command=command))
    return f"/v1/sandboxes/{box}/terminals/{terminal.id}"


async def test_without_a_key_no_web_page_gets_in(native: Node, serving: Serve) -> None:
    address = await serving(native)
    url = f"ws://{address}{await open_terminal(native, 'cat')}"
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example", "http://localhost.evil.example:80"):
        assert await refusal(url, Origin=origin) == (401, "unauthorized")
    for allowed in ({}, {"Origin": "http://localhost:3000"}):
        async with connect(url, additional_headers=allowed, proxy=None) as link:
            await link.send(b"typed\n")
            assert b"typed\r\n" in await link.recv()  # the control: it is the origin that is refused
            await link.close()
    # A name that leads to this machine, as a page of its own would have it.
    reader, writer = await asyncio.open_connection(*address.split(":"))
    words = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    words += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    writer.write(f"GET {url.removeprefix(f'ws://{address}')} HTTP/1.1\r\nHost: evil.example\r\n{words}\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_with_a_key_nobody_is_let_in_without_it(native: Node, serving: Serve) -> None:
    address = await serving(native, "sesame")
    url = f"ws://{address}{await open_terminal(native, 'cat')}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        assert await refusal(url, **headers) == (401, "unauthorized")
    async with connect(url, additional_headers={"Authorization": "Bearer sesame"}, proxy=None) as link:
        await link.send(b"typed\n")
        assert b"typed\r\n" in await link.recv()
    box, terminal = url.split("/")[-3], url.split("/")[-1]
    wrong, right = HttpNode(f"http://{address}", "wrong"), HttpNode(f"http://{address}", "sesame")
    with pytest.raises(Unauthorized):
        await wrong.attach_terminal(box, terminal)
    await (await right.attach_terminal(box, terminal)).close()
    await wrong.close()
    await right.close()


async def test_what_is_not_there_is_said(fake: Node, serving: Serve) -> None:
    address = await serving(fake)
    box = (await fake.create(SandboxSpec())).id
    assert await refusal(f"ws://{address}/v1/sandboxes/{box}/terminals/t-0") == (404, "not_found")
    assert await refusal(f"ws://{address}/v1/sandboxes/sb-0/terminals/t-0") == (404, "not_found")
    for nowhere in (f"/v1/sandboxes/{box}", "/v1/nothing", "/healthz", "/"):
        assert await refusal(f"ws://{address}{nowhere}") == (404, "not_found")
    for wrong in ("replay=many", "replay=-1", "watch=perhaps"):
        assert await refusal(f"ws://{address}/v1/sandboxes/{box}/terminals/t-0?{wrong}") == (400, "invalid")
    await fake.destroy(box)
    assert await refusal(f"ws://{address}/v1/sandboxes/{box}/terminals/t-0") == (410, "ended")
    node = HttpNode(f"http://{address}")
    with pytest.raises(NotFound, match="no sandbox sb-0"):
        await node.attach_terminal("sb-0", "t-0")
    silent = HttpNode("http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        await silent.attach_terminal(box, "t-0")
    await node.close()
    await silent.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"resize": 7}', '{"resize": {"rows": 0}}', '{"more": 1}', "\x00"])
async def test_words_that_are_none_are_refused_on_the_socket(native: Node, serving: Serve, text: str) -> None:
    address = await serving(native)
    path = await open_terminal(native, "cat")
    async with connect(f"ws://{address}{path}", proxy=None) as link:
        await link.send(text)
        assert json.loads(await told(link))["error"]["code"] == "invalid"
        with pytest.raises(ConnectionClosed):
            await link.recv()
    async with connect(f"ws://{address}{path}", proxy=None) as link:  # the terminal is as it was
        await link.send(b"typed\n")
        assert b"typed\r\n" in await link.recv()


async def told(link: ClientConnection) -> str:
    while isinstance(message := await asyncio.wait_for(link.recv(), 30), bytes):
        pass
    return message


async def test_frames_that_are_too_large_end_the_connection_only(native: Node, serving: Serve) -> None:
    address = await serving(native)
    path = await open_terminal(native, "sh", "-c", "stty raw -echo; exec wc -c")
    async with connect(f"ws://{address}{path}", proxy=None) as link:
        with pytest.raises(ConnectionClosed):
            await link.send(b"x" * (MOST_FRAME_BYTES + 1))
            await asyncio.wait_for(link.recv(), 30)
    async with connect(f"ws://{address}{path}", proxy=None):
        pass


async def test_they_take_room_and_give_it_back(native: Node, serving: Serve) -> None:
    room = asgi.Room(2)
    address = await serving(native, None, room)
    url = f"ws://{address}{await open_terminal(native, 'cat')}?watch=true"
    for _ in range(3):
        first, second = await connect(url, proxy=None), await connect(url, proxy=None)
        with pytest.raises((OSError, InvalidMessage)):
            await connect(url, proxy=None)
        assert not room.take()
        await first.close()
        second.transport.abort()  # as a program that is killed
        for _ in range(100):
            if room.take():
                room.leave()
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
    assert room.take() and room.take() and not room.take()


async def test_a_caller_that_vanishes_is_attached_no_more(native: Node, serving: Serve) -> None:
    address = await serving(native)
    path = await open_terminal(native, "sh", "-c", "while :; do echo on; done")
    link = await connect(f"ws://{address}{path}", proxy=None)
    assert await link.recv()
    box = path.split("/")[3]
    assert [info.attached for info in await native.terminals(box)] == [True]
    link.transport.abort()
    for _ in range(600):
        if not any(info.attached for info in await native.terminals(box)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it is attached still")


async def test_they_are_told_of_as_every_request_is(
    native: Node, serving: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(native)
    address = await serving(native, app=app)
    path = await open_terminal(native, "cat")
    caplog.set_level(logging.INFO, LOGGER.name)
    async with connect(f"ws://{address}{path}", additional_headers={"X-Request-Id": "mine"}, proxy=None) as link:
        assert link.response is not None
        assert link.response.headers["x-request-id"] == "mine"
        await link.send(b"typed\n")
        assert b"typed\r\n" in await link.recv()
        draining = asyncio.create_task(app.state.work.drain(30))
        await asyncio.sleep(0.1)
        assert not draining.done()  # it is waited for, as every request
        assert await refusal(f"ws://{address}{path}") == (503, "unreachable")
    await asyncio.wait_for(draining, 10)
    told = [record.__dict__["fields"] for record in caplog.records if record.message == "request"]
    first = next(each for each in told if each["request"] == "mine")
    assert (first["method"], first["status"], first["error"]) == ("GET", 101, None)
    assert (first["route"], first["sandbox"]) == (
        "/v1/sandboxes/{sandbox_id}/terminals/{terminal_id}",
        path.split("/")[3],
    )
    assert first["received"] == len(b"typed\n")
    assert first["sent"] >= len(b"typed\r\n")
    assert b'status="101"' in app.state.metrics.text({}, ())


async def test_a_key_that_is_revoked_sees_no_more(tmp_path: Path, native: Node, serving: Serve) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.create(None, Scope.RUN, Quota(), None)  # so that one is left
    made, words = keys.create(None, Scope.READ, Quota(), None)
    address = await serving(native, app=create_app(native, keys=keys))
    path = await open_terminal(native, "cat")
    mine = await native.attach_terminal(path.split("/")[3], path.split("/")[-1])
    authorization = {"Authorization": f"Bearer {words}"}
    async with connect(f"ws://{address}{path}?watch=true", additional_headers=authorization, proxy=None) as link:
        await mine.write(b"before\n")
        while b"before" not in await link.recv():
            pass
        keys.revoke(made.id)
        await mine.write(b"secret\n")
        last = await link.recv()
        while isinstance(last, bytes):
            assert b"secret" not in last
            last = await link.recv()
        assert json.loads(last)["error"]["code"] == "unauthorized"
    await mine.close()


async def test_a_key_that_is_revoked_types_no_more(tmp_path: Path, native: Node, serving: Serve) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.create(None, Scope.RUN, Quota(), None)  # so that one is left
    made, words = keys.create(None, Scope.RUN, Quota(), 0.1)  # at such a rate each frame must not count as a request
    address = await serving(native, app=create_app(native, keys=keys))
    path = await open_terminal(native, "cat")
    authorization = {"Authorization": f"Bearer {words}"}
    async with connect(f"ws://{address}{path}", additional_headers=authorization, proxy=None) as link:
        for _ in range(5):
            await link.send(b"before\n")
        while b"before" not in await link.recv():
            pass
        keys.revoke(made.id)
        await link.send(b"after\n")
        error = json.loads(await told(link))["error"]
        assert (error["code"], bool(error["request_id"])) == ("unauthorized", True)
        with pytest.raises(ConnectionClosed):
            await link.recv()
    link_now = await native.attach_terminal(path.split("/")[3], path.split("/")[-1])
    assert b"after" not in await link_now.read()
    await link_now.close()


async def test_a_key_that_only_looks_may_watch(tmp_path: Path, native: Node, serving: Serve) -> None:
    keys = Keys(tmp_path / "keys.json")
    words = keys.create(None, Scope.READ, Quota(), None)[1]
    address = await serving(native, app=create_app(native, keys=keys))
    path = await open_terminal(native, "sh", "-c", "echo shown; exec cat")
    url, authorization = f"ws://{address}{path}", {"Authorization": f"Bearer {words}"}
    assert await refusal(url, **authorization) == (403, "forbidden")
    async with connect(f"{url}?watch=true", additional_headers=authorization, proxy=None) as link:
        assert b"shown" in await link.recv()
        await link.send(b"typed\n")
        assert json.loads(await told(link))["error"]["code"] == "invalid"
    node = HttpNode(f"http://{address}", words)
    box, terminal = path.split("/")[3], path.split("/")[-1]
    with pytest.raises(Forbidden, match="may watch"):
        await node.attach_terminal(box, terminal)
    watching = await node.attach_terminal(box, terminal, watch=True)
    assert b"shown" in await watching.read()
    await watching.close()
    await node.close()

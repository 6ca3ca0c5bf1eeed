"""Promises of the HTTP API, spoken to as any program would:

1. Every error is {"error": {"code", "message", "hint", "request_id"}} with a fitting status; wrong words are named.
2. With a key nothing but /healthz answers without it; without one only programs of this machine get in, no web page.
3. A body over the limit is refused, with a length or without.
4. The routes of the first version exist and are in the OpenAPI document.
5. An image that is sent leaves room on the server's disk for others.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sandlot import asgi
from sandlot.drivers.fake import FakeDriver
from sandlot.node.node import Node
from sandlot.server.app import MOST_BODY_BYTES, create_app


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


async def client_of(app: Any) -> tuple[asgi.Served, httpx2.AsyncClient]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return await asgi.serve(listener, app), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}")


@pytest.fixture
async def http(node: Node) -> AsyncIterator[httpx2.AsyncClient]:
    served, client = await client_of(create_app(node))
    yield client
    await client.aclose()
    served.close()


def fault(answer: httpx2.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "hint", "request_id"}
    assert error["code"] == code
    assert error["request_id"] == answer.headers["x-request-id"]
    return str(error["message"])


async def test_a_sandbox_s_life_in_json(http: httpx2.AsyncClient) -> None:
    made = await http.post("/v1/sandboxes", json={"env": {"A": "1"}})
    assert made.status_code == 201
    box = f"/v1/sandboxes/{made.json()['id']}"
    assert [info["id"] for info in (await http.get("/v1/sandboxes")).json()] == [made.json()["id"]]
    assert (await http.put(f"{box}/files", params={"path": "/root/f"}, content=b"\x00\xff")).status_code == 204
    assert (await http.get(f"{box}/files", params={"path": "/root/f"})).content == b"\x00\xff"
    stdin = base64.b64encode(b"\xfe\x00").decode()
    result = (await http.post(f"{box}/run", json={"argv": ["cat"], "stdin": stdin})).json()
    assert (result["exit_code"], result["out"]) == (0, {"data": stdin, "total": 2})
    assert (await http.post(f"{box}/routes/8484", json={"url": "http://127.0.0.1:9"})).status_code == 204
    assert (await http.get("/v1/ledger")).json()["created"] == 1
    assert (await http.get("/v1/capabilities")).json()[0]["state"] == "kept"
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    ended = (await http.delete(box)).json()
    assert (ended["state"], ended["ending"]) == ("ended", "exit")
    assert (await http.delete(box)).json() == ended
    assert "was closed by its owner" in fault(await http.post(f"{box}/run", json={"argv": ["true"]}), 410, "ended")


async def test_wrong_words_are_named(http: httpx2.AsyncClient) -> None:
    async def create(**body: Any) -> str:
        return fault(await http.post("/v1/sandboxes", json=body), 400, "invalid")

    assert "nmae" in await create(nmae="x")
    assert "limits.memory" in await create(limits={"memory": "lots"})
    assert "labels" in await create(labels=7)
    box = f"/v1/sandboxes/{(await http.post('/v1/sandboxes', json={})).json()['id']}"
    assert "argv" in fault(await http.post(f"{box}/run", json={"argv": []}), 400, "invalid")
    json_type = {"content-type": "application/json"}
    for text in (
        '{"lifetime": "inf"}',
        '{"idle_timeout": 1e400}',
        '{"limits": {"cpus": "nan"}}',
        '{"lifetime": 1e308}',
    ):
        fault(await http.post("/v1/sandboxes", content=text, headers=json_type), 400, "invalid")
    timeout = '{"argv": ["true"], "timeout": 1e400}'
    assert "timeout" in fault(await http.post(f"{box}/run", content=timeout, headers=json_type), 400, "invalid")
    assert "stdin" in fault(await http.post(f"{box}/run", json={"argv": ["cat"], "stdin": "%"}), 400, "invalid")
    assert "path" in fault(await http.get(f"{box}/files"), 400, "invalid")
    assert "port" in fault(await http.post(f"{box}/routes/70000", json={"url": "http://x"}), 400, "invalid")
    for url in ("file:///etc", "http://", "http://\x87", "http://[::1", "http://x:99999"):
        assert "url" in fault(await http.post(f"{box}/routes/80", json={"url": url}), 400, "invalid")
    for headers in ({"a b": "c"}, {"": "c"}, {"a": "b\r\nc: d"}, {"a": "\u20ac"}, {"a": "\0"}):
        wrong = {"url": "http://127.0.0.1:9", "headers": headers}
        assert "headers" in fault(await http.post(f"{box}/routes/80", json=wrong), 400, "invalid")
    assert "ending" in fault(await http.delete(box, params={"ending": "boredom"}), 400, "invalid")
    assert "JSON" in fault(await http.post("/v1/sandboxes", content=b"{", headers=json_type), 400, "invalid")
    fault(await http.post("/v1/sandboxes", content=b"\xff\xfe", headers=json_type), 400, "invalid")
    assert "there is no GET /nowhere" in fault(await http.get("/nowhere"), 404, "not_found")
    assert "PATCH" in fault(await http.patch("/v1/sandboxes"), 405, "invalid")


async def test_an_image_whose_name_ends_like_an_export_is_an_image(http: httpx2.AsyncClient) -> None:
    said = fault(await http.get("/v1/images/ghcr.io%2Fowner%2Ftar"), 404, "not_found")
    assert "ghcr.io/owner/tar" in said
    said = fault(await http.get("/v1/images/ghcr.io%2Fowner/tar"), 404, "not_found")
    assert "ghcr.io/owner" in said
    assert "tar" not in said


async def test_with_a_key_nothing_answers_without_it(node: Node) -> None:
    served, client = await client_of(create_app(node, api_key="sesame"))
    async with client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
            fault(await client.get("/v1/sandboxes", headers=headers), 401, "unauthorized")
            fault(await client.get("/openapi.json", headers=headers), 401, "unauthorized")
        assert (await client.get("/healthz")).status_code == 200
        right = {"authorization": "Bearer sesame", "host": "box.example", "origin": "https://box.example"}
        assert (await client.get("/v1/sandboxes", headers=right)).json() == []
    served.close()


async def test_without_a_key_no_web_page_gets_in(http: httpx2.AsyncClient) -> None:
    for headers in (
        {"host": "evil.example"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "["},
    ):
        fault(await http.post("/v1/sandboxes", json={}, headers=headers), 401, "unauthorized")
    for headers in ({"host": "localhost:1"}, {"host": "[::1]:80"}, {"origin": "http://127.0.0.1:3000"}):
        assert (await http.post("/v1/sandboxes", json={}, headers=headers)).status_code == 201


async def test_a_body_over_the_limit_is_refused(http: httpx2.AsyncClient) -> None:
    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * (1 << 20)

    box = f"/v1/sandboxes/{(await http.post('/v1/sandboxes', json={})).json()['id']}"
    stdin = f"{box}/commands/none/stdin"
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(f"POST {stdin} HTTP/1.1\r\nhost: localhost\r\n".encode())
    writer.write(b"content-length: %d\r\n\r\n" % (MOST_BODY_BYTES + 1))  # and nothing of it is awaited
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"larger" in answer
    writer.close()
    over = (MOST_BODY_BYTES >> 20) + 1
    assert "larger" in fault(await http.post(stdin, content=chunks(over)), 400, "invalid")
    as_json = {"content-type": "application/json"}
    assert "larger" in fault(await http.post("/v1/sandboxes", content=chunks(over), headers=as_json), 400, "invalid")
    path = {"path": "/root/f"}  # files have none
    assert (await http.put(f"{box}/files", params=path, content=chunks(over))).status_code == 204
    assert len((await http.get(f"{box}/files", params=path)).content) == over << 20


async def test_the_document_names_every_route(http: httpx2.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    routes = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert routes == {
        "POST /v1/sandboxes",
        "GET /v1/sandboxes",
        "POST /v1/sandboxes/batch",
        "GET /v1/sandboxes/{sandbox_id}",
        "GET /v1/sandboxes/{sandbox_id}/wait",
        "GET /v1/sandboxes/{sandbox_id}/stats",
        "DELETE /v1/sandboxes/{sandbox_id}",
        "POST /v1/sandboxes/{sandbox_id}/run",
        "POST /v1/sandboxes/{sandbox_id}/commands",
        "GET /v1/sandboxes/{sandbox_id}/commands",
        "GET /v1/sandboxes/{sandbox_id}/commands/{command_id}/wait",
        "GET /v1/sandboxes/{sandbox_id}/commands/{command_id}/output",
        "POST /v1/sandboxes/{sandbox_id}/commands/{command_id}/signal",
        "POST /v1/sandboxes/{sandbox_id}/commands/{command_id}/stdin",
        "POST /v1/sandboxes/{sandbox_id}/shells",
        "GET /v1/sandboxes/{sandbox_id}/shells",
        "DELETE /v1/sandboxes/{sandbox_id}/shells/{shell_id}",
        "POST /v1/sandboxes/{sandbox_id}/shells/{shell_id}/run",
        "POST /v1/sandboxes/{sandbox_id}/shells/{shell_id}/interrupt",
        "GET /v1/sandboxes/{sandbox_id}/shells/{shell_id}/commands/{command_id}",
        "POST /v1/sandboxes/{sandbox_id}/terminals",
        "GET /v1/sandboxes/{sandbox_id}/terminals",
        "DELETE /v1/sandboxes/{sandbox_id}/terminals/{terminal_id}",
        "POST /v1/sandboxes/{sandbox_id}/reset",
        "POST /v1/sandboxes/{sandbox_id}/snapshot",
        "POST /v1/sandboxes/{sandbox_id}/fork",
        "POST /v1/sandboxes/{sandbox_id}/pause",
        "POST /v1/sandboxes/{sandbox_id}/resume",
        "GET /v1/sandboxes/{sandbox_id}/diff",
        "GET /v1/images",
        "GET /v1/images/{name}",
        "PUT /v1/images/{name}",
        "POST /v1/images/pull",
        "POST /v1/images/prune",
        "DELETE /v1/images/{name}",
        "GET /v1/images/{name}/tar",
        "POST /v1/images/{image}/tag",
        "PUT /v1/sandboxes/{sandbox_id}/tree",
        "GET /v1/pools",
        "GET /v1/sandboxes/{sandbox_id}/files",
        "PUT /v1/sandboxes/{sandbox_id}/files",
        "POST /v1/sandboxes/{sandbox_id}/files",
        "PATCH /v1/sandboxes/{sandbox_id}/files",
        "DELETE /v1/sandboxes/{sandbox_id}/files",
        "GET /v1/sandboxes/{sandbox_id}/files/stat",
        "GET /v1/sandboxes/{sandbox_id}/files/list",
        "GET /v1/sandboxes/{sandbox_id}/files/glob",
        "GET /v1/sandboxes/{sandbox_id}/files/find",
        "GET /v1/sandboxes/{sandbox_id}/files/watch",
        "PUT /v1/sandboxes/{sandbox_id}/files/directory",
        "POST /v1/sandboxes/{sandbox_id}/files/move",
        "GET /v1/sandboxes/{sandbox_id}/tree",
        "POST /v1/sandboxes/{sandbox_id}/routes/{port}",
        "GET /v1/capabilities",
        "GET /v1/ledger",
        "GET /healthz",
        "GET /readyz",
        "GET /metrics",
    }
    assert {"SandboxSpec", "Run", "RunResult", "Info", "Upstream", "Capability"} <= set(
        document["components"]["schemas"]
    )


async def test_an_image_that_is_sent_leaves_room_for_others(node: Node, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8M", "none", str(spool)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    served, client = await client_of(create_app(node, spool=spool))
    try:
        answer = await client.put("/v1/images/large", content=bytes((8 << 20) - 4096))
        assert "no space left to keep the image that is sent" in fault(answer, 507, "host_fault")
        answer = await client.put("/v1/images/small", content=bytes(7 << 20))
        assert "no root file system" in fault(answer, 422, "unsupported")
    finally:
        await client.aclose()
        served.close()
        subprocess.run(["umount", "--lazy", str(spool)], check=True)

"""Promises of files over HTTP, spoken to as any program would:

1. A range of a file is 206 and those bytes, one outside it is 416; what is no range, or several, is the whole.
2. Who names the tag of what it has gets 304 and no bytes; a range of something else than it has is the whole.
3. A file of any size goes in and out, and the server holds little of it at a time.
4. Names that are no UTF-8 are `%XX` in a URL and `\\udcXX` in JSON.
5. Events come as they happen, and their caller's leaving is noticed.
6. A body that breaks off changes nothing; every mistake is a 4xx that says which.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest

from sandlot import asgi
from sandlot.drivers.fake import FakeDriver
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox
from sandlot.server.app import create_app
from sandlot.server.contents import wanted
from tests.support.server import Server

DATA = bytes(range(256)) * 10_000  # 2.4 MiB: more than is answered in one go


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


@pytest.fixture
async def box(node: Node) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of one sandbox's files."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = await asgi.serve(listener, create_app(node))
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        made = (await client.post("/v1/sandboxes", json={})).json()
        client.base_url = httpx2.URL(f"http://127.0.0.1:{port}/v1/sandboxes/{made['id']}")
        yield client
    served.close()


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", None),
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=90-1000", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=100-", (100, 100)),
        ("bytes=9223372036854775807-", ((1 << 63) - 1, 100)),
        ("bytes=-0", (100, 100)),
        ("bytes=9-0", None),
        ("bytes=-", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=x-", None),
        ("bytes=99999999999999999999-", None),
    ],
)
def test_what_is_a_range_and_what_is_none(header: str, found: tuple[int, int] | None) -> None:
    assert wanted(header, 100) == found


@pytest.mark.parametrize("data", [DATA, DATA[:5000]], ids=["long", "short"])
async def test_a_range_is_those_bytes(box: httpx2.AsyncClient, data: bytes) -> None:
    path = {"path": "/root/f"}
    assert (await box.put("/files", params=path, content=data)).status_code == 204
    whole = await box.get("/files", params=path)
    assert (whole.status_code, whole.content, whole.headers["accept-ranges"]) == (200, data, "bytes")
    assert whole.headers["content-length"] == str(len(data))
    for header, begin, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=1000-3999", 1000, 4000),
        ("bytes=-7", len(data) - 7, len(data)),
        ("bytes=5-", 5, len(data)),
    ):
        part = await box.get("/files", params=path, headers={"range": header})
        assert (part.status_code, part.content) == (206, data[begin:end])
        assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/{len(data)}"
    outside = await box.get("/files", params=path, headers={"range": f"bytes={len(data)}-"})
    assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{len(data)}")
    assert outside.json()["error"]["code"] == "invalid"
    several = await box.get("/files", params=path, headers={"range": "bytes=0-1,4-5"})
    assert (several.status_code, several.content) == (200, data)


async def test_who_has_it_gets_no_bytes(box: httpx2.AsyncClient) -> None:
    path = {"path": "/root/f"}
    await box.put("/files", params=path, content=DATA)
    tag = (await box.get("/files", params=path)).headers["etag"]
    stat = (await box.get("/files/stat", params=path)).json()
    assert tag == f'"{stat["etag"]}"'
    for known in (tag, f'"x", W/{tag}', "*"):
        same = await box.get("/files", params=path, headers={"if-none-match": known})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    part = await box.get("/files", params=path, headers={"range": "bytes=0-9", "if-range": tag})
    assert (part.status_code, part.content) == (206, DATA[:10])
    await box.put("/files", params=path, content=DATA[1:])
    other = await box.get("/files", params=path, headers={"if-none-match": tag})
    assert (other.status_code, other.content) == (200, DATA[1:])
    whole = await box.get("/files", params=path, headers={"range": "bytes=0-9", "if-range": tag})
    assert (whole.status_code, whole.content) == (200, DATA[1:])


async def test_a_name_is_any_bytes(box: httpx2.AsyncClient) -> None:
    name = "/root/caf%E9%0A"
    assert (await box.put(f"/files?path={name}", content=b"text")).status_code == 204
    assert (await box.get(f"/files?path={name}")).content == b"text"
    listed = await box.get("/files/list?path=/root")
    assert [each["path"] for each in json.loads(listed.content)] == ["/root/caf\udce9\n"]
    assert b'"/root/caf\\udce9\\n"' in listed.content
    assert (await box.post(f"/files/move?path={name}&to={name}2")).status_code == 204
    found = await box.get(f"/files/find?text=text&path={name}2")
    assert found.json()["hits"] == [{"path": "/root/caf\udce9\n2", "line": 1, "column": 1, "text": "text"}]
    assert (await box.delete(f"/files?path={name}2")).status_code == 204
    missing = await box.get(f"/files?path={name}2")
    assert (missing.status_code, "\\udce9" in missing.text) == (404, True)


async def test_a_mistake_says_which(box: httpx2.AsyncClient) -> None:
    await box.put("/files/directory", params={"path": "/root/d/e"})
    await box.put("/files", params={"path": "/root/f"}, content=b"")
    for method, path, status in (
        ("GET", "/files", 400),
        ("GET", "/files?path=f", 400),
        ("GET", "/files?path=/root/none", 404),
        ("GET", "/files?path=/root", 400),
        ("GET", "/files/stat?path=/root/none", 404),
        ("GET", "/files/list?path=/root/f", 400),
        ("GET", "/files/glob?pattern=*", 400),
        ("GET", "/files/glob?pattern=/*&limit=0", 400),
        ("GET", "/files/find?path=/root", 400),
        ("GET", "/files/find?path=/root&text=(&regex=true", 400),
        ("GET", "/files/watch?path=/root/none", 404),
        ("GET", "/tree?path=/root/none", 404),
        ("PUT", "/files?path=/root", 400),
        ("PUT", "/files?path=/x&mode=4755", 400),
        ("POST", "/files?path=/root/f/g", 409),
        ("PUT", "/files/directory?path=/root/f", 409),
        ("POST", "/files/move?path=/root/f", 400),
        ("POST", "/files/move?path=/root/f&to=/root/d", 409),
        ("DELETE", "/files?path=/root/d", 409),
        ("DELETE", "/files?path=/root/none", 404),
        ("PATCH", "/files?path=/root/none&mode=1", 404),
        ("PATCH", "/files?path=/root/f&user=-1", 400),
    ):
        answer = await box.request(method, path)
        assert answer.status_code == status, (method, path, answer.text)
        assert answer.json()["error"]["message"]


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (the server is in this loop)
            await asyncio.sleep(0)


async def test_a_body_that_breaks_off_changes_nothing(box: httpx2.AsyncClient, node: Node) -> None:
    (info,) = await node.list()
    await node.write_file(info.id, "/root/f", b"as it was")
    for length in (b"content-length: 5000000\r\n", b"transfer-encoding: chunked\r\n"):
        _, writer = await asyncio.open_connection(box.base_url.host, box.base_url.port)
        path = f"/v1/sandboxes/{info.id}/files?path=/root/f"
        writer.write(f"PUT {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + length + b"\r\n")
        writer.write(b"fff\r\n" + b"x" * 4095 + b"\r\n")
        await writer.drain()
        await soon(lambda: node._live[info.id].busy == 1)
        writer.close()
        await soon(lambda: node._live[info.id].busy == 0)
        assert await node.read_file(info.id, "/root/f") == b"as it was"


async def test_events_come_as_they_happen_until_nobody_listens(box: httpx2.AsyncClient, node: Node) -> None:
    (info,) = await node.list()
    async with box.stream("GET", "/files/watch", params={"path": "/root", "recursive": "true"}) as answer:
        lines = answer.aiter_lines()
        async with asyncio.timeout(10):
            assert json.loads(await anext(lines)) == {"kind": "watching", "path": "/root", "directory": True}
            await box.put("/files?path=/root/caf%E9", content=b"")
            assert json.loads(await anext(lines))["path"] == "/root/caf\udce9"
        assert node._live[info.id].watches == 1
    await soon(lambda: node._live[info.id].watches == 0)
    async with box.stream("GET", "/files/watch", params={"path": "/root"}) as answer:
        lines = answer.aiter_lines()
        async with asyncio.timeout(10):
            await anext(lines)
            await node.destroy(info.id)
            assert json.loads(await anext(lines))["error"]["code"] == "ended"


LARGE = 200 << 20
MOST_GROWTH = 32 << 20


def peak(pid: int, *, begin: bool = False) -> int:
    """The most memory that a process has had since `begin` (bytes)."""
    if begin:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) << 10


async def test_a_large_file_is_never_held_in_memory(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    large, back = tmp_path / "large", tmp_path / "back"
    with large.open("wb") as file:
        file.truncate(LARGE)
        os.pwrite(file.fileno(), b"middle", LARGE // 2)
    told: list[tuple[int, int | None]] = []
    async with Server(tmp_path / "state") as server:
        assert server.process is not None
        pids = (os.getpid(), server.process.pid)
        async with await Sandbox.create(url=server.url) as box:
            await box.upload(__file__, "/root/small")  # what is loaded for the first time is no growth
            await box.download("/root/small", tmp_path / "small")
            before = [peak(pid, begin=True) for pid in pids]
            await box.upload(large, "/root/large", progress=lambda *each: told.append(each))
            await box.download("/root/large", back, progress=lambda *each: told.append(each))
            growth = [peak(pid) - was for pid, was in zip(pids, before, strict=True)]
            assert (await box.stat_file("/root/large")).size == LARGE
            assert await box.read_file("/root/large", LARGE // 2, 6) == b"middle"
    assert max(growth) < MOST_GROWTH, growth
    assert back.stat().st_size == LARGE
    with back.open("rb") as file:
        assert os.pread(file.fileno(), 8, LARGE // 2 - 1) == b"\0middle\0"
    assert told[-1] == (LARGE, LARGE)
    assert [each for each in told if each == (LARGE, LARGE)] == [(LARGE, LARGE)] * 2
    large.unlink()
    back.unlink()


async def test_control_what_is_read_at_once_is_held_in_memory(tmp_path: Path, native_reason: str | None) -> None:
    """The same measure sees 64 MiB that are held."""
    if native_reason:
        pytest.skip(native_reason)
    async with Server(tmp_path / "state") as server, await Sandbox.create(url=server.url) as box:
        before = peak(os.getpid(), begin=True)
        await box.write_file("/root/f", bytes(48 << 20))
        assert len(await box.read_file("/root/f")) == 48 << 20
        assert peak(os.getpid()) - before > MOST_GROWTH

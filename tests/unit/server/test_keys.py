"""Promises of API keys:

1. What is kept of a key is a hash; the file is its owner's alone, and whoever reads it sees a whole one.
2. A key that is made or revoked counts at the next request of a server that runs, and ends what goes on with it; the
   last one's end opens nothing.
3. A key may look, or run too, at a rate; what it may not is refused with 403 or 429 and when to come back.
4. A file that others may write, or that is damaged, lets nobody in.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from sandlot import asgi
from sandlot.api import Quota, Run, SandboxSpec
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Forbidden, HostFault, NotFound, QuotaExceeded, Unauthorized
from sandlot.node.node import Node
from sandlot.server.app import create_app
from sandlot.server.keys import Keys, Scope
from tests.support.server import Server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.json"


@pytest.fixture
async def url(tmp_path: Path, file: Path) -> AsyncIterator[str]:
    keys = Keys(file)
    async with Node(FakeDriver(), tmp_path / "nodes", quota_of=keys.quota) as node:
        listener = socket.create_server(("127.0.0.1", 0))
        served = await asgi.serve(listener, create_app(node, keys=keys))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        served.close()


def made(file: Path, tenant: str | None = None, scope: Scope = Scope.RUN, **quota: float) -> str:
    rate = quota.pop("rate", None)
    return Keys(file).create(tenant, scope, Quota.model_validate(quota), rate)[1]


async def test_what_is_kept_of_a_key_is_a_hash(file: Path) -> None:
    words = [made(file, "acme") for _ in range(3)]
    text = file.read_text()
    assert len(set(words)) == 3
    assert not any(key in text or key.removeprefix("sandlot-") in text for key in words)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(len(key) >= 43 for key in words)  # 256 bits
    found = Keys(file)
    assert [found.caller(key.encode()).tenant for key in words] == ["acme"] * 3  # type: ignore[union-attr]
    assert found.caller(b"") is found.caller(b"sandlot-") is found.caller(words[0][:-1].encode()) is None
    assert [path.name for path in file.parent.iterdir()] == ["keys.json"]


def test_many_at_once_lose_none(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        words = list(pool.map(lambda n: made(file, f"t{n}"), range(24)))
    keys = Keys(file)
    assert len(keys.all()) == 24
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: Keys(file).revoke(key.id), keys.all()[:12]))
    assert sum(Keys(file).caller(key.encode()) is not None for key in words) == 12
    with pytest.raises(NotFound, match="no key k-0"):
        keys.revoke("k-0")


async def test_keys_count_from_the_next_request_on(url: str, file: Path) -> None:
    async with httpx2.AsyncClient(base_url=url) as client:

        async def asked(key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await client.get("/v1/sandboxes", headers=headers)).status_code

        assert await asked(None) == 200  # without any key whoever is on this machine may
        one = made(file)
        assert (await asked(None), await asked("wrong"), await asked(one)) == (401, 401, 200)
        other = made(file)
        assert (await asked(one), await asked(other)) == (200, 200)
        for key in Keys(file).all():
            Keys(file).revoke(key.id)
        assert (await asked(one), await asked(other), await asked(None)) == (401, 401, 401)
        file.unlink()
        assert await asked(None) == 401
        refused = await client.get("/v1/sandboxes", headers={"authorization": f"Basic {one}"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await client.get("/healthz")).status_code == 200
    node = HttpNode(url)
    with pytest.raises(Unauthorized):
        await node.list()
    await node.close()


@dataclass
class Revoked:
    """A sandbox, and somebody who looks at it until their key is revoked."""

    node: HttpNode
    box: str
    client: httpx2.AsyncClient
    path: str
    revoke: Callable[[], None]


@pytest.fixture
async def revoked(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Revoked]:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "served"
    state.mkdir(mode=0o700)
    keys = Keys(state / "keys.json")
    words = keys.create(None, Scope.RUN, Quota(), None)[1]
    shown, theirs = keys.create(None, Scope.READ, Quota(), None)
    async with Server(state, "--drain-seconds", "0") as server:
        node = HttpNode(server.url, words)
        headers = {"authorization": f"Bearer {theirs}"}
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
            box = (await node.create(SandboxSpec())).id
            yield Revoked(node, box, client, f"/v1/sandboxes/{box}", lambda: keys.revoke(shown.id))
        await node.close()


async def test_output_that_is_followed_with_a_key_that_is_revoked_ends(revoked: Revoked) -> None:
    node, box = revoked.node, revoked.box
    for key, said in (("spoke", "echo before;"), ("silent", "")):
        await node.launch(box, Run(argv=("sh", "-c", f"{said} read line; echo $line"), key=key, stdin_open=True))
    spoke, silent = f"{revoked.path}/commands/spoke", f"{revoked.path}/commands/silent"
    async with revoked.client.stream("GET", f"{spoke}/output") as answer:
        lines = answer.aiter_lines()
        assert "data" in await anext(lines)
        late = asyncio.create_task(revoked.client.get(f"{silent}/output"))  # of which nothing was told yet
        waiting = asyncio.create_task(revoked.client.get(f"{silent}/wait"))
        await asyncio.sleep(0.5)
        revoked.revoke()
        for key in ("spoke", "silent"):
            await node.write_stdin(box, key, b"secret\n", True)
        rest = [json.loads(line) async for line in lines]
    assert [each["error"]["code"] for each in rest] == ["unauthorized"]
    assert [json.loads(line)["error"]["code"] for line in (await late).text.splitlines()] == ["unauthorized"]
    assert ((await waiting).status_code, (await waiting).json()["error"]["code"]) == (401, "unauthorized")
    assert (await node.wait(box, "silent")).stdout == "secret\n"


async def test_files_that_are_watched_with_a_key_that_is_revoked_are_told_of_no_more(revoked: Revoked) -> None:
    async with revoked.client.stream("GET", f"{revoked.path}/files/watch?path=/root") as answer:
        lines = answer.aiter_lines()
        assert "watching" in await anext(lines)
        await revoked.node.write_file(revoked.box, "/root/before", b"")
        while "before" not in await anext(lines):
            pass
        await asyncio.sleep(0.5)
        revoked.revoke()
        await revoked.node.write_file(revoked.box, "/root/secret", b"")
        rest = [line async for line in lines]
    assert json.loads(rest[-1])["error"]["code"] == "unauthorized"
    assert not any("secret" in line for line in rest)


async def test_what_is_downloaded_with_a_key_that_is_revoked_breaks_off(revoked: Revoked) -> None:
    large = Run(argv=("sh", "-c", "head -c 60000000 /dev/zero >/root/f"))
    assert (await revoked.node.run(revoked.box, large)).exit_code == 0
    pieces = []
    async with AsyncExitStack() as held:  # all begin before it is revoked, and are read afterwards
        for path in ("tree", "files"):
            asked = revoked.client.stream("GET", f"{revoked.path}/{path}?path=/root/f")
            pieces.append((await held.enter_async_context(asked)).aiter_raw())
            assert await anext(pieces[-1])
        revoked.revoke()
        for rest in pieces:
            with pytest.raises(httpx2.RemoteProtocolError):
                async for _ in rest:
                    pass


async def test_a_key_that_may_look_changes_nothing(url: str, file: Path) -> None:
    running, reading = HttpNode(url, made(file)), HttpNode(url, made(file, scope=Scope.READ))
    box = await running.create(SandboxSpec())
    await running.write_file(box.id, "/root/f", b"seen")
    assert await reading.read_file(box.id, "/root/f") == b"seen"
    assert [info.id for info in await reading.list()] == [box.id]
    assert (await reading.counts())["created"] == 1
    async with httpx2.AsyncClient(base_url=url, headers=reading._headers) as client:
        document = (await client.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method in set(methods) - {"get", "head"}:
                path = path.replace("{sandbox_id}", box.id)
                answer = await client.request(method, path, json={})
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
    with pytest.raises(Forbidden, match="may look"):
        await reading.destroy(box.id)
    assert (await running.info(box.id)).state == "running"
    for node in (running, reading):
        await node.close()


async def test_a_key_that_may_look_ends_no_command_and_takes_no_result(
    tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "served"
    state.mkdir(mode=0o700)
    keys = Keys(state / "keys.json")
    (_, runs), (_, looks) = [keys.create(None, scope, Quota(), None) for scope in (Scope.RUN, Scope.READ)]
    async with Server(state, "--drain-seconds", "0") as server:
        node, looking = HttpNode(server.url, runs), HttpNode(server.url, looks)
        box = (await node.create(SandboxSpec())).id
        run = Run(argv=("sh", "-c", "sleep 2; echo done"), key="k", kill_on_disconnect=True)
        await node.launch(box, run)
        for path in ("wait", "output"):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = f"GET /v1/sandboxes/{box}/commands/k/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            writer.write(f"{head}authorization: Bearer {looks}\r\n\r\n".encode())
            await asyncio.sleep(0.3)
            writer.transport.abort()
            await asyncio.sleep(0.2)
        assert (await looking.wait(box, "k")).exit_code == 0
        for number in range(70):  # more than are kept of those that were received
            await node.run(box, Run(argv=("true",), key=f"k{number}"))
        assert "k" in [each.id for each in await node.commands(box)]
        assert (await node.run(box, run)).stdout == "done\n"
        assert "k" not in [each.id for each in await node.commands(box)]
        await node.close()
        await looking.close()


async def test_a_key_is_good_for_so_many_requests_a_second(url: str, file: Path) -> None:
    slow, free = HttpNode(url, made(file, rate=2)), HttpNode(url, made(file))
    outcomes = await asyncio.gather(*(slow.list() for _ in range(10)), return_exceptions=True)
    refused = [each for each in outcomes if isinstance(each, QuotaExceeded)]
    assert 7 <= len(refused) <= 8
    assert all(each.retry_after == 1 for each in refused)
    await asyncio.gather(*(free.list() for _ in range(50)))
    await asyncio.sleep(1)
    assert await slow.list() == []
    for node in (slow, free):
        await node.close()


async def test_a_quota_is_a_tenants(url: str, file: Path) -> None:
    made(file, "acme", Scope.READ)  # makes nothing, so it gives nothing
    few, also = HttpNode(url, made(file, "acme", boxes=1)), HttpNode(url, made(file, "acme", boxes=2))
    await few.create(SandboxSpec())
    await few.create(SandboxSpec())  # the tenant has what gives it most
    for node in (few, also):
        with pytest.raises(QuotaExceeded, match="2 of 2 sandboxes"):
            await node.create(SandboxSpec())
    Keys(file).revoke(next(key.id for key in Keys(file).all() if key.quota.boxes == 2))
    for info in await few.list():
        await few.destroy(info.id)
    await few.create(SandboxSpec())
    with pytest.raises(QuotaExceeded, match="1 of 1"):
        await few.create(SandboxSpec())
    for node in (few, also):
        await node.close()


async def test_a_file_that_cannot_be_trusted_lets_nobody_in(url: str, file: Path) -> None:
    key = made(file)
    good = file.read_text()
    node = HttpNode(url, key)
    assert await node.list() == []
    for damage in (
        lambda: file.chmod(0o622),
        lambda: file.write_text("{"),
        lambda: file.write_text("[]"),
        lambda: file.write_text(json.dumps({"keys": [{"id": 1}]})),
        lambda: file.write_text(good.replace('"run"', '"everything"')),
    ):
        damage()
        os.utime(file, ns=(1, file.stat().st_mtime_ns + 1_000_000))
        with pytest.raises(HostFault, match=r"keys\.json") as told:
            await node.list()
        assert str(file) in (told.value.hint or "")
        file.chmod(0o600)
        file.write_text(good)
        assert await node.list() == []
    await node.close()

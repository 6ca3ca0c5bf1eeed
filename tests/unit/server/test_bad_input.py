"""Promises about whoever calls a server badly, over a real one with real boxes: each mistake is a clear error, nothing
is lost, nothing hangs, and the sandbox and the server are as usable as before.

1. More than Linux passes to a program, or a word that is too long for it, is said as that; a shell takes it.
2. Five hundred connections at once are all answered.
3. Whoever reads slowly costs the server no memory, and holds up nobody but themselves.
4. Whoever vanishes in the middle leaves their command alone, unless it was to die with them.
5. What is cut short, or is no HTTP, costs a connection.
6. Names that are not UTF-8 are names.
7. A number that the kernel does not take is none that this server takes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from sandlot.api import Run, SandboxSpec, ShellRun
from sandlot.client import HttpNode
from sandlot.errors import SandboxEnded
from tests.support.server import Server


@pytest.fixture
async def server(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Server]:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    async with Server(state, "--drain-seconds", "0") as server:
        yield server


@pytest.fixture
async def node(server: Server) -> AsyncIterator[HttpNode]:
    node = server.node()
    yield node
    await node.close()


def memory(server: Server) -> int:
    """Bytes that are resident of the server's process."""
    assert server.process is not None
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def sh(text: str, **more: object) -> Run:
    return Run.model_validate({"argv": ("sh", "-c", text), **more})


async def usable(node: HttpNode, box: str) -> bool:
    return (await node.run(box, Run(argv=("echo", "usable")))).stdout == "usable\n"


async def test_more_than_linux_passes_on_is_said_as_that(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    big = {f"N{number}": "x" * 100_000 for number in range(100)}  # ten megabytes
    as_json = {"content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=server.url, headers=as_json) as client:
        for path, body in (
            ("/v1/sandboxes", {"env": big}),
            (f"/v1/sandboxes/{box}/run", {"argv": ["true"], "env": big}),
            (f"/v1/sandboxes/{box}/commands", {"argv": ["true"], "env": big}),
            (f"/v1/sandboxes/{box}/shells", {"env": big}),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")
            assert "env: 10000490 bytes are more than the 2097152" in answer.json()["error"]["message"]
        for words in (["sh", "-c", "x" * (17 << 20)], ["true", *["y" * 100_000] * 200]):
            answer = await client.post(f"/v1/sandboxes/{box}/run", json={"argv": words})
            assert answer.status_code == 400, answer.text
            assert "cannot be passed on" in answer.json()["error"]["message"]
    text = "true " + "word " * 200_000  # a megabyte
    for run in (sh(text), sh("true", env={"A": "x" * 200_000}), Run(argv=("true", *["y" * 100_000] * 30))):
        refused = await node.run(box, run)
        assert refused.exit_code == 126
        assert "Argument list too long (a word may have 128 KiB" in refused.stderr
    shell = await node.open_shell(box)
    assert (await node.run_in_shell(box, shell.id, ShellRun(command=text + "; echo end"))).stdout == "end\n"
    assert (await node.run(box, Run(argv=("sh",), stdin=f"{text}\necho end\n".encode()))).stdout == "end\n"
    assert await usable(node, box)


async def test_five_hundred_connections_at_once_are_answered(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    head = f"GET /v1/sandboxes/{box} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()

    async def ask(number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head[: number % len(head)])  # they all come in pieces
        await asyncio.sleep(0.2)
        writer.write(head[number % len(head) :])
        answer = await reader.read()
        writer.close()
        return answer

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(ask(number) for number in range(500)))
    assert all(answer.startswith(b"HTTP/1.1 200 ") and box.encode() in answer for answer in answers)
    results = await asyncio.gather(*(node.run(box, Run(argv=("echo", str(number)))) for number in range(200)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(200)]


async def stuck(server: Server, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Somebody who asks, and takes nothing of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_whoever_reads_slowly_costs_no_memory_and_holds_up_nobody(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    text = "head -c 300000000 /dev/zero; echo end"
    flood = (await node.launch(box, sh(text, output_cap=1 << 20))).id
    before = memory(server)
    followers = [await stuck(server, f"/v1/sandboxes/{box}/commands/{flood}/output") for _ in range(20)]
    result = await node.wait(box, flood)
    assert (result.exit_code, result.out.total) == (0, 300_000_004)
    assert memory(server) - before < 64 << 20
    assert await usable(node, box)
    async with asyncio.timeout(60):  # whoever goes on reading is told what they have missed
        reader, writer = followers[0]
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1 << 20)
            assert piece, "the answer breaks off"
            rest += piece
    chunks = [json.loads(line) for line in rest.splitlines() if line.startswith(b'{"stream"')]
    assert sum(chunk["lost"] + len(base64.b64decode(chunk["data"])) for chunk in chunks) == 300_000_004
    assert sum(chunk["lost"] for chunk in chunks) > 100_000_000
    assert base64.b64decode(chunks[-1]["data"]).endswith(b"end\n")
    for _, writer in followers:
        writer.transport.abort()
    assert await usable(node, box)


async def test_whoever_vanishes_leaves_their_command_alone_or_takes_it_along(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    text = "echo begun; i=0; while [ $i -lt 30 ]; do sleep 0.1; i=$((i+1)); done; echo end"
    for kept in (True, False):
        for path in ("output", "wait"):
            run = sh(text, key=f"{path}-{kept}", kill_on_disconnect=not kept)
            command = (await node.launch(box, run)).id
            there = f"/v1/sandboxes/{box}/commands/{command}/{path}"
            first, second = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            for _, writer in (first, second):
                writer.write(f"GET {there} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            await asyncio.sleep(0.5)
            first[1].transport.abort()
            await asyncio.sleep(0.3)
            (info,) = [each for each in await node.commands(box) if each.id == command]
            assert info.running  # somebody is still there
            second[1].transport.abort()
            if kept:
                assert (await node.wait(box, command)).stdout == "begun\nend\n"
            else:
                await asyncio.sleep(0.5)
                result = await node.run(box, run)
                assert (result.signal, result.stdout) == (9, "begun\n")
    assert "sleep" not in (await node.run(box, sh("ps -eo comm"))).stdout
    assert await usable(node, box)


async def test_whoever_vanishes_before_a_command_says_anything_takes_it_along(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    run = sh("sleep 30", key="quiet", kill_on_disconnect=True)
    await node.launch(box, run)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET /v1/sandboxes/{box}/commands/quiet/output HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    await asyncio.sleep(0.5)
    writer.transport.abort()
    await asyncio.sleep(0.5)
    assert (await asyncio.wait_for(node.run(box, run), 10)).signal == 9
    assert await usable(node, box)


async def test_the_last_line_of_a_stream_that_an_error_ends_names_its_request(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.launch(box, sh("echo begun; sleep 30", key="k"))
    async with httpx2.AsyncClient(base_url=server.url) as client:
        path = f"/v1/sandboxes/{box}/commands/k/output"
        async with client.stream("GET", path, headers={"x-request-id": "mine"}) as answer:
            lines = answer.aiter_lines()
            assert "data" in await anext(lines)
            await node.destroy(box)
            error = json.loads(await anext(lines))["error"]
    assert (error["code"], error["request_id"]) == ("ended", "mine")


@pytest.mark.parametrize("field", [{"image": "\ud800"}, {"image": "/x\ud800"}, {"image": "a:\ud800"}])
async def test_half_a_character_is_no_image(field: dict[str, object], server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    as_json = {"content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=server.url, headers=as_json) as client:
        for path, body in (("", field), (f"/{box}/reset", field), ("/batch", {"spec": field, "count": 1})):
            answer = await client.post(f"/v1/sandboxes{path}", content=json.dumps(body).encode())
            assert answer.status_code == 400, answer.text
            assert "half a character" in answer.json()["error"]["message"]
        volume = {"volumes": [{"source": "/x\ud800", "target": "/y"}]}
        answer = await client.post("/v1/sandboxes", content=json.dumps(volume).encode())
        assert answer.status_code == 400
    assert await usable(node, box)


async def test_what_is_cut_short_or_no_http_costs_a_connection(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    host = b"host: 127.0.0.1\r\n"
    post = b"POST /v1/sandboxes HTTP/1.1\r\n" + host + b"content-type: application/json\r\n"
    for sent, answered in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"HTTP/1.1 400 "),  # a client that speaks TLS
        (b"GET\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET / HTTP/9.9\r\n" + host + b"\r\n", b"HTTP/1.1 400 "),
        (post + b"content-length: -5\r\n\r\n", b"HTTP/1.1 400 "),
        (post + b"content-length: x\r\n\r\n", b"HTTP/1.1 400 "),
        (post + b"content-length: 7\r\n\r\n[[[[[[[", b"HTTP/1.1 400 "),
        (post + b"content-length: 200000\r\n\r\n" + b"[" * 200_000, b"HTTP/1.1 400 "),  # deeper than any parser likes
        (post + b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 400 "),
        (post + b"content-length: 100\r\n\r\n{", b""),  # and goes away
        (post + b"x: " + b"y" * 70_000 + b"\r\n\r\n", b""),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        if answered:
            async with asyncio.timeout(20):
                assert (await reader.read(13)) == answered, sent[:80]
        writer.transport.abort()
    assert len(await node.list()) == 1
    assert await usable(node, box)


async def test_names_that_are_not_utf_8_are_names(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    async with httpx2.AsyncClient(base_url=server.url) as client:
        files = f"/v1/sandboxes/{box}/files"
        assert (await client.put(f"{files}?path=/root/a%FFb", content=b"inside")).status_code == 204
        assert (await client.get(f"{files}?path=/root/a%FFb")).content == b"inside"
        lost = await client.get(f"{files}?path=/root/%C3%28")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
        for wrong in ("", "relative", "/root/%00"):
            answer = await client.get(f"{files}?path={wrong}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid"), wrong
    assert (await node.run(box, sh("cat /root/a*b"))).stdout == "inside"


async def test_a_number_past_what_the_kernel_takes_is_refused(server: Server, node: HttpNode) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.launch(box, sh("echo one; sleep 30", key="k"))
    await node.write_file(box, "/root/f", b"some")
    async with httpx2.AsyncClient(base_url=f"{server.url}/v1/sandboxes/{box}") as client:
        for number in (-(1 << 63), -1, 1 << 63, 1 << 64, 10**30):
            for method, path in (
                ("GET", f"/commands/k/output?out={number}"),
                ("GET", f"/commands/k/output?err={number}"),
                ("GET", f"/files/glob?pattern=/*&limit={number}"),
                ("GET", f"/files/find?text=x&limit={number}"),
                ("PUT", f"/files?path=/root/g&mode={number}"),
                ("PATCH", f"/files?path=/root/f&user={number}"),
                ("PATCH", f"/files?path=/root/f&group={number}"),
                ("PATCH", f"/files?path=/root/f&mode={number}"),
                ("PUT", f"/files/directory?path=/root/d&mode={number}"),
                ("PUT", f"/tree?path=/root&user={number}"),
                ("GET", f"/wait?timeout={number}"),
            ):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid"), (method, path)
            for path, field in (("/commands/k/signal", "number"), ("/fork", "count"), ("/run", "output_cap")):
                body = {"argv": ["true"], field: number} if path == "/run" else {field: number}
                answer = await client.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid"), (path, number)
        whole = await client.get("/files?path=/root/f", headers={"range": f"bytes={1 << 63}-"})
        assert whole.status_code == 416
    assert await usable(node, box)


async def test_a_dead_sandbox_says_of_what_it_died(server: Server, node: HttpNode) -> None:
    short = await node.create(SandboxSpec(lifetime=0.2))
    idle = await node.create(SandboxSpec(idle_timeout=0.2))
    for box, reason in ((short.id, "the end of its lifetime"), (idle.id, "nothing was run in it")):
        await node.wait_ended(box)
        with pytest.raises(SandboxEnded, match=reason) as ended:
            await node.run(box, Run(argv=("true",)))
        assert ended.value.hint

"""Promises of a node behind HTTP, over a real server on a free port:

1. Results and errors are the node's own: the same values, the same exception classes, messages and hints.
2. Bytes of any kind survive, of files, input and output.
3. An application of this process answers for a sandbox on the server; its key never reaches the box or the application.
4. A create that is cancelled leaves nothing on the server, and a cancelled run no command; every ending is counted
   there.
5. No server, a stranger's server and a server that breaks off are three clear errors; a create, a run with a key and
   who follows a command wait a minute for a server that is gone, counted from when it was last there, but not for one
   that never was.
6. What is told of snapshots, changes and pools is the node's own.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandlot import asgi
from sandlot.api import Change, Chunk, Ending, ImageConfig, Limits, Run, RunResult, SandboxSpec, Upstream, Warm
from sandlot.client import HttpNode
from sandlot.drivers.base import NOT_KEPT, Keeping
from sandlot.drivers.fake import Context, FakeDriver
from sandlot.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    SandboxEnded,
    SandlotError,
    StartFailed,
    Unreachable,
    Unsupported,
)
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox
from sandlot.server.app import create_app


async def ask(context: Context) -> int:
    reader, writer = await context.connect(8484)
    writer.write(b"GET /models HTTP/1.1\r\nhost: m\r\nauthorization: Bearer sandlot\r\nconnection: close\r\n\r\n")
    await context.write(await reader.read())
    writer.close()
    return 0


class Telling:
    """A program that never ends by itself, and says when it begins and is killed."""

    began = asyncio.Event()
    ended = asyncio.Event()

    @classmethod
    async def program(cls, context: Context) -> int:
        cls.began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cls.ended.set()
        return 0


async def listening(app: Any) -> tuple[asgi.Served, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return await asgi.serve(listener, app), f"http://127.0.0.1:{port}"


class Creating:
    """What happens while the fake driver makes a box: nothing, a wait, or an error."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, box_id: str, spec: SandboxSpec) -> None:
        if spec.labels.get("be") == "slow":
            self.entered.set()
            await self.go_on.wait()
        if spec.labels.get("be") == "broken":
            raise StartFailed("mount /proc: not permitted", "`sandlot doctor`")


@pytest.fixture
async def creating() -> Creating:
    return Creating()


@pytest.fixture
async def local(tmp_path: Path, creating: Creating) -> AsyncIterator[Node]:
    async with Node(FakeDriver({"ask": ask, "tell": Telling.program}, creating), tmp_path) as node:
        yield node


@pytest.fixture
async def remote(local: Node) -> AsyncIterator[HttpNode]:
    served, url = await listening(create_app(local))
    node = HttpNode(url)
    yield node
    await node.close()
    served.close()


def run(*argv: str, **fields: Any) -> Run:
    return Run(argv=argv, **fields)


async def test_results_are_the_node_s_own(local: Node, remote: HttpNode) -> None:
    made = await remote.create(SandboxSpec(labels={"a": "b"}))
    assert made == await local.info(made.id) == await remote.info(made.id)
    assert await remote.list() == await local.list()
    result = await remote.run(made.id, run("false"))
    assert (result.exit_code, result.ok) == (1, False)
    assert (await remote.run(made.id, run("nope"))).exit_code == 127
    assert (await remote.run(made.id, run("sleep", "9", timeout=0.05))).timed_out
    assert await remote.capabilities() == await local.capabilities()
    ended = await remote.destroy(made.id, Ending.PREEMPTED)
    assert ended == await local.info(made.id)
    assert await remote.counts() == await local.counts()
    assert (await remote.counts())["preempted"] == 1


async def test_what_fails_here_while_it_is_sent_is_told_as_it_is(remote: HttpNode) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"x" * 5000
        raise ZeroDivisionError

    box = (await remote.create(SandboxSpec())).id
    with pytest.raises(ZeroDivisionError):
        await remote.upload(box, "/root", failing())
    assert (await remote.run(box, run("true"))).ok


async def test_as_many_calls_as_there_may_be_connections_are_all_answered(remote: HttpNode) -> None:
    box = (await remote.create(SandboxSpec())).id

    async def calls() -> None:
        for _ in range(3):
            assert (await remote.run(box, run("true"))).ok

    await asyncio.gather(*(calls() for _ in range(asgi.MOST_CONNECTIONS)))


async def test_snapshots_and_changes_are_the_node_s_own(local: Node, remote: HttpNode) -> None:
    box = (await remote.create(SandboxSpec())).id
    await remote.write_file(box, "/root/new", b"snapped")
    assert await remote.diff(box) == await local.diff(box) == [Change(path="/root/new", kind="added")]
    config = ImageConfig(env={"A": "b"}, workdir="/tmp")
    made = await remote.snapshot(box, "solved", config)
    assert made.config == config
    assert await remote.images() == await local.images() == [made]
    written = b"".join([chunk async for chunk in remote.export_image("solved")])
    with tarfile.open(fileobj=io.BytesIO(written)) as tar:
        assert tar.extractfile("root/new").read() == b"snapped"  # type: ignore[union-attr]
    await remote.reset(box, "solved")
    (fork,) = await remote.fork(box)
    assert await remote.read_file(fork.id, "/root/new") == b"snapped"
    await remote.delete_image("solved")
    for call in (lambda: anext(remote.export_image("solved")), lambda: remote.delete_image("solved")):
        with pytest.raises(NotFound, match="solved"):
            await call()


async def test_pools_are_the_node_s_own(tmp_path: Path) -> None:
    async with Node(FakeDriver(), tmp_path, warm=[Warm(size=2)]) as local:
        served, url = await listening(create_app(local))
        remote = HttpNode(url)
        async with asyncio.timeout(5):
            while (await remote.pools())[0].ready < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await remote.create(SandboxSpec())
        (pool,) = await remote.pools()
        assert (pool.image, pool.size, pool.hits, pool.misses) == ("host", 2, 1, 0)
        assert [pool.hits for pool in await local.pools()] == [1]
        await remote.close()
        served.close()


async def test_errors_are_the_node_s_own(local: Node, remote: HttpNode) -> None:
    made = await remote.create(SandboxSpec())
    await remote.destroy(made.id)
    wrong = [
        (NotFound, lambda node: node.create(SandboxSpec(image="nope"))),
        (NotFound, lambda node: node.info("sb-ä %2e?#")),
        (SandboxEnded, lambda node: node.run(made.id, run("true"))),
        (StartFailed, lambda node: node.create(SandboxSpec(labels={"be": "broken"}))),
        (NotFound, lambda node: node.destroy("sb-never")),
    ]
    for kind, call in wrong:
        said = []
        for node in (local, remote):
            with pytest.raises(kind) as raised:
                await call(node)
            said.append((type(raised.value), raised.value.message.replace("1 s", "0 s"), raised.value.hint))
        assert said[0] == said[1]
    box = (await remote.create(SandboxSpec())).id
    with pytest.raises(InvalidRequest, match="is a directory"):
        await remote.read_file(box, "/tmp")
    with pytest.raises(InvalidRequest):
        await remote.write_file(box, "/tmp/x", b"", mode=0o7777)


async def test_any_bytes_survive(remote: HttpNode) -> None:
    box = (await remote.create(SandboxSpec())).id
    data = os.urandom(2 << 20)
    path = "/root/ä dir/100%?&#.bin"
    await remote.write_file(box, path, data, mode=0o600)
    assert await remote.read_file(box, path) == data
    assert (await remote.run(box, run("cat", stdin=data[: 1 << 20]))).out.data == data[: 1 << 20]
    await remote.write_file(box, path, b"")
    assert await remote.read_file(box, path) == b""


async def test_names_that_are_not_utf_8_are_told_and_taken(local: Node, remote: HttpNode) -> None:
    made = await remote.create(SandboxSpec(env={"ODD": "\udcfe"}))
    path = "/root/a\udcffb ä%+&.txt"  # as `os.fsdecode` gives the byte 0xff
    await remote.write_file(made.id, path, b"inside")
    assert await remote.read_file(made.id, path) == await local.read_file(made.id, path) == b"inside"
    assert [change.path for change in await remote.diff(made.id)] == [path]
    assert (await remote.run(made.id, run("cat", path, key="once"))).stdout == "inside"
    assert (await remote.run(made.id, run("cat", path, stdin=b"\xff" * 9, env={"N\udcff": "v"}))).stdout == "inside"
    said = []
    for node in (local, remote):
        with pytest.raises(NotFound, match="none") as raised:
            await node.read_file(made.id, "/root/\udcff/none")
        said.append(raised.value.message)
    assert said[0] == said[1]
    with pytest.raises(InvalidRequest, match="is not text"):
        await remote.read_file(made.id, "/root/\ud800")


async def test_only_named_limits_are_named_on_the_server(tmp_path: Path) -> None:
    seen: list[frozenset[str]] = []

    class Noting(FakeDriver):
        async def create(
            self, box_id: str, spec: Any, named: frozenset[str], keeping: Keeping = NOT_KEPT, *more: Any
        ) -> Any:
            seen.append(named)
            return await super().create(box_id, spec, named, keeping, *more)

    async with Node(Noting(), tmp_path) as local:
        served, url = await listening(create_app(local))
        remote = HttpNode(url)
        await remote.create(SandboxSpec(limits=Limits(memory=1 << 30)))
        await remote.create(SandboxSpec())
        await remote.close()
        served.close()
    assert seen == [{"memory"}, frozenset()]


async def test_an_application_here_answers_for_a_sandbox_there(remote: HttpNode) -> None:
    seen: list[dict[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for word in (b"one ", b"two"):
            await send({"type": "http.response.body", "body": word, "more_body": True})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with await Sandbox.create(node=remote) as box:
        await box.route(8484, app)
        answer = (await box.run(["ask"])).stdout
        assert answer.startswith("HTTP/1.1 200 ")
        assert all(word in answer for word in ("one ", "two", "/models"))
        assert b"authorization" not in seen[0]
        assert "Bearer" not in answer
        with pytest.raises(Conflict):
            await box.route(8484, app)
        assert remote._handlers is not None
        assert len(remote._handlers._apps) == 1
    assert remote._handlers._apps == {}


async def test_who_has_no_key_reaches_no_application(remote: HttpNode, local: Node) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("reached")

    box = (await remote.create(SandboxSpec())).id
    await remote.route(box, 8484, app)
    assert remote._handlers is not None
    assert remote._handlers._served is not None
    port = remote._handlers._served.result()[1]
    await local.route(box, 8485, Upstream(url=f"http://127.0.0.1:{port}"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: m\r\nauthorization: Bearer guess\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
    writer.close()
    with pytest.raises(Unsupported, match="cannot reach an application of this process"):
        await HttpNode("http://192.0.2.1:1").route(box, 1, app)


async def test_a_cancelled_create_leaves_nothing_on_the_server(
    local: Node, remote: HttpNode, creating: Creating
) -> None:
    asking = asyncio.ensure_future(remote.create(SandboxSpec(labels={"be": "slow"})))
    await creating.entered.wait()
    asking.cancel()
    creating.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await local.list() == []
    counts = await local.counts()
    assert (counts["created"], counts["exit"], counts["running"]) == (1, 1, 0)


async def test_a_client_that_vanishes_during_a_create_leaves_nothing(tmp_path: Path, creating: Creating) -> None:
    died = asyncio.Event()

    class Watched(FakeDriver):
        async def create(self, *arguments: Any) -> Any:
            box = await super().create(*arguments)
            box.death.add_done_callback(lambda _: died.set())
            return box

    async with Node(Watched(creating=creating), tmp_path) as local:
        served, url = await listening(create_app(local))
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = b'{"labels": {"be": "slow"}}'
        writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await creating.entered.wait()
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.02)
        creating.go_on.set()
        await asyncio.wait_for(died.wait(), 5)
        await asyncio.sleep(0)
        assert await local.list() == []
        assert (await local.counts())["killed"] == 1
        served.close()


async def test_a_cancelled_run_kills_its_command_on_the_server(local: Node, remote: HttpNode) -> None:
    assert isinstance(local.driver, FakeDriver)
    box = (await remote.create(SandboxSpec())).id
    running = asyncio.ensure_future(remote.run(box, run("tell", timeout=None)))
    async with asyncio.timeout(5):
        await Telling.began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await Telling.ended.wait()
    assert (await remote.run(box, run("echo", "usable"))).stdout == "usable\n"


class Flaky:
    """A server that breaks off its first requests after some seconds each, and then answers."""

    def __init__(self, *breaks: float) -> None:
        self._breaks = list(breaks)
        self.asked = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        await reader.readuntil(b"\r\n\r\n")
        if self._breaks:
            await asyncio.sleep(self._breaks.pop(0))
        else:
            body = RunResult(exit_code=7).model_dump_json().encode()
            head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
        writer.close()

    @asynccontextmanager
    async def node(self) -> AsyncIterator[HttpNode]:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        node = HttpNode(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            yield node
        finally:
            await node.close()
            server.close()


@pytest.fixture
def short_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute that is 0.5 s long."""
    for name, seconds in (("_AWAY_SECONDS", 0.5), ("_AWAY_STEP", 0.02), ("_HELD_SECONDS", 0.3)):
        monkeypatch.setattr(f"sandlot.client.{name}", seconds)


@pytest.mark.usefixtures("short_minute")
async def test_a_run_that_is_older_than_a_minute_survives_its_server() -> None:
    flaky = Flaky(0.8, 0, 0, 0.6, 0)  # twice it was there for longer than that
    async with flaky.node() as node:
        assert (await node.run("sb-1", run("true", key="k"))).exit_code == 7
    assert flaky.asked == 6


@pytest.mark.usefixtures("short_minute")
async def test_a_server_that_stays_away_for_a_minute_is_given_up() -> None:
    flaky = Flaky(*[0.01] * 1000)
    async with flaky.node() as node:
        async with asyncio.timeout(5):
            with pytest.raises(Unreachable):
                await node.run("sb-1", run("true", key="k"))
        assert flaky.asked > 3
        flaky.asked = 0
        with pytest.raises(Unreachable):
            await node.run("sb-1", run("true"))  # without a key it may have run: it is not asked again
        assert flaky.asked == 1


@pytest.mark.usefixtures("short_minute")
async def test_who_follows_a_command_goes_on_where_the_connection_broke() -> None:
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in told[len(asked) - 1]:
            line = chunk.model_dump_json().encode() + b"\n"
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
        if len(asked) == len(told):
            writer.write(b"0\r\n\r\n")
        writer.close()

    told = [
        [Chunk(stream="out", offset=5, data=b"abc"), Chunk(stream="err", offset=0, data=b"x")],
        [],
        [Chunk(stream="out", offset=8, data=b"def")],
    ]
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    node = HttpNode(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert [chunk.data async for chunk in node.follow("sb-1", "c-1", 5)] == [b"abc", b"x", b"def"]
    assert [path.partition("?")[2] for path in asked] == ["out=5&err=0", "out=8&err=1", "out=8&err=1"]
    server.close()
    asked.clear()
    async with asyncio.timeout(5):
        with pytest.raises(Unreachable, match="no server answers"):  # half a second later
            await anext(node.follow("sb-1", "c-1"))
    await node.close()


async def test_a_create_that_begins_while_the_server_is_away_waits_for_it(local: Node) -> None:
    served, url = await listening(create_app(local))
    node = HttpNode(url)
    box = (await node.create(SandboxSpec())).id
    served.close()
    await asyncio.sleep(0.1)
    work = [
        asyncio.ensure_future(each)
        for each in (
            node.create(SandboxSpec()),
            node.launch(box, run("true", key="k")),
            node.run(box, run("true", key="l")),
        )
    ]
    await asyncio.sleep(0.5)
    assert not any(each.done() for each in work)
    listener = socket.create_server(("127.0.0.1", int(url.rpartition(":")[2])))
    served = await asgi.serve(listener, create_app(local))
    async with asyncio.timeout(20):
        await asyncio.gather(*work)
    assert len(await node.list()) == 2
    await node.close()
    served.close()


async def test_a_server_that_never_was_there_is_not_waited_for() -> None:
    node = HttpNode("http://127.0.0.1:9")
    for asked in (node.create(SandboxSpec()), node.wait("sb-1", "c-1"), anext(node.follow("sb-1", "c-1"))):
        async with asyncio.timeout(5):
            with pytest.raises(Unreachable, match="no server answers"):
                await asked
    await node.close()


async def test_what_no_server_can_know_is_not_sent() -> None:
    node = HttpNode("http://127.0.0.1:9")  # where it would be Unreachable
    for name in ("", ".", "..", "../..", "a/b"):
        for asked in (node.info(name), node.destroy(name), node.wait(name, "c-1")):
            with pytest.raises(NotFound, match="there is no sandbox"):
                await asked
        for asked in (node.wait("sb-1", name), node.signal("sb-1", name, 9), anext(node.follow("sb-1", name))):
            with pytest.raises(NotFound, match="there is no command"):
                await asked
        with pytest.raises(NotFound, match="there is no shell"):
            await node.close_shell("sb-1", name)
        with pytest.raises(NotFound, match="there is no terminal"):
            await node.close_terminal("sb-1", name)
    with pytest.raises(InvalidRequest, match="is not text"):
        await node.info("\ud800")
    await node.close()
    for key in ("a\nb", "\udcff", "caf\xe9"):
        with pytest.raises(InvalidRequest, match="the API key has a letter") as error:
            HttpNode("http://127.0.0.1:9", key)
        assert key not in str(error.value)


async def test_words_of_a_shell_may_be_any_bytes(remote: HttpNode) -> None:
    async with await Sandbox.create(node=remote) as box:
        for words in ({"env": {"A": "\udcff"}}, {"cwd": "/\udcff"}):
            try:
                await (await box.shell(**words)).close()  # type: ignore[arg-type]
            except SandlotError as error:
                assert not isinstance(error, Unreachable)


async def test_no_server_is_unreachable() -> None:
    node = HttpNode("http://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"no server answers at http://127\.0\.0\.1:9") as error:
        await node.list()
    assert "sandlot serve" in (error.value.hint or "")
    await node.close()
    for wrong in ("127.0.0.1:8750", "ftp://x", "http://"):
        with pytest.raises(InvalidRequest, match=r"not the URL of a server|not a URL"):
            HttpNode(wrong)


async def test_a_stranger_s_server_is_recognised() -> None:
    async def stranger(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["method"] == "GET" else 502
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>welcome</html>"})

    served, url = await listening(stranger)
    node = HttpNode(url)
    with pytest.raises(SandlotError, match="is not a Sandlot server of this version"):
        await node.list()
    with pytest.raises(SandlotError, match="answered 502 without an explanation"):
        await node.create(SandboxSpec())
    await node.close()
    served.close()


async def test_a_server_that_breaks_off_is_said(remote: HttpNode, local: Node) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"[", "more_body": True})
        served.close()

    served, url = await listening(broken)
    node = HttpNode(url)
    with pytest.raises(Unreachable, match="broke the connection while listing the sandboxes"):
        await node.list()
    await node.close()

"""Promises of an application on a listener:

1. An answer leaves at once: its body does not wait for the receipt of its head.
2. `drain` lets an answer finish and drops idle connections; `close` drops everything, and the application is told.
3. Of more connections than there is room for, the next is cut off, and let in when another is gone.
4. Who sends a head without end, or none, is cut off: it cannot make this process hold more and more.
5. Who says nothing takes room too where TLS is to begin, and gives it back.
6. Who is silent in the middle of a body is told so with 408, and cut off; who is slow is not, nor who is held up.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sandlot import asgi

REQUEST = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


async def listening(app: Any) -> tuple[asgi.Served, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return await asgi.serve(listener, app), port


class Slow:
    """Answers when it is let go; knows whether its caller left."""

    def __init__(self) -> None:
        self.asked, self.go_on, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.asked.set()
        gone = asyncio.ensure_future(receive())
        waiting = asyncio.ensure_future(self.go_on.wait())
        await asyncio.wait((gone, waiting), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.left.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})


async def test_an_answer_leaves_at_once() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    served, port = await listening(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seconds = []
    for _ in range(11):
        started = time.perf_counter()
        writer.write(REQUEST)
        await reader.readuntil(b"done")
        seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[5] < 0.02
    writer.close()
    served.close()


async def test_drain_lets_an_answer_finish() -> None:
    app = Slow()
    served, port = await listening(app)
    idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    await app.asked.wait()
    draining = asyncio.ensure_future(served.drain(5))
    assert await asyncio.wait_for(idle.read(), 5) == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    app.go_on.set()
    assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"done")
    await draining
    idle_writer.close()
    writer.close()


async def test_close_drops_everything_and_tells_the_application() -> None:
    app = Slow()
    served, port = await listening(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    await app.asked.wait()
    served.close()
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    await asyncio.wait_for(app.left.wait(), 5)
    writer.close()


async def closed_after(port: int, data: bytes, pieces: int) -> int:
    """How many bytes of `data`, sent again and again, are taken before the connection is dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    with suppress(ConnectionError):
        for _ in range(pieces):
            writer.write(data)
            await writer.drain()
            sent += len(data)
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return sent


async def test_a_head_without_end_is_cut_off() -> None:
    app = Slow()
    served, port = await listening(app)
    head = b"GET / HTTP/1.1\r\nhost: h\r\nx: "
    assert await closed_after(port, head + b"a" * 60_000, 1000) < 10 << 20
    assert not app.asked.is_set()
    served.close()


async def test_a_connection_that_asks_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    monkeypatch.setattr(asgi._config(), "timeout_keep_alive", 0.2)
    served = await asgi.serve(listener, Reader(), head_seconds=0.2)
    for words in (b"", b"GET / HT", REQUEST, REQUEST + b"GET / HT", REQUEST + b"\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST if words.startswith(REQUEST) else words)
        if words.startswith(REQUEST):
            await reader.readuntil(b"\r\n\r\n0")
            writer.write(words.removeprefix(REQUEST))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    served.close()


async def test_no_more_connections_are_held_than_there_is_room_for() -> None:
    room = asgi.Room(3, within=asgi.Room(3))
    ports, served = [], []
    for _ in range(2):  # the room is of both together
        listener = socket.create_server(("127.0.0.1", 0))
        ports.append(listener.getsockname()[1])
        served.append(await asgi.serve(listener, Slow(), room=room))
    held = [await asyncio.open_connection("127.0.0.1", ports[i % 2]) for i in range(3)]
    reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    held[0][1].close()
    async with asyncio.timeout(5):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[1])
            writer.write(b"GARBAGE\r\n\r\n")
            with suppress(ConnectionResetError):
                if (await reader.read()).startswith(b"HTTP/1.1 400"):  # somebody listens
                    break
    for each in served:
        each.close()
    for _, each_writer in held:
        each_writer.close()
    writer.close()


def certificate(tmp_path: Path) -> ssl.SSLContext:
    pem = tmp_path / "cert.pem"
    words = ["-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", "req", "-x509", *words, "-keyout", pem, "-out", pem], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    return context


async def test_who_says_nothing_to_a_tls_server_takes_room_too(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    listener = socket.create_server(("127.0.0.1", 0))
    address = ("127.0.0.1", listener.getsockname()[1])
    served = await asgi.serve(listener, app, room=asgi.Room(3), tls=certificate(tmp_path))
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    silent = [await asyncio.open_connection(*address) for _ in range(3)]
    await asyncio.sleep(0.1)
    refused, writer = await asyncio.open_connection(*address)
    with suppress(ConnectionError):
        assert await asyncio.wait_for(refused.read(), 10) == b""
    writer.close()
    silent[0][1].close()  # one goes, one speaks something else
    silent[1][1].write(REQUEST)
    with suppress(ConnectionError):
        await asyncio.wait_for(silent[1][0].read(), 10)
    for _ in range(5):  # each gives its room back
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(*address, ssl=trusting)
            writer.write(REQUEST)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await writer.wait_closed()
    served.close()
    with suppress(ConnectionError):
        assert await asyncio.wait_for(silent[2][0].read(), 10) == b""  # it was in the middle of it
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    for _, writer in silent:
        writer.close()


class Reader:
    """Answers with how much it was sent, which it begins to read when it is let."""

    def __init__(self) -> None:
        self.begin, self.left = asyncio.Event(), asyncio.Event()
        self.begin.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.begin.wait()
        read, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            read += len(message["body"])
            more = message["more_body"]
        body = str(read).encode()
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})


PUT = b"PUT / HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: "


@pytest.mark.parametrize("sent", [b"", b"x"])
async def test_a_body_that_never_comes_is_told_and_cut_off(sent: bytes) -> None:
    app = Reader()
    listener = socket.create_server(("127.0.0.1", 0))
    served = await asgi.serve(listener, app, body_seconds=0.4)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(PUT + b"10\r\n\r\n" + sent)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"nothing came of the request's body" in answer
    await asyncio.wait_for(app.left.wait(), 10)
    writer.close()
    served.close()


async def test_a_body_that_was_refused_is_not_waited_for() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    served = await asgi.serve(listener, app, body_seconds=0.4)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(PUT.replace(b"connection: close\r\n", b"") + b"10\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"x")
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    served.close()


async def test_a_slow_body_is_read_to_its_end() -> None:
    app = Reader()
    listener = socket.create_server(("127.0.0.1", 0))
    served = await asgi.serve(listener, app, body_seconds=0.4)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(PUT + b"10\r\n\r\n")
    for _ in range(10):
        await asyncio.sleep(0.1)
        writer.write(b"x")
    assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"\r\n\r\n10")
    writer.close()
    app.begin.clear()  # the caller has sent all that is taken, and it is not its fault that no more is
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    body = b"x" * (8 << 20)
    writer.write(PUT + str(len(body)).encode() + b"\r\n\r\n" + body)
    await asyncio.sleep(1)
    app.begin.set()
    assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"\r\n\r\n" + str(len(body)).encode())
    writer.close()
    served.close()

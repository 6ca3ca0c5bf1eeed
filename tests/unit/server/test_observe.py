"""Promises of what a server tells of itself:

1. Every answer has an id, the caller's or a new one; errors name it, and so does the log.
2. What nobody expected is answered with 500, and logged with where it was raised and without its words.
3. The numbers are about routes, never about what was asked for; they agree with the node's own account.
4. A server is ready unless it stops or a disk is full; when it stops, it finishes what runs and lets no more in.
5. A request is a span of the trace that it came with, where OpenTelemetry is configured.
6. A log that nobody reads holds nothing up.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sandlot import asgi
from sandlot.api import SandboxSpec, Warm
from sandlot.drivers.fake import Context, FakeDriver
from sandlot.node.node import Node
from sandlot.server import ready
from sandlot.server.app import create_app
from sandlot.server.logs import LOGGER, Log, fields_of, written


class Telling:
    """A program that goes on until it is told to end."""

    began = asyncio.Event()
    end = asyncio.Event()

    @classmethod
    async def program(cls, context: Context) -> int:
        cls.began.set()
        await cls.end.wait()
        await context.write(b"done")
        return 0


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    for event in (Telling.began, Telling.end):
        event.clear()
    async with Node(FakeDriver({"tell": Telling.program}), tmp_path / "nodes", warm=[Warm(size=1)]) as node:
        yield node


async def served(app: Any, **words: Any) -> tuple[asgi.Served, httpx2.AsyncClient]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return await asgi.serve(listener, app, **words), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}")


class Lines(logging.Handler):
    """What is logged, as `Log` writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = io.BytesIO()
        self.log = Log("json", self.stream)

    def __enter__(self) -> Lines:
        self.log.start(every_request=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.log.stop()

    @property
    def text(self) -> str:
        return self.stream.getvalue().decode()

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


async def test_every_answer_has_an_id(node: Node) -> None:
    app = create_app(node)
    running, client = await served(app)
    async with client:
        with Lines() as lines:
            given = {"x-request-id": "from-the-caller.7"}
            assert (await client.get("/v1/sandboxes", headers=given)).headers["x-request-id"] == "from-the-caller.7"
            lost = await client.get("/v1/sandboxes/sb-none", headers=given)
            assert lost.json()["error"]["request_id"] == "from-the-caller.7"
            made = [(await client.get("/nowhere")).headers["x-request-id"] for _ in range(2)]
            assert made[0] != made[1] and re.fullmatch(r"[0-9a-f]{16}", made[0])
            for forged in ("a b", "x" * 101, "a\x80"):
                answer = await client.get("/healthz", headers={"x-request-id": forged.encode("latin-1")})
                assert answer.headers["x-request-id"] != forged
            refused = await client.get("/healthz", headers={"host": "evil.example"})
            assert refused.status_code == 200
            await client.get("/v1/sandboxes", headers={"host": "evil.example", **given})
        told = lines.all()
        assert [each["request"] for each in told[:2]] == ["from-the-caller.7"] * 2
        assert (told[1]["route"], told[1]["status"], told[1]["error"]) == (
            "/v1/sandboxes/{sandbox_id}",
            404,
            "not_found",
        )
        assert told[1]["sandbox"] == "sb-none"
        assert (told[-1]["status"], told[-1]["error"], told[-1]["route"]) == (401, "unauthorized", "none")
    running.close()


async def test_what_nobody_expected_is_answered_and_logged_without_its_words(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("PLANTED-in-an-exception")

    running, client = await served(create_app(node))
    monkeypatch.setattr(node, "info", broken)
    async with client:
        with Lines() as lines:
            answer = await client.get("/v1/sandboxes/sb-1")
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "error")
            assert answer.headers["x-request-id"] in (answer.json()["error"]["hint"] or "")
        fault, request = lines.all()
        assert (fault["level"], fault["error"], fault["request"]) == ("error", "KeyError", request["request"])
        assert any("test_observe.py" in frame and "broken" in frame for frame in fault["trace"])
        assert "PLANTED" not in lines.text and "PLANTED" not in answer.text
        assert (await client.get("/v1/sandboxes")).status_code == 200
    running.close()


def values(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """name → label values → value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_the_numbers_are_about_routes(node: Node) -> None:
    running, client = await served(create_app(node))
    async with client:
        async with asyncio.timeout(10):
            while not (await node.pools())[0].ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        box = (await client.post("/v1/sandboxes", json={"labels": {"a": "PLANTED"}})).json()["id"]
        for _ in range(3):
            await client.post(f"/v1/sandboxes/{box}/run", json={"argv": ["echo", "hello"]})
        await client.get("/v1/sandboxes/sb-none")
        await client.request("TRACE", "/teapot")
        await client.delete(f"/v1/sandboxes/{box}")
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = values(answer.text)
        assert found["sandlot_creates_total"][()] == 1
        assert found["sandlot_live"][()] == 0
        assert found["sandlot_ends_total"][("exit",)] == 1
        assert found["sandlot_ends_total"][("oom",)] == 0
        assert found["sandlot_pool_hits_total"][("host", "default")] == 1
        assert found["sandlot_requests_total"][("POST", "/v1/sandboxes/{sandbox_id}/run", "200")] == 3
        assert found["sandlot_requests_total"][("GET", "/v1/sandboxes/{sandbox_id}", "404")] == 1
        assert found["sandlot_requests_total"][("other", "none", "404")] == 1
        assert found["sandlot_run_seconds_count"][()] == 3
        assert found["sandlot_create_seconds_count"][()] == 1
        assert found["sandlot_run_seconds_sum"][()] > 0
        assert found["sandlot_sent_bytes_total"][("/v1/sandboxes/{sandbox_id}/run",)] > 100
        assert found["sandlot_requests_running"][()] == 1
        assert "process_resident_memory_bytes" in found
        assert box not in answer.text and "PLANTED" not in answer.text and "teapot" not in answer.text
    running.close()


async def test_a_server_is_ready_unless_it_stops_or_a_disk_is_full(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(node, "sesame", places=(tmp_path,))
    running, client = await served(app)
    async with client:

        async def asked() -> tuple[int, str]:
            answer = await client.get("/readyz")  # without a key
            return answer.status_code, answer.text

        assert (await asked())[0] == 200
        for name, most, said in (
            ("LEAST_BYTES", 1 << 62, "is full"),
            ("LEAST_FILES", 1 << 62, "more files"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(ready, name, most)
                status, text = await asked()
                assert status == 503 or (name == "LEAST_FILES" and not os.statvfs(tmp_path).f_files)
                assert said in text or status == 200
        assert (await asked())[0] == 200
        app.state.places = (tmp_path / "gone",)
        assert (await asked())[0] == 503
        app.state.places = ()
        app.state.work.draining = True
        status, text = await asked()
        assert status == 503 and "about to stop" in text
        assert (await client.get("/healthz")).status_code == 200
    running.close()


async def test_a_server_that_stops_finishes_what_runs_and_lets_no_more_in(node: Node) -> None:
    app = create_app(node)
    running, client = await served(app)
    async with client:
        box = (await client.post("/v1/sandboxes", json={})).json()["id"]
        working = asyncio.ensure_future(client.post(f"/v1/sandboxes/{box}/run", json={"argv": ["tell"]}))
        looking = asyncio.ensure_future(client.get(f"/v1/sandboxes/{box}/wait", timeout=60))
        await Telling.began.wait()
        await asyncio.sleep(0.05)
        draining = asyncio.ensure_future(app.state.work.drain(30))
        await asyncio.sleep(0.05)
        refused = await client.post("/v1/sandboxes", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unreachable")
        assert not draining.done()
        Telling.end.set()
        assert (await working).json()["exit_code"] == 0
        await asyncio.wait_for(draining, 5)  # whoever only looks is not waited for
        looking.cancel()
        Telling.end.clear()
        app.state.work.draining = False
        longer = asyncio.ensure_future(client.post(f"/v1/sandboxes/{box}/run", json={"argv": ["tell"]}))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await app.state.work.drain(0.2)
        assert 0.2 <= time.monotonic() - began < 5
        Telling.end.set()
        await longer
    running.close()


async def test_a_request_is_a_span_of_the_trace_that_it_came_with(node: Node) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from sandlot.server.spans import Spans

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    running, client = await served(create_app(node, spans=Spans(provider)))
    async with client:
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "r1"}
        made = await client.post("/v1/sandboxes", json={"env": {"A": "PLANTED"}}, headers=headers)
        box = made.json()["id"]
        await client.post(f"/v1/sandboxes/{box}/run", json={"argv": ["echo", "PLANTED"]})
    running.close()
    create, run = kept.get_finished_spans()
    assert (create.name, f"{create.context.trace_id:032x}") == ("POST /v1/sandboxes", trace)
    assert create.attributes is not None and run.attributes is not None
    assert create.attributes["sandlot.request"] == "r1"
    assert (run.name, run.attributes["sandlot.sandbox"]) == ("POST /v1/sandboxes/{sandbox_id}/run", box)
    assert run.attributes["http.response.status_code"] == 200
    assert "PLANTED" not in create.to_json() + run.to_json()


def test_spans_go_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from sandlot.server import spans

    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    assert spans.configured() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    found = spans.configured()
    assert found is not None
    found.close()
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert spans.configured() is None


class Stuck(io.BytesIO):
    """A reader that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        import threading

        self.go_on = threading.Event()

    def write(self, data: Any) -> int:
        self.go_on.wait(30)
        return super().write(data)


async def test_nobody_can_write_a_line_of_the_log(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sandlot.server")
    transport = httpx2.ASGITransport(create_app(node))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/v1/sandboxes/x%0aFORGED%1b[31m")).status_code == 404
        assert (await client.get("/v1/sandboxes/sb-no")).status_code == 404
    forged, real = [fields_of(record) for record in caplog.records if record.message == "request"]
    assert forged["sandbox"] is None
    assert real["sandbox"] == "sb-no"
    line = written({**real, "said": "a\nFORGED\x1b[31m\ud800", "key": "k\r\x85"}, "text")
    assert line.count(b"\n") == 1
    assert b"a\\nFORGED\\x1b[31m\\ud800" in line
    assert b"k\\r\\x85" in line


def test_a_log_that_nobody_reads_holds_nothing_up() -> None:
    stream = Stuck()
    log = Log("text", stream).start(every_request=True)
    began = time.monotonic()
    for number in range(25_000):
        LOGGER.info("request", extra={"fields": {"number": number}})
    assert time.monotonic() - began < 25
    stream.go_on.set()
    while not log._waiting.empty():
        time.sleep(0.01)
    LOGGER.warning("after")
    log.stop()
    text = stream.getvalue().decode()
    assert re.search(r"lines were left out  lines=1[45]\d\d\d\n", text)
    assert "INFO" not in text and " info    request  number=0\n" in text
    assert text.rstrip().splitlines()[-1].endswith(" warning after")


async def test_a_body_that_never_comes_is_told_with_the_log_s_id(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    serving, client = await served(create_app(node), body_seconds=0.4)
    with Lines() as lines:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(
            f"PUT /v1/sandboxes/{box}/files?path=/root/s HTTP/1.1\r\nhost: localhost\r\nx-request-id: slow-one\r\n"
            "content-length: 10\r\n\r\nx".encode()
        )
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"x-request-id: slow-one" in head
        assert json.loads(body)["error"]["request_id"] == "slow-one"
        await client.get("/healthz")  # and by then it was written
    (line,) = [line for line in lines.all() if line["request"] == "slow-one"]
    assert (line["status"], line["error"], line["received"]) == (408, "invalid", 1)
    await client.aclose()
    serving.close()

"""Promise of the HTTP API: whatever its OpenAPI document lets a program send, and much that it does not, is answered
with a status that the document names, never by a failure of the server, and the server goes on.

Each operation is tried with sandboxes that live and that never were, over boxes of the fake driver and over real ones.
SANDLOT_FUZZ_EXAMPLES says how many times each (5); what is tried is the same every time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sandlot import asgi
from sandlot.drivers.fake import FakeDriver
from sandlot.node.node import Node
from sandlot.server.app import create_app
from tests.support.server import SANDLOT

schemathesis = pytest.importorskip("schemathesis", exc_type=ImportError)
hypothesis = pytest.importorskip("hypothesis")

EXAMPLES = int(os.environ.get("SANDLOT_FUZZ_EXAMPLES", "5"))


class InThread:
    """A server over the fake driver."""

    def __init__(self, state: Path) -> None:
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(state)))

    def __enter__(self) -> InThread:
        self._thread.start()
        self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self, state: Path) -> None:
        async with Node(FakeDriver(), state) as node:
            listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            served = await asgi.serve(listener, create_app(node))
            self._ready.set()
            await self._stop.wait()
            served.close()


@pytest.fixture(params=["fake", "native"])
def url(request: pytest.FixtureRequest, tmp_path: Path, native_reason: str | None) -> Iterator[str]:
    if request.param == "fake":
        with InThread(tmp_path) as server:
            yield server.url
        return
    if native_reason:
        pytest.skip(native_reason)
    # It asks no registry: none is allowed that could be there.
    words = ("serve", "--port", "0", "--state-dir", str(tmp_path), "--drain-seconds", "0")
    words += ("--allow-registry", "registry.invalid")
    with subprocess.Popen((*SANDLOT, *words), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def tried(url: str, operation: Any, known: dict[str, str], positive: bool) -> list[str]:
    """What is wrong with the answers to some requests for one operation."""
    from schemathesis import GenerationMode, checks

    wrong: list[str] = []
    names = {each.name for each in operation.path_parameters}
    fixed = {name: value for name, value in known.items() if name in names}
    strategy = operation.as_strategy(
        GenerationMode.POSITIVE if positive else GenerationMode.NEGATIVE, path_parameters=fixed or None
    )
    checks.load_all_checks()
    looked_at = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.response_schema_conformance,
        checks.content_type_conformance,
    ]

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=strategy)
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("count"), int):
            case.body["count"] = min(case.body["count"], 3)  # a thousand sandboxes show nothing more
        if operation.path.endswith("/wait"):
            case.query["timeout"] = 0.1
        answer = case.call(base_url=url, timeout=60)
        try:
            case.validate_response(answer, checks=looked_at)
        except BaseException as error:  # hypothesis would try to make it smaller, for minutes
            if not isinstance(error, Exception | BaseExceptionGroup):
                raise
            said = " ".join(str(error).split())[:300]
            wrong.append(f"{case.method} {case.formatted_path} {answer.status_code} {str(case.body)[:200]!r}: {said}")

    with suppress(hypothesis.errors.Unsatisfiable):  # there is nothing about it that could be wrong
        ask()
    return wrong


def test_whatever_is_sent_is_answered_as_the_document_says(url: str, request: pytest.FixtureRequest) -> None:
    import requests

    fake = request.node.callspec.params["url"] == "fake"

    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    wrong: list[str] = []
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        count += 1
        if fake and operation.method == "post" and operation.path.endswith(("}/shells", "}/terminals")):
            continue  # it has none
        made = requests.post(f"{url}/v1/sandboxes", json={"lifetime": 600}, timeout=60)
        assert made.status_code == 201, made.text
        box = f"{url}/v1/sandboxes/{made.json()['id']}"
        shell = requests.post(f"{box}/shells", json={}, timeout=60)
        known = {"sandbox_id": made.json()["id"], "shell_id": shell.json().get("id", "sh-none")}
        for positive in (True, False):
            wrong += tried(url, operation, known, positive)
        wrong += tried(url, operation, {}, True)
        requests.delete(box, timeout=60)
        assert requests.get(f"{url}/healthz", timeout=60).status_code == 200
    assert count > 40
    assert not wrong, "\n".join([f"{len(wrong)} answers are wrong:", *wrong[:40]])

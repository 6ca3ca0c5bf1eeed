"""Promises of the OpenAPI document:

1. Each route says how it can fail: by what any can, and what those can that are about a sandbox or an image.
2. Its examples are what a server takes.
3. Whatever it refers to is in it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sandlot import asgi
from sandlot.drivers.fake import FakeDriver
from sandlot.node.node import Node
from sandlot.server.app import create_app
from sandlot.server.document import ERRORS, EXAMPLES


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with Node(FakeDriver(), tmp_path) as node:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        served = await asgi.serve(listener, create_app(node))
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
        served.close()


async def operations(http: httpx2.AsyncClient) -> dict[tuple[str, str], dict[str, Any]]:
    paths = (await http.get("/openapi.json")).json()["paths"]
    return {(method, path): each for path, methods in paths.items() for method, each in methods.items()}


async def test_each_route_says_how_it_can_fail(http: httpx2.AsyncClient) -> None:
    for (method, path), operation in (await operations(http)).items():
        said = set(operation["responses"])
        assert any(status[0] == "2" for status in said), path
        if path.startswith("/v1/"):
            assert {"400", "401", "403", "429", "500", "503", "504", "507"} <= said, path
        if "{sandbox_id}" in path:
            assert {"404", "409", "410", "422"} <= said, path
        if path.startswith("/v1/images"):
            assert {"404", "409", "422"} <= said, path
        for status in said & set(ERRORS):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Error"}, f"{method} {path} {status}"
        assert operation.get("description") or operation.get("summary"), path


async def test_its_examples_are_what_a_server_takes(http: httpx2.AsyncClient) -> None:
    found = await operations(http)
    box = (await http.post("/v1/sandboxes", json={})).json()["id"]
    await http.post(f"/v1/sandboxes/{box}/snapshot", json={"name": "solved"})
    command = (await http.post(f"/v1/sandboxes/{box}/commands", json={"argv": ["sleep", "60"]})).json()["id"]
    known = {"sandbox_id": box, "command_id": command, "port": "8484", "image": "solved"}
    elsewhere = {"/v1/images/pull", "/v1/sandboxes/{sandbox_id}/shells", "/v1/sandboxes/{sandbox_id}/snapshot"}
    for (method, path), example in EXAMPLES.items():
        assert found[method, path]["requestBody"]["content"]["application/json"]["example"] == example
        there = re.sub(r"\{(\w+)\}", lambda match: known.get(match[1], "none"), path)
        answer = await http.request(method, there, json=example)
        assert answer.status_code != 400, answer.text
        if path not in elsewhere and "{shell_id}" not in path:  # which the fake driver has not, or which is taken
            assert answer.is_success, f"{path}: {answer.text}"


async def test_whatever_it_refers_to_is_in_it(http: httpx2.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    schemas = answer.json()["components"]["schemas"]
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', answer.text))
    assert referred <= set(schemas)
    assert "HTTPValidationError" not in schemas
    wrong = (await http.get("/v1/sandboxes/sb-none")).json()
    assert set(wrong["error"]) == set(schemas["Error"]["properties"]["error"]["properties"])

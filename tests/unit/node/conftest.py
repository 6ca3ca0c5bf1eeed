"""A sandbox, made in this process and on a server: what is promised of one is promised of the other."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot import asgi
from sandlot.client import HttpNode
from sandlot.node.node import local_node
from sandlot.sandbox import Sandbox
from sandlot.server.app import create_app


@pytest.fixture(params=["in this process", "on a server"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path, native_reason: str | None) -> AsyncIterator[Sandbox]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path / "state") as node:
        if request.param == "in this process":
            async with await Sandbox.create(node=node) as box:
                yield box
            return
        listener = socket.create_server(("127.0.0.1", 0))
        served = await asgi.serve(listener, create_app(node), websockets=True)
        remote = HttpNode(f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with await Sandbox.create(node=remote) as box:
            yield box
        await remote.close()
        served.close()

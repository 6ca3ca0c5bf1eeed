"""Promises of what a server lets its callers do that costs its host: a network only if it was allowed at the start, a
tree of any size, and no more than a body's limit of anything else."""

from __future__ import annotations

import io
import socket
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot import asgi
from sandlot.api import ImageConfig, SandboxSpec
from sandlot.client import HttpNode
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Conflict, InvalidRequest, NotFound, Unsupported
from sandlot.node.node import Node
from sandlot.server.app import MOST_BODY_BYTES, create_app


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


async def served(node: Node, **options: frozenset[str]) -> tuple[asgi.Served, HttpNode]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return await asgi.serve(listener, create_app(node, **options)), HttpNode(f"http://127.0.0.1:{port}")  # type: ignore[arg-type]


async def test_a_network_is_given_only_where_it_was_allowed(local: Node) -> None:
    for networks, allowed in (({}, False), ({"networks": frozenset({"none", "host"})}, True)):
        running, remote = await served(local, **networks)
        if allowed:
            assert (await remote.create(SandboxSpec(network="host"))).state == "running"
        else:
            with pytest.raises(Unsupported, match="no sandbox the network 'host'") as refused:
                await remote.create(SandboxSpec(network="host"))
            assert "--allow-network host" in (refused.value.hint or "")
            assert (await local.counts())["created"] == 0
        await remote.close()
        running.close()


async def test_a_tree_may_be_of_any_size_and_errors_are_the_nodes(local: Node) -> None:
    running, remote = await served(local)
    box = (await remote.create(SandboxSpec())).id
    size = MOST_BODY_BYTES + 1

    async def tar() -> AsyncIterator[bytes]:
        info = tarfile.TarInfo("big")
        info.size = size
        yield info.tobuf()
        for _ in range(size >> 20):
            yield bytes(1 << 20)
        yield bytes((-size % 512) + size % (1 << 20) + 1024)

    await remote.upload(box, "/root/tree", tar())
    assert len((await local.run(box, _cat("/root/tree/big"))).out.data) > 0
    for content, error in (
        (b"no tar" * 200, InvalidRequest),
        (_tar("../x"), InvalidRequest),
        (_tar(""), InvalidRequest),
    ):

        async def bits(content: bytes = content) -> AsyncIterator[bytes]:
            yield content
            for _ in range(64):  # of which nobody wants to hear
                yield bytes(1 << 20)

        if content != _tar(""):
            with pytest.raises(error):
                await remote.upload(box, "/root/tree", bits())
    with pytest.raises(NotFound):
        await remote.upload("sb-none", "/root", tar())
    await remote.close()
    running.close()


def _cat(path: str) -> object:
    from sandlot.api import Run

    return Run(argv=("cat", path), output_cap=1000)


def _tar(name: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as writer:
        writer.addfile(tarfile.TarInfo(name))
    return packed.getvalue()


async def test_images_are_asked_about_and_named(local: Node) -> None:
    running, remote = await served(local)
    box = (await remote.create(SandboxSpec())).id
    await remote.snapshot(box, f"step-{'0' * 32}")
    assert await remote.images() == []
    config = ImageConfig(env={"A": "b"})
    made = await remote.tag_image(f"step-{'0' * 32}", "made", config)
    assert (made.kind, made.config) == ("built", config)
    assert await remote.image("made") == made
    assert (await remote.image("host")).base == "host"
    await remote.snapshot(box, "mine")
    with pytest.raises(Conflict):
        await remote.tag_image("made", "mine")
    with pytest.raises(NotFound):
        await remote.image("none")
    await remote.close()
    running.close()

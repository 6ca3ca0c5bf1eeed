"""Promises of files in a box, over the fake driver and, for what takes a kernel, the native one:

1. Any bytes come back as they were written; parents are made; a file is replaced whole, with the mode asked for.
2. What is no regular file is refused, and never hangs the node: directories, devices, pipes, sockets.
3. A missing file is NotFound; a file over the cap is refused, not held in memory.
4. A full disk of the box is the box's, not the host's: InvalidRequest, and the node goes on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot.api import Limits, Run, SandboxSpec
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import InvalidRequest, NotFound
from sandlot.node import files
from sandlot.node.node import Node, local_node


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(), tmp_path) as node:
        yield node


@pytest.fixture
async def native(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node:
        yield node


@pytest.fixture(params=["fake", "native"])
def node(request: pytest.FixtureRequest) -> Node:
    node: Node = request.getfixturevalue(request.param)
    return node


async def test_bytes_come_back_as_written(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    for data in (b"", b"\0\xff\n", os.urandom(3 << 20)):
        await node.write_file(box, "/root/deep/er/file", data)
        assert await node.read_file(box, "/root/deep/er/file") == data
    assert (await node.run(box, Run(argv=("cat", "/root/deep/er/file"), output_cap=4 << 20))).out.data == data


async def test_a_file_is_replaced_whole(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.write_file(box, "/tmp/f", b"a long first version")
    await node.write_file(box, "/tmp/f", b"short")
    assert await node.read_file(box, "/tmp/f") == b"short"


async def test_a_missing_file_is_not_found(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    with pytest.raises(NotFound, match="there is no file /root/missing"):
        await node.read_file(box, "/root/missing")
    with pytest.raises(InvalidRequest, match="is a directory"):
        await node.read_file(box, "/tmp")
    for path in ("relative", "", "/nul\0"):
        with pytest.raises(InvalidRequest, match="is not an absolute path"):
            await node.write_file(box, path, b"")
    with pytest.raises(InvalidRequest, match="mode"):
        await node.write_file(box, "/tmp/f", b"", mode=0o4755)


async def test_a_file_over_the_cap_is_refused(fake: Node) -> None:
    assert isinstance(fake.driver, FakeDriver)
    box = (await fake.create(SandboxSpec())).id
    fd = await fake.driver.boxes[box].open("/root/big", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, files.MOST_BYTES + 1)
    os.close(fd)
    with pytest.raises(InvalidRequest, match="/root/big is larger than 64 MiB"):
        await fake.read_file(box, "/root/big")


async def sh(node: Node, box: str, text: str) -> str:
    result = await node.run(box, Run(argv=("sh", "-c", text)))
    assert result.exit_code == 0, result
    return result.stdout


async def test_the_mode_is_the_one_asked_for(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    await native.write_file(box, "/root/tool", b"#!/bin/sh\necho works\n", mode=0o755)
    assert await sh(native, box, "/root/tool") == "works\n"
    await native.write_file(box, "/root/tool", b"", mode=0o600)
    assert await sh(native, box, "stat -c %a:%u /root/tool") == "600:0\n"


async def test_what_is_no_regular_file_never_hangs(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    await sh(native, box, "mkfifo /root/pipe; ln -s /dev/zero /root/zero; ln -s /root/loop /root/loop")
    async with asyncio.timeout(10):
        for path in ("/root/pipe", "/root/zero", "/dev/tty", "/root/loop"):
            for call in (native.read_file(box, path), native.write_file(box, path, b"x")):
                with pytest.raises((InvalidRequest, NotFound)):
                    await call


async def test_a_file_of_proc_is_read_though_it_says_it_is_empty(native: Node) -> None:
    box = (await native.create(SandboxSpec())).id
    assert (await native.read_file(box, "/proc/version")).startswith(b"Linux version")


async def test_a_full_disk_of_the_box_is_the_box_s(native: Node) -> None:
    box = (await native.create(SandboxSpec(limits=Limits(disk=4 << 20)))).id
    with pytest.raises(InvalidRequest, match="the sandbox's disk is full") as full:
        await native.write_file(box, "/root/big", b"x" * (8 << 20))
    assert "disk" in (full.value.hint or "")
    await sh(native, box, "rm /root/big")
    await native.write_file(box, "/root/small", b"fits")

"""Promises of a box with the host's network, beside one without any:

1. It reaches the host's listeners, loopback and abstract, and knows who resolves names; the other reaches nothing.
2. It has no more of the host than that: no sysfs, no setting, no interface, no raw packet, no port below 1024.
3. The loss is named. No port of it is routed or reached, for that would be the host's; adopted by another node neither.
4. A parked box is not handed out for it; fork and reset keep it.
5. An image that has a link where who resolves names is to be, even one that leads nowhere, is as good as any.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandlot.api import Run, SandboxSpec, Upstream, Warm
from sandlot.drivers.native.box import NativeBox
from sandlot.errors import Unsupported
from sandlot.node.node import Node, local_node
from tests.support.native import PYTHON, Boxes, sh

HOST = SandboxSpec(network="host")

REACH = """
import socket, sys
for where in (("127.0.0.1", int(sys.argv[1])), "\\0" + sys.argv[2]):
    try:
        socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET).connect(where)
        print("reached")
    except OSError as error:
        print("refused")
"""


@pytest.fixture
async def node(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node:
        yield node


@pytest.fixture
def listeners() -> Iterator[tuple[str, str]]:
    """A port and an abstract name on which this host listens."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        port = str(tcp.getsockname()[1])
        unix.bind(f"\0sandlot-{port}")
        unix.listen()
        yield port, f"sandlot-{port}"


async def test_it_reaches_the_host_and_no_other_does(boxes: Boxes, listeners: tuple[str, str]) -> None:
    for spec, said in ((HOST, "reached\n"), (SandboxSpec(), "refused\n")):
        box = await boxes(spec)
        assert (await sh(box, PYTHON, "-I", "-S", "-c", REACH, *listeners))[1] == 2 * said
        ours = (await sh(box, "readlink /proc/self/ns/net"))[1].strip() == os.readlink("/proc/self/ns/net")
        assert ours is (spec is HOST)
        resolver = (await sh(box, "cat /etc/resolv.conf"))[1]
        assert resolver == (Path("/etc/resolv.conf").read_text() if spec is HOST else "")
        assert any(loss.startswith("network: the host's own") for loss in box.losses) is (spec is HOST)


async def test_it_has_no_more_of_the_host_than_that(boxes: Boxes) -> None:
    box = await boxes(HOST)
    assert int((await sh(box, "nproc"))[1]) > 0
    assert await box.changes() == []  # what its start made is nobody's
    for command in (
        "touch /sys/x",
        "ls -A /sys | grep .",
        "mount -t sysfs sysfs /mnt",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "echo x > /etc/resolv.conf",
        "ip link add sandlot0 type dummy",
        "ip link set lo down",
        f"{PYTHON} -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
        f"{PYTHON} -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
        f"{PYTHON} -c 'import socket; socket.socket().bind((\"127.0.0.1\", 1023))'",
    ):
        ended, output = await sh(box, command)
        assert ended.code != 0, (command, output)


async def test_its_ports_are_not_routed(node: Node) -> None:
    box = (await node.create(HOST)).id
    with pytest.raises(Unsupported, match="the host's network"):
        await node.route(box, 8484, Upstream(url="http://127.0.0.1:9"))
    inside = node._live[box].box
    with pytest.raises(Unsupported, match="the host's network"):
        await inside.connect(22)


async def test_fork_and_reset_keep_it(node: Node, listeners: tuple[str, str]) -> None:
    box = (await node.create(HOST)).id
    (fork,) = await node.fork(box)
    await node.reset(box)
    for each in (box, fork.id):
        result = await node.run(each, Run(argv=(PYTHON, "-I", "-S", "-c", REACH, *listeners)))
        assert result.stdout == "reached\nreached\n"


async def test_a_parked_box_is_not_handed_out_for_it(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path, warm=[Warm(size=1)]) as node:
        async with asyncio.timeout(20):
            while (await node.pools())[0].ready < 1:  # noqa: ASYNC110  (the pool tells nobody)
                await asyncio.sleep(0.01)
        info = await node.create(HOST)
        assert any(loss.startswith("network:") for loss in info.losses)
        assert (await node.pools())[0].hits == 0


async def test_another_node_knows_it_too(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    from sandlot.drivers.base import Keeping
    from sandlot.drivers.native.driver import NativeDriver

    directory = tmp_path / f"node-net{os.getpid()}"
    directory.mkdir()
    first = NativeDriver(directory)
    box = await first.create("box", HOST, frozenset(), Keeping(grace=30, note="n"))
    assert box._channel is not None
    box._channel.close()  # as if that node were gone
    second = NativeDriver(directory)
    (adopted,), _ = await second.adopt()
    assert isinstance(adopted.box, NativeBox)
    with pytest.raises(Unsupported, match="the host's network"):
        await adopted.box.listen(8484)
    await adopted.box.destroy()
    await second.close()
    await first.close()


async def test_a_link_in_the_way_is_no_harm(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    for target in ("/run/nowhere/resolv.conf", "/etc/hostname", "../run/x"):
        await node.run(box, Run(argv=("ln", "-sfn", target, "/etc/resolv.conf")))
        image = (await node.snapshot(box, f"link-{len(target)}")).name
        info = await node.create(SandboxSpec(image=image, network="host"))
        result = await node.run(info.id, Run(argv=("cat", "/etc/resolv.conf")))
        assert result.stdout == Path("/etc/resolv.conf").read_text()
        assert (await node.run(box, Run(argv=("sh", "-c", f"test ! -e {target}")))).ok

"""Attack: reach something over a network from a box that has none: the host's ports and addresses, metadata addresses,
other boxes, over TCP, UDP, ICMP, raw packets, IPv6, abstract sockets; make an interface or a route.

Must hold: no packet leaves and nothing of these is reached. Unix sockets of the host are reached only where a volume
shows them: who mounts a directory with a socket in it has opened that door, and only that. The control runs the same
program where the network is: on the host.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sandlot.api import Volume
from tests.support.calls import CALL, answers
from tests.support.hostile import Arena, all_capabilities

PROMISE = "network"

REACH = """
import socket, sys
def reach(kind, where):
    if kind == "unix":
        socket.socket(socket.AF_UNIX).connect(where.replace("@", "\\0"))
        return
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if kind == "tcp":
        with socket.socket(family) as sock:
            sock.settimeout(1)
            sock.connect((host, int(port)))
    elif kind == "udp":
        socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (host, int(port)))
    elif kind == "ping":
        socket.socket(family, socket.SOCK_DGRAM, socket.IPPROTO_ICMP).sendto(b"\\10\\0\\0\\0\\0\\0\\0\\0", (host, 0))
    elif kind == "raw":
        socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_ICMP).sendto(b"\\10\\0\\0\\0\\0\\0\\0\\0", (host, 0))
    elif kind == "broadcast":
        sock = socket.socket(family, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.sendto(b"x", (host, int(port)))
for word in sys.argv[1:]:
    kind, _, where = word.partition("=")
    try:
        reach(kind, where)
        print(word, "reached")
    except OSError as error:
        print(word, "failed")
"""
OUTSIDE = (
    "tcp=169.254.169.254:80",
    "tcp=169.254.170.2:80",
    "tcp=100.100.100.200:80",
    "tcp=192.0.2.1:80",
    "tcp=10.0.0.1:80",
    "tcp=fd00:ec2::254:80",
    "tcp=2001:db8::1:80",
    "udp=8.8.8.8:53",
    "udp=2001:db8::1:53",
    "broadcast=255.255.255.255:67",
    "udp=224.0.0.251:5353",
    "udp=ff02::1:5353",
    "ping=8.8.8.8:0",
    "raw=8.8.8.8:0",
    "raw=127.0.0.1:0",
)


def addresses() -> list[str]:
    """The host's own."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return [address for address in found if ":" not in address] + ["127.0.0.1"]


@contextmanager
def servers(path: Path) -> Iterator[list[str]]:
    """Listeners on the host, as words for REACH: on all its addresses, on an abstract name, in a directory."""
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = tcp.getsockname()[1]
        words = [f"tcp={address}:{port}" for address in addresses()]
        for name in (f"@sandlot-test-{port}", str(path / "socket")):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(name.replace("@", "\0"))
            unix.listen()
            words.append(f"unix={name}")
        path.chmod(0o755)
        (path / "socket").chmod(0o777)
        yield words


async def test_nothing_is_reached(arena: Arena, tmp_path: Path) -> None:
    with servers(tmp_path) as mine:
        said = answers((await arena.python(REACH, *mine, *OUTSIDE)).stdout)
        assert said.keys() == {*mine, *OUTSIDE}
        assert set(said.values()) == {"failed"}, said


@pytest.mark.control
async def test_control_on_the_host_the_same_is_reached(tmp_path: Path) -> None:
    with servers(tmp_path) as mine:
        outside = subprocess.run([sys.executable, "-c", REACH, *mine], capture_output=True, text=True, check=True)
        assert set(answers(outside.stdout).values()) == {"reached"}


async def test_a_socket_in_a_volume_is_the_door_that_was_opened(arena: Arena, tmp_path: Path) -> None:
    with servers(tmp_path) as mine:
        volumes = (Volume(source=str(tmp_path), target="/out", read_only=False),)
        said = answers((await arena.python(REACH, *mine, "unix=/out/socket", volumes=volumes)).stdout)
        assert said.pop("unix=/out/socket") == "reached"
        assert set(said.values()) == {"failed"}


async def test_boxes_do_not_reach_each_other(arena: Arena) -> None:
    first, second = await arena.box(), await arena.box()
    serve = (
        "import os, socket\n"
        "listeners = [socket.create_server(('127.0.0.1', 8080)), socket.socket(socket.AF_UNIX)]\n"
        "listeners[1].bind('\\0inside'); listeners[1].listen()\n"
        "if os.fork() == 0:\n"
        "    for fd in range(3): os.close(fd)\n"
        "    import signal; signal.pause()"
    )
    assert (await arena.python(serve, box=first)).ok
    words = ("tcp=127.0.0.1:8080", "unix=@inside")
    assert set(answers((await arena.python(REACH, *words, box=first)).stdout).values()) == {"reached"}  # the control
    assert set(answers((await arena.python(REACH, *words, box=second)).stdout).values()) == {"failed"}


CONFIGURE = (
    CALL
    + """
import fcntl, os, socket, struct
print("interfaces", ",".join(name for _, name in socket.if_nameindex()))
def link():  # RTM_NEWLINK, type dummy
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    kind = struct.pack("HH8s", 9, 1, b"dummy")[:9] + b"\\0\\0\\0"
    info = struct.pack("HH", 4 + len(kind), 18) + kind
    body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + info
    sock.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
    answer = struct.unpack_from("i", sock.recv(4096), 16)[0]
    if answer: raise OSError(-answer, "")
def address():
    request = struct.pack("16sH2s4s8x", b"lo", socket.AF_INET, b"", socket.inet_aton("10.9.8.7"))
    fcntl.ioctl(socket.socket(), 0x8916, request)
say("link", attempt(link))
say("address", attempt(address))
say("tun", attempt(os.open, "/dev/net/tun", os.O_RDWR))
say("packet", attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW))
"""
)


async def test_no_interface_or_address_can_be_made(arena: Arena) -> None:
    said = answers((await arena.python(CONFIGURE)).stdout)
    assert said["interfaces"] == "lo"
    assert (said["link"], said["address"], said["tun"]) == ("EPERM", "EPERM", "ENOENT")
    assert said["packet"] in ("EAFNOSUPPORT", "EPERM")


@pytest.mark.control
async def test_control_with_every_capability_they_can_and_still_lead_nowhere(arena: Arena) -> None:
    box = await arena.box(without=all_capabilities)
    away = [word for word in OUTSIDE if word.startswith(("tcp", "udp=8"))]
    reached = answers((await arena.python(REACH, *away, "raw=127.0.0.1:0", box=box)).stdout)
    assert reached.pop("raw=127.0.0.1:0") == "reached"
    assert set(reached.values()) == {"failed"}
    said = answers((await arena.python(CONFIGURE, box=box)).stdout)
    assert (said["address"], said["packet"]) == ("ok", "ok")
    assert said["link"] in ("ok", "ENOTSUP")  # the second: this kernel has no such interface

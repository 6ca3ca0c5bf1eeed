"""Attack: reach something over a network from a box that has none.

Must hold: no packet leaves; neither the host's ports and addresses, nor another box, nor an abstract socket, nor raw
access is reached. The control runs the same program where the network is: on the host.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support.hostile import Arena, all_capabilities

REACH = """
import socket, sys
for word in sys.argv[1:]:
    kind, _, where = word.partition("=")
    try:
        if kind == "tcp":
            host, port = where.rsplit(":", 1)
            socket.create_connection((host, int(port)), 1)
        elif kind == "udp":
            host, port = where.rsplit(":", 1)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (host, int(port)))
        elif kind == "abstract":
            socket.socket(socket.AF_UNIX).connect("\\0" + where)
        elif kind == "icmp":
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        elif kind == "packet":
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        print("reached", word)
    except OSError as error:
        print("failed", word)
"""


async def test_nothing_is_reached(arena: Arena) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        name = f"sandlot-test-{port}"
        abstract.bind("\0" + name)
        abstract.listen()
        mine = [f"tcp=127.0.0.1:{port}", f"abstract={name}"]
        others = [
            "tcp=169.254.169.254:80",
            "tcp=192.0.2.1:80",
            "tcp=2001:db8::1:80",
            "udp=8.8.8.8:53",
            "udp=2001:db8::1:53",
        ]
        result = await arena.python(REACH, *mine, *others, "icmp=", "packet=")
        assert result.stdout.count("failed") == len(mine) + len(others) + 2, result.stdout
        outside = subprocess.run([sys.executable, "-c", REACH, *mine], capture_output=True, text=True, check=True)
        assert outside.stdout.count("reached") == len(mine)  # the control


async def test_boxes_do_not_reach_each_other(arena: Arena) -> None:
    first, second = await arena.box(), await arena.box()
    serve = "import socket, os; s = socket.create_server(('127.0.0.1', 8080)); os.fork() and os._exit(0); s.accept()"
    assert (await arena.python(serve, box=first)).ok
    assert "reached" in (await arena.python(REACH, "tcp=127.0.0.1:8080", box=first)).stdout  # the control
    assert "failed" in (await arena.python(REACH, "tcp=127.0.0.1:8080", box=second)).stdout


@pytest.mark.control
async def test_control_with_every_capability_raw_sockets_open_but_lead_nowhere(arena: Arena) -> None:
    box = await arena.box(without=all_capabilities)
    result = await arena.python(REACH, "icmp=", "packet=", "tcp=192.0.2.1:80", box=box)
    assert result.stdout.split() == ["reached", "icmp=", "reached", "packet=", "failed", "tcp=192.0.2.1:80"]

"""Attack: take the node's descriptors: open connection after connection to the ports that are routed to it, say nothing
on them and keep them open.

Must hold: a box holds no more than its own number of them, on all its ports together, and each further one is cut off;
the node answers its neighbours meanwhile, and the box itself once the connections are gone.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from sandlot import asgi
from sandlot.sandbox import Sandbox
from tests.support.hostile import Arena

PROMISE = "open files limit"

PORTS = (8000, 8001)
# As many as it is told to. `hold` says how many of them are still open, once that is settled: when it is no more than
# it may be, and after a while if that is not so.
FLOOD = """
import select, socket, sys, time
kept = []
for at in range(int(sys.argv[1])):
    try: kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[3 + at % 2])), timeout=5))
    except OSError: break
gone = select.poll()
for each in kept: gone.register(each, select.POLLIN | select.POLLHUP)
until = time.monotonic() + 8
time.sleep(0.5)
while (held := len(kept) - len(gone.poll(0))) > int(sys.argv[2]) and time.monotonic() < until: time.sleep(0.1)
hold(held)
"""
ASK = """
import socket
with socket.create_connection(("127.0.0.1", 8000), timeout=5) as sock:
    sock.sendall(b"GET / HTTP/1.1\\r\\nhost: h\\r\\nconnection: close\\r\\n\\r\\n")
    print(sock.recv(100).split()[1].decode())
"""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"lives"})


async def routed(arena: Arena) -> Sandbox:
    box = await arena.box()
    for port in PORTS:
        await arena.node.route(box.id, port, app)
    return box


async def test_a_box_holds_its_own_number_of_connections_and_no_more(arena: Arena) -> None:
    box, neighbour = await routed(arena), await routed(arena)
    before = len(os.listdir("/proc/self/fd"))
    async with arena.holding(FLOOD, "900", str(asgi.BOX_CONNECTIONS), *map(str, PORTS), box=box) as said:
        assert int(said) <= asgi.BOX_CONNECTIONS
        assert len(os.listdir("/proc/self/fd")) <= before + asgi.BOX_CONNECTIONS + 100
        assert (await arena.python(ASK, box=neighbour)).stdout == "200\n"
        assert (await neighbour.run("echo lives")).stdout == "lives\n"
    assert (await arena.python(ASK, box=box)).stdout == "200\n"


@pytest.mark.control
async def test_control_with_room_for_more_they_are_held(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BOX_CONNECTIONS", 1000)
    async with arena.holding(FLOOD, "900", "1000", *map(str, PORTS), box=await routed(arena)) as said:
        assert int(said) == 900

"""Promises of a native box whose node is killed:
1. It goes on; another driver on the same directory gets it back: the same processes, what was held, its ports.
2. How a command ended is told to the new node, even if it ended while there was none.
3. Without a new node it ends when its grace is over, and a later one is told so; a parked one ends at once.
4. While a node lives no other gets in, and a box's ids are nobody else's as long as it lives.
5. Dead with its node, or never finished, nothing of it is left after the next adoption: no cgroup either.
6. What the dead node asked for last is answered to nobody; a node that hangs keeps no box beyond its lifetime.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandlot.api import Ending, SandboxSpec
from sandlot.drivers.base import Adopted, Remains, Spawn
from sandlot.drivers.native.box import NativeBox, NativeProcess
from sandlot.drivers.native.driver import NativeDriver
from sandlot.drivers.native.keep import records
from sandlot.drivers.native.wire import Channel, Frame, Key, pack
from sandlot.errors import HostFault
from tests.support.native import ENV, Boxes, read_all, sh
from tests.support.server import alive, until_gone

NODE = """
import asyncio, os, sys
from pathlib import Path
from sandlot.api import Limits, SandboxSpec
from sandlot.drivers.base import Hold, Keeping, Spawn
from sandlot.drivers.native.driver import NativeDriver

async def main(directory, grace, lifetime, parked, *commands):
    driver = NativeDriver(Path(directory))
    keeping = Keeping(float(grace), "note of the box", parked == "parked")
    box = await driver.create("box", SandboxSpec(lifetime=float(lifetime) or None), frozenset(), keeping)
    await box.listen(8080, "note of the port")
    driver.cgroups.make("half", Limits())  # of a box whose node is killed before it has a record
    for command in commands:
        read, write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        what = Spawn(("sh", "-c", command), {"PATH": "/usr/bin:/bin"}, "/")
        await box.spawn(what, null, write, write, Hold((read,), command))
        os.close(write)
    print(box._pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass
class Dead:
    """A node that was killed."""

    directory: Path
    pid: int

    @property
    def cgroups(self) -> list[Path]:
        """The node's own that exist."""
        listing = self.directory / "cgroups"
        listed = [Path(line) for line in listing.read_text().splitlines()] if listing.exists() else []
        return [path for path in listed if path.exists()]

    async def adopt(self) -> tuple[list[Adopted], list[Remains], NativeDriver]:
        driver = NativeDriver(self.directory)
        return *await driver.adopt(), driver


Start = Callable[..., Awaitable[Dead]]  # commands, grace, lifetime, parked


@pytest.fixture
async def node(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Start]:
    if native_reason:
        pytest.skip(native_reason)
    directory = tmp_path / f"node-{secrets.token_hex(3)}"  # cgroups are named after it
    directory.mkdir()
    started: list[asyncio.subprocess.Process] = []

    async def start(*commands: str, grace: float = 30, lifetime: float = 0, parked: bool = False) -> Dead:
        words = (str(directory), str(grace), str(lifetime), "parked" if parked else "", *commands)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", NODE, *words, stdout=asyncio.subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(20):
            dead = Dead(directory, int(await process.stdout.readline()))
        process.kill()
        await process.wait()
        return dead

    yield start
    driver = NativeDriver(directory)
    adopted, _ = await driver.adopt()
    for each in adopted:
        await each.box.destroy(Ending.KILLED)
    await driver.close()


async def test_another_node_gets_the_box_back_with_all_that_was_held(node: Start) -> None:
    dead = await node("echo before; read nothing; sleep 0.3; echo after; sleep 600", "echo quick; exit 7")
    (adopted,), _, driver = await dead.adopt()
    assert adopted.note == "note of the box"
    box = adopted.box
    assert isinstance(box, NativeBox)
    assert (await sh(box, "echo works"))[1] == "works\n"
    ((listener, port, note),) = adopted.listeners
    assert (port, note) == (8080, "note of the port")
    inside, _ = await asyncio.gather(
        sh(box, "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8080 && echo connected"),
        asyncio.get_running_loop().sock_accept(listener),
    )
    assert inside[1] == "connected\n"
    listener.close()
    (slow, _, slow_fds), (quick, quick_note, quick_fds) = adopted.runs
    assert quick_note == "echo quick; exit 7"
    assert (await quick.wait()).code == 7  # it ended while there was no node
    assert os.read(quick_fds[0], 100) == b"quick\n"
    read = b""
    while len(read) < len(b"before\nafter\n"):
        read += await asyncio.to_thread(os.read, slow_fds[0], 100)
    assert read == b"before\nafter\n"
    await slow.kill_tree()
    assert (await slow.wait()).signal == signal.SIGKILL
    for process, _, fds in adopted.runs:
        await process.release()
        for fd in fds:
            os.close(fd)
    assert (await box.destroy(Ending.KILLED)).ending == Ending.KILLED
    assert not alive(dead.pid)
    assert records(dead.directory / "boxes") == []
    await driver.close()
    assert dead.cgroups == []


async def test_it_can_be_adopted_again_and_again(node: Start) -> None:
    dead = await node("sleep 600")
    for _ in range(3):
        (adopted,), _, _ = await dead.adopt()
        box = adopted.box
        assert isinstance(box, NativeBox)
        assert len(adopted.runs) == 1
        assert (await sh(box, "echo works"))[1] == "works\n"
        for _, _, fds in adopted.runs:
            os.close(fds[0])
        adopted.listeners[0][0].close()
        killed(box)


def killed(box: NativeBox) -> None:
    """As if the node of an adopted box were killed."""
    box._loop.remove_reader(box._pidfd)
    channel(box).close()
    os.close(box._pidfd)


def channel(box: NativeBox) -> Channel:
    assert box._channel is not None
    return box._channel


async def again(dead: Dead) -> NativeBox:
    """The box in the hands of another node, and the listener that was held for it let go."""
    (adopted,), _, _ = await dead.adopt()
    assert isinstance(adopted.box, NativeBox)
    adopted.listeners[0][0].close()
    return adopted.box


async def test_the_answer_to_a_dead_nodes_copy_is_not_taken_for_the_next_ones(node: Start) -> None:
    dead = await node()
    box = await again(dead)
    await sh(box, "seq -f /root/%0200g 1000 | xargs touch")  # more than a pipe holds
    number = channel(box)._next_id
    read, write = os.pipe()
    first = asyncio.ensure_future(box._work(Frame.LIST, "listing", [write]))
    await box.stats()  # which is answered: so the list has begun
    killed(box)
    os.close(write)
    with suppress(HostFault):
        await first
    box = await again(dead)
    channel(box)._next_id = number  # as it comes to be after as many requests
    next_read, next_write = os.pipe()
    second = asyncio.ensure_future(box._work(Frame.LIST, "listing", [next_write]))
    await box.stats()
    os.close(read)  # the first list can go no further: it failed
    done, _ = await asyncio.wait((second,), timeout=0.2)
    os.close(next_write)
    listed = await asyncio.to_thread(read_all, next_read)
    assert not done, second.exception()
    await second
    assert listed.count(b"froot/0") == 1000
    await box.destroy(Ending.KILLED)


async def test_the_end_of_a_dead_nodes_command_is_not_taken_for_that_of_another(node: Start) -> None:
    dead = await node()
    box = await again(dead)
    number = channel(box)._next_id
    _, said, first = await asking(box, 5)
    killed(box)
    box = await again(dead)
    channel(box)._next_id = number
    process, next_said, second = await asking(box, 6)
    os.write(first, b"go on\n")
    assert await asyncio.to_thread(read_all, said) == b""  # it has ended
    await box.stats()
    os.write(second, b"go on\n")
    assert (await process.wait()).code == 6
    await process.release()
    for fd in (first, second, next_said):
        os.close(fd)
    await box.destroy(Ending.KILLED)


async def asking(box: NativeBox, code: int) -> tuple[NativeProcess, int, int]:
    """A command that nothing is held of, its output and input: it ends with `code` when it is given a line."""
    read, write = os.pipe2(os.O_CLOEXEC)
    typed, given = os.pipe2(os.O_CLOEXEC)
    process = await box.spawn(Spawn(("sh", "-c", f"read line; exit {code}"), ENV, "/"), typed, write, write)
    os.close(write)
    os.close(typed)
    return process, read, given


@pytest.mark.parametrize("half", [False, True], ids=["reading nothing", "in the middle of a request"])
async def test_a_lifetime_ends_a_box_whose_node_hangs(boxes: Boxes, half: bool) -> None:
    box = await boxes(SandboxSpec(lifetime=2))
    node_end = channel(box)
    box._loop.remove_reader(node_end._sock)
    if half:
        node_end._sock.send(pack(Frame.KILL, 1, [(Key.RUN, 1)])[:16])
    else:
        for number in range(2000):  # answers for more than the socket holds
            node_end.send(Frame.KILL, number, [(Key.RUN, 1 << 20)])
    try:
        await until_gone(box._pid)
    finally:
        box._loop.add_reader(node_end._sock, node_end._readable)  # it goes on
    assert (await box.death).ending == Ending.LIFETIME


async def test_without_a_node_it_ends_when_its_grace_is_over(node: Start) -> None:
    dead = await node("sleep 600", grace=0.3)
    await until_gone(dead.pid)
    adopted, (remains,), driver = await dead.adopt()
    assert adopted == []
    assert (remains.note, remains.death.ending) == ("note of the box", Ending.ORPHANED)
    await driver.close()
    _, (again,), driver = await dead.adopt()  # told again until somebody has written it down
    assert again.death == remains.death
    again.forget()
    assert records(dead.directory / "boxes") == []
    await driver.close()
    assert dead.cgroups == []


async def test_a_lifetime_goes_on_without_a_node(node: Start) -> None:
    dead = await node("sleep 600", lifetime=0.5)
    await until_gone(dead.pid)
    _, (remains,), driver = await dead.adopt()
    assert remains.death.ending == Ending.LIFETIME
    await driver.close()


async def test_one_that_is_killed_meanwhile_is_told_as_such(node: Start) -> None:
    dead = await node("sleep 600")
    os.kill(dead.pid, signal.SIGKILL)
    await until_gone(dead.pid)
    _, (remains,), driver = await dead.adopt()
    assert remains.death.ending == Ending.HELPER_DIED
    await driver.close()


async def test_a_parked_one_is_nobodys(node: Start) -> None:
    dead = await node(parked=True)
    await until_gone(dead.pid)
    assert (await dead.adopt())[:2] == ([], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only a root node has ids to give")
async def test_its_ids_stay_taken_as_long_as_it_lives(node: Start, tmp_path: Path) -> None:
    dead = await node("sleep 600")
    (record,) = records(dead.directory / "boxes")
    facts = record.facts()
    assert facts is not None
    other = tmp_path / f"node-{secrets.token_hex(3)}"
    other.mkdir()
    driver = NativeDriver(other)
    box = await driver.create("other", SandboxSpec())
    assert box._base is not None
    assert abs(box._base - facts["base"]) >= 65_536
    await box.destroy()
    await driver.close()


@pytest.mark.parametrize("grace", [0, 30])
async def test_no_cgroup_of_a_box_that_is_dead_or_was_never_made_is_left(node: Start, grace: float) -> None:
    dead = await node("sleep 600", grace=grace)
    if grace:
        os.kill(dead.pid, signal.SIGKILL)
    for path in dead.cgroups[:1]:  # as if the dead node had been started in another cgroup than the next one
        elsewhere = path.with_name(f"{path.name}-elsewhere")
        elsewhere.mkdir()
        with (dead.directory / "cgroups").open("a") as listing:
            listing.write(f"{elsewhere}\n")
    adopted, _, driver = await dead.adopt()
    assert adopted == []
    assert [box for path in dead.cgroups for box in path.glob("*/") if box.name in ("box", "half")] == []
    await driver.close()  # which has made no box itself
    assert dead.cgroups == []


async def test_the_cgroups_of_a_box_that_lives_are_left_alone(node: Start) -> None:
    dead = await node("sleep 600")
    (adopted,), _, driver = await dead.adopt()
    box = adopted.box
    assert isinstance(box, NativeBox)
    assert [path for path in box.group.directories if not Path(path).is_dir()] == []
    assert (await sh(box, "echo works"))[1] == "works\n"
    for _, _, fds in adopted.runs:
        os.close(fds[0])
    adopted.listeners[0][0].close()
    await box.destroy(Ending.KILLED)
    await driver.close()

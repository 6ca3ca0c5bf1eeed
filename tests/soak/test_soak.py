"""Soak: one server, and so many sandboxes and ten times as many commands that whatever leaks shows.

Must hold: the second half is like the first. The server's memory has grown by no more than 2 %, and it has as many
descriptors, threads, child processes, directories, cgroups and namespaces after the last quarter as after the second.

SANDLOT_SOAK_BOXES says how many sandboxes (400; `make soak` makes it 20,000). A line for each quarter is printed.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sandlot.sandbox import Sandbox
from tests.support.server import Server, cgroups, leftovers, note_nodes

BOXES = int(os.environ.get("SANDLOT_SOAK_BOXES", "400"))
AT_ONCE = 8
QUARTERS = 4


@dataclass(frozen=True)
class Seen:
    """A server when nothing is asked of it."""

    rss_kib: int
    descriptors: int
    threads: int
    processes: int
    paths: int  # of its state directory
    cgroups: int
    namespaces: int  # of it and its children

    @classmethod
    def of(cls, server: Server) -> Seen:
        assert server.process is not None
        proc = Path("/proc", str(server.process.pid))
        children = [child for task in (proc / "task").iterdir() for child in (task / "children").read_text().split()]
        memory = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
        spaces = {os.readlink(link) for pid in (proc.name, *children) for link in Path("/proc", pid, "ns").iterdir()}
        nodes = {path.name for path in server.state.glob("node-*")}
        return cls(
            rss_kib=int(memory["Rss"].split()[0]),
            descriptors=len(os.listdir(proc / "fd")),
            threads=len(os.listdir(proc / "task")),
            processes=len(children),
            paths=sum(1 for _ in server.state.rglob("*")),
            cgroups=len(cgroups(nodes)),
            namespaces=len(spaces),
        )


async def life(box: Sandbox, number: int) -> None:
    """A dozen commands, of every way in which one can be run, and what else is done with a sandbox now and then."""
    assert (await box.run("echo $((6 * 7))")).stdout == "42\n"
    assert (await box.run(["cat"], stdin=b"x" * 5000)).out.total == 5000
    assert (await box.run(["false"])).exit_code == 1
    assert (await box.run(["no-such-program"])).exit_code == 127
    assert (await box.run("head -c 100000 /dev/zero", output_cap=1000)).out.total == 100_000
    assert (await box.run(["true"], key=f"key-{number}")).ok
    started = await box.start("cat; exit 3", stdin_open=True)
    await started.write(b"fed", end=True)
    assert [chunk.data async for chunk in started.output()] == [b"fed"]
    assert (await started.wait()).exit_code == 3
    await box.write_file("/root/f", b"kept" * 1000)
    assert len(await box.read_file("/root/f")) == 4000
    if number % 10 == 0:
        async with await box.shell() as shell:
            assert (await shell.run("cd /tmp; sleep 60 &")).ok
            assert (await shell.run("pwd")).stdout == "/tmp\n"
    if number % 10 == 1:
        assert (await box.run(["sleep", "60"], timeout=0.01)).timed_out
    if number % 10 == 2:
        await box.reset()
    if number % 50 == 3:
        image = await box.snapshot(f"soak-{number}")
        (fork,) = await box.fork()
        assert len(await fork.read_file("/root/f")) == 4000
        await fork.close()
        await box._node.delete_image(image.name)
    assert (await box.run("exit 9")).exit_code == 9
    assert (await box.run(["pwd"])).stdout == "/root\n"
    assert (await box.run("sleep 60 & echo left")).stdout == "left\n"


async def test_the_second_half_is_like_the_first(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    seen: list[Seen] = []
    async with Server(state) as server:
        note_nodes(state)
        node = server.node()
        numbers = iter(range(BOXES))

        async def work(until: int) -> None:
            for number in numbers:
                async with await Sandbox.create(node=node, labels={"number": str(number)}) as box:
                    await life(box, number)
                if number >= until:
                    return

        for quarter in range(1, QUARTERS + 1):
            began = time.monotonic()
            await asyncio.gather(*(work(BOXES * quarter // QUARTERS) for _ in range(AT_ONCE)))
            await settled(server)
            seen.append(Seen.of(server))
            print(f"quarter {quarter}: {time.monotonic() - began:.0f} s, {seen[-1]}", flush=True)
        counts = await node.counts()
        await node.close()
    assert counts["running"] == 0
    assert counts["created"] >= BOXES
    half, end = seen[1], seen[3]
    assert end.rss_kib <= half.rss_kib * 1.02
    assert replace(end, rss_kib=half.rss_kib) == half
    assert leftovers(state) == []


async def settled(server: Server) -> None:
    """What is cleaned up after an answer is done: a moment in which nothing of the server changes."""
    async with asyncio.timeout(30):
        before, now = None, Seen.of(server)
        while now != before:
            await asyncio.sleep(0.5)
            before, now = now, Seen.of(server)

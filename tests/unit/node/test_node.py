"""Promises of a node, whatever its driver:

1. A command's failure is a result: exit code, signal, timeout with partial output, not found, not executable.
2. Output is bounded: head and tail are kept, the total is told; the rest costs no memory.
3. Standard input of any size arrives whole, and a command that does not read it does not hang.
4. Every sandbox ends once, in a named way that can be asked about; the ledger's counts add up. A call that meets its
   end says so, and whoever asks next is told the same.
5. Idle time and lifetime end a sandbox; work renews the first and not the second.
6. A cancelled create leaves nothing; a cancelled run kills its command; a cancelled destroy is still carried out.
7. A host in trouble is a HostFault with a hint, and leaves nothing.
8. A route is served inside; it ends with its sandbox, its connections too.
9. A node sweeps what dead nodes left, never what living ones hold, and leaves nothing when it closes or is cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Ending, Filter, Run, SandboxSpec, Upstream
from sandlot.drivers.fake import Context, FakeDriver
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, SandboxEnded, Unsupported
from sandlot.node.ledger import NodeDirectory
from sandlot.node.node import Node
from tests.support.disk import fill, small_disk


async def flood(context: Context) -> int:
    """Writes argv[1] bytes of `x` between `<` and `>`."""
    await context.write(b"<" + b"x" * (int(context.argv[1]) - 2) + b">")
    return 0


async def mumble(context: Context) -> int:
    """Says something, then takes for ever."""
    await context.write(b"partial")
    await asyncio.sleep(3600)
    return 0


async def crash(context: Context) -> int:
    return -11


async def leave_writer(context: Context) -> int:
    """Exits while a background child still holds the output."""
    held = os.dup(context.stdout)
    await context.write(b"done")
    asyncio.get_running_loop().call_later(1.0, os.close, held)
    return 0


async def ask(context: Context) -> int:
    """An HTTP request to port argv[1]; prints the answer's last line."""
    reader, writer = await context.connect(int(context.argv[1]))
    writer.write(b"GET /path?x=1 HTTP/1.1\r\nhost: model\r\nconnection: close\r\n\r\n")
    await context.write((await reader.read()).splitlines()[-1])
    writer.close()
    return 0


PROGRAMS = {
    "flood": flood,
    "mumble": mumble,
    "crash": crash,
    "leave-writer": leave_writer,
    "ask": ask,
}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(FakeDriver(PROGRAMS), tmp_path) as node:
        yield node
        counts = await node.counts()
        assert counts["created"] == counts["running"] + sum(counts[ending] for ending in Ending)
    assert list(tmp_path.iterdir()) == []


def run(*argv: str, **fields: Any) -> Run:
    return Run(argv=argv, **fields)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def test_a_command_s_end_is_a_result(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    ok = await node.run(box, run("echo", "hello"))
    assert (ok.exit_code, ok.signal, ok.stdout, ok.stderr, ok.timed_out) == (0, None, "hello\n", "", False)
    assert (await node.run(box, run("false"))).exit_code == 1
    crashed = await node.run(box, run("crash"))
    assert (crashed.exit_code, crashed.signal) == (139, 11)
    assert ok.seconds < 1


async def test_a_command_that_cannot_start_says_why(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    missing = await node.run(box, run("nope"))
    assert (missing.exit_code, missing.stderr) == (127, "sandlot: nope: command not found\n")
    await node.write_file(box, "/tmp/text", b"not a program")
    refused = await node.run(box, run("/tmp/text"))
    assert (refused.exit_code, refused.stderr) == (126, "sandlot: /tmp/text: cannot be executed: Permission denied\n")
    nowhere = await node.run(box, run("true", cwd="/no/where"))
    assert nowhere.exit_code == 127
    assert nowhere.stderr == "sandlot: working directory /no/where: No such file or directory\n"


async def test_a_timeout_returns_the_partial_output(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    result = await node.run(box, run("mumble", timeout=0.1))
    assert (result.timed_out, result.exit_code, result.signal, result.stdout) == (True, 137, 9, "partial")
    assert 0.1 <= result.seconds < 2
    assert (await node.run(box, run("echo", "usable"))).stdout == "usable\n"


async def test_head_and_tail_are_kept_within_the_cap(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    result = await node.run(box, run("flood", "3000000", output_cap=1000))
    assert (result.out.total, len(result.out.data), result.out.truncated) == (3_000_000, 1000, True)
    assert (result.out.data[:1], result.out.data[-1:]) == (b"<", b">")
    for size in (2, 999, 1000):
        whole = await node.run(box, run("flood", str(size), output_cap=1000))
        assert whole.out.data == b"<" + b"x" * (size - 2) + b">"
        assert not whole.out.truncated
    nothing = await node.run(box, run("flood", "100", output_cap=0))
    assert (nothing.out.data, nothing.out.total) == (b"", 100)


async def test_standard_input_arrives_whole(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    data = os.urandom(1 << 20)
    assert (await node.run(box, run("cat", stdin=data))).out.data == data
    assert (await node.run(box, run("true", stdin=data))).exit_code == 0  # does not read it
    assert (await node.run(box, run("cat"))).out.data == b""  # at its end from the start


async def test_a_child_that_holds_the_output_is_not_waited_for(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    result = await node.run(box, run("leave-writer"))
    assert result.stdout == "done"
    assert result.seconds < 0.5


async def test_the_environment_is_the_sandbox_s_and_the_run_s(node: Node) -> None:
    box = (await node.create(SandboxSpec(env={"A": "box", "B": "box"}))).id
    seen = (await node.run(box, run("env", env={"B": "run"}))).stdout.splitlines()
    assert {"A=box", "B=run", "HOME=/root"} <= set(seen)
    assert any(line.startswith("PATH=") for line in seen)
    assert "HOME=/" in (await node.run(box, run("env", user=1000))).stdout.splitlines()


async def test_another_user_is_not_sent_to_a_directory_that_is_closed_to_it(node: Node) -> None:
    async def where(spec: SandboxSpec, **fields: Any) -> str:
        return (await node.run((await node.create(spec)).id, run("pwd", **fields))).stdout.strip()

    assert await where(SandboxSpec()) == "/root"
    assert await where(SandboxSpec(), user=1000) == "/"
    assert await where(SandboxSpec(), user=1000, cwd="/root") == "/root"
    assert await where(SandboxSpec(cwd="/tmp"), user=1000) == "/tmp"
    assert await where(SandboxSpec(cwd="/root"), user=1000) == "/root"


async def test_an_end_can_be_asked_about_and_is_counted_once(node: Node) -> None:
    made = await node.create(SandboxSpec(labels={"for": "test"}))
    assert [info.id for info in await node.list()] == [made.id]
    first, second = await asyncio.gather(node.destroy(made.id), node.destroy(made.id, Ending.KILLED))
    assert first.ending == second.ending == Ending.EXIT
    assert (await node.info(made.id)).labels == {"for": "test"}
    with pytest.raises(SandboxEnded, match=f"sandbox {made.id} was closed by its owner 0 s ago"):
        await node.run(made.id, run("true"))
    with pytest.raises(NotFound):
        await node.run("sb-never", run("true"))
    assert await node.list() == []
    counts = await node.counts()
    assert (counts["created"], counts["exit"], counts["killed"]) == (1, 1, 0)


async def test_a_box_that_dies_says_how(node: Node) -> None:
    assert isinstance(node.driver, FakeDriver)
    box = (await node.create(SandboxSpec())).id
    running = asyncio.ensure_future(node.run(box, run("mumble")))
    await asyncio.sleep(0.01)
    node.driver.boxes[box].die(Ending.OOM, "sandlot-init was killed for memory")
    with pytest.raises(SandboxEnded, match="ran out of memory") as ended:
        await running
    assert "memory" in (ended.value.hint or "")
    assert (await node.info(box)).ending == Ending.OOM
    assert (await node.counts())["oom"] == 1


async def test_a_box_that_answers_no_more_is_ended_not_the_host_s_trouble(node: Node) -> None:
    assert isinstance(node.driver, FakeDriver)
    calls = [
        lambda box: node.run(box, run("true")),
        lambda box: node.read_file(box, "/f"),
        lambda box: node.route(box, 8484, hello),
    ]
    for call in calls:
        box = (await node.create(SandboxSpec())).id
        node.driver.boxes[box].fall_silent()
        asyncio.get_running_loop().call_later(0.05, node.driver.boxes[box].die, Ending.HELPER_DIED)
        with pytest.raises(SandboxEnded, match="its first process died"):
            await call(box)
        assert (await node.info(box)).ending == Ending.HELPER_DIED


async def test_an_end_can_be_asked_about_for_an_hour(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [(await node.create(SandboxSpec())).id for _ in range(3)]
    started = time.time()
    for box, minutes in zip(boxes, (0, 59, 61), strict=True):
        monkeypatch.setattr("sandlot.node.node.time.time", lambda at=started + 60 * minutes: at)
        await node.destroy(box)
        if minutes == 59:
            assert (await node.info(boxes[0])).ending == Ending.EXIT
    assert (await node.info(boxes[1])).ending == Ending.EXIT
    with pytest.raises(NotFound):
        await node.info(boxes[0])


async def test_idleness_and_lifetime_end_a_sandbox(node: Node) -> None:
    idle = (await node.create(SandboxSpec(idle_timeout=0.15))).id
    busy = (await node.create(SandboxSpec(idle_timeout=0.15))).id
    short = (await node.create(SandboxSpec(lifetime=0.15))).id
    ends = asyncio.gather(
        node.run(busy, run("sleep", "0.4")), node.run(short, run("sleep", "5")), return_exceptions=True
    )
    await asyncio.sleep(0.3)
    assert (await node.info(idle)).ending == Ending.IDLE
    assert (await node.info(busy)).state == "running"
    assert (await node.info(short)).ending == Ending.LIFETIME
    worked, cut = await ends
    assert not isinstance(worked, BaseException)
    assert worked.exit_code == 0
    assert isinstance(cut, SandboxEnded)
    await asyncio.sleep(0.3)
    assert (await node.info(busy)).ending == Ending.IDLE


async def test_a_cancelled_create_leaves_nothing(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def slow(box_id: str, spec: SandboxSpec) -> None:
        entered.set()
        await asyncio.sleep(3600)

    driver = FakeDriver(creating=slow)
    async with Node(driver, tmp_path) as node:
        creating = asyncio.ensure_future(node.create(SandboxSpec()))
        await entered.wait()
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert driver.boxes == {}
        counts = await node.counts()
        assert (counts["created"], counts["running"], counts["start_failed"]) == (1, 0, 1)


async def test_a_cancelled_run_kills_its_command(node: Node) -> None:
    assert isinstance(node.driver, FakeDriver)
    box = (await node.create(SandboxSpec())).id
    running = asyncio.ensure_future(node.run(box, run("mumble")))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0)
    assert node.driver.boxes[box]._processes == {}


async def test_a_cancelled_destroy_is_carried_out(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    running = asyncio.ensure_future(node.run(box, run("mumble")))
    await asyncio.sleep(0.01)
    ending = asyncio.ensure_future(node.destroy(box))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait((ending,))
    assert (await node.info(box)).ending == Ending.EXIT
    with pytest.raises(SandboxEnded):
        await running


async def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    async def full(box_id: str, spec: SandboxSpec) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with Node(FakeDriver(creating=full), tmp_path) as node:
        with pytest.raises(HostFault, match="No space left") as fault:
            await node.create(SandboxSpec())
        assert fault.value.hint
        assert (await node.counts())["running"] == 0

    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        driver = FakeDriver()
        async with Node(driver, disk) as node:
            box = (await node.create(SandboxSpec(key="k"))).id
            filling = fill(disk)
            with pytest.raises(HostFault, match="No space left") as fault:
                await node.create(SandboxSpec())
            assert fault.value.hint
            assert list(driver.boxes) == [box]
            await node.destroy(box)
            for room in (False, True):
                if room:
                    filling.unlink()
                    await node.create(SandboxSpec())
                with pytest.raises(SandboxEnded):
                    await node.run(box, run("true"))
                with pytest.raises(SandboxEnded):
                    await node.create(SandboxSpec(key="k"))
                assert [each.id for each in (await node.page(Filter(states=("ended",)))).sandboxes] == [box]
        assert list(disk.iterdir()) == []


async def test_no_descriptors_left_is_said_and_none_is_lost(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.run(box, run("true"))
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 64, hard))
    taken = []
    try:
        with pytest.raises(OSError):  # until there is none left
            while True:
                taken.append(os.dup(0))
        for _ in range(6):  # three pipes are needed
            with pytest.raises(HostFault, match="Too many open files") as fault:
                await node.run(box, run("cat", stdin=b"x"))
            assert "ulimit" in (fault.value.hint or "")
            os.close(taken.pop())
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert (await node.run(box, run("cat", stdin=b"x"))).stdout == "x"


async def test_no_descriptors_left_for_a_file_or_a_route_is_said(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.write_file(box, "/root/f", b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    taken = []
    try:
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(0))
        for call in (
            node.read_file(box, "/root/f"),
            node.write_file(box, "/root/g", b"x"),
            node.route(box, 8484, hello),
            node.route(box, 8485, Upstream(url="https://127.0.0.1:9")),
        ):
            with pytest.raises(HostFault, match="Too many open files") as fault:
                await call
            assert "ulimit" in (fault.value.hint or "")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await node.read_file(box, "/root/f") == b"x"
    await node.route(box, 8484, hello)


async def test_a_route_is_served_inside_and_ends_with_its_sandbox(node: Node) -> None:
    assert isinstance(node.driver, FakeDriver)
    box = (await node.create(SandboxSpec())).id
    await node.route(box, 8484, hello)
    assert (await node.run(box, run("ask", "8484"))).stdout == "hello"
    with pytest.raises(Conflict):
        await node.route(box, 8484, hello)
    with pytest.raises(InvalidRequest):
        await node.route(box, 0, hello)
    reader, writer = await asyncio.open_connection(sock=await node.driver.boxes[box].connect(8484))
    await asyncio.sleep(0.01)
    await node.destroy(box)
    with suppress(ConnectionResetError):  # dropped, not left to its keep-alive
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_node_sweeps_the_dead_and_spares_the_living(tmp_path: Path) -> None:
    dead, alive = NodeDirectory.claim(tmp_path), NodeDirectory.claim(tmp_path)
    (dead.path / "record").write_text("what its driver knew")
    dead.release()
    driver = FakeDriver()
    async with Node(driver, tmp_path):
        assert driver.swept == [dead.path]
        assert not dead.path.exists()
        assert alive.path.exists()
    alive.remove()


async def test_what_one_node_could_not_sweep_another_can(tmp_path: Path) -> None:
    class Failing(FakeDriver):
        async def sweep(self, directory: Path) -> bool:
            raise HostFault("a process of it hangs in the kernel")

    dead = NodeDirectory.claim(tmp_path)
    dead.release()
    async with Node(Failing(), tmp_path):
        assert dead.path.exists()
        async with Node(FakeDriver(), tmp_path):  # while the first one lives
            assert not dead.path.exists()


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    entered = asyncio.Event()

    class Slow(FakeDriver):
        async def sweep(self, directory: Path) -> None:
            entered.set()
            await asyncio.sleep(3600)

    dead = NodeDirectory.claim(tmp_path)
    dead.release()
    starting = asyncio.ensure_future(Node(Slow(), tmp_path).start())
    await entered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert list(tmp_path.iterdir()) == [dead.path]


async def test_close_ends_all_and_later_calls_say_so(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def slow(box_id: str, spec: SandboxSpec) -> None:
        if spec.labels:
            entered.set()
            await asyncio.sleep(0.05)

    driver = FakeDriver(PROGRAMS, creating=slow)
    node = Node(driver, tmp_path)
    await node.start()
    box = (await node.create(SandboxSpec())).id
    running = asyncio.ensure_future(node.run(box, run("mumble")))
    creating = asyncio.ensure_future(node.create(SandboxSpec(labels={"slow": "yes"})))
    await entered.wait()
    await node.close()
    with pytest.raises(SandboxEnded, match="node was shut down"):
        await running
    assert (await node.info((await creating).id)).ending == Ending.DRAINED
    assert (await node.info(box)).ending == Ending.DRAINED
    with pytest.raises(HostFault, match="shutting down"):
        await node.create(SandboxSpec())
    assert driver.boxes == {}
    assert list(tmp_path.iterdir()) == []
    await node.close()


async def test_many_commands_at_once_keep_their_output_apart(node: Node) -> None:
    boxes = [(await node.create(SandboxSpec())).id for _ in range(5)]
    results = await asyncio.gather(*(node.run(boxes[i % 5], run("echo", str(i))) for i in range(200)))
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(200)]


def test_without_uvicorn_a_route_says_what_to_install() -> None:
    # In a process of its own, where the module is truly not there.
    program = """
import asyncio, pathlib, sys, tempfile
sys.modules["uvicorn"] = None
from sandlot.api import SandboxSpec
from sandlot.drivers.fake import FakeDriver
from sandlot.errors import Unsupported
from sandlot.node.node import Node
async def main():
    async with Node(FakeDriver(), pathlib.Path(tempfile.mkdtemp())) as node:
        box = await node.create(SandboxSpec())
        try:
            await node.route(box.id, 8484, None)
        except Unsupported as error:
            print(error.hint)
asyncio.run(main())
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "`pip install 'sandlot[serve]'`\n"
    assert Unsupported.status == 422

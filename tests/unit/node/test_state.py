"""Promises of what becomes of a sandbox's files and processes, over real boxes:

1. A reset sandbox has its id, labels, limits and routes, none of its files, none of its processes; what ran in it is
   told so. A reset to an image that is not there changes nothing.
2. A snapshot can be started from, by name, until it is deleted; forks have the files and ids of their own, all or none.
3. A paused sandbox says so and runs nothing until it is resumed.
4. A warm pool hands out boxes that answer, with the limits that were asked for, and is refilled; others are made anew.
5. A run with a key is started once, goes on when its caller goes away, and answers whoever asks again.
6. An image says as whom, where and in what environment commands run; the sandbox and the run may say otherwise.
7. A reset that meets an end, and any call that meets the node's, leaves no box behind.
8. What was told once is told the same by a node after a killed one: results, endings, labels, what is paused, routes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Ending, Filter, ImageConfig, Info, Limits, Message, Run, RunResult, SandboxSpec, Scope, Warm
from sandlot.drivers.base import Box, Hold, Keeping
from sandlot.drivers.fake import FakeDriver
from sandlot.drivers.native.box import NativeBox
from sandlot.drivers.native.driver import NativeDriver
from sandlot.drivers.native.keep import records
from sandlot.errors import Conflict, HostFault, InvalidRequest, NotFound, SandboxEnded, Unsupported
from sandlot.node import creates, keyed
from sandlot.node.live import About
from sandlot.node.node import Node, local_node
from tests.support.killed import killed
from tests.support.native import PYTHON


def sh(text: str, **more: Any) -> Run:
    return Run(argv=("sh", "-c", text), **more)


@pytest.fixture
async def node(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    node = local_node(tmp_path)
    await node.start()
    yield node
    await node.close()


async def hello(scope: Scope, receive: Any, send: Any) -> None:
    start: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}
    await send(start)
    await send({"type": "http.response.body", "body": b"hello"})


GET = "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ASK = f"exec 3<>/dev/tcp/127.0.0.1/8000; printf '{GET}' >&3; tail -n1 <&3"


async def test_a_reset_keeps_the_sandbox_and_nothing_in_it(node: Node) -> None:
    spec = SandboxSpec(labels={"a": "b"}, limits=Limits(pids=77), env={"X": "y"})
    box = (await node.create(spec)).id
    await node.route(box, 8000, hello)
    await node.run(box, sh("echo mine > /root/f; (sleep 600 &)"))
    waiting = asyncio.create_task(node.run(box, sh("echo started; sleep 600")))
    while (await node.run(box, sh("pgrep -c sleep"))).stdout != "2\n":
        pass
    info = await node.reset(box)
    assert (info.id, info.state, info.labels) == (box, "running", {"a": "b"})
    with pytest.raises(Conflict, match="reset"):
        await waiting
    result = await node.run(box, sh("ls /root; pgrep sleep; echo $X"))
    assert result.stdout == "y\n"
    assert (await node.run(box, Run(argv=("bash", "-c", ASK)))).stdout == "hello"
    counts = await node.counts()
    assert (counts["created"], counts["running"]) == (1, 1)
    assert (await node.destroy(box)).ending == "exit"


async def test_a_reset_to_what_is_not_there_changes_nothing(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.run(box, sh("echo mine > /root/f"))
    with pytest.raises(NotFound, match="nowhere"):
        await node.reset(box, "nowhere")
    assert (await node.run(box, sh("cat /root/f"))).stdout == "mine\n"


async def test_a_snapshot_is_started_from_and_reset_to(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.run(box, sh("echo one > /root/f"))
    image = await node.snapshot(box, "one")
    assert (image.name, [each.name for each in await node.images()]) == ("one", ["one"])
    await node.run(box, sh("echo two > /root/f"))
    assert [(change.path, change.kind) for change in await node.diff(box)] == [("/root/f", "added")]
    assert (await node.reset(box, "one")).image == "one"
    assert (await node.run(box, sh("cat /root/f"))).stdout == "one\n"
    assert await node.diff(box) == []
    other = (await node.create(SandboxSpec(image="one"))).id
    await node.delete_image("one")
    assert (await node.run(other, sh("cat /root/f"))).stdout == "one\n"
    with pytest.raises(NotFound, match="one"):
        await node.create(SandboxSpec(image="one"))
    with pytest.raises(NotFound):
        await node.delete_image("one")
    assert len(b"".join([chunk async for chunk in exported(node, box)])) > 1000


async def exported(node: Node, box: str) -> AsyncIterator[bytes]:
    await node.snapshot(box, "export")
    async for chunk in node.export_image("export"):
        yield chunk


async def test_forks_have_the_files_and_nothing_else_of_it(node: Node, tmp_path: Path) -> None:
    box = (await node.create(SandboxSpec(labels={"a": "b"}))).id
    await node.run(box, sh("echo mine > /root/f; (sleep 600 &)"))
    forks = await node.fork(box, 5)
    assert len({fork.id for fork in forks} | {box}) == 6
    for number, fork in enumerate(forks):
        assert fork.labels == {"a": "b"}
        result = await node.run(fork.id, sh(f"cat /root/f; pgrep sleep; echo {number} > /root/f"))
        assert result.stdout == "mine\n"
    assert (await node.run(box, sh("cat /root/f"))).stdout == "mine\n"
    assert await node.images() == []
    await node.reset(forks[0].id)  # back to what it was forked as
    assert (await node.run(forks[0].id, sh("cat /root/f"))).stdout == "mine\n"
    for fork in forks:
        await node.destroy(fork.id)
    await node.close()
    assert list((tmp_path / "images/layers").iterdir()) == []
    with pytest.raises(InvalidRequest):
        await node.fork(box, 0)


async def test_a_paused_sandbox_says_so(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    assert (await node.pause(box)).state == (await node.info(box)).state == "paused"
    with pytest.raises(Conflict, match="paused"):
        await node.run(box, sh("true"))
    await node.write_file(box, "/root/f", b"written meanwhile")
    await node.snapshot(box, "paused")
    assert (await node.info(box)).state == "paused"  # a snapshot does not wake it
    assert (await node.resume(box)).state == "running"
    assert (await node.run(box, sh("cat /root/f"))).stdout == "written meanwhile"


@pytest.fixture
async def warm(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Node]:
    if native_reason:
        pytest.skip(native_reason)
    node = local_node(tmp_path, warm=[Warm(size=2)])
    await node.start()
    await full(node)
    yield node
    await node.close()


async def full(node: Node, size: int = 2) -> None:
    async with asyncio.timeout(20):
        while (await node.pools())[0].ready < size:  # noqa: ASYNC110  (the pool tells nobody)
            await asyncio.sleep(0.01)


async def test_a_warm_box_becomes_what_was_asked_for(warm: Node) -> None:
    assert (await warm.counts())["created"] == 0  # nobody's yet
    named = {"pids": 60} if warm.driver.facts.controllers else {}  # type: ignore[attr-defined]
    box = (await warm.create(SandboxSpec(env={"X": "y"}, limits=Limits(**named), lifetime=100))).id
    assert (await warm.pools())[0].hits == 1
    assert (await warm.run(box, sh("echo $X; hostname"))).stdout == "y\nsandlot\n"
    if named:
        bomb = await warm.run(box, sh("for i in $(seq 200); do sleep 5 & done; wait"))
        assert "fork" in bomb.stderr
    await full(warm)


async def test_a_warm_box_takes_more_memory_and_less(warm: Node) -> None:
    if "memory" not in warm.driver.facts.controllers:  # type: ignore[attr-defined]
        pytest.skip("no memory cgroup here")
    for memory in ("4G", "1792M"):
        await warm.create(SandboxSpec(limits=Limits.model_validate({"memory": memory})))
    assert (warm._pool._kinds[0].hits, warm._pool._kinds[0].misses) == (2, 0)


async def test_what_does_not_fit_is_made_anew(warm: Node) -> None:
    box = (await warm.create(SandboxSpec(hostname="other"))).id
    assert (await warm.run(box, sh("hostname"))).stdout == "other\n"
    found = (await warm.pools())[0]
    assert (found.hits, found.misses, found.ready) == (0, 0, 2)
    with pytest.raises(Unsupported):
        await warm.create(SandboxSpec(limits=Limits(open_files=1 << 30)))


async def test_one_that_does_not_answer_is_not_handed_out(warm: Node) -> None:
    parked = [box for kind in warm._pool._kinds for box in kind.ready]
    assert isinstance(parked[0], NativeBox)
    os.kill(parked[0]._pid, signal.SIGSTOP)
    box = (await warm.create(SandboxSpec())).id
    assert (await warm.run(box, sh("echo lives"))).stdout == "lives\n"
    await full(warm)


async def test_one_that_dies_is_replaced(warm: Node) -> None:
    parked = warm._pool._kinds[0].ready[0]
    assert isinstance(parked, NativeBox)
    os.kill(parked._pid, signal.SIGKILL)
    await parked.death
    await full(warm)
    assert parked not in warm._pool._kinds[0].ready


async def test_a_reset_takes_a_warm_box(warm: Node) -> None:
    box = (await warm.create(SandboxSpec())).id
    await warm.run(box, sh("touch /root/f"))
    await full(warm)
    await warm.reset(box)
    assert (await warm.pools())[0].hits == 2
    assert (await warm.run(box, sh("ls /root"))).stdout == ""


async def test_a_run_with_a_key_is_started_once(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    run = sh("echo x >> /root/count; sleep 0.3; wc -l < /root/count", key="once")
    first = asyncio.create_task(node.run(box, run))
    await asyncio.sleep(0.05)
    first.cancel()  # the caller goes away, the run goes on
    results = [await node.run(box, run) for _ in range(2)]
    assert [result.stdout for result in results] == ["1\n", "1\n"]
    assert (await node.run(box, sh("wc -l < /root/count"))).stdout == "1\n"
    for number in range(80):  # results are kept for a while, not for ever
        await node.run(box, sh("true", key=f"k{number}"))
    assert len(node._live[box].keyed) <= 65
    await node.destroy(box, Ending.KILLED)


async def test_a_program_that_was_just_written_can_be_started(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    program = Path("/usr/bin/true").read_bytes()
    for number in range(100):
        await node.write_file(box, f"/root/p{number}", program, mode=0o755)
        result = await node.run(box, Run(argv=(f"/root/p{number}",)))
        assert result.exit_code == 0, result.stderr  # not: "Text file busy"


async def test_a_cancelled_snapshot_or_pause_leaves_everything_running(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.run(box, sh("head -c 30M /dev/urandom > /root/f"))
    for number in range(25):
        for work in (node.snapshot(box, f"s{number}"), node.pause(box)):
            task = asyncio.ensure_future(work)
            await asyncio.sleep(number * 0.0004)
            task.cancel()
            await asyncio.wait((task,))
        await node.resume(box)
        async with asyncio.timeout(10):
            assert (await node.run(box, sh("echo lives"))).stdout == "lives\n"


async def test_a_run_with_a_key_that_could_not_be_started_is_as_if_it_had_not_been_asked_for(node: Node) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.pause(box)
    with pytest.raises(Conflict, match="paused"):
        await node.run(box, sh("echo hello", key="k"))
    await node.resume(box)
    assert (await node.run(box, sh("echo hello", key="k"))).stdout == "hello\n"
    with pytest.raises(Conflict, match="another command"):
        await node.run(box, sh("echo other", key="k"))
    await node.reset(box)
    assert (await node.run(box, sh("echo other", key="k"))).stdout == "other\n"  # a new box knows of none


async def test_a_run_with_a_key_is_work_even_when_nobody_waits_for_it(node: Node) -> None:
    box = (await node.create(SandboxSpec(idle_timeout=0.3))).id
    asking = asyncio.ensure_future(node.run(box, sh("sleep 1; echo done", key="k")))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.sleep(0.6)
    assert (await node.run(box, sh("sleep 1; echo done", key="k"))).stdout == "done\n"


async def test_no_descriptor_is_left_of_runs_with_keys(node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        box = (await node.create(SandboxSpec())).id
        for number in range(20):
            await node.run(box, sh("true", key=f"k{number}"))
        await node.reset(box)
        await node.run(box, sh("true", key="again"))
        await node.destroy(box)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


FULL = """
import os, signal
try:
    while True:
        if os.fork() == 0: signal.pause()
except OSError:
    open("/root/full", "w").write("kept")
    signal.pause()
"""


async def test_a_box_at_its_limit_of_processes_can_be_copied_and_forked(node: Node) -> None:
    box = (await node.create(SandboxSpec(limits=Limits(pids=40)))).id
    if "pids" not in node.driver.facts.controllers:  # type: ignore[attr-defined]
        pytest.skip("nobody counts processes here")
    bomb = asyncio.ensure_future(node.run(box, Run(argv=(PYTHON, "-I", "-S", "-c", FULL), key="bomb")))
    async with asyncio.timeout(20):
        while (await node.stats(box)).pids != 40:  # noqa: ASYNC110  (a box tells nobody)
            await asyncio.sleep(0.02)
    (fork,) = await node.fork(box)
    assert (await node.run(fork.id, sh("cat /root/full"))).stdout == "kept"
    assert "/root/full" in {change.path for change in await node.diff(box)}
    assert (await node.stats(box)).pids == 40  # not more than before
    await node.destroy(box)
    await asyncio.wait((bomb,))


async def test_a_warm_box_has_the_disk_and_the_image_that_were_asked_for(
    tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as first:
        for text in ("one", "two"):
            box = (await first.create(SandboxSpec())).id
            await first.run(box, sh(f"echo {text} > /root/f"))
            await first.snapshot(box, text)
    async with local_node(tmp_path, warm=[Warm(image="one", size=2)]) as node:
        await full(node)
        await node.delete_image("one")
        with pytest.raises(NotFound):
            await node.create(SandboxSpec(image="one"))
        box = (await node.create(SandboxSpec(image="two"))).id
        await node.snapshot(box, "one")  # another image of the old name
        again = (await node.create(SandboxSpec(image="one"))).id
        assert (await node.run(again, sh("cat /root/f"))).stdout == "two\n"
        if "memory" in node.driver.facts.controllers:  # type: ignore[attr-defined]
            small = (await node.create(SandboxSpec(image="two", limits=Limits(memory=64 << 20)))).id
            assert "No space" in (await node.run(small, sh("head -c 100M /dev/zero > /root/big"))).stderr


async def test_a_cancelled_fork_leaves_nothing(node: Node, tmp_path: Path) -> None:
    box = (await node.create(SandboxSpec())).id
    for number in range(12):
        forking = asyncio.ensure_future(node.fork(box, 8))
        await asyncio.sleep(number * 0.006)
        forking.cancel()
        await asyncio.wait((forking,))
        if not forking.cancelled():
            for fork in forking.result():
                await node.destroy(fork.id)
        assert [info.id for info in await node.list()] == [box]
    await node.close()
    assert list((tmp_path / "images/layers").iterdir()) == []


async def test_an_image_says_how_its_commands_run_unless_the_sandbox_or_the_run_does(node: Node) -> None:
    maker = (await node.create(SandboxSpec())).id
    await node.run(maker, sh("mkdir -m 755 /work; mkdir -m 755 /home/dev"))
    config = ImageConfig(env={"A": "image", "B": "image", "C": "image"}, workdir="/work", user=1000, home="/home/dev")
    made = await node.snapshot(maker, "tool", config)
    assert made.config == config
    info = await node.create(SandboxSpec(image="tool", env={"B": "sandbox", "C": "sandbox"}))
    box = info.id
    user = 1000 if not any(loss.startswith("user:") for loss in info.losses) else 0
    told = await node.run(box, sh("echo $A $B $C $HOME $(pwd) $(id -u)", env={"C": "run"}))
    home = "/home/dev" if user else "/root"
    assert told.stdout == f"image sandbox run {home} /work {user}\n"
    told = await node.run(box, sh("echo $HOME $(pwd) $(id -u)", user=0, cwd="/tmp"))
    assert told.stdout == "/root /tmp 0\n"
    again = (await node.snapshot(box, "tool-again")).config
    assert again.env["A"] == "image" and again.workdir == "/work"  # what is made from it says the same
    await node.reset(box, "host")
    assert (await node.run(box, sh("echo $A $(pwd) $(id -u)"))).stdout == "/root 0\n"
    for name in ("tool", "tool-again"):
        await node.delete_image(name)


# -- ends that meet other calls -----------------------------------------------------------------------------------


class Gate:
    """Where a fake driver waits before it makes a box, while it is shut."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.reached = asyncio.Event()

    async def __call__(self, box_id: str, spec: SandboxSpec) -> None:
        self.reached.set()
        await self.open.wait()

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def fake(tmp_path: Path, gate: Gate) -> AsyncIterator[Node]:
    async with Node(FakeDriver(creating=gate), tmp_path) as node:
        yield node


def boxes_of(node: Node) -> dict[str, Any]:
    assert isinstance(node.driver, FakeDriver)
    return node.driver.boxes


async def test_a_reset_that_meets_an_end_leaves_no_box(fake: Node, gate: Gate) -> None:
    box = (await fake.create(SandboxSpec())).id
    old, slowly = fake._live[box].box, asyncio.Event()
    destroy = old.destroy

    async def destroy_slowly(ending: Ending = Ending.EXIT) -> Any:
        await slowly.wait()
        return await destroy(ending)

    old.destroy = destroy_slowly  # type: ignore[method-assign]
    gate.shut()
    resetting = asyncio.ensure_future(fake.reset(box))
    await gate.reached.wait()
    ending = asyncio.ensure_future(fake.destroy(box))  # has begun when the new box is made, and is not done
    await asyncio.sleep(0)
    gate.open.set()
    asyncio.get_running_loop().call_later(0.05, slowly.set)
    async with asyncio.timeout(5):
        assert (await ending).ending == "exit"
        with pytest.raises(SandboxEnded):
            await resetting
    assert boxes_of(fake) == {}


async def test_a_reset_that_cannot_listen_again_changes_nothing(fake: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    box = (await fake.create(SandboxSpec())).id
    await fake.route(box, 8000, hello)

    async def refuse(self: Node, live: Any, box: Box, port: int, target: object) -> Any:
        raise HostFault("no descriptors")

    with monkeypatch.context() as patch:
        patch.setattr(Node, "_listen", refuse)
        with pytest.raises(HostFault, match="no descriptors"):
            await fake.reset(box)
    assert list(boxes_of(fake)) == [box]  # the one that it had, and its port is routed
    assert [route.port for route in fake._live[box].routes] == [8000]
    (await fake._live[box].box.connect(8000)).close()


async def test_a_node_that_closes_while_it_forks_leaves_no_box(fake: Node, gate: Gate) -> None:
    box = (await fake.create(SandboxSpec())).id
    gate.shut()
    forking = asyncio.ensure_future(fake.fork(box, 50))  # some of them wait for their turn
    await gate.reached.wait()
    asyncio.get_running_loop().call_later(0.05, gate.open.set)
    await fake.close()
    assert boxes_of(fake) == {}
    with pytest.raises(HostFault, match="shutting down"):
        await forking


async def test_a_node_that_closes_while_it_resets_leaves_no_box(fake: Node, gate: Gate) -> None:
    box = (await fake.create(SandboxSpec())).id
    gate.shut()
    resetting = asyncio.ensure_future(fake.reset(box))
    await gate.reached.wait()
    asyncio.get_running_loop().call_later(0.05, gate.open.set)
    await fake.close()
    assert resetting.done()
    assert boxes_of(fake) == {}
    assert (await fake.info(box)).ending == "drained"
    with pytest.raises(SandboxEnded):
        await fake.reset(box)


async def test_looking_at_a_file_does_not_keep_a_sandbox_from_being_idle(fake: Node) -> None:
    box = (await fake.create(SandboxSpec(idle_timeout=0.3))).id
    until = time.monotonic() + 0.9
    while time.monotonic() < until:
        await fake.write_file(box, "/root/f", b"work")
        await asyncio.sleep(0.05)
    with pytest.raises(SandboxEnded, match="nothing was run in it"):
        async with asyncio.timeout(5):
            while True:
                await fake.read_file(box, "/root/f")
                await asyncio.sleep(0.05)


# -- images under the feet of sandboxes ---------------------------------------------------------------------------


async def test_a_reset_goes_back_to_the_image_it_was_made_from_whatever_the_name_means_now(node: Node) -> None:
    maker = (await node.create(SandboxSpec())).id
    await node.run(maker, sh("echo one > /root/f"))
    await node.snapshot(maker, "name")
    box = (await node.create(SandboxSpec(image="name"))).id
    await node.delete_image("name")
    await node.run(box, sh("echo mine > /root/f"))
    await node.reset(box)
    assert (await node.run(box, sh("cat /root/f"))).stdout == "one\n"
    await node.run(maker, sh("echo two > /root/f"))
    await node.snapshot(maker, "name")
    await node.reset(box)
    assert (await node.run(box, sh("cat /root/f"))).stdout == "one\n"
    await node.reset(box, "name")  # unless it is asked for by name
    assert (await node.run(box, sh("cat /root/f"))).stdout == "two\n"
    await node.delete_image("name")


async def test_what_sandboxes_were_forked_as_cannot_be_deleted(node: Node, tmp_path: Path) -> None:
    box = (await node.create(SandboxSpec())).id
    await node.run(box, sh("echo mine > /root/f"))
    (fork,) = await node.fork(box)
    with pytest.raises(Conflict, match="forked"):
        await node.delete_image(fork.image)
    await node.reset(fork.id)
    assert (await node.run(fork.id, sh("cat /root/f"))).stdout == "mine\n"
    await node.reset(fork.id, "host")  # nobody stands on it any more
    await node.close()
    assert list((tmp_path / "images/layers").iterdir()) == []


# -- warm pools ---------------------------------------------------------------------------------------------------


async def test_a_create_that_is_refused_costs_one_warm_box(warm: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, refused in ((Unsupported("not kept"), True), (HostFault("the disk is full"), False)):
        await full(warm)
        claimed: list[Box] = []

        async def claim(
            box: Box,
            spec: SandboxSpec,
            named: frozenset[str],
            keeping: Keeping,
            error: Exception = error,
            claimed: list[Box] = claimed,
        ) -> None:
            claimed.append(box)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(warm.driver, "claim", claim)
            if refused:
                with pytest.raises(Unsupported):
                    await warm.create(SandboxSpec())
            else:
                await warm.create(SandboxSpec())  # it is made anew
        assert len(claimed) == 1


# -- a node that is killed ----------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, native_reason: str | None) -> Path:
    if native_reason:
        pytest.skip(native_reason)
    return tmp_path


def next_node(state: Path) -> Node:
    return local_node(state, name="test", orphan_grace=60)


OVER = {
    "missing": Run(argv=("nosuchprogram",), key="missing"),
    "late": sh("echo hi; sleep 100", key="late", timeout=0.4),
    "leaves": sh("echo first; (sleep 0.7; echo second) & exit 3", key="leaves"),
    "memory": Run(argv=(PYTHON, "-I", "-S", "-c", "x = bytearray(400 << 20)"), key="memory"),
}


async def test_the_result_of_a_run_with_a_key_is_the_same_when_another_node_tells_it(state: Path) -> None:
    said = await killed(
        state,
        f"""
        try:
            box = (await node.create(SandboxSpec(limits=Limits(memory=128 << 20)))).id
        except Unsupported:  # nobody counts memory here
            box = (await node.create(SandboxSpec())).id
        say(box)
        for text in {[run.model_dump_json() for run in OVER.values()]!r}:
            say((await node.run(box, Run.model_validate_json(text))).model_dump_json())
        """,
    )
    await asyncio.sleep(1)  # seconds that are nobody's, and the second line of the one that left a child
    async with next_node(state) as node:
        for run, text in zip(OVER.values(), said[1:], strict=True):
            for _ in range(2):
                assert await node.run(said[0], run) == RunResult.model_validate_json(text), run.key
        await node.destroy(said[0])


async def test_how_a_run_minds_its_followers_outlives_its_node(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = await killed(
        state,
        """
        box = (await node.create(SandboxSpec())).id
        counting = sh("seq 1 3000000", key="counting", lossless=True, output_cap=1 << 19)
        await node.launch(box, counting)
        await node.launch(box, sh("sleep 600", key="alone", kill_on_disconnect=True))
        await node.launch(box, sh("sleep 600", key="other", kill_on_disconnect=True))
        total = 0
        async for chunk in node.follow(box, "counting"):
            total += len(chunk.data)
            if total > 1_000_000:
                break
        say(box, total)
        """,
    )
    box, total = said[0].split()[0], int(said[0].split()[1])
    monkeypatch.setattr(keyed, "FIRST_SECONDS", 1.0)
    async with next_node(state) as node:
        waiting = asyncio.create_task(node.wait(box, "other"))
        await asyncio.sleep(2)  # in which it would write many times the cap
        running = {info.id: info.running for info in await node.commands(box)}
        assert running == {"counting": True, "alone": False, "other": True}
        async for chunk in node.follow(box, "counting", out=total):
            assert (chunk.offset, chunk.lost) == (total, 0)
            total += len(chunk.data)
        assert total == sum(len(f"{number}\n") for number in range(1, 3_000_001))
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert (await node.wait(box, "other")).signal == 9


async def test_a_run_that_times_out_says_so_when_its_node_is_killed_at_that_moment(state: Path) -> None:
    (box,) = await killed(
        state,
        """
        box = (await node.create(SandboxSpec())).id
        say(box)
        async def kill(process):
            await process.kill_tree()
            await process.wait()
            die()
        module._kill = kill
        await node.run(box, sh("echo hi; sleep 100", key="late", timeout=0.3))
        """,
    )
    async with next_node(state) as node:
        result = await node.run(box, sh("echo hi; sleep 100", key="late", timeout=0.3))
        assert (result.timed_out, result.stdout) == (True, "hi\n")


async def test_a_sandbox_that_ended_is_told_of_with_all_that_was_known(state: Path) -> None:
    said = await killed(
        state,
        """
        one = await node.create(SandboxSpec(labels={"a": "b"}))
        await node.destroy(one.id)
        say((await node.info(one.id)).model_dump_json())
        """,
    )
    async with next_node(state) as node:
        told = await node.info(json.loads(said[0])["id"])
    assert told == Info.model_validate_json(said[0])


async def test_a_damaged_ledger_costs_no_sandbox(
    state: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creates, "AWAY_SECONDS", 0.3)
    text = """
    await node.destroy((await node.create(SandboxSpec())).id)
    say((await node.create(SandboxSpec(key="k"))).id)
    """
    (box,) = await killed(state, text)
    for path in state.glob("node-*/ledger*"):
        path.write_bytes(b"?" * path.stat().st_size)
    async with next_node(state) as node:
        assert "is damaged" in caplog.text
        assert (await node.create(SandboxSpec(key="k"))).id == box
        await asyncio.sleep(0.6)  # whether somebody was told of it is not known: it stays
        assert (await node.info(box)).state == "running"
        counts = await node.counts()
        assert (counts["created"], counts["running"]) == (1, 1)


@pytest.mark.parametrize("trouble", ["locked", "a directory", "of another version"])
async def test_a_ledger_that_cannot_be_opened_costs_no_sandbox(trouble: str, state: Path) -> None:
    (box,) = await killed(state, 'say((await node.create(SandboxSpec(key="k"))).id)')
    (ledger,) = state.glob("node-*/ledger.db")
    if trouble == "locked":
        other = sqlite3.connect(ledger, isolation_level=None)
        other.execute("BEGIN")
        other.execute("SELECT * FROM sandboxes").fetchall()
        with pytest.raises(HostFault, match="locked"):
            await next_node(state).start()
        other.close()
    else:
        for path in ledger.parent.glob("ledger.db*"):
            path.unlink()
        if trouble == "a directory":
            ledger.mkdir()
            with pytest.raises(HostFault, match="open"):
                await next_node(state).start()
            ledger.rmdir()
        else:
            other = sqlite3.connect(ledger)
            other.execute("CREATE TABLE sandboxes (id TEXT PRIMARY KEY)")
            other.close()
    async with next_node(state) as node:
        assert (await node.run(box, sh("echo hi"))).stdout == "hi\n"
        await node.destroy(box)


async def test_a_start_that_is_cut_short_ends_no_sandbox_that_it_has_not_adopted(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (box,) = await killed(state, "say((await node.create(SandboxSpec())).id)")

    async def told_to_stop(_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(NativeDriver, "adopt", told_to_stop)
        with pytest.raises(asyncio.CancelledError):
            await next_node(state).start()
    async with next_node(state) as node:
        assert (await node.run(box, sh("echo hi"))).stdout == "hi\n"
        await node.destroy(box)
    assert list(state.glob("node-*")) == []


async def test_a_sandbox_whose_directory_is_not_utf_8_holds_nobody_up(node: Node, tmp_path: Path) -> None:
    image = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    Path(image).mkdir()
    box = await node.create(SandboxSpec())
    await node.reset(box.id, image)
    waiting = asyncio.ensure_future(node.wait_ended(box.id))
    await asyncio.sleep(0)
    await node.destroy(box.id)
    assert (await asyncio.wait_for(waiting, 5)).image == image
    assert [each.id for each in (await node.page(Filter(states=("ended",), image=image))).sandboxes] == [box.id]
    await node.destroy((await node.create(SandboxSpec())).id)


async def test_a_sandbox_that_died_with_its_node_ended_as_orphaned(state: Path) -> None:
    (box,) = await killed(state, 'say((await node.create(SandboxSpec(labels={"a": "b"}))).id)', grace=0)
    async with next_node(state) as node:
        info = await node.info(box)
        assert (info.ending, info.labels) == ("orphaned", {"a": "b"})
        counts = await node.counts()
        assert (counts["created"], counts["running"], counts["orphaned"]) == (1, 0, 1)


async def test_how_a_server_s_sandboxes_ended_is_known_when_others_start_meanwhile(state: Path) -> None:
    text = """
    box = (await node.create(SandboxSpec())).id
    say(box, (await node.create(SandboxSpec())).id)
    await node.destroy(box)
    """
    said = await killed(state, text, grace=0)
    ended, orphaned = said[0].split()
    async with local_node(state):
        pass
    async with next_node(state) as node:
        assert (await node.info(ended)).ending == "exit"
        assert (await node.info(orphaned)).ending == "orphaned"
    await killed(state, text, grace=0)
    (directory,) = state.glob("node-*")
    for path in (directory, *directory.glob("ledger*")):
        os.utime(path, (time.time() - 4000,) * 2)
    async with local_node(state):  # finds what is to be removed, and that is when the hour begins
        assert directory.exists() or not node.driver.facts.controllers  # type: ignore[attr-defined]
    if directory.exists():
        os.utime(directory, (time.time() - 4000,) * 2)
        async with local_node(state):
            assert not directory.exists()


async def test_a_sandbox_that_died_without_a_node_is_told_of_until_that_is_written_down(state: Path) -> None:
    said = await killed(
        state,
        """
        info = await node.create(SandboxSpec())
        say(info.id)
        os.kill(node._live[info.id].box._pid, signal.SIGKILL)
        """,
    )
    await killed(state, "pass", before="module.Node._record_end = die")  # while it adopts
    async with next_node(state) as node:
        assert (await node.info(said[0])).ending == "helper_died"
        assert node._directory is not None
        assert records(node._directory.path / "boxes") == []


@pytest.mark.parametrize("dead", [False, True])
async def test_half_a_box_of_a_killed_node_is_nobody_s_sandbox(state: Path, dead: bool) -> None:
    end = "os.kill(box._pid, signal.SIGKILL)" if dead else "None"
    (half,) = await killed(
        state,
        'await node.create(SandboxSpec(key="k"))',
        before=f"NativeBox.lose = lambda box, _: (say(box.id), {end}, die())",
    )
    async with next_node(state) as node:
        assert (await node.info(half)).ending == "orphaned"
        whole = await node.create(SandboxSpec(key="k"))
        assert whole.id != half
        assert whole.losses == (await node.create(SandboxSpec())).losses
        assert node._directory is not None
        assert {each.key for each in records(node._directory.path / "boxes")} == set(node._live)


async def test_a_sandbox_that_was_resumed_on_a_full_disk_is_not_paused_again(state: Path) -> None:
    said = await killed(
        state,
        """
        box = (await node.create(SandboxSpec())).id
        await node.pause(box)
        write = Record.write
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        Record.write = full
        try:
            await node.resume(box)
        except HostFault:
            say((await node.info(box)).state)
        Record.write = write
        say((await node.resume(box)).state)
        say(box)
        """,
    )
    assert said[:2] == ["paused", "running"]
    async with next_node(state) as node:
        assert (await node.info(said[2])).state == "running"
        assert (await node.run(said[2], sh("echo runs"))).stdout == "runs\n"


@pytest.mark.parametrize("moment", ["module.Node._listen = die", "NativeBox.destroy = die"])
async def test_a_route_is_there_after_its_node_was_killed_inside_a_reset(state: Path, moment: str) -> None:
    (box,) = await killed(
        state,
        f"""
        box = (await node.create(SandboxSpec())).id
        say(box)
        await node.route(box, 8000, Upstream(url="http://127.0.0.1:1/"))
        {moment}
        await node.reset(box)
        """,
    )
    async with next_node(state) as node:
        assert [info.id for info in await node.list()] == [box]
        ask = "exec 3<>/dev/tcp/127.0.0.1/8000 && echo listens"
        assert (await node.run(box, Run(argv=("bash", "-c", ask)))).stdout == "listens\n"
        await node.reset(box)
        assert (await node.run(box, Run(argv=("bash", "-c", ask)))).stdout == "listens\n"


async def test_a_limit_is_what_was_asked_for_after_a_node_was_killed_inside_a_copy(state: Path) -> None:
    (box,) = await killed(
        state,
        """
        box = (await node.create(SandboxSpec(limits=Limits(pids=40)))).id
        say(box)
        NativeBox._work = die
        await node.snapshot(box, "one")
        """,
    )
    async with next_node(state) as node:
        found = node._live[box].box
        assert isinstance(found, NativeBox)
        files = [Path(path, "pids.max") for path in found.group.directories if Path(path, "pids.max").exists()]
        assert {file.read_text() for file in files} <= {"40\n"}
        assert files or "pids" not in node.driver.facts.controllers  # type: ignore[attr-defined]


def test_what_is_noted_of_a_run_fits_whatever_its_words_are() -> None:
    for word in ("a", "\\", "\x01", "😀", "\udcff"):
        about = About(
            "\\" * 100, "f" * 16, word * 4000, word * 4000, 1e9 / 3, 1.7976931348623157e308, 1 << 40, True, True
        )
        note = about.write()
        Hold((), note)
        read = About.read(note)
        assert (read.key, read.what, read.timeout) == (about.key, about.what, about.timeout)
        assert about.argv0.startswith(read.argv0)
    with pytest.raises(ValueError, match="501 bytes"):
        Hold((), "x" * 501)

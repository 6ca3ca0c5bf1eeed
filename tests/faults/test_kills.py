"""Fault: kill -9 of the server, of a box's first process, or of both, at any moment, while commands run.

Must hold: boxes that were not killed are there again, the same ids and processes; a command's result comes whole, not
a byte of it lost, none twice, and it was started once; boxes that were killed say so; no process is left of them; and
when the server is stopped in the end, no directory, cgroup or process of any of it is left.

SANDLOT_FAULT_ROUNDS says how many times (30; `make faults` makes it 1,000); the seed is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sandlot.api import Info, Run, SandboxSpec, ShellRun, TerminalSpec, Upstream
from sandlot.client import HttpNode
from sandlot.errors import NotFound, SandboxEnded, SandlotError, StartFailed, Unreachable
from tests.support.server import Server, alive, first_processes, kill, leftovers, note_nodes, owners, until_gone

ROUNDS = int(os.environ.get("SANDLOT_FAULT_ROUNDS", "30"))
SEED = int(os.environ.get("SANDLOT_FAULT_SEED", str(random.randrange(1 << 30))))
BOXES = 4

# Counts its starts, writes numbered lines on both streams in bursts, and ends with a code that the caller chose.
TALK = """
echo $1 >> /root/starts
i=0; while [ $i -lt 400 ]; do
  echo "$1 out $i"; echo "$1 err $i" >&2
  [ $((i % 100)) = 0 ] && sleep 0.01
  i=$((i+1))
done
exit $2
"""


@pytest.fixture
def state(tmp_path: Path, native_reason: str | None) -> Path:
    if native_reason:
        pytest.skip(native_reason)
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


def whole(stream: str, word: str, key: str) -> bool:
    return stream == "".join(f"{key} {word} {i}\n" for i in range(400))


async def talk(node: HttpNode, box: str, key: str, code: int) -> str:
    """One command, whatever happens to the server meanwhile: "whole" or "ended"."""
    run = Run(argv=("sh", "-c", TALK, "sh", key, str(code)), key=key, timeout=120)
    try:
        result = await node.run(box, run)
    except SandboxEnded:
        return "ended"
    assert result.exit_code == code, result
    assert whole(result.stdout, "out", key), f"{len(result.stdout)} bytes of output"
    assert whole(result.stderr, "err", key), f"{len(result.stderr)} bytes of errors"
    return "whole"


async def churn(node: HttpNode, box: str, chance: random.Random, name: str) -> None:
    """A call that changes the box, whatever happens to it meanwhile: done or not, never half."""
    what = chance.choice(["reset", "end", "fork", "snapshot", "pause"])
    try:
        if what == "reset":
            await node.reset(box)
        elif what == "end":
            await end_during_reset(node, box, chance.random() * 0.02)
        elif what == "fork":
            await asyncio.gather(*(node.destroy(fork.id) for fork in await node.fork(box, 2)))
        elif what == "snapshot":
            await node.snapshot(box, name)
        else:
            await node.pause(box)
    except (SandboxEnded, Unreachable):
        pass


async def end_during_reset(node: HttpNode, box: str, after: float) -> None:
    """Raises Unreachable when the server goes away."""
    resetting = asyncio.ensure_future(node.reset(box))
    await asyncio.sleep(after)
    for outcome in await asyncio.gather(resetting, node.destroy(box), return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, SandboxEnded):
            raise outcome


async def until_every_box_is_somebodys(state: Path, node: HttpNode) -> None:
    """Each box that lives is the one box of a sandbox that the node knows."""
    known, boxes = [""], list[str]()
    try:
        async with asyncio.timeout(20):
            while boxes != known:
                known, boxes = sorted(info.id for info in await node.list()), sorted(owners(state))
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"boxes of {boxes}, sandboxes {known}") from None


async def test_whatever_is_killed_nothing_is_lost(state: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    async with Server(state, "--orphan-grace", "120", "--warm", "host=2") as server:
        note_nodes(state)
        node = server.node()
        boxes: list[str] = []
        outcomes = {"whole": 0, "ended": 0}
        for number in range(ROUNDS):
            while len(boxes) < BOXES:
                boxes.append((await node.create(SandboxSpec(labels={"round": str(number)}))).id)
            changing = (await node.create(SandboxSpec(labels={"changes": str(number)}))).id
            await node.run(changing, Run(argv=("sh", "-c", "head -c 3000000 /dev/urandom > /root/some")))
            work = [
                asyncio.create_task(talk(node, box, f"r{number}-{index}-{again}", chance.randrange(100)))
                for index, box in enumerate(boxes)
                for again in range(2)
            ]
            changes = asyncio.create_task(churn(node, changing, chance, f"round-{number}"))
            await asyncio.sleep(chance.random() * 0.08)  # about as long as the commands take
            what = chance.choice(["node", "node", "helper", "both"])
            victims = []
            if what != "node":
                victims = [pid for pid in first_processes(state) if alive(pid)]
                victims = chance.sample(victims, k=min(len(victims), 1 + chance.randrange(2)))
                for pid in victims:
                    kill(pid)
                    if chance.random() < 0.5:
                        await asyncio.sleep(chance.random() * 0.01)
            if what != "helper":
                await server.kill()
                await asyncio.sleep(chance.random() * 0.1)
                await server.start()
                note_nodes(state)
            for done in await asyncio.gather(*work):
                outcomes[done] += 1
            try:
                await changes
            except StartFailed:
                assert victims  # one of them was a box that was being made for it
            for pid in victims:
                await until_gone(pid)
            for info in await node.list():  # forks that nobody was told of, and the one that changed
                if "changes" in info.labels:
                    if info.state == "paused":
                        await node.resume(info.id)
                    with suppress(SandboxEnded):
                        assert (await node.run(info.id, Run(argv=("echo", "lives")))).stdout == "lives\n"
                    await node.destroy(info.id)
            left = []
            for box in boxes:
                try:
                    starts = (await node.run(box, Run(argv=("cat", "/root/starts")))).stdout.split()
                except SandboxEnded:
                    assert (await node.info(box)).ending in ("helper_died", "oom")
                    continue
                assert len(starts) == len(set(starts)), f"started twice: {starts}"
                left.append(box)
            assert {info.id for info in await node.list()} == set(left)
            await until_every_box_is_somebodys(state, node)
            boxes = left
        for image in await node.images():
            await node.delete_image(image.name)
        print(outcomes)
        assert outcomes["whole"] > outcomes["ended"] or ROUNDS < 10
        await node.close()
        everybody = first_processes(state)
    assert not [pid for pid in everybody if alive(pid)]
    assert leftovers(state) == []
    # A name half written when the server was killed is removed when it is a minute old.
    assert [path.name for path in (state / "images").rglob("[!.]*") if path.is_file()] == []


async def talk_in(node: HttpNode, box: str, shell: str, key: str, code: int) -> None:
    """One text of a shell, whatever happens to the server meanwhile."""
    text = TALK.replace("$1", key).replace("exit $2", f"turn=$((turn+1)); (exit {code})")
    result = await node.run_in_shell(box, shell, ShellRun(command=text, key=key, timeout=120, queue=True))
    assert (result.exit_code, result.ended) == (code, False), result
    assert whole(result.stdout, "out", key), f"{len(result.stdout)} bytes of output"
    assert whole(result.stderr, "err", key), f"{len(result.stderr)} bytes of errors"


async def test_shells_go_on_whenever_their_server_is_killed(state: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    async with Server(state, "--orphan-grace", "120") as server:
        note_nodes(state)
        node = server.node()
        box = (await node.create(SandboxSpec())).id
        shells = [(await node.open_shell(box)).id for _ in range(3)]
        before = [(await node.run_in_shell(box, each, ShellRun(command="echo $$; turn=0"))).stdout for each in shells]
        terminal = await node.open_terminal(box, TerminalSpec(command=("cat",)))
        for number in range(ROUNDS):
            work = [
                asyncio.create_task(talk_in(node, box, shell, f"r{number}-{shell}-{again}", chance.randrange(100)))
                for shell in shells
                for again in range(2)
            ]
            await asyncio.sleep(chance.random() * 0.15)  # about as long as the texts take
            await server.kill()
            await asyncio.sleep(chance.random() * 0.1)
            await server.start()
            note_nodes(state)
            await asyncio.gather(*work)
        starts = (await node.run(box, Run(argv=("cat", "/root/starts")))).stdout.split()
        assert len(starts) == len(set(starts)) == ROUNDS * len(shells) * 2
        for shell, pid in zip(shells, before, strict=True):  # which never were another, nor missed a turn
            told = await node.run_in_shell(box, shell, ShellRun(command="echo $$; echo $turn"))
            assert told.stdout == f"{pid}{ROUNDS * 2}\n"
        link = await node.attach_terminal(box, terminal.id)
        await link.write(b"typed\n")
        assert b"typed" in await link.read()
        await link.close()
        await node.close()
    assert leftovers(state) == []


async def test_a_sandbox_that_is_ended_while_it_is_reset_leaves_no_box(state: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    async with Server(state, "--orphan-grace", "30") as server:
        note_nodes(state)
        node = server.node()
        for _ in range(60):
            await end_during_reset(node, (await node.create(SandboxSpec())).id, chance.random() * 0.02)
        await until_every_box_is_somebodys(state, node)
        await node.close()
    assert leftovers(state) == []


async def test_a_server_that_is_stopped_while_it_forks_and_resets_leaves_nothing(state: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    for _ in range(4):
        server = Server(state, "--orphan-grace", "30", "--drain-seconds", "0")
        await server.start()
        note_nodes(state)
        node = server.node()
        box, *others = [(await node.create(SandboxSpec())).id for _ in range(5)]
        work = [asyncio.ensure_future(node.reset(other)) for other in others]
        forking = asyncio.ensure_future(node.fork(box, 60))
        await asyncio.sleep(chance.random() * 0.5)
        await server.stop()
        assert server.process is not None
        assert server.process.returncode == 0
        assert leftovers(state) == []
        for outcome in await asyncio.gather(forking, *work, return_exceptions=True):
            assert not isinstance(outcome, BaseException) or isinstance(outcome, SandlotError), outcome
        await node.close()


async def test_two_hundred_boxes_are_found_again(state: Path) -> None:
    async with Server(state, "--orphan-grace", "120") as server:
        note_nodes(state)
        node = server.node()
        made = await asyncio.gather(*(node.create(SandboxSpec(labels={"n": str(n)})) for n in range(200)))
        busy = [info.id for info in made[:50]]
        text = "echo $$; sleep 1; seq 3000; exit 5"
        running = [asyncio.create_task(node.run(box, Run(argv=("sh", "-c", text), key="k"))) for box in busy]
        await asyncio.sleep(0.6)
        before = set(first_processes(state))
        await server.kill()
        await server.start()
        note_nodes(state)
        assert set(first_processes(state)) == before
        assert {info.id: info.labels for info in await node.list()} == {info.id: info.labels for info in made}
        for result in await asyncio.gather(*running):
            assert (result.exit_code, result.stdout.split("\n", 1)[1]) == (5, "".join(f"{i}\n" for i in range(1, 3001)))
        answers = await asyncio.gather(*(node.run(info.id, Run(argv=("echo", info.id))) for info in made))
        assert [answer.stdout for answer in answers] == [f"{info.id}\n" for info in made]
        await node.close()
    assert leftovers(state) == []
    assert not [pid for pid in before if alive(pid)]


async def test_what_a_server_knew_the_next_one_knows(state: Path) -> None:
    async with Server(state, "--orphan-grace", "60") as server:
        note_nodes(state)
        node = server.node()
        kept = await node.create(SandboxSpec(lifetime=300, idle_timeout=300))
        ended = await node.create(SandboxSpec())
        await node.destroy(ended.id)
        short = await node.create(SandboxSpec(lifetime=2))
        paused = await node.create(SandboxSpec())
        await node.pause(paused.id)
        reset = await node.create(SandboxSpec())
        await node.run(reset.id, Run(argv=("touch", "/root/f")))
        await node.reset(reset.id)
        await node.run(reset.id, Run(argv=("touch", "/root/g")))
        forked = (await node.fork(reset.id))[0]
        await node.route(kept.id, 8000, Upstream(url=server.url))  # the server itself answers
        await server.kill()
        await asyncio.sleep(2.2)  # the lifetime of `short`
        await server.start()
        note_nodes(state)
        assert (await node.info(ended.id)).ending == "exit"
        assert (await node.info(short.id)).ending == "lifetime"
        assert (await node.info(paused.id)).state == "paused"
        assert (await node.resume(paused.id)).state == "running"
        assert (await node.run(paused.id, Run(argv=("echo", "awake")))).stdout == "awake\n"
        for box in (reset.id, forked.id):
            assert (await node.run(box, Run(argv=("ls", "/root")))).stdout == "g\n"
        get = "exec 3<>/dev/tcp/127.0.0.1/8000; printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        assert "ok" in (await node.run(kept.id, Run(argv=("bash", "-c", get)))).stdout
        counts = await node.counts()
        assert counts["created"] == counts["running"] + sum(
            v for k, v in counts.items() if k not in ("created", "running")
        )
        await node.reset(forked.id)
        assert (await node.run(forked.id, Run(argv=("ls", "/root")))).stdout == "g\n"
        await node.close()
    assert leftovers(state) == []
    assert not list((state / "images/layers").iterdir())


async def test_boxes_of_a_server_that_never_comes_back_end_and_are_swept(state: Path) -> None:
    async with Server(state, "--orphan-grace", "1") as server:
        note_nodes(state)
        node = server.node()
        await node.create(SandboxSpec())
        pids = first_processes(state)
        await server.kill()
        await node.close()
    for pid in pids:
        await until_gone(pid)
    (left,) = state.glob("node-*")
    async with Server(state):  # another address: not the one that they waited for
        note_nodes(state)
        assert not [path for path in Path("/sys/fs/cgroup").glob(f"*/sandlot-{left.name}/*") if path.is_dir()]
    for path in (left, *left.glob("ledger*")):  # it stays for the hour in which its server could tell how they ended
        os.utime(path, (0, 0))
    async with Server(state):
        note_nodes(state)
        assert len(list(state.glob("node-*"))) == 1
    assert leftovers(state) == []


# argv: the state directory. A box, and a worker of this program's own, as multiprocessing makes one.
FORKING = """
import asyncio, os, sys, time
from pathlib import Path
from sandlot.api import SandboxSpec
from sandlot.node.node import local_node

async def main():
    node = local_node(Path(sys.argv[1]))
    await node.start()
    info = await node.create(SandboxSpec())
    first = node._live[info.id].box._pid
    worker = os.fork()
    if worker == 0:
        os.close(1)
        time.sleep(600)
    print(first, worker, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_programs_boxes_end_with_it_though_a_worker_that_it_forked_lives_on(state: Path) -> None:
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKING, str(state), stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    async with asyncio.timeout(60):
        first, worker = map(int, (await program.stdout.readline()).split())
    note_nodes(state)
    try:
        program.kill()
        await program.wait()
        await until_gone(first)
        assert alive(worker)
        async with Server(state):  # which finds the directory nobody's
            note_nodes(state)
            assert len(list(state.glob("node-*"))) == 1
    finally:
        kill(worker)
    assert leftovers(state) == []


async def test_servers_and_embedded_runs_leave_each_others_boxes_alone(state: Path) -> None:
    from sandlot.node.node import local_node

    async with Server(state, "--orphan-grace", "60") as first, Server(state) as second:
        note_nodes(state)
        one, two = first.node(), second.node()
        mine: list[tuple[HttpNode, Info]] = [(node, await node.create(SandboxSpec())) for node in (one, two)]
        await first.kill()  # its box lives, and waits for it
        embedded = local_node(state)
        await embedded.start()  # sweeps what is dead
        box = await embedded.create(SandboxSpec())
        await second.kill()
        await second.start()
        await first.start()
        note_nodes(state)
        for node, info in mine:
            assert (await node.run(info.id, Run(argv=("echo", "lives")))).stdout == "lives\n"
            with pytest.raises(NotFound):
                await embedded.info(info.id)
        assert (await embedded.run(box.id, Run(argv=("echo", "lives")))).stdout == "lives\n"
        await embedded.close()
        await one.close()
        await two.close()
    assert leftovers(state) == []

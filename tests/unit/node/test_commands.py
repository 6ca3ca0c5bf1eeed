"""Promises of commands that are left to themselves, over real boxes, in this process and on a server:

1. A command that was started goes on by itself; it is listed, waited for by anybody, any number of times.
2. What it writes is told as it comes, from any offset, every byte once; who comes late is told how much is lost, and
   a command that is lossless waits for who is slow, and for the slowest of several.
3. Its input can come piece by piece; a command that takes no more says so.
4. Signals reach it; 9 ends its whole tree. Its true status is told.
5. Its standard streams can be opened by their names, as `tee /dev/stderr` does.
6. A follower that goes away leaves it alone, and so does the end of its sandbox's other commands.
7. What is kept of those that ended is bounded, whether anybody asks for it or not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable

import pytest

from sandlot.drivers.native.box import NativeProcess
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, Unsupported
from sandlot.node import keyed, streams
from sandlot.sandbox import Command, Sandbox


async def said(command: Command, out: int = 0, err: int = 0) -> dict[str, bytes]:
    parts = {"out": b"", "err": b""}
    at = {"out": out, "err": err}
    async for chunk in command.output(out, err):
        assert chunk.lost == 0 and chunk.offset == at[chunk.stream]
        at[chunk.stream] += len(chunk.data)
        parts[chunk.stream] += chunk.data
    return parts


class Taken:
    """What one follower takes of a command's output, on its own pace."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.size = self.lost = 0

    async def all(self, out: int = 0, first: Awaitable[None] | None = None) -> None:
        """`first` is waited for after the first chunk."""
        async for chunk in self.command.output(out):
            self.size += len(chunk.data)
            self.lost += chunk.lost
            if first is not None:
                await first
                first = None

    async def rests(self) -> None:
        """Returns when it gets no more for a second, having got some, however slow the host is."""
        before = -1
        while not self.size or self.size > before:
            before = self.size
            await asyncio.sleep(1)


async def test_a_command_that_was_started_goes_on_by_itself(sandbox: Sandbox) -> None:
    command = await sandbox.start("echo one; sleep 0.3; echo two >&2; exit 3")
    (info,) = await sandbox.commands()
    assert (info.id, info.argv0, info.running) == (command.id, "sh", True) and info.pid
    results = await asyncio.gather(command.wait(), (await sandbox.command(command.id)).wait())
    assert results[0] == results[1]
    assert (results[0].exit_code, results[0].stdout, results[0].stderr) == (3, "one\n", "two\n")
    assert await command.wait() == results[0]
    (info,) = await sandbox.commands()
    assert (info.running, info.pid, info.out_total, info.err_total) == (False, None, 4, 4)
    again = await sandbox.start("echo keyed", key="mine")
    assert again.id == (await sandbox.start("echo keyed", key="mine")).id == "mine"
    with pytest.raises(Conflict, match="another command"):
        await sandbox.start("echo other", key="mine")
    assert (await (await sandbox.start(["/no/such"])).wait()).exit_code == 127


async def test_what_it_writes_is_told_as_it_comes(sandbox: Sandbox) -> None:
    command = await sandbox.start("echo one; read line; echo $line; echo err >&2", stdin_open=True)
    chunks = command.output()
    first = await anext(chunks)
    assert (first.stream, first.data) == ("out", b"one\n")  # while it waits for its input
    await command.write("two\n", end=True)
    rest = [chunk async for chunk in chunks]
    assert {(chunk.stream, chunk.offset, chunk.data) for chunk in rest} == {("out", 4, b"two\n"), ("err", 0, b"err\n")}
    assert await said(command) == {"out": b"one\ntwo\n", "err": b"err\n"}  # by whoever comes later
    assert await said(command, out=4, err=4) == {"out": b"two\n", "err": b""}


async def test_fifty_megabytes_come_whole_to_who_takes_them(sandbox: Sandbox) -> None:
    text = "i=0; while [ $i -lt 50 ]; do head -c 1000000 /dev/zero | tr '\\0' $((i % 10)); i=$((i+1)); done"
    command = await sandbox.start(text, output_cap=64 << 20)
    digest = hashlib.sha256()
    total = 0
    async for chunk in command.output():
        assert (chunk.lost, chunk.offset) == (0, total)
        digest.update(chunk.data)
        total += len(chunk.data)
    wanted = hashlib.sha256(b"".join(str(i % 10).encode() * 1_000_000 for i in range(50)))
    assert (total, digest.hexdigest()) == (50_000_000, wanted.hexdigest())


async def test_who_comes_late_is_told_what_is_lost(sandbox: Sandbox) -> None:
    command = await sandbox.start("head -c 10000000 /dev/zero; echo end", output_cap=1000)
    await command.wait()
    chunks = [chunk async for chunk in command.output()]
    assert sum(chunk.lost + len(chunk.data) for chunk in chunks) == 10_000_004
    assert chunks[-1].data.endswith(b"end\n") and sum(len(chunk.data) for chunk in chunks) == 1000


async def test_one_that_is_lossless_waits_for_who_is_slow(sandbox: Sandbox) -> None:
    async def missed(lossless: bool) -> tuple[int, int]:
        command = await sandbox.start("seq 1 3000000; seq 1 9 >&2", output_cap=1 << 19, lossless=lossless)
        await asyncio.sleep(0.5)  # in which it would write many times the cap
        lost = 0
        digest = hashlib.sha256()
        async for chunk in command.output():
            if not lost:
                await asyncio.sleep(0.01)
            lost += chunk.lost
            digest.update(chunk.data if chunk.stream == "out" else b"")
        wanted = hashlib.sha256("".join(f"{number}\n" for number in range(1, 3_000_001)).encode())
        assert (digest.digest() == wanted.digest()) == (lost == 0)
        return lost, (await command.wait()).exit_code

    assert await missed(lossless=True) == (0, 0)
    lost, _ = await missed(lossless=False)
    assert lost > 1_000_000, "it is no test of anything"


async def test_one_that_is_lossless_waits_for_who_comes_back_soon(sandbox: Sandbox) -> None:
    command = await sandbox.start("seq 1 3000000", output_cap=1 << 19, lossless=True)
    digest = hashlib.sha256()
    total = 0
    for turn in range(4):
        chunks = command.output(out=total)
        async for chunk in chunks:
            assert (chunk.offset, chunk.lost) == (total, 0)
            digest.update(chunk.data)
            total += len(chunk.data)
            if turn == 0 and total < 300_000:
                await asyncio.sleep(1)  # in which much of it comes to be on the way
            if total > 1_000_000 and turn < 3:
                break
        await chunks.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)  # in which it would write many times the cap
    assert digest.digest() == hashlib.sha256("".join(f"{n}\n" for n in range(1, 3_000_001)).encode()).digest()


@pytest.mark.parametrize("sandbox", ["in this process"], indirect=True)
async def test_one_that_is_lossless_waits_for_nobody_who_only_looks(sandbox: Sandbox) -> None:
    async def look() -> None:
        keyed.ONLY_LOOKS.set(True)
        await looker.all()

    command = await sandbox.start("seq 1 3000000", output_cap=1 << 19, lossless=True)
    looker, follower = Taken(command), Taken(command)
    looking = asyncio.create_task(look())  # of its own context
    await looker.rests()  # all of it, if it were waited for
    await follower.all()
    assert (follower.size, follower.lost) == (22_888_896, 0)
    await looking


async def test_one_that_is_lossless_waits_for_the_slowest(sandbox: Sandbox) -> None:
    command = await sandbox.start("seq 1 3000000", output_cap=1 << 19, lossless=True)
    slow, fast, far = [Taken(command) for _ in range(3)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as following:
        following.create_task(slow.all(first=fast.rests()))
        following.create_task(fast.all())
        following.create_task(far.all(out=1 << 62))
    assert (slow.size, slow.lost) == (fast.size, fast.lost) == (22_888_896, 0)
    assert (far.size, far.lost) == (0, 0)


async def test_one_that_is_lossless_goes_on_when_the_slowest_has_gone(sandbox: Sandbox) -> None:
    command = await sandbox.start("seq 1 3000000", output_cap=1 << 19, lossless=True)
    stuck = command.output()
    assert (await anext(stuck)).offset == 0
    fast = Taken(command)
    following = asyncio.create_task(fast.all())
    await fast.rests()
    assert not following.done()
    await stuck.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        await following
    assert (fast.size, fast.lost) == (22_888_896, 0)


async def test_one_that_is_lossless_waits_for_nobody_who_has_gone(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "NEXT_SECONDS", 0.5)
    command = await sandbox.start("seq 1 3000000; exit 3", output_cap=1 << 19, lossless=True)
    chunks = command.output()
    assert (await anext(chunks)).data.startswith(b"1\n2\n")
    await asyncio.sleep(0.2)
    assert (await sandbox.commands())[0].running
    await chunks.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        assert (await command.wait()).exit_code == 3


async def test_input_comes_piece_by_piece(sandbox: Sandbox) -> None:
    command = await sandbox.start("cat; echo done", stdin=b"first ", stdin_open=True)
    for number in range(10):
        await command.write(f"{number} ")
    await command.write(b"x" * 1_000_000)
    await command.write(b"", end=True)
    result = await command.wait()
    assert result.out.total == len(b"first ") + 20 + 1_000_000 + len(b"done\n")
    with pytest.raises(Conflict, match="takes no more input"):
        await command.write("late")
    full = await sandbox.start("sleep 0.5", stdin_open=True)  # which never reads, and ends while this waits
    with pytest.raises(Conflict, match="takes no more input"):
        async with asyncio.timeout(20):
            await full.write(b"x" * 1_000_000)
    closed = await sandbox.start("exec <&-; sleep 600", stdin_open=True)
    with pytest.raises(Conflict, match="nobody reads"):
        for _ in range(100):
            await closed.write(b"x" * 10_000)
    await closed.kill()
    with pytest.raises(Conflict, match="stdin_open"):
        await (await sandbox.start("sleep 600")).write("x")


async def test_signals_reach_it_and_its_true_status_is_told(sandbox: Sandbox) -> None:
    asked = await sandbox.start("trap 'echo asked; exit 5' TERM; echo ready; while :; do sleep 0.01; done")
    assert (await anext(asked.output())).data == b"ready\n"
    await asked.signal(15)
    result = await asked.wait()
    assert (result.exit_code, result.stdout) == (5, "ready\nasked\n")
    await asked.signal(15)  # it has ended: no error
    for _ in range(20):  # however soon after its start
        ended = await sandbox.start("sleep 600")
        await ended.signal(10)
        assert ((await ended.wait()).exit_code, (await ended.wait()).signal) == (138, 10)
    tree = await sandbox.start("setsid sleep 599 & setsid sleep 599 & echo ready; wait")
    assert (await anext(tree.output())).data == b"ready\n"
    await tree.kill()
    assert (await tree.wait()).exit_code == 137
    # The kernel takes them down in its own time, which is a moment.
    gone = "i=0; while pgrep -x sleep >/dev/null && [ $i -lt 50 ]; do sleep 0.1; i=$((i+1)); done; pgrep -x sleep"
    assert (await sandbox.run(f"{gone} || echo none")).stdout == "none\n"
    with pytest.raises(InvalidRequest):
        await ended.signal(99)


async def test_a_follower_that_goes_away_leaves_it_alone(sandbox: Sandbox) -> None:
    command = await sandbox.start("sleep 0.5; echo end")
    following = asyncio.create_task(said(command))
    waiting = asyncio.create_task(command.wait())
    await asyncio.sleep(0.1)
    following.cancel()
    waiting.cancel()
    await asyncio.wait((following, waiting))
    assert (await command.wait()).stdout == "end\n"


async def test_one_that_dies_alone_ends_when_nobody_came(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "FIRST_SECONDS", 0.5)
    alone, other = [await sandbox.start("sleep 600", kill_on_disconnect=True) for _ in range(2)]
    waiting = asyncio.create_task(other.wait())
    await asyncio.sleep(1)
    assert {info.id: info.running for info in await sandbox.commands()} == {alone.id: False, other.id: True}
    assert (await alone.wait()).signal == 9
    await other.kill()
    await waiting


async def test_the_end_of_its_sandbox_is_told(sandbox: Sandbox) -> None:
    command = await sandbox.start("echo begun; sleep 600")
    following = asyncio.create_task(said(command))
    waiting = asyncio.create_task(command.wait())
    await asyncio.sleep(0.2)
    await sandbox.close()
    for each in (following, waiting):
        with pytest.raises(SandboxEnded):
            await each
    with pytest.raises(SandboxEnded):
        await command.wait()


@pytest.mark.parametrize("most", [("UNRECEIVED", 5), ("UNRECEIVED_BYTES", 5000)])
@pytest.mark.parametrize("sandbox", ["in this process"], indirect=True)
async def test_results_that_nobody_asks_for_are_bounded(
    sandbox: Sandbox, most: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, *most)
    freed: list[NativeProcess] = []

    async def release(process: NativeProcess) -> None:
        freed.append(process)
        await original(process)

    original = NativeProcess.release
    monkeypatch.setattr(NativeProcess, "release", release)

    async def until(ended: Command) -> None:
        for _ in range(2000):
            if not any(info.id == ended.id and info.running for info in await sandbox.commands()):
                return
            await asyncio.sleep(0.01)

    slow = await sandbox.start("read line; head -c 1000 /dev/zero", stdin_open=True)
    started = []
    for _ in range(20):
        started.append(await sandbox.start("head -c 1000 /dev/zero"))
        await until(started[-1])
    assert [info.id for info in await sandbox.commands()] == [each.id for each in (slow, *started[-5:])]
    with pytest.raises(NotFound, match=f"no command {started[0].id}") as told:
        await started[0].wait()
    assert "its result is forgotten" in (told.value.hint or "")
    await slow.write("now\n")
    await until(slow)
    assert [info.id for info in await sandbox.commands()] == [each.id for each in (slow, *started[-4:])]
    assert (await slow.wait()).out.total == 1000  # it is the last that ended, though the first that began
    await asyncio.sleep(0.1)
    assert len(freed) == 16  # else PID 1 holds what is theirs for all time


@pytest.mark.parametrize("sandbox", ["in this process"], indirect=True)
async def test_results_that_were_followed_to_their_end_are_as_those_that_were_waited_for(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "KEPT", 2)
    started = []
    for _ in range(5):
        started.append(await sandbox.start("echo one"))
        assert (await said(started[-1]))["out"] == b"one\n"
    assert [info.id for info in await sandbox.commands()] == [each.id for each in started[-2:]]


async def test_what_was_never_started_is_not_found(sandbox: Sandbox) -> None:
    never = await sandbox.command("never")
    for asked in (never.wait(), never.signal(15), never.write("x"), said(never)):
        with pytest.raises(NotFound, match="no command never"):
            await asked


@pytest.mark.parametrize("offset", [-1, 1 << 63])
async def test_what_is_no_offset_is_refused(sandbox: Sandbox, offset: int) -> None:
    command = await sandbox.start("echo one")
    for asked in (said(command, out=offset), said(command, err=offset)):
        with pytest.raises(InvalidRequest):
            await asked
    assert await said(command, out=(1 << 63) - 1) == {"out": b"", "err": b""}


@pytest.mark.parametrize("user", [0, 1000])
async def test_its_streams_can_be_opened_by_their_names(sandbox: Sandbox, user: int) -> None:
    text = "cat /dev/stdin; echo out >/dev/stdout; echo both | tee /dev/stderr"
    try:
        result = await sandbox.run(text, stdin="in\n", user=user, cwd="/")
    except Unsupported as error:
        pytest.skip(error.message)
    assert (result.stdout, result.stderr) == ("in\nout\nboth\n", "both\n")

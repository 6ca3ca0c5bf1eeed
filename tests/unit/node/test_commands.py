"""Promises of commands that are left to themselves, over real boxes, in this process and on a server:

1. A command that was started goes on by itself; it is listed, waited for by anybody, any number of times.
2. What it writes is told as it comes, from any offset, every byte once; who comes late is told how much is lost.
3. Its input can come piece by piece; a command that takes no more says so.
4. Signals reach it; 9 ends its whole tree. Its true status is told.
5. Its standard streams can be opened by their names, as `tee /dev/stderr` does.
6. A follower that goes away leaves it alone, and so does the end of its sandbox's other commands.
"""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from sandlot.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, Unsupported
from sandlot.sandbox import Command, Sandbox


async def said(command: Command, out: int = 0, err: int = 0) -> dict[str, bytes]:
    parts = {"out": b"", "err": b""}
    at = {"out": out, "err": err}
    async for chunk in command.output(out, err):
        assert chunk.lost == 0 and chunk.offset == at[chunk.stream]
        at[chunk.stream] += len(chunk.data)
        parts[chunk.stream] += chunk.data
    return parts


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


async def test_what_was_never_started_is_not_found(sandbox: Sandbox) -> None:
    never = await sandbox.command("never")
    for asked in (never.wait(), never.signal(15), never.write("x"), said(never)):
        with pytest.raises(NotFound, match="no command never"):
            await asked


@pytest.mark.parametrize("user", [0, 1000])
async def test_its_streams_can_be_opened_by_their_names(sandbox: Sandbox, user: int) -> None:
    text = "cat /dev/stdin; echo out >/dev/stdout; echo both | tee /dev/stderr"
    try:
        result = await sandbox.run(text, stdin="in\n", user=user, cwd="/")
    except Unsupported as error:
        pytest.skip(error.message)
    assert (result.stdout, result.stderr) == ("in\nout\nboth\n", "both\n")

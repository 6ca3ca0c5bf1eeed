"""Promises of a terminal, over real programs in a real box, in this process and over a WebSocket:

1. A program has a terminal of its own, as large as was asked for: it is told of a new size, and ^C reaches it.
2. Its exit status is told at the end, with all that it wrote; one that cannot be started says why.
3. Who detaches finds it again, with the last of its output. Of two who attach the later one has it, and the other is
   told; who watches sees it and types nothing. Those who may only look leave room for others, and no sandbox lives
   for them.
4. A program that writes faster than is read waits, and nothing is lost; with nobody attached it goes on, in little
   room.
5. It ends with its box, with a reset, and when it is closed; nothing of it stays.
6. It is there again in a node after a killed one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandlot.api import MOST_REPLAY, Limits, SandboxSpec, TerminalSpec
from sandlot.errors import Conflict, InvalidRequest, NotFound
from sandlot.node import keyed, terminals
from sandlot.node.node import local_node
from sandlot.sandbox import Sandbox, Terminal
from tests.support.killed import killed
from tests.support.native import PYTHON

# A shell that says no more than it is asked for.
QUIET = ("bash", "--noprofile", "--norc", "--noediting")


# What is typed comes back before that is switched off, so nothing that is waited for may stand in it: `re''ady`.


async def until(terminal: Terminal, words: str) -> str:
    """What comes until these words have come."""
    seen = ""
    async with asyncio.timeout(60):
        while words not in seen:
            data = await terminal.read()
            assert data, f"it ended: {seen!r}"
            seen += data.decode(errors="replace")
    return seen


async def rest(terminal: Terminal) -> str:
    async with asyncio.timeout(60):
        return b"".join([data async for data in terminal.output()]).decode(errors="replace")


async def test_a_program_has_a_terminal_of_the_size_that_was_asked_for(sandbox: Sandbox) -> None:
    async with await sandbox.terminal(QUIET, rows=30, columns=100, cwd="/usr", env={"X": "given"}) as terminal:
        await terminal.write("stty -echo; PS1=; test -t 0 -a -t 1 -a -t 2; echo $? $(stty size) $X $PWD $TERM\n")
        await until(terminal, "0 30 100 given /usr xterm-256color\r\n")
        await terminal.write("trap 'echo now $(stty size)' WINCH; echo re''ady; sleep 600 & wait\n")
        await until(terminal, "ready\r\n")
        await terminal.resize(40, 120)
        await until(terminal, "now 40 120\r\n")
        (info,) = await sandbox.terminals()
        assert (info.id, info.rows, info.columns, info.attached) == (terminal.id, 40, 120, True)
        assert (info.command, info.ended, info.exit_code) == (QUIET, False, None)
        with pytest.raises(InvalidRequest, match="rows"):
            await terminal.resize(0, 80)
    assert await sandbox.terminals() == []
    with pytest.raises(NotFound, match="no terminal"):
        await sandbox.attach_terminal(terminal.id)


async def test_keys_reach_what_stands_in_the_foreground(sandbox: Sandbox) -> None:
    async with await sandbox.terminal(QUIET) as terminal:
        await terminal.write("stty -echo; PS1='$?> '; echo be''gun; sleep 600\n")
        await until(terminal, "begun\r\n")
        await asyncio.sleep(0.5)
        await terminal.write("\x03")
        await until(terminal, "130> ")
        await terminal.write(b"\x04")  # the end of what is typed
        assert "exit" in await rest(terminal)
        assert terminal.end is not None and (terminal.end.reason, terminal.end.exit_code) == ("exit", 130)


async def test_another_program_is_talked_to(sandbox: Sandbox) -> None:
    async with await sandbox.terminal([PYTHON, "-i", "-q", "-c", "import sys"]) as terminal:
        await until(terminal, ">>> ")
        await terminal.write("print(6 * 7)\n")
        await until(terminal, "42\r\n>>> ")
        await terminal.write("sys.exit(5)\n")
        assert await terminal.wait() == 5
        with pytest.raises(Conflict, match="takes no more"):
            await terminal.write("more\n")


async def test_a_login_shell_is_what_there_is_by_default(sandbox: Sandbox) -> None:
    async with await sandbox.terminal() as terminal:
        await terminal.write("shopt login_shell; exit 3\n")
        assert "login_shell    \ton" in await rest(terminal)
        assert terminal.end is not None and terminal.end.exit_code == 3


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["no-such-program"], 127, "no-such-program: command not found"),
        (["/etc/passwd"], 126, "cannot be executed"),
        ("echo last words; kill -9 $$", 137, "last words"),
        ("seq 20000; exit 7", 7, "\r\n20000\r\n"),
    ],
)
async def test_how_a_program_ended_is_told_after_all_that_it_wrote(
    sandbox: Sandbox, command: str | list[str], code: int, said: str
) -> None:
    async with await sandbox.terminal(command) as terminal:
        assert said in await rest(terminal)
        assert terminal.end is not None and (terminal.end.reason, terminal.end.exit_code) == ("exit", code)
        assert await terminal.read() == b""
        (info,) = await sandbox.terminals()
        assert (info.ended, info.exit_code, info.attached) == (True, code, False)
        again = await sandbox.attach_terminal(terminal.id)  # what it wrote can be read again
        assert said in await rest(again)
        assert await again.wait() == code


async def test_who_comes_back_finds_the_last_of_its_output(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminal(QUIET)
    await terminal.write("stty -echo; PS1=; x=kept; echo re''ady\n")
    await until(terminal, "ready\r\n")
    await terminal.detach()
    with pytest.raises(Conflict):
        await terminal.write("echo no\n")
    assert [info.attached for info in await sandbox.terminals()] == [False]
    again = await sandbox.attach_terminal(terminal.id)
    await until(again, "ready\r\n")
    await again.write("seq 100000; echo $x\n")
    await until(again, "kept\r\n")
    await again.detach()
    last = await sandbox.attach_terminal(terminal.id, replay=14)
    assert await last.read() == b"100000\r\nkept\r\n"
    await last.detach()
    none = await sandbox.attach_terminal(terminal.id, replay=0)
    await none.write("echo end; exec true\n")
    assert await rest(none) == "end\r\n"
    with pytest.raises(InvalidRequest, match="replayed"):
        await sandbox.attach_terminal(terminal.id, replay=MOST_REPLAY + 1)
    await terminal.close()


async def test_the_later_one_has_it_and_the_earlier_is_told(sandbox: Sandbox) -> None:
    first = await sandbox.terminal(QUIET)
    await first.write("stty -echo; PS1=; echo re''ady\n")
    await until(first, "ready\r\n")
    reading = asyncio.create_task(first.read())
    second = await sandbox.attach_terminal(first.id)
    assert await reading == b""
    assert first.end is not None and first.end.reason == "taken"
    with pytest.raises(Conflict):
        await first.write("echo no\n")
    with pytest.raises(Conflict, match="not attached"):
        await first.wait()
    await second.write("echo mine\n")
    await until(second, "mine\r\n")
    await second.close()


async def test_who_watches_sees_it_and_types_nothing(sandbox: Sandbox) -> None:
    async with await sandbox.terminal(QUIET) as terminal:
        watchers = [await sandbox.attach_terminal(terminal.id, watch=True) for _ in range(3)]
        await terminal.write("stty -echo; PS1=; echo re''ady\n")
        for each in (terminal, *watchers):
            await until(each, "ready\r\n")
        with pytest.raises((InvalidRequest, Conflict)):
            for _ in range(100):
                await watchers[0].write("echo no\n")
                await asyncio.wait_for(watchers[0].read(), 60)
        await watchers[1].detach()
        await terminal.write("echo on; exec sh -c 'exit 4'\n")
        assert (await rest(terminal)).endswith("on\r\n")
        assert await watchers[2].wait() == 4


@contextmanager
def only_looks() -> Iterator[None]:
    token = keyed.ONLY_LOOKS.set(True)
    try:
        yield
    finally:
        keyed.ONLY_LOOKS.reset(token)


@pytest.mark.parametrize("sandbox", ["in this process"], indirect=True)
async def test_those_who_only_look_leave_room_for_others(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandlot.node.terminal.WATCHERS", 4)
    async with await sandbox.terminal(QUIET) as shown:
        with only_looks():
            for _ in range(2):
                await sandbox.attach_terminal(shown.id, watch=True)
            with pytest.raises(Conflict, match="2 watch"):
                await sandbox.attach_terminal(shown.id, watch=True)
        for _ in range(2):
            await sandbox.attach_terminal(shown.id, watch=True)
        with pytest.raises(Conflict, match="4 watch"):
            await sandbox.attach_terminal(shown.id, watch=True)


async def test_a_sandbox_is_idle_though_somebody_looks_who_may_do_no_more(
    tmp_path: Path, native_reason: str | None
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node:
        box = (await node.create(SandboxSpec(idle_timeout=2))).id
        shown = await node.open_terminal(box, TerminalSpec(command=QUIET))
        with only_looks():
            link = await node.attach_terminal(box, shown.id, watch=True)
        assert (await node.wait_ended(box, 30)).ending == "idle"
        assert link.end is not None and link.end.reason == "closed"


async def test_a_program_that_writes_faster_than_is_read_waits(sandbox: Sandbox) -> None:
    size = 24_000_000  # more than sockets hold on the way
    async with await sandbox.terminal(f"stty raw; seq 100000; head -c {size} /dev/zero; echo end") as terminal:
        await asyncio.sleep(1)
        assert not (await sandbox.terminals())[0].ended
        said = await rest(terminal)
        assert said.strip("\0") == "".join(f"{number}\n" for number in range(1, 100_001)) + "\0" * size + "end\n"


async def test_with_nobody_attached_it_goes_on_in_little_room(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node, await Sandbox.create(node=node) as box:
        terminal = await box.terminal("stty raw; head -c 20000000 /dev/zero; echo end; sleep 600")
        mine = node._live[box.id].terminals[terminal.id]
        watcher = await box.attach_terminal(terminal.id, watch=True)  # which reads nothing
        await asyncio.sleep(0.5)
        assert mine._total < 2 * MOST_REPLAY  # it waits for who types
        await terminal.detach()
        last = await box.attach_terminal(terminal.id, replay=0)
        await until(last, "end\n")
        assert mine._total > 20_000_000
        assert os.fstat(mine._log).st_blocks * 512 <= 4 * MOST_REPLAY
        assert len(await watcher.read()) > 0
        await last.close()


async def test_a_program_that_reads_nothing_holds_up_nobody_else(sandbox: Sandbox) -> None:
    first = await sandbox.terminal("stty raw -echo; echo begun; sleep 600")
    await until(first, "begun\n")

    async def type_on() -> None:
        while True:
            await first.write(b"x" * 65536)

    typing = asyncio.create_task(type_on())
    await asyncio.sleep(0.5)
    second = await sandbox.attach_terminal(first.id)
    with pytest.raises(Conflict):
        async with asyncio.timeout(60):
            await typing
    await second.close()


async def test_it_ends_with_a_reset_and_with_its_box(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminal(QUIET)
    await sandbox.reset()
    await rest(terminal)
    assert terminal.end is not None and terminal.end.reason == "closed"
    assert await sandbox.terminals() == []
    terminal = await sandbox.terminal(QUIET)
    await sandbox.close()
    await rest(terminal)
    assert terminal.end is not None and terminal.end.reason == "closed"


async def test_a_box_has_many(sandbox: Sandbox) -> None:
    terminals = [await sandbox.terminal(f"echo {number}; read line; echo got $line") for number in range(20)]
    for number, terminal in enumerate(terminals):
        await until(terminal, f"{number}\r\n")
        await terminal.write(f"line {number}\n")
    for number, terminal in enumerate(terminals):
        assert f"got line {number}\r\n" in await rest(terminal)
        await terminal.close()


async def test_a_sandbox_has_no_more_terminals_than_there_may_be(
    tmp_path: Path, native_reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    spec = TerminalSpec(command=("sleep", "600"))
    async with local_node(tmp_path) as node:
        box = (await node.create(SandboxSpec(limits=Limits(pids=2000)))).id
        opened = await asyncio.gather(*(node.open_terminal(box, spec) for _ in range(230)), return_exceptions=True)
        refused = [each for each in opened if isinstance(each, BaseException)]
        assert {str(each) for each in refused} == {f"sandbox {box} has 200 terminals already"}
        assert len(await node.terminals(box)) == 200 == 230 - len(refused)
        monkeypatch.setattr(terminals, "MOST_TERMINALS", 1000)
        with pytest.raises(Conflict, match="one more terminal") as none_left:
            for _ in range(100):
                await node.open_terminal(box, spec)
        assert none_left.value.hint is not None and "a sandbox has 256" in none_left.value.hint


async def test_a_sandbox_somebody_is_attached_to_is_not_idle(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    async with local_node(tmp_path) as node:
        box = (await node.create(SandboxSpec(idle_timeout=1))).id
        terminal = await node.open_terminal(box, TerminalSpec(command=("sleep", "600")))
        link = await node.attach_terminal(box, terminal.id)
        await asyncio.sleep(2.5)
        assert (await node.info(box)).state == "running"
        await link.close()
        async with asyncio.timeout(60):
            await asyncio.wait((node._live[box].box.death,))
        assert (await node.info(box)).ending == "idle"


async def test_terminals_leave_no_descriptor_behind(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with local_node(tmp_path) as node, await Sandbox.create(node=node) as box:
        before = descriptors()
        for command in ("true", "sleep 600", "exit 1"):
            terminal = await box.terminal(command)
            await box.attach_terminal(terminal.id, watch=True)
            await terminal.close()
        terminal = await box.terminal("sleep 600")
        await box.reset()
        await rest(terminal)
        await box.run("true")
        assert descriptors() == before


async def test_another_node_finds_it(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    said = await killed(
        tmp_path,
        f"""
        from sandlot.api import TerminalSpec
        box = (await node.create(SandboxSpec())).id
        terminal = (await node.open_terminal(box, TerminalSpec(command={QUIET!r}, rows=33))).id
        link = await node.attach_terminal(box, terminal)
        await link.write(b"stty -echo; PS1=; x=kept; echo re''ady\\n")
        seen = b""
        while b"ready\\r\\n" not in seen:
            seen += await link.read()
        say(box, terminal)
        """,
    )
    box_id, terminal_id = said[0].split()
    async with local_node(tmp_path, name="test", orphan_grace=60) as node:
        box = await Sandbox.attach(box_id, node=node)
        (info,) = await box.terminals()
        assert (info.id, info.command, info.rows, info.attached) == (terminal_id, QUIET, 33, False)
        terminal = await box.attach_terminal(terminal_id)
        await until(terminal, "ready\r\n")  # that was said to the dead one
        await terminal.write("echo $x; exit 6\n")
        await until(terminal, "kept\r\n")
        assert await terminal.wait() == 6

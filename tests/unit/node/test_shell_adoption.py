"""Promises of a shell whose node is killed, over a real bash in a real box:

1. Another node on the same directory finds it: the same id and process, its directory, variables, functions, options.
2. A text that runs goes on, and its result is whole, whatever it wrote meanwhile, for who asks with its key and, by its
   id, for anybody. It is run once, at whatever moment the node was killed.
3. What ended while there was no node is told: the text, with its status; the shell, with its own.
4. Its timeout goes on, and it can be interrupted; what its children in the background write is its own still.
5. Of a shell that is closed the box keeps nothing.
6. A client of the server does not notice.
"""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import Run, SandboxSpec, ShellResult, ShellRun
from sandlot.errors import Conflict, SandlotError
from sandlot.node.node import Node, local_node
from sandlot.sandbox import Sandbox
from tests.support.killed import killed
from tests.support.server import Server, first_processes


@pytest.fixture
def state(tmp_path: Path, native_reason: str | None) -> Path:
    if native_reason:
        pytest.skip(native_reason)
    return tmp_path


@asynccontextmanager
async def next_node(state: Path) -> AsyncIterator[Node]:
    async with local_node(state, name="test", orphan_grace=60) as node:
        yield node


class Known:
    """A shell of a node, by its ids."""

    def __init__(self, node: Node, box: str, shell: str) -> None:
        self.node, self.box, self.shell = node, box, shell

    async def run(self, text: str, **more: Any) -> ShellResult:
        run = ShellRun(command=text, **{"timeout": 30, **more})
        return await self.node.run_in_shell(self.box, self.shell, run)

    async def idle(self) -> None:
        """Until the text that was running is over."""
        await self.run("true", queue=True)


OPEN = """
box = (await node.create(SandboxSpec())).id
shell = (await node.open_shell(box, ShellSpec(cwd="/usr"))).id
async def run(text, **more):
    return await node.run_in_shell(box, shell, ShellRun(command=text, **more))
def begin(text, **more):
    return asyncio.ensure_future(run(text, **more))
async def until(path):
    while (await node.run(box, sh(f"test -e {path}"))).exit_code:
        pass
say(box, shell)
"""


async def left(state: Path, text: str, **more: Any) -> tuple[str, str, list[str]]:
    """A shell of a node that did this and was killed: its box, its id, what else was said."""
    first, *said = await killed(state, OPEN + textwrap.dedent(text), **more)
    box, shell = first.split()
    return box, shell, said


async def test_another_node_finds_the_same_shell(state: Path) -> None:
    box, shell, said = await left(
        state,
        """
        await run("cd /tmp; x='a b'; f() { echo f $1; }; shopt -s nullglob; set -o pipefail; alias a='echo aliased'")
        say((await run("echo $$")).stdout.strip())
        """,
    )
    for _ in range(2):
        async with next_node(state) as node:
            (info,) = await node.shells(box)
            assert (info.id, info.cwd, info.running, info.ended, info.lacks) == (shell, "/tmp", None, False, ())
            known = Known(node, box, shell)
            result = await known.run(
                'echo $$; pwd; echo "$x"; f 1; a; echo /no/such/*; false | true; echo $?; cat', stdin=b"in"
            )
            assert result.stdout == f"{said[0]}\n/tmp\na b\nf 1\naliased\n\n1\nin"
            assert (await known.run("sleep 60", timeout=0.3)).timed_out
            assert (await known.run("echo next")).stdout == "next\n"
            await die(node)


async def die(node: Node) -> None:
    """As if it were killed, as far as one can be in the process of its test."""
    node.ledger.close()
    assert node._directory is not None
    node._directory.release()
    for live in node._live.values():
        box: Any = live.box
        box._loop.remove_reader(box._pidfd)
        box._channel.close()
    node._closing = True


@pytest.mark.parametrize("key", ["k", None])
async def test_a_text_that_runs_goes_on_and_its_output_is_whole(state: Path, key: str | None) -> None:
    text = "touch /tmp/begun; for i in {1..60000}; do echo $i; done; echo err >&2; (exit 7)"
    box, shell, _ = await left(state, f"begin({text!r}, key={key!r}); await until('/tmp/begun')")
    async with next_node(state) as node:
        known = Known(node, box, shell)
        running = (await node.shells(box))[0].running
        if key:
            result = await known.run(text, key=key)
            code, out, err = result.exit_code, result.out, result.err
            assert result.id in (running, result.id)
        else:
            if running is not None:
                with pytest.raises(Conflict, match=f"busy with command {running}"):
                    await known.run("true")
            await known.idle()
            assert running is not None
            found = await node.shell_output(box, shell, running)
            assert found.exit_code is not None
            code, out, err = found.exit_code, found.out, found.err
        assert (code, err.text) == (7, "err\n")
        assert out.text == "".join(f"{number}\n" for number in range(1, 60001))
        assert (await known.run("echo next")).stdout == "next\n"


async def test_what_ended_without_a_node_is_told(state: Path) -> None:
    box, shell, _ = await left(
        state,
        """
        begin("touch /tmp/begun; sleep 0.5; cd /var; echo done; (exit 5)", key="k")
        await until("/tmp/begun")
        """,
    )
    await asyncio.sleep(1)
    async with next_node(state) as node:
        known = Known(node, box, shell)
        text = "touch /tmp/begun; sleep 0.5; cd /var; echo done; (exit 5)"
        result = await known.run(text, key="k")
        assert (result.stdout, result.exit_code, result.cwd, result.ended) == ("done\n", 5, "/var", False)
        assert await known.run(text, key="k") == result
        with pytest.raises(Conflict, match="another text"):
            await known.run("echo other", key="k")


async def test_a_shell_that_ended_without_a_node_says_how(state: Path) -> None:
    text = "touch /tmp/begun; sleep 0.5; echo bye; exit 3"
    box, shell, _ = await left(state, f"begin({text!r}, key='k'); await until('/tmp/begun')")
    await asyncio.sleep(1)
    async with next_node(state) as node:
        known = Known(node, box, shell)
        result = await known.run(text, key="k")
        assert (result.stdout, result.exit_code, result.ended) == ("bye\n", 3, True)
        (info,) = await node.shells(box)
        assert (info.ended, info.exit_code) == (True, 3)
        with pytest.raises(Conflict, match="exit code 3"):
            await known.run("true")
        again = await known.run("pwd", restart=True)
        assert (again.stdout, again.restarted) == ("/usr\n", True)


async def test_its_timeout_goes_on(state: Path) -> None:
    text = "touch /tmp/begun; echo before; sleep 60"
    box, shell, _ = await left(state, f"begin({text!r}, key='k', timeout=3); await until('/tmp/begun')")
    async with next_node(state) as node:
        known = Known(node, box, shell)
        result = await known.run(text, key="k", timeout=3)
        assert (result.timed_out, result.stdout, result.ended) == (True, "before\n", False)
        assert 3 <= result.seconds < 15
        assert (await known.run("echo next")).stdout == "next\n"


async def test_it_can_be_interrupted(state: Path) -> None:
    text = "touch /tmp/begun; echo before; sleep 60"
    box, shell, _ = await left(state, f"begin({text!r}); await until('/tmp/begun')")
    async with next_node(state) as node:
        (info,) = await node.shells(box)
        assert info.running is not None
        assert (await node.shell_output(box, shell, info.running)).exit_code is None
        assert await node.interrupt_shell(box, shell)
        assert (await Known(node, box, shell).run("echo next", queue=True)).stdout == "next\n"
        found = await node.shell_output(box, shell, info.running)
        assert (found.exit_code, found.out.text) == (130, "before\n")


async def test_what_the_background_writes_is_its_own_command_s(state: Path) -> None:
    text = "(echo one; until test -e /tmp/go; do sleep 0.05; done; echo two) & echo now"
    box, shell, said = await left(state, f"say((await run({text!r})).id); await asyncio.sleep(0.2)")
    async with next_node(state) as node:
        known = Known(node, box, shell)
        assert (await known.run("touch /tmp/go; wait; echo mine")).stdout == "mine\n"
        found = await node.shell_output(box, shell, said[0])
        assert (sorted(found.out.text.split()), found.exit_code) == (["now", "one", "two"], 0)


# Where the node is killed: `die` in the place of what it does, or just after.
MOMENTS = {
    "before the text is written": "module._write = die",
    "before the shell is told": "Shell._begin = killed_at(Shell._begin, 'write')",
    "when it has been told": "Shell._complete = die",
    "when it hears the status": "Shell._hear = die_if_running",
    "before the result is written down": "module._Pair.conclude = die",
    "before the pair is free again": "Shell._make_room = die_if_done",
}
BEFORE = """
global module, Shell, die_if_running, die_if_done, killed_at
    from sandlot.node import shell as module
    from sandlot.node.shell import Shell
    hear, make_room = Shell._hear, Shell._make_room
    def die_if_running(self):
        if self._running is not None:
            die()
        hear(self)
    def die_if_done(self):
        if any(each.key == "k" for each in self._done.values()):
            die()
        make_room(self)
    def killed_at(method, name):
        async def wrapped(*words):
            class Os:
                def __getattr__(self, other):
                    return die if other == name else getattr(os, other)
            module.os = Os()
            return await method(*words)
        return wrapped
"""


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_text_is_run_once_at_whatever_moment_its_node_is_killed(state: Path, moment: str) -> None:
    text = "echo once >> /tmp/runs; echo out; echo err >&2; (exit 4)"
    box, shell, _ = await left(
        state,
        f"""
        await run("echo ready")
        {MOMENTS[moment]}
        await run({text!r}, key="k")
        """,
        before=BEFORE.strip(),
    )
    async with next_node(state) as node:
        known = Known(node, box, shell)
        result = await known.run(text, key="k", queue=True)
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 4)
        assert (await known.run("cat /tmp/runs")).stdout == "once\n"


async def test_of_a_closed_shell_the_box_keeps_nothing(state: Path) -> None:
    async with local_node(state, name="test", orphan_grace=60) as node:
        box = (await node.create(SandboxSpec())).id
        (pid,) = first_processes(state)

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        before = descriptors()
        for number in range(3):
            known = Known(node, box, (await node.open_shell(box)).id)
            for text in ("true", "sleep 600 &", "echo x"):
                await known.run(text, key=f"{text}-{number}".replace(" ", "-"))
            for job in range(5):
                await known.run(f"sleep 600 & echo {job}")
            assert descriptors() > before
            await node.close_shell(box, known.shell)
        async with asyncio.timeout(20):  # the jobs were killed, and are reaped one by one
            while descriptors() > before:
                await node.stats(box)


async def test_results_with_keys_and_jobs_are_kept_within_bounds(state: Path) -> None:
    async with local_node(state, name="test", orphan_grace=60) as node:
        box = (await node.create(SandboxSpec())).id
        known = Known(node, box, (await node.open_shell(box)).id)
        server = await known.run("while :; do echo tick; sleep 0.1; done &", key="server")
        for number in range(100):
            result = await known.run(f"echo {number}", key=f"k{number}")
            assert await known.run(f"echo {number}", key=f"k{number}") == result
        shell = node._live[box].shells[known.shell]
        assert len(shell._done) < 12 and len(shell._keyed) <= 8
        assert (await known.run("jobs -rp | wc -l")).stdout == "1\n"  # nobody closed its output
        assert "tick" in (await node.shell_output(box, known.shell, server.id)).out.text


async def test_a_client_of_the_server_does_not_notice(state: Path) -> None:
    async with Server(state) as server:
        remote = server.node()
        async with await Sandbox.create(node=remote) as box:
            shell = await box.shell(cwd="/usr")
            await shell.run("cd /tmp; x=1")
            text = "touch begun; for i in {1..2000}; do echo $i; done; sleep 1; echo $x; (exit 6)"
            running = asyncio.create_task(shell.run(text, key="long"))
            while (await box.run(["test", "-e", "/tmp/begun"])).exit_code:
                pass
            await server.kill()
            await server.start()
            result = await running
            assert result.exit_code == 6
            assert result.stdout == "".join(f"{number}\n" for number in range(1, 2001)) + "1\n"
            with pytest.raises(SandlotError):  # without a key nobody may ask twice
                await asyncio.gather(shell.run("sleep 5"), _killed(server))
            await server.start()
            assert (await shell.run("echo $x $PWD", queue=True)).stdout == "1 /tmp\n"
        await remote.close()


async def _killed(server: Server) -> None:
    await asyncio.sleep(1)
    await server.kill()


def test_a_key_is_a_word() -> None:
    with pytest.raises(ValueError, match="key"):
        ShellRun(command="true", key="a b")
    assert Run(argv=("true",), key="k").key == "k"

"""Promises of the small `sh` of boxes in memory, on which a user's tests can use texts and shells:

1. A text runs programs of the driver one after another, with quotes, variables and files; its status is the last one's.
2. A shell keeps its directory and variables, takes a text at a time, and is ended by what ends a program.
3. What it has not it says, with status 2, and runs nothing of that text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandlot.drivers.fake import Context, FakeDriver
from sandlot.errors import Conflict
from sandlot.node.node import Node
from sandlot.sandbox import Sandbox


async def agent(context: Context) -> int:
    await context.write(f"{context.argv[1]} in {context.cwd} with {context.env.get('X', 'nothing')}\n".encode())
    return 3


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with Node(FakeDriver({"agent": agent}), tmp_path) as node:
        yield await Sandbox.create(node=node)


@pytest.mark.parametrize(
    ("text", "out", "code"),
    [
        ("echo hello", "hello\n", 0),
        ("", "", 0),
        ("# only a comment", "", 0),
        ("echo one; echo two\necho three # and this", "one\ntwo\nthree\n", 0),
        ("false && echo no || echo yes", "yes\n", 0),
        ("true && false", "", 1),
        ("x='a  b'; echo $x \"$x\" '$x' $x\"c\"", "a b a  b $x a bc\n", 0),
        ('echo "a \\"b\\" \\$x" \\; c\\ d', 'a "b" $x ; c d\n', 0),
        ("echo ${HOME}/x $nothing.", "/root/x .\n", 0),
        ("false; echo $?", "1\n", 0),
        ("cd /tmp && pwd; cd /nowhere 2>/dev/null; echo $? $PWD", "/tmp\n1 /tmp\n", 0),
        ("X=given agent task; echo $? $X", "task in /root with given\n3\n", 0),
        (
            "X=1; agent a; export X; agent b; unset X; agent c",
            "a in /root with nothing\nb in /root with 1\nc in /root with nothing\n",
            3,
        ),
        ("echo one >/tmp/f; echo two >>/tmp/f; cat </tmp/f; cat /tmp/f", "one\ntwo\none\ntwo\n", 0),
        ("nothing 2>&1; echo $?", "sh: nothing: No such file or directory\n127\n", 0),
        ("cat </nowhere 2>/dev/null; echo $?", "1\n", 0),
        ("printf '%s-%s\\n' a b; printf 'x\\t100%%'", "a-b\nx\t100%", 0),
        ("exit 7; echo no", "", 7),
        ("exec echo last; echo no", "last\n", 0),
        ("eval 'echo a; y=2'; echo $y", "a\n2\n", 0),
        ("read a b; echo $b $a", "two words one\n", 0),
        ("cat", "one two words\nmore\n", 0),
        ("echo 'open", "", 2),
        ("echo a | cat", "", 2),
        ("sleep 5 &", "", 2),
        ("if true; then echo no; fi", "", 2),
        ("for x in a; do echo no; done", "", 2),
        ("f() { echo no; }", "", 2),
        ("echo `pwd`", "", 2),
        ("echo $(pwd)", "", 2),
        ("echo *", "", 2),
        ("echo hi >&9; echo no", "", 2),
        ("echo hi >&x", "", 2),
        ("echo a 2>&-", "", 2),
        ("exec 5>/tmp/x", "", 2),
        ("set -e; false; echo no", "", 2),
        ("set -u; echo $nope", "", 2),
        ("trap 'echo bye' EXIT; exit 0", "", 2),
        ("trap : INT; echo yes", "yes\n", 0),
        ("echo $1", "", 2),
        ('echo "$@" $#', "", 2),
        ("echo ~", "", 2),
        ("x=~/a; echo $x", "", 2),
        ("echo a~ '~'", "a~ ~\n", 0),
        ("printf '%d %5s\\n' 3 a", "", 2),
        ("printf '\\101'", "", 2),
        ("printf '%s,' a b c; printf x y", "a,b,c,x", 0),
        ("read -p hi x", "", 2),
        ("echo a >&2; echo b 1>&1", "b\n", 0),
        ("cat <<EOF\nx\nEOF", "", 2),
    ],
)
async def test_a_text_is_run(box: Sandbox, text: str, out: str, code: int) -> None:
    result = await box.run(text, stdin="one two words\nmore\n")
    assert (result.stdout, result.exit_code) == (out, code), result.stderr
    assert code != 2 or "a fake box has no" in result.stderr


async def test_an_exit_status_that_is_no_number_is_two(box: Sandbox) -> None:
    for wrong in ("abc", "²", "-1", "9" * 5000):
        result = await box.run(f"exit {wrong}; echo no")
        assert (result.stdout, result.exit_code) == ("", 2) and "is no number" in result.stderr


async def test_a_shell_keeps_its_state(box: Sandbox) -> None:
    async with await box.shell(cwd="/tmp", env={"X": "1"}) as shell:
        assert any("bash" in lack for lack in shell.lacks)
        first = await shell.run("echo $X $PWD; cd /; y='a b'; echo err >&2; cat", stdin="given")
        assert (first.stdout, first.stderr, first.cwd) == ("1 /tmp\ngiven", "err\n", "/")
        assert (await shell.run('agent task; echo $? "$y"')).stdout == "task in / with 1\n3 a b\n"
        assert (await shell.run("false")).exit_code == 1
        assert (await shell.run("if true; then :; fi")).exit_code == 2
        assert (await shell.run("echo next", key="k")).stdout == "next\n"
        assert (await shell.run("echo next", key="k")).stdout == "next\n"
        running = asyncio.create_task(shell.run("sleep 0.2; echo done"))
        await asyncio.sleep(0.05)
        with pytest.raises(Conflict, match="busy"):
            await shell.run("true")
        assert (await running).stdout == "done\n"
        assert await box.diff() == []  # what the shell is told by is no file of the sandbox
        ended = await shell.run("exit 4")
        assert (ended.ended, ended.exit_code) == (True, 4)
        again = await shell.run("echo $PWD", restart=True)
        assert (again.stdout, again.restarted) == ("/tmp\n", True)


async def test_a_shell_is_ended_by_its_timeout_and_by_its_box(box: Sandbox) -> None:
    shell, other = await box.shell(), await box.shell()
    late = await shell.run("echo before; sleep 60", timeout=0.2)
    assert (late.timed_out, late.ended, late.stdout) == (True, True, "before\n")
    running = asyncio.create_task(other.run("sleep 60"))
    await asyncio.sleep(0.05)
    await box.close()
    await asyncio.wait((running,))
    assert running.exception() is not None

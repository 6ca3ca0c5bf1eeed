"""Promises of a shell, over a real bash in a real box, where there is one to be had:

1. Each result is that of its own text, whatever the texts before it did: quotes that never close, `exec`, `set -e`,
   traps, closed descriptors, forged words, output by the megabyte. No text keeps the next from running.
2. Directory, variables, functions, options, traps and jobs persist.
3. A text that does not end is cut short, with what it wrote until then, and the shell goes on; so does one that is
   interrupted at any moment.
4. What ends the shell is told with its true status, and the next command says so.
5. What a background job writes is its own command's, and in nobody else's result.
6. They are a sandbox's, in this process and on a server, and end with it and with a reset; nothing of them stays.
7. Where an image has no bash, `sh` does, and says what it lacks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandlot.api import SandboxSpec, ShellResult
from sandlot.drivers.base import Box
from sandlot.drivers.native.driver import NativeDriver
from sandlot.errors import Conflict, InvalidRequest, NotFound, SandboxEnded
from sandlot.node.node import local_node
from sandlot.node.shell import Shell
from sandlot.sandbox import Sandbox
from tests.support.native import ENV

CAP = 1 << 20


@pytest.fixture
async def box(tmp_path: Path, native_reason: str | None) -> AsyncIterator[Box]:
    if native_reason:
        pytest.skip(native_reason)
    directory = tmp_path / f"node-{secrets.token_hex(3)}"  # cgroups are named after it
    directory.mkdir()
    driver = NativeDriver(directory)
    box = await driver.create("sb-shell", SandboxSpec())
    yield box
    await box.destroy()
    await driver.close()


@pytest.fixture
async def shell(box: Box) -> AsyncIterator[Shell]:
    shell = await Shell.open(box, ENV, "/root")
    yield shell
    await shell.close()


async def run(shell: Shell, text: str, timeout: float | None = 20, **more: Any) -> ShellResult:
    return await shell.run(text, timeout=timeout, cap=CAP, **more)


# What is run one after another, and what the last of it says: its output, and its exit code. After each the shell must
# still be the same one, in step.
CASES: dict[str, tuple[list[str], str, int]] = {
    "a command": (["echo hello"], "hello\n", 0),
    "nothing": ([""], "", 0),
    "only a comment": (["# nothing"], "", 0),
    "no newline at the end": (["printf x"], "x", 0),
    "an exit status": (["(exit 42)"], "", 42),
    "a program that is not there": (["no-such-program 2>/dev/null"], "", 127),
    "a file that is not a program": (["/etc/passwd 2>/dev/null"], "", 126),
    "the directory stays": (["cd /usr", "pwd"], "/usr\n", 0),
    "a directory that is gone": (["mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d", "echo here"], "here\n", 0),
    "a variable stays": (["x='a  b'", 'echo "$x"'], "a  b\n", 0),
    "an exported variable reaches programs": (["export X=1", "env | grep ^X="], "X=1\n", 0),
    "declare is global": (["declare -i n=3; declare -A m=([k]=v)", "echo $n ${m[k]}"], "3 v\n", 0),
    "an array stays": (["a=(1 2 3)", "echo ${#a[@]}"], "3\n", 0),
    "a function stays": (["f() { echo f$1; return 3; }", "f 1"], "f1\n", 3),
    "an alias stays": (["alias ll='echo aliased'", "ll"], "aliased\n", 0),
    "an option stays": (["set -o pipefail", "false | true"], "", 1),
    "shopt stays": (["shopt -s nullglob", "echo /no/such/*"], "\n", 0),
    "a trap stays": (["trap 'echo caught' USR1", "kill -USR1 $$; true"], "caught\n", 0),
    "umask stays": (["umask 077", "umask"], "0077\n", 0),
    "a heredoc": (["cat <<'EOF'\n$not 'quoted\nEOF"], "$not 'quoted\n", 0),
    "a heredoc that never ends": (["cat <<EOF 2>/dev/null\nline", "echo next"], "next\n", 0),
    "a herestring": (['cat <<< "a b"'], "a b\n", 0),
    "a quote that never closes": (["echo 'open", "echo next"], "next\n", 0),
    "a double quote that never closes": (['echo "open', "echo next"], "next\n", 0),
    "a brace that never closes": (["f() { echo x", "echo next"], "next\n", 0),
    "an if that never ends": (["if true; then echo x", "echo next"], "next\n", 0),
    "a paren that never closes": (["(echo x", "echo next"], "next\n", 0),
    "a backquote that never closes": (["echo `date", "echo next"], "next\n", 0),
    "a backslash at the end": (["echo a \\", "echo next"], "next\n", 0),
    "a syntax error in the middle": (["echo one; ); echo two", "echo next"], "next\n", 0),
    "set -e ends the text": (["set -e; false; echo no"], "", 1),
    "set -e stays and the shell lives": (["set -e", "false; echo no"], "", 1),
    "set -e in a function": (["set -e; f() { false; echo no; }; f; echo no2"], "", 1),
    "set -e in a subshell": (["set -e; (false; echo no); echo no2"], "", 1),
    "set -e in a condition": (["set -e; if false; then :; fi; false || echo yes"], "yes\n", 0),
    "set +e again": (["set -e; false", "set +e; false; echo yes"], "yes\n", 0),
    "set -u": (["set -u; echo $nope; echo no", "echo next"], "next\n", 0),
    "set -x": (["set -x", "echo traced 2>/dev/null"], "traced\n", 0),
    "set -v": (["set -v", "echo next"], "next\n", 0),
    "set -n": (["set -n", "echo next"], "next\n", 0),
    "set -f": (["set -f", "echo /*"], "/*\n", 0),
    "set -m off": (["set +m; sleep 0.01 & wait", "echo next"], "next\n", 0),
    "posix mode": (["set -o posix", "echo next"], "next\n", 0),
    "an expansion that fails": (["echo ${nope?gone}", "echo next"], "next\n", 0),
    "a bad substitution": (["echo ${!}x${a-b}${", "echo next"], "next\n", 0),
    "a division by zero": (["echo $((1/0))", "echo next"], "next\n", 0),
    "a variable that cannot be set": (["readonly R=1; R=2", "echo next"], "next\n", 0),
    "return at the top": (["return 7; echo no"], "", 7),
    "break at the top": (["break; echo no", "echo next"], "next\n", 0),
    "a deep break": (["break 9", "echo next"], "next\n", 0),
    "continue at the top": (["continue; echo no", "echo next"], "next\n", 0),
    "PS1": (["PS1='$ '; PS2='> '; PS4='$(echo x)'", "echo next"], "next\n", 0),
    "PROMPT_COMMAND": (["PROMPT_COMMAND='echo mine'", "echo next"], "next\n", 0),
    "IFS": (["IFS=e", "echo next"], "next\n", 0),
    "PATH": (["PATH=/nowhere", "cd /; pwd"], "/\n", 0),
    "exec of standard output": (["exec >/dev/null; echo no", "echo next"], "next\n", 0),
    "exec of standard input": (["exec </dev/null", "echo next"], "next\n", 0),
    "exec of both into a file": (["exec >/tmp/log 2>&1; echo logged", "cat /tmp/log"], "logged\n", 0),
    "closed descriptors": (["exec 0<&- 1>&- 2>&-", "echo next"], "next\n", 0),
    "every descriptor closed": (['for n in /proc/$$/fd/*; do eval "exec ${n##*/}>&-"; done', "echo next"], "next\n", 0),
    "a program that reads standard input": (["cat", "echo next"], "next\n", 0),
    "read": (['read line; echo "[$line]"'], "[]\n", 0),
    "a program that reads the rest of the text": (["sh; echo on"], "on\n", 0),
    "forged words": (["printf 'start 0  /\\0deadbeef 0  /\\0' >/dev/shm/.sandlot-*/status", "echo next"], "next\n", 0),
    "a forged line for the loop": (["echo 'echo no' >/dev/shm/.sandlot-*/control; true", "echo next"], "next\n", 0),
    "a prompt in the output": (["printf '$ \\n# \\nroot@sandlot:~# '"], "$ \n# \nroot@sandlot:~# ", 0),
    "control characters": (["printf '\\001\\003\\004\\032\\033[2J'"], "\x01\x03\x04\x1a\x1b[2J", 0),
    "bytes that are not text": (["printf '\\377\\376' | wc -c"], "2\n", 0),
    "names that are not UTF-8": (["cd /tmp; mkdir $'\\377'; cd $'\\377'; pwd | wc -c"], "7\n", 0),
    "a NUL in the output": (["printf 'a\\0b' | od -An -c | tr -d ' '"], "a\\0b\n", 0),
    "a debug trap": (["trap 'x=$((x+1))' DEBUG", "trap - DEBUG; echo next"], "next\n", 0),
    "a return trap": (["trap 'echo ret >&2' RETURN", "echo next"], "next\n", 0),
    "SIGINT sent to itself": (["kill -INT $$; echo no", "echo next"], "next\n", 0),
    "SIGTERM sent to itself": (["kill $$; echo on"], "on\n", 0),
    "SIGINT ignored": (["trap '' INT", "echo next"], "next\n", 0),
    "an error trap of its own": (["trap 'echo err' ERR", "false; echo next"], "err\nnext\n", 0),
    "a job": (["sleep 5 & j=$!", "kill $j; wait $j 2>/dev/null; echo $?"], "143\n", 0),
    "wait for a job": (["(exit 9) & ", "wait $!"], "", 9),
    "fg": (["sleep 0.1 & fg >/dev/null", "echo next"], "next\n", 0),
    "a coprocess": (["coproc cat; echo hi >&${COPROC[1]}; read x <&${COPROC[0]}; echo $x"], "hi\n", 0),
    "a daemon": (["setsid sh -c 'sleep 3' >/dev/null 2>&1 &", "echo next"], "next\n", 0),
    "a thousand lines": (["\n".join(f": {n}" for n in range(1000)) + "\necho end"], "end\n", 0),
    "a megabyte of text": (["x=" + "y" * 1_000_000, "echo ${#x}"], "1000000\n", 0),
    "an exclamation mark": (["echo 'a!b' !x"], "a!b !x\n", 0),
    "history": (["history | wc -l"], "0\n", 0),
    "the terminal": (["test -t 0; echo $?; tty </dev/tty"], "1\n/dev/tty\n", 0),
    "a program on the terminal": (["echo x >/dev/tty; stty -echo </dev/tty; echo next"], "next\n", 0),
    "a million bytes to the terminal": (["head -c 1000000 /dev/zero >/dev/tty; echo next"], "next\n", 0),
    "a pipe that closes": (["yes | head -1"], "y\n", 0),
    "a program killed": (["sh -c 'kill -9 $$' 2>/dev/null; echo $?"], "137\n", 0),
    "process substitution": (["cat <(echo a) <(echo b)"], "a\nb\n", 0),
    "source": (["echo 'v=7; return 4' >/tmp/s; . /tmp/s; echo $? $v"], "4 7\n", 0),
    "its own functions hidden": (["printf() { :; }; builtin printf ok"], "ok", 0),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_text_has_its_own_result_and_the_shell_goes_on(shell: Shell, name: str) -> None:
    texts, expected, code = CASES[name]
    for text in texts[:-1]:
        assert not (await run(shell, text)).ended
    last = await run(shell, texts[-1])
    assert (last.stdout, last.exit_code, last.timed_out, last.ended) == (expected, code, False, False), last.stderr
    same = await run(shell, "builtin echo in step")
    assert same.out.data.endswith(b"in step\n")


async def test_stdout_and_stderr_are_apart_and_in_full(shell: Shell) -> None:
    result = await run(shell, "echo out; echo err >&2")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    result = await run(shell, "head -c 50000000 /dev/zero; echo tail >&2", timeout=60)
    assert (result.out.total, len(result.out.data), result.stderr) == (50_000_000, CAP, "tail\n")


async def test_a_text_gets_its_standard_input(shell: Shell) -> None:
    data = bytes(range(256)) * 100
    assert (await run(shell, "cat", stdin=data)).out.data == data
    assert (await run(shell, "read a; echo $a", stdin=b"one\ntwo\n")).stdout == "one\n"
    assert (await run(shell, "cat")).stdout == ""


@pytest.mark.parametrize(
    "text",
    [
        "echo before; sleep 600",
        "echo before; while :; do :; done",
        "echo before; f() { f; }; while :; do sleep 600; done",
        "echo before; sleep 600 | sleep 600; sleep 600",
        "echo before; trap '' INT; sleep 600",
        "echo before; trap 'echo no' INT; sleep 600",
        "echo before; cat /dev/tty",
        "echo before; (trap '' INT TERM; sleep 600)",
        "echo before; setsid -w sleep 600",
        "echo before; read x </dev/tty",
        "echo before; sh -c 'trap : INT; while :; do sleep 600; done'",
    ],
)
async def test_a_text_that_does_not_end_is_cut_short_and_the_shell_goes_on(shell: Shell, text: str) -> None:
    await run(shell, "kept=yes")
    result = await run(shell, text, timeout=0.5)
    assert result.timed_out and not result.ended
    assert result.stdout.startswith("before\n")
    assert (await run(shell, "trap - INT; echo $kept")).stdout == "yes\n"


async def test_a_shell_that_nothing_stops_is_ended_and_says_so(shell: Shell) -> None:
    result = await run(shell, "trap '' INT; while :; do :; done", timeout=0.5)
    assert result.timed_out and result.ended
    with pytest.raises(Conflict, match="has ended"):
        await run(shell, "echo")


async def test_an_interrupt_at_any_moment_leaves_the_shell_in_step(shell: Shell) -> None:
    for number in range(40):
        running = asyncio.create_task(run(shell, "for i in 1 2 3 4 5 6 7 8; do sleep 0.002; done"))
        await asyncio.sleep(number * 0.0008)
        await shell.interrupt()
        result = await running
        assert result.exit_code in (0, 130)
        assert (await run(shell, f"echo {number}")).stdout == f"{number}\n"
    assert not await shell.interrupt()  # nothing runs


async def test_a_caller_that_goes_away_leaves_the_shell_usable(shell: Shell) -> None:
    running = asyncio.create_task(run(shell, "sleep 600"))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await run(shell, "echo next")).stdout == "next\n"


async def test_a_busy_shell_says_so_or_queues(shell: Shell) -> None:
    running = asyncio.create_task(run(shell, "sleep 0.3; echo one"))
    await asyncio.sleep(0.1)
    with pytest.raises(Conflict, match=f"busy with command {shell.running}"):
        await run(shell, "echo two")
    assert (await run(shell, "echo two", queue=True)).stdout == "two\n"
    assert (await running).stdout == "one\n"


@pytest.mark.parametrize(
    ("text", "code"), [("exit 3", 3), ("exec sh -c 'exit 4'", 4), ("kill -9 $$", 137), ("set -e; exec false", 1)]
)
async def test_what_ends_the_shell_is_told_with_its_status(shell: Shell, text: str, code: int) -> None:
    result = await run(shell, f"echo bye; {text}")
    assert (result.ended, result.exit_code, result.stdout) == (True, code, "bye\n")
    with pytest.raises(Conflict, match="has ended"):
        await run(shell, "echo")


async def test_what_a_background_job_writes_is_its_own_commands(shell: Shell) -> None:
    first = await run(shell, "(sleep 0.3; echo late; echo late >&2) & echo now")
    assert first.stdout == "now\n"
    second = await run(shell, "sleep 0.6; echo second")
    assert second.stdout == "second\n" and "late" not in second.stderr.splitlines()
    found = shell.background(first.id)
    assert found is not None and found[0].text == "now\nlate\n" and found[1].text.endswith("late\n")


async def test_an_endless_writer_in_the_background_holds_nobody_up(shell: Shell) -> None:
    first = await run(shell, "yes & echo now")
    for number in range(5000):
        assert (await run(shell, f"echo {number}")).stdout == f"{number}\n"
        found = shell.background(first.id)
        if number > 20 and found and found[0].total > 2 * CAP:
            break
    assert found is not None and found[0].total > 2 * CAP and len(found[0].data) == CAP
    await run(shell, "kill %1")


async def test_many_shells_of_a_box_do_not_meet(box: Box) -> None:
    shells = [await Shell.open(box, ENV, "/root") for _ in range(40)]
    await asyncio.gather(*(run(shell, f"n={number}; cd /tmp") for number, shell in enumerate(shells)))
    results = await asyncio.gather(*(run(shell, "echo $n $(pwd)") for shell in shells))
    assert [result.stdout for result in results] == [f"{number} /tmp\n" for number in range(40)]
    await asyncio.gather(*(shell.close() for shell in shells))


async def test_a_shell_of_another_user_is_that_users(box: Box) -> None:
    try:
        shell = await Shell.open(box, ENV | {"HOME": "/"}, "/", user=1000)
    except Exception as error:
        pytest.skip(str(error))
    assert (await run(shell, "id -u; cd /tmp; echo x >mine; stat -c %u mine")).stdout == "1000\n1000\n"
    assert (await run(shell, "sleep 600", timeout=0.3)).timed_out
    assert (await run(shell, "echo next")).stdout == "next\n"
    await shell.close()


async def test_without_bash_sh_does_and_says_what_it_lacks(box: Box) -> None:
    shell = await Shell.open(box, ENV, "/root", bash=False)
    assert any("bash" in lack for lack in shell.lacks)
    assert (await run(shell, "cd /usr; x=1; echo $0")).exit_code == 0
    assert (await run(shell, "echo $x $(pwd); echo err >&2")).stdout == "1 /usr\n"
    assert (await run(shell, "echo 'a b'; (exit 5)")).exit_code == 5
    late = await run(shell, "sleep 600", timeout=0.3)
    assert late.timed_out
    if not late.ended:
        assert (await run(shell, "echo next")).stdout == "next\n"
    await shell.close()


async def until_busy(sandbox: Sandbox) -> None:
    for _ in range(1000):
        if any(info.running for info in await sandbox._node.shells(sandbox.id)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no shell is busy")


async def test_a_sandbox_has_shells(sandbox: Sandbox) -> None:
    async with await sandbox.shell(cwd="/usr", env={"X": "1"}) as shell:
        first = await shell.run("echo $X $(pwd); cd /tmp; echo err >&2; cat", stdin="given")
        assert (first.stdout, first.stderr, first.cwd) == ("1 /usr\ngiven", "err\n", "/tmp")
        infos = await sandbox._node.shells(sandbox.id)
        assert [(info.id, info.cwd, info.running, info.ended) for info in infos] == [(shell.id, "/tmp", None, False)]
        running = asyncio.create_task(shell.run("sleep 600; echo no"))
        await until_busy(sandbox)
        with pytest.raises(Conflict, match="busy"):
            await shell.run("true")
        assert await shell.interrupt()
        assert ((await running).interrupted, (await running).exit_code) == (True, 130)
        job = await shell.run("(sleep 0.2; echo later) & true")
        await shell.run("wait")
        assert (await shell.output(job.id)).out.text == "later\n"
        with pytest.raises(NotFound, match="in the background"):
            await shell.output("never")
    assert await sandbox._node.shells(sandbox.id) == []
    with pytest.raises(NotFound, match=f"no shell {shell.id}"):
        await shell.run("true")


async def test_words_that_are_no_text_are_refused(sandbox: Sandbox) -> None:
    shell = await sandbox.shell()
    with pytest.raises(InvalidRequest, match="NUL"):
        await shell.run("echo a\0b")
    with pytest.raises(InvalidRequest, match="timeout"):
        await shell.run("true", timeout=-1)
    with pytest.raises(InvalidRequest, match="/no/such"):
        await sandbox.shell(cwd="/no/such")


async def test_a_reset_ends_shells_and_so_does_the_end(sandbox: Sandbox) -> None:
    shell, other = await sandbox.shell(), await sandbox.shell()
    running = asyncio.create_task(other.run("sleep 600"))
    await until_busy(sandbox)
    await sandbox.reset()
    with pytest.raises(Conflict, match="was reset"):
        await running
    with pytest.raises(NotFound, match="no shell"):
        await shell.run("true")
    shell = await sandbox.shell()
    running = asyncio.create_task(shell.run("sleep 600"))
    await until_busy(sandbox)
    await sandbox.close()
    with pytest.raises(SandboxEnded):
        await running


async def test_shells_leave_no_descriptor_behind(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with local_node(tmp_path) as node, await Sandbox.create(node=node) as box:
        async with await box.shell() as shell:
            await shell.run("true")
        before = descriptors()
        for text in ("exit 1", "sleep 600 & true", "kill -9 $$"):
            shell = await box.shell()
            await shell.run(text)
            await shell.close()
        running = asyncio.create_task((await box.shell()).run("sleep 600"))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait((running,))
        for info in await node.shells(box.id):
            await node.close_shell(box.id, info.id)
        assert descriptors() == before

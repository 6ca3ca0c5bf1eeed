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
    "a forged status that is no number": (
        ["printf 'start \\302\\262 x /\\0start %05000d x /\\0' 1 >/dev/shm/.sandlot-*/status", "echo next"],
        "next\n",
        0,
    ),
    "forged words": (["printf 'start 0  /\\0deadbeef 0  /\\0' >/dev/shm/.sandlot-*/status", "echo next"], "next\n", 0),
    "the rest of a line that an interrupt cut": (
        ["echo '0.out 2>/dev/null || exit 125' >/dev/shm/.sandlot-*/control; true", "echo next"],
        "next\n",
        0,
    ),
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
    "functions in the loop's way": (
        ["exec() { echo no; }; .() { :; }; set() { :; }; eval() { :; }", "echo next"],
        "next\n",
        0,
    ),
    "functions that read and write": (["read() { :; }; printf() { :; }; cd() { :; }", "echo next"], "next\n", 0),
    "an alias is the text's own": (["alias exec=false .=false builtin=false", "unalias -a; echo next"], "next\n", 0),
    "no prompt command": (["unset PROMPT_COMMAND", "echo next"], "next\n", 0),
    "many prompt commands": (["unset PROMPT_COMMAND; PROMPT_COMMAND=(a b)", "echo next"], "next\n", 0),
    "PS0": (["PS0='$(echo no)'", "echo next"], "next\n", 0),
    "a trap at the end": (["trap 'echo bye' EXIT", "echo next"], "next\n", 0),
    "a trap for children": (["trap 'x=1' CHLD; sleep 0.1", "echo next"], "next\n", 0),
    "every option of set": (
        [
            "for o in allexport errtrace functrace hashall histexpand history ignoreeof interactive-comments keyword "
            "monitor notify physical pipefail vi emacs; do set -o $o; done",
            "echo next",
        ],
        "next\n",
        0,
    ),
    "every option of shopt": (
        ["for o in $(shopt | cut -f1); do shopt -s $o; done 2>/dev/null", "echo next"],
        "next\n",
        0,
    ),
    "no option of shopt": (["for o in $(shopt | cut -f1); do shopt -u $o; done 2>/dev/null", "echo next"], "next\n", 0),
    "noclobber": (["set -o noclobber", "echo next"], "next\n", 0),
    "a limit on files": (["ulimit -f 0", "echo next"], "next\n", 0),
    "a limit on processes": (["ulimit -u 1", "echo next"], "next\n", 0),
    "PWD": (["PWD=/fake", "echo next"], "next\n", 0),
    "no PWD": (["unset PWD OLDPWD", "echo next"], "next\n", 0),
    "a directory with a line break": (["mkdir -p $'/tmp/a\\nb'; cd $'/tmp/a\\nb'", "pwd"], "/tmp/a\nb\n", 0),
    "no PATH": (["unset PATH", "echo next"], "next\n", 0),
    "LC_ALL": (["LC_ALL=C.UTF-8; LANG=none", "echo next"], "next\n", 0),
    "TMOUT": (["TMOUT=1; sleep 1.2", "echo next"], "next\n", 0),
    "descriptors of its own": (
        ["exec 3>/tmp/three; echo kept >&3", "echo more >&3; cat /tmp/three"],
        "kept\nmore\n",
        0,
    ),
    "the loop's directory closed": (["chmod 0 /dev/shm/.sandlot-*", "echo next"], "next\n", 0),
    "it stops itself": (["(sleep 0.3; kill -CONT $$) & kill -STOP $$; echo on"], "on\n", 0),
    "SIGTSTP sent to itself": (["kill -TSTP $$; echo on"], "on\n", 0),
    "SIGQUIT sent to itself": (["kill -QUIT $$; echo on"], "on\n", 0),
    "a function that calls itself": (["FUNCNEST=50; f() { f; }; f 2>/dev/null", "echo next"], "next\n", 0),
    "twenty thousand variables": (["for i in {1..20000}; do declare v$i=$i; done", "echo $v20000"], "20000\n", 0),
    "an environment of megabytes": (
        ["export BIG=$(head -c 3000000 /dev/zero | tr '\\0' x)", "echo ${#BIG}"],
        "3000000\n",
        0,
    ),
    "a coprocess that dies": (["coproc { exit 3; }; sleep 0.1", "echo next"], "next\n", 0),
    "a heredoc of megabytes": (["cat <<EOF | wc -c\n" + "x" * 3_000_000 + "\nEOF"], "3000001\n", 0),
    "select": (["select x in a b; do echo no; done 2>/dev/null", "echo next"], "next\n", 0),
    "a carriage return": (["echo a\r"], "a\r\n", 0),
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


async def test_what_starts_one_program_after_another_is_ended_in_seconds(shell: Shell) -> None:
    late = await run(shell, "trap '' INT; echo before; while :; do sleep 600; done", timeout=0.5)
    assert (late.timed_out, late.ended, late.stdout) == (True, True, "before\n")
    assert late.seconds < 8


async def test_an_interrupt_at_any_moment_leaves_the_shell_in_step(shell: Shell) -> None:
    for number in range(40):
        running = asyncio.create_task(run(shell, "for i in 1 2 3 4 5 6 7 8; do sleep 0.002; done"))
        await asyncio.sleep(number * 0.0008)
        await shell.interrupt()
        result = await running
        assert result.exit_code in (0, 130)
        assert (await run(shell, f"echo {number}")).stdout == f"{number}\n"
    assert not await shell.interrupt()  # nothing runs


async def test_an_interrupt_that_comes_too_late_is_not_the_next_text_s(shell: Shell) -> None:
    for number in range(250):
        running = asyncio.create_task(run(shell, "sleep 0.002"))
        await asyncio.sleep(number % 50 * 0.0001)
        await shell.interrupt()
        await running
        assert (await run(shell, f"echo {number}")).stdout == f"{number}\n"


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
    ("text", "code"),
    [
        ("exit 3", 3),
        ("f() { exit 5; }; f", 5),
        ("trap 'exit 6' EXIT; exit 2", 6),
        ("exec sh -c 'exit 4'", 4),
        ("set -e; exec false", 1),
        ("exec no-such-program 2>/dev/null; echo no", 127),
        ("kill -9 $$", 137),
        ("kill -HUP $$", 129),
        ("rm -r /dev/shm/.sandlot-*", 125),  # which is where it is told what to do
        ("set -r", 125),  # after which it may not open what it needs to
    ],
)
async def test_what_ends_the_shell_is_told_with_its_status(shell: Shell, text: str, code: int) -> None:
    result = await run(shell, f"echo bye; {text}")
    assert (result.ended, result.exit_code, result.stdout) == (True, code, "bye\n")
    assert result.signal == (code - 128 if code > 128 else None)
    assert (shell.info().ended, shell.info().exit_code) == (True, code)
    with pytest.raises(Conflict, match=f"has ended, with exit code {code}"):
        await run(shell, "echo")


async def test_a_shell_that_cannot_open_its_files_runs_nothing(shell: Shell) -> None:
    await run(shell, "ulimit -n 5")
    result = await run(shell, "touch /tmp/run")
    assert (result.ended, result.exit_code) == (True, 125)


async def test_what_a_background_job_writes_is_its_own_commands(shell: Shell) -> None:
    first = await run(shell, "(sleep 0.3; echo late; echo late >&2) & echo now")
    assert first.stdout == "now\n"
    second = await run(shell, "sleep 0.6; echo second")
    assert second.stdout == "second\n" and "late" not in second.stderr.splitlines()
    found = shell.output(first.id)
    assert found is not None and found.out.text == "now\nlate\n" and found.err.text.endswith("late\n")


async def test_an_endless_writer_in_the_background_holds_nobody_up(shell: Shell) -> None:
    first = await run(shell, "yes & echo now")
    for number in range(5000):
        assert (await run(shell, f"echo {number}")).stdout == f"{number}\n"
        found = shell.output(first.id)
        if number > 20 and found and found.out.total > 2 * CAP:
            break
    assert found is not None and found.out.total > 2 * CAP and len(found.out.data) == CAP
    await run(shell, "kill %1")


async def test_many_shells_of_a_box_do_not_meet(box: Box) -> None:
    shells = [await Shell.open(box, ENV, "/root") for _ in range(200)]
    assert not any(shell.lacks for shell in shells)
    await asyncio.gather(*(run(shell, f"n={number}; cd /tmp") for number, shell in enumerate(shells)))
    results = await asyncio.gather(*(run(shell, "echo $n $(pwd)") for shell in shells))
    assert [result.stdout for result in results] == [f"{number} /tmp\n" for number in range(200)]
    running = asyncio.create_task(run(shells[-1], "sleep 600"))
    await asyncio.sleep(0.5)
    assert await shells[-1].interrupt()
    assert ((await running).exit_code, (await running).ended) == (130, False)
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


async def test_an_ended_shell_is_put_anew_only_where_that_is_asked(sandbox: Sandbox) -> None:
    async with await sandbox.shell(cwd="/usr", env={"X": "given"}) as shell:
        assert not (await shell.run("cd /tmp; y=set", restart=True)).restarted  # it has not ended
        assert (await shell.run("exit 3")).ended
        with pytest.raises(Conflict, match="exit code 3"):
            await shell.run("true")
        asked = [
            shell.run(f"echo $X $PWD $y; n=$((n+1)); echo $n {number}", restart=True, queue=True) for number in range(5)
        ]
        results = await asyncio.gather(*asked)
        assert sorted(result.stdout.split()[2] for result in results) == ["1", "2", "3", "4", "5"]  # one shell for all
        assert all(result.stdout.startswith("given /usr\n") for result in results)
        assert any(result.restarted for result in results)
        assert len(await sandbox._node.shells(sandbox.id)) == 1
        first, second = shell.run("exit 4"), shell.run("echo after", restart=True, queue=True)
        assert [result.exit_code for result in await asyncio.gather(first, second)] == [4, 0]


async def test_a_text_with_a_key_is_run_once(sandbox: Sandbox) -> None:
    async with await sandbox.shell() as shell:
        text = "n=$((n+1)); sleep 0.2; echo $n"
        asked = [shell.run(text, key="a") for _ in range(3)]
        assert {result.stdout for result in await asyncio.gather(*asked)} == {"1\n"}
        assert (await shell.run(text, key="b")).stdout == "2\n"
        assert (await shell.run(text, key="a")).stdout == "1\n"
        with pytest.raises(Conflict, match="another text"):
            await shell.run("echo other", key="a")
        running = asyncio.create_task(shell.run("sleep 0.5; echo on", key="c"))
        await until_busy(sandbox)
        with pytest.raises(Conflict, match="busy"):
            await shell.run("true", key="d")
        running.cancel()  # its caller goes away, and it goes on
        await asyncio.wait((running,))
        assert (await shell.run("sleep 0.5; echo on", key="c")).stdout == "on\n"
        assert (await shell.run("echo d", key="d")).stdout == "d\n"  # it was refused before, not run


async def test_a_text_with_a_key_is_run_once_though_the_shell_was_put_anew_meanwhile(sandbox: Sandbox) -> None:
    async with await sandbox.shell() as shell:
        text = "echo run >>/tmp/log; exit 3"
        assert (await shell.run(text, key="k")).exit_code == 3
        for _ in range(2):
            assert (await shell.run("echo other; exit 1", restart=True)).restarted
            assert (await shell.run(text, key="k", restart=True)).exit_code == 3
        with pytest.raises(Conflict, match="another text"):
            await shell.run("echo other", key="k", restart=True)
    assert (await sandbox.run("cat /tmp/log")).stdout == "run\n"


async def test_closed_shells_leave_nothing_in_the_sandboxs_memory(tmp_path: Path, native_reason: str | None) -> None:
    if native_reason:
        pytest.skip(native_reason)
    text = "#" + "x" * (4 << 20) + "\necho ok"
    async with local_node(tmp_path) as node, await Sandbox.create(node=node, limits={"memory": "128M"}) as box:
        for _ in range(20):
            shell = await box.shell()
            assert (await shell.run(text, stdin=b"y" * (4 << 20))).stdout == "ok\n"
            assert (await shell.run("exit 1")).ended
            assert (await shell.run(text, restart=True)).stdout == "ok\n"
            await shell.close()
        for _ in range(100):  # what was put anew is closed in the background
            left = (await box.run("ls -A /dev/shm")).stdout
            if not left:
                break
            await asyncio.sleep(0.05)
        assert left == ""


async def test_what_a_running_text_has_written_can_be_seen(sandbox: Sandbox) -> None:
    async with await sandbox.shell() as shell:
        running = asyncio.create_task(shell.run("echo begun; sleep 600"))
        await until_busy(sandbox)
        (info,) = await sandbox._node.shells(sandbox.id)
        assert info.running is not None
        for _ in range(200):
            found = await shell.output(info.running)
            if found.out.text:
                break
            await asyncio.sleep(0.02)
        assert (found.out.text, found.exit_code) == ("begun\n", None)
        await shell.interrupt()
        assert (await running).id == info.running


async def test_what_is_called_bash_and_is_none_is_passed_by(sandbox: Sandbox) -> None:
    await sandbox.run("mkdir -p /a/bash /b /c; echo text >/b/bash; ln -s bash /c/bash")
    path = f"/{'x' * 300}:/a:/b:/c:/usr/bin:/bin"
    async with await sandbox.shell(env={"PATH": path}) as shell:
        assert (shell.lacks, (await shell.run("echo ${BASH##*/}")).stdout) == ((), "bash\n")
    async with await sandbox.terminal(env={"PATH": path}) as terminal:
        await terminal.write("exit 5\n")
        assert await terminal.wait() == 5


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

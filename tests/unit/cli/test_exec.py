"""Promises of a command that runs in a sandbox as if it ran here, in a process of its own against a real server:

1. Its output comes as it writes it, stream by stream and byte for byte; its exit status is the program's.
2. `-i` gives it our standard input as that comes; a command that reads none of it is not waited for.
3. The first Ctrl-C is the command's, which may live on; the second kills it, and SIGTERM does at once: 130 and 143.
4. Whoever reads our output may leave (`| head`): the command ends by SIGPIPE, and nothing is said.
5. `-d` leaves it to itself: `commands`, `logs`, `logs -f` and `kill` find it.
6. In all of that `run` without a server does the same.
7. A sandbox or a server that goes away in the middle is said, with a status of its own, and no traceback; a server that
   is killed and comes back is not noticed.
8. A command that somebody stays with ends with them, when they are killed with -9 too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cli import CLEAN, COMMAND, Server, has_process, wait_for

# Where a command runs: in a sandbox of a server, or in a fresh one of this process.
HERE_AND_THERE = pytest.mark.parametrize("where", ["exec", "run"])


def words(where: str, box: str, *options: str) -> list[str]:
    return [where, *options, *([box] if where == "exec" else []), "--"]


def started(served: Server, where: str, words: list[str], **options: object) -> subprocess.Popen[str]:
    env = {} if where == "exec" else {"SANDLOT_URL": ""}
    return served.started(*words, env=env, **options)


@HERE_AND_THERE
def test_output_comes_as_it_is_written(served: Server, box: str, where: str) -> None:
    command = [*words(where, box, "-i"), "sh", "-c", "echo first; read x; echo $x >&2; exit 7"]
    with started(served, where, command, stdin=subprocess.PIPE) as running:
        assert running.stdout and running.stderr and running.stdin
        assert running.stdout.readline() == "first\n"  # and it waits for input now
        running.stdin.write("second\n")
        running.stdin.flush()
        assert running.stderr.readline() == "second\n"
        assert running.wait(20) == 7
        assert (running.stdout.read(), running.stderr.read()) == ("", "")


@HERE_AND_THERE
def test_bytes_go_through_as_they_are(served: Server, box: str, where: str, tmp_path: Path) -> None:
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(os.urandom(3 << 20) + b"\0\xff\r\n")
    with given.open("rb") as stdin, got.open("wb") as stdout:
        command = [*words(where, box, "-i"), "cat"]
        assert started(served, where, command, stdin=stdin, stdout=stdout).wait(60) == 0
    assert got.read_bytes() == given.read_bytes()


@HERE_AND_THERE
def test_a_slow_reader_misses_nothing(served: Server, box: str, where: str) -> None:
    with started(served, where, [*words(where, box), "seq", "1", "3000000"]) as running:
        assert running.stdout
        time.sleep(1)  # in which it would write many times of what is kept
        count = sum(int(line) == number for number, line in enumerate(running.stdout, 1))
        assert (running.wait(20), count) == (0, 3_000_000)


def test_options_come_before_and_after_the_id(served: Server, box: str) -> None:
    show = ("sh", "-c", "echo $A $PWD $(id -u)")
    assert served.sandlot("exec", "-e", "A=b", box, "-w", "/tmp", "--", *show).stdout == "b /tmp 0\n"
    assert served.sandlot("exec", box, "--env=A=b", "-w/tmp", *show).stdout == "b /tmp 0\n"
    # After the program they are its own.
    assert served.sandlot("exec", box, "echo", "-i", "-w", "x").stdout == "-i -w x\n"
    assert served.sandlot("exec", box, "--", "echo", "--", "-d").stdout == "-- -d\n"


def test_a_program_that_cannot_start_has_the_status_that_shells_give(served: Server, box: str) -> None:
    missing = served.sandlot("exec", box, "nope")
    assert (missing.returncode, missing.stdout, missing.stderr) == (127, "", "sandlot: nope: command not found\n")
    assert served.sandlot("exec", box, "/etc").returncode == 126
    assert served.sandlot("exec", box, "--", "sh", "-c", "kill -9 $$").returncode == 137
    late = served.sandlot("exec", "--timeout", "0.2", box, "--", "sh", "-c", "echo begun; sleep 60")
    assert (late.returncode, late.stdout, late.stderr) == (137, "begun\n", "(killed: it ran longer than 0.2 s)\n")


def test_json_is_one_object(served: Server, box: str) -> None:
    done = served.sandlot("exec", "--json", box, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (3, "")
    assert (found["exit_code"], found["stdout"], found["stderr"], found["sandbox"]) == (3, "out\n", "err\n", box)


@HERE_AND_THERE
def test_who_reads_no_input_is_not_waited_for(served: Server, box: str, where: str) -> None:
    command = [*words(where, box, "-i"), "sh", "-c", "echo done"]
    with started(served, where, command, stdin=subprocess.PIPE) as running:  # which nobody writes to, and stays open
        assert running.wait(20) == 0
    endless = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    with started(served, where, [*words(where, box, "-i"), "head", "-n1"], stdin=endless.stdout) as running:
        assert running.communicate(timeout=20) == ("y\n", "")
    endless.kill()
    endless.communicate()


@HERE_AND_THERE
def test_without_i_no_input_is_read(served: Server, box: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("of the loop")
    with (tmp_path / "given").open() as given:
        with started(served, where, [*words(where, box), "cat"], stdin=given) as running:
            assert running.communicate(timeout=20) == ("", "")
        assert given.buffer.raw.tell() == 0


@HERE_AND_THERE
def test_the_first_ctrl_c_is_the_command_s(served: Server, box: str, where: str) -> None:
    handles = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done"
    with started(served, where, [*words(where, box), "sh", "-c", handles]) as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=20) == ("caught\n", "")
    assert running.returncode == 9
    with started(served, where, [*words(where, box), "sh", "-c", "echo ready; exec sleep 60"]) as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=20) == ("", "")
    assert running.returncode == 130


@HERE_AND_THERE
def test_the_second_ctrl_c_kills(served: Server, box: str, where: str) -> None:
    stubborn = "trap '' INT TERM; echo ready; sleep 6091; sleep 6091"
    with started(served, where, [*words(where, box), "sh", "-c", stubborn]) as running:
        assert running.stdout and running.stderr and running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.stderr.readline() == "(it goes on; Ctrl-C again kills it)\n"
        assert has_process("sleep\x006091")
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=20) == ("", "")
    assert running.returncode == 130
    wait_for(lambda: not has_process("sleep\x006091"))


@HERE_AND_THERE
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_lost_terminal_kill_at_once(served: Server, box: str, where: str, number: signal.Signals) -> None:
    with started(
        served, where, [*words(where, box), "sh", "-c", "trap '' TERM HUP; echo ready; sleep 6092"]
    ) as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
        running.send_signal(number)
        assert running.communicate(timeout=20) == ("", "")
    assert running.returncode == 128 + number
    wait_for(lambda: not has_process("sleep\x006092"))
    if where == "exec":
        assert served.sandlot("exec", box, "true").returncode == 0, "the sandbox lives on"


@HERE_AND_THERE
def test_a_reader_who_leaves_ends_the_command(served: Server, box: str, where: str) -> None:
    with started(served, where, [*words(where, box), "yes", "6093"]) as running:
        assert running.stdout and running.stderr and running.stdout.readline() == "6093\n"
        running.stdout.close()
        assert (running.wait(20), running.stderr.read()) == (1, "")
    wait_for(lambda: not has_process("yes\x006093"))


@HERE_AND_THERE
def test_a_slow_reader_does_not_keep_ctrl_c_from_being_heard(served: Server, box: str, where: str) -> None:
    with started(served, where, [*words(where, box), "yes", "6094"]) as running:
        wait_for(lambda: has_process("yes\x006094"))
        running.send_signal(signal.SIGINT)  # while our pipe, which nobody reads, is full
        wait_for(lambda: not has_process("yes\x006094"))
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130


def test_a_command_that_was_left_to_itself_is_found_again(served: Server, box: str) -> None:
    text = "echo begun; echo err >&2; sleep 0.2; trap 'echo told; exit 4' INT; sleep 6095 & wait"
    left = served.sandlot("exec", "-d", box, "--", "sh", "-c", text)
    assert (left.returncode, left.stderr) == (0, "")
    command = left.stdout.strip()
    wait_for(lambda: has_process("sleep\x006095"))
    so_far = served.sandlot("logs", box, command)
    assert (so_far.returncode, so_far.stdout, so_far.stderr) == (0, "begun\n", "err\n")
    assert [each["id"] for each in json.loads(served.sandlot("commands", box, "--json").stdout)] == [command]
    with served.started("logs", "-f", box, command) as following:
        assert following.stdout and following.stdout.readline() == "begun\n"
        assert served.sandlot("kill", box, command, "-s", "INT").returncode == 0
        assert following.communicate(timeout=20) == ("told\n", "err\n")
    assert following.returncode == 0
    row = served.sandlot("commands", box).stdout.splitlines()[1]
    assert row.split() == [command, "sh", "ended", "11", "4"]
    missing = served.sandlot("logs", box, "c-nope")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == (
        f"error: there is no command c-nope in sandbox {box}\n\nhint: `sandlot commands {box}` lists them\n"
    )


def test_what_is_asked_about_commands_can_be_read_by_a_script(served: Server, box: str) -> None:
    command = served.sandlot("exec", "-d", box, "--", "sh", "-c", "echo out; echo err >&2; sleep 60").stdout.strip()
    wait_for(lambda: "err" in served.sandlot("logs", box, command).stderr)
    so_far = {"sandbox": box, "command": command, "stdout": "out\n", "stderr": "err\n", "lost": 0}
    done = served.sandlot("logs", "--json", box, command)
    assert (json.loads(done.stdout), done.stderr) == (so_far, "")
    done = served.sandlot("kill", "--json", box, command, "-s", "KILL")
    assert (json.loads(done.stdout), done.stderr) == ({"sandbox": box, "command": command, "signal": 9}, "")
    assert json.loads(served.sandlot("logs", "-f", "--json", box, command).stdout) == so_far


def test_ctrl_c_of_logs_leaves_the_command_alone(served: Server, box: str) -> None:
    command = served.sandlot("exec", "-d", box, "--", "sh", "-c", "echo begun; sleep 6096").stdout.strip()
    with served.started("logs", "-f", box, command) as following:
        assert following.stdout and following.stdout.readline() == "begun\n"
        following.send_signal(signal.SIGINT)
        assert following.communicate(timeout=20) == ("", "")
    assert following.returncode == 130
    assert has_process("sleep\x006096")


def test_a_sandbox_that_ends_under_a_command_is_said(served: Server) -> None:
    box = served.sandlot("create").stdout.strip()
    with served.started("exec", box, "--", "sh", "-c", "echo ready; sleep 60") as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
        assert served.sandlot("rm", box).returncode == 0
        out, err = running.communicate(timeout=20)
    assert (running.returncode, out) == (3, "")
    assert err.startswith(f"error: sandbox {box} was ended on request ")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_goes_away_is_said(native_reason: str | None, tmp_path: Path, number: signal.Signals) -> None:
    if native_reason:
        pytest.skip(native_reason)
    server = Server("--state-dir", str(tmp_path), "--orphan-grace", "0.1")
    box = server.sandlot("create").stdout.strip()
    with server.started("exec", box, "--", "sh", "-c", "echo ready; sleep 60") as running:
        assert running.stdout and running.stdout.readline() == "ready\n"
        server.stop(number)
        if number == signal.SIGKILL:  # it may come back for a minute; who does not want to wait need not
            assert running.stderr and running.stderr.readline().startswith("the server does not answer; it is asked ")
            running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=20)
    if number == signal.SIGKILL:
        assert (running.returncode, out, err) == (143, "", "")
    else:
        assert (running.returncode, out) == (3, "")
        assert err.startswith("error: ") and "Traceback" not in err


def test_a_server_that_is_killed_and_comes_back_is_not_noticed(native_reason: str | None, tmp_path: Path) -> None:
    if native_reason:
        pytest.skip(native_reason)
    words = ("--state-dir", str(tmp_path), "--orphan-grace", "60")
    server = Server(*words)
    box = server.sandlot("create").stdout.strip()
    text = "i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); sleep 0.1; done; exit 5"
    with (
        server.started("exec", box, "--", "sh", "-c", text) as running,
        server.started("exec", "--json", box, "--", "sh", "-c", text) as waiting,
    ):
        assert running.stdout and running.stdout.readline() == "0\n"
        wait_for(lambda: len(json.loads(server.sandlot("commands", box, "--json").stdout)) == 2)
        server.stop(signal.SIGKILL)
        time.sleep(0.5)
        again = Server("--port", server.url.rpartition(":")[2], *words)
        out, err = running.communicate(timeout=30)
        assert (running.returncode, out) == (5, "".join(f"{i}\n" for i in range(1, 40)))
        assert "error" not in err
        assert json.loads(waiting.communicate(timeout=30)[0])["stdout"].splitlines() == [f"{i}" for i in range(40)]
    again.sandlot("rm", "--all")
    again.stop(signal.SIGTERM)


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_command_ends_when_who_stays_with_it_is_killed(served: Server, box: str, option: tuple[str, ...]) -> None:
    number = 6097 + len(option)
    with served.started("exec", *option, box, "--", "sleep", f"{number}") as running:
        wait_for(lambda: has_process(f"sleep\x00{number}"))
        time.sleep(1)  # until it is stayed with
        running.kill()
        wait_for(lambda: not has_process(f"sleep\x00{number}"), 40)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_missing_standard_stream_is_an_empty_one(native_reason: str | None, closed: str) -> None:
    if native_reason:
        pytest.skip(native_reason)
    text = f'"$@" run -i -- sh -c "cat; exit 5" {closed}'
    done = subprocess.run(["sh", "-c", text, "sh", *COMMAND], capture_output=True, timeout=60, env=CLEAN)
    assert (done.returncode, done.stdout, done.stderr) == (5, b"", b"")


def test_what_cannot_be_read_or_written_is_said(served: Server, box: str) -> None:
    with open(os.devnull, "w") as unreadable, served.started("exec", "-i", box, "cat", stdin=unreadable) as running:
        out, err = running.communicate(timeout=20)
    assert (running.returncode, out) == (2, "")
    assert err == "error: standard input cannot be read: Bad file descriptor\n"
    with open("/dev/full", "w") as full, served.started("exec", box, "echo", "hi", stdout=full) as running:
        _, err = running.communicate(timeout=20)
    assert (running.returncode, err) == (1, "error: the output could not be written: No space left on device\n")

"""Promises of `sandlot shell`, used by a person at a terminal:

1. What is typed goes in, what comes out is seen, Ctrl-C and the terminal's size are the program's; its status is ours,
   and the terminal is as it was before.
2. It is a shell in a sandbox that there is, or in a fresh one, on a server or not, which ends with it.
3. Ctrl-] twice leaves it, `--attach` comes back to what was there; who comes later takes the place; `--watch` looks
   on.
4. What comes through a pipe is a script.
5. A window that is closed ends it; a sandbox that ends under it is said.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.cli import CLEAN, COMMAND, Server, has_process, wait_for
from tests.support.person import Person


@pytest.fixture
def people() -> Iterator[list[Person]]:
    there: list[Person] = []
    yield there
    for person in there:
        if person.process.poll() is None:
            person.process.kill()
            person.process.wait()
        person.close()


def sits(people: list[Person], served: Server, *words: str, **env: str) -> Person:
    environment = {**CLEAN, "SANDLOT_URL": served.url, "TERM": "xterm", **env}
    person = Person([*COMMAND, "shell", *words], environment)
    people.append(person)
    return person


def test_a_terminal_as_if_it_was_here(served: Server, box: str, people: list[Person]) -> None:
    person = sits(people, served, box, "-w", "/tmp", "-e", "A=b")
    person.type("echo $A $PWD $TERM; stty size\n")
    person.sees("b /tmp xterm\r\n30 100\r\n")
    assert person.is_raw()
    person.type("until stty size | grep '20 6'0; do sleep 0.05; done\n")
    person.resize(20, 60)
    person.sees("20 60\r\n")
    person.type("sleep 6098\n")
    wait_for(lambda: has_process("sleep\x006098"))
    person.type("\x03echo after=$?\n")
    person.sees("after=130")
    person.type("exit 7\n")
    assert person.leaves() == 7
    assert not person.is_raw()


@pytest.mark.parametrize("url", ["", None], ids=["here", "on a server"])
def test_a_shell_in_a_fresh_sandbox_ends_with_it(served: Server, people: list[Person], url: str | None) -> None:
    person = sits(
        people, served, "host", "--", "sh", "-c", "hostname; read x", SANDLOT_URL=served.url if url is None else ""
    )
    person.sees("sandlot\r\n")
    listed = json.loads(served.sandlot("ls", "--json").stdout)
    assert len(listed) == (1 if url is None else 0)
    person.type("\n")
    assert person.leaves() == 0
    assert json.loads(served.sandlot("ls", "--json").stdout) == []


def test_it_can_be_left_and_come_back_to(served: Server, box: str, people: list[Person]) -> None:
    first = sits(people, served, box)
    first.type("x=kept; echo re''ady\n")
    first.sees("ready")
    first.type("\x1d\x1d")
    back = first.sees(r"sandlot shell [\w-]+ --attach [\w-]+").split()[1:]
    assert first.leaves() == 0
    (listed,) = json.loads(served.sandlot("terminals", box, "--json").stdout)
    assert (listed["id"], listed["attached"]) == (back[-1], False)
    assert served.sandlot("terminals", box).stdout.splitlines()[1].split()[:3] == [back[-1], "running", "no"]
    second = sits(people, served, *back[1:])
    second.sees("ready")
    second.type("echo is=$x\n")
    second.sees("is=kept")
    watcher = sits(people, served, *back[1:], "--watch")
    watcher.sees("is=kept")
    watcher.type("echo never\n")
    third = sits(people, served, *back[1:])
    third.sees("is=kept")
    assert second.leaves() == 1
    assert b"somebody else came to terminal" in second.seen
    third.type("echo on''ly; exit 3\n")
    third.sees("only")
    assert (third.leaves(), watcher.leaves()) == (3, 3)
    assert b"never" not in third.seen + watcher.seen


def test_a_single_leaving_key_is_the_program_s(served: Server, box: str, people: list[Person]) -> None:
    person = sits(people, served, box, "--", "sh", "-c", "stty raw -echo; echo ready; od -An -tx1 -N3")
    person.sees("ready")
    person.type("\x1d")
    person.type("a\x1d")
    person.type("b")
    person.sees("1d 61 1d")
    assert person.leaves() == 0


def test_what_comes_through_a_pipe_is_a_script(served: Server, box: str) -> None:
    done = served.sandlot("shell", box, "-w", "/tmp", input="pwd\nfalse || echo or\nexit 5\n")
    assert (done.returncode, done.stdout, done.stderr) == (5, "/tmp\nor\n", "")
    text = 'echo "echo piped" | "$@" shell'
    here = subprocess.run(["sh", "-c", text, "sh", *COMMAND], capture_output=True, text=True, timeout=60, env=CLEAN)
    assert (here.returncode, here.stdout, here.stderr) == (0, "piped\n", "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_window_that_is_closed_ends_the_shell(
    served: Server, box: str, people: list[Person], number: signal.Signals
) -> None:
    person = sits(people, served, box)
    person.type("trap '' HUP; sleep 6097\n")
    wait_for(lambda: has_process("sleep\x006097"))
    person.process.send_signal(number)
    assert person.leaves() == 128 + number
    assert not person.is_raw()
    wait_for(lambda: not has_process("sleep\x006097"))


def test_a_sandbox_that_ends_under_it_is_said(served: Server, people: list[Person]) -> None:
    box = served.sandlot("create").stdout.strip()
    person = sits(people, served, box)
    person.type("echo re''ady\n")
    person.sees("ready")
    assert served.sandlot("rm", box).returncode == 0
    assert person.leaves() == 3
    assert f"sandbox {box} was ended on request".encode() in person.seen
    assert not person.is_raw()


def test_wrong_words_are_said(served: Server, box: str) -> None:
    for words, said in (
        ((box, "--watch"), "nothing to look on at"),
        ((box, "--attach", "t-1"), "from a terminal"),
        (("host", "--attach", "t-1"), "a fresh sandbox has no terminal yet"),
    ):
        done = served.sandlot("shell", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr

"""Promises of the commands about sandboxes, each a process of its own against a real server:

1. `create` prints an id and nothing else, for a sandbox that is as its options say; `ls` and `rm` find it by label.
2. `snapshot`, `fork`, `reset`, `pause`, `resume` and `diff` do what the API does, and `--json` prints what it answers.
3. An id that never was and one that has ended are told apart by their words and their status; of several ids the good
   ones are not kept from their turn by the bad.
4. Without a server each says that it needs one, and how to start it.
"""

from __future__ import annotations

import json

import pytest

from sandlot.cli.commands import COMMANDS
from tests.support.cli import Server, sandlot


def test_create_prints_an_id_of_what_was_asked_for(served: Server) -> None:
    words = ("--label", "job=a b", "-e", "GREETING=hi", "--limit", "memory=64M", "--limit", "pids=50", "-w", "/srv")
    made = served.sandlot("create", "host", *words)
    assert (made.returncode, made.stderr) == (0, "")
    box = made.stdout.strip()
    large = "echo $GREETING $PWD; x=$(head -c 100m /dev/zero | tr '\\0' a)"
    inside = served.sandlot("exec", box, "--", "sh", "-c", large)
    assert (inside.returncode, inside.stdout) == (137, "hi /srv\n"), "100 MB fit into 64"
    assert "the kernel killed it for memory" in inside.stderr
    assert served.sandlot("rm", box).stderr == f"removed {box}\n"


def test_ls_and_rm_find_by_label(served: Server) -> None:
    first, second, third = (
        json.loads(served.sandlot("create", "--json", "-l", f"job={job}", "-l", f"n={n}").stdout)["id"]
        for n, job in enumerate("aab")
    )
    table = served.sandlot("ls", "--label", "job=a").stdout.splitlines()
    assert table[0].split() == ["id", "image", "state", "age", "labels"]
    assert [line.split()[0] for line in table[1:]] == [first, second]
    assert all("host" in line and "running" in line and "job=a" in line for line in table[1:])
    assert served.sandlot("ls", "-q", "-l", "job=a", "-l", "n=1").stdout == f"{second}\n"
    assert [each["id"] for each in json.loads(served.sandlot("ls", "--json", "-l", "job=b").stdout)] == [third]
    removed = served.sandlot("rm", "--label", "job=a", "--json")
    assert {each["id"]: each["ending"] for each in json.loads(removed.stdout)} == {first: "killed", second: "killed"}
    assert served.sandlot("rm", "--all").stderr == f"removed {third}\n"
    empty = served.sandlot("ls")
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "there are none\n")
    assert json.loads(served.sandlot("ls", "--json").stdout) == []


def test_a_sandbox_is_copied_set_back_and_stopped(served: Server, box: str) -> None:
    served.sandlot("exec", box, "--", "sh", "-c", "echo solved > /root/answer; rm /etc/passwd; echo >> /etc/hosts")
    assert {"C /etc/hosts", "D /etc/passwd", "A /root/answer"} <= {*served.sandlot("diff", box).stdout.splitlines()}
    found = json.loads(served.sandlot("diff", box, "--json").stdout)
    assert {"path": "/root/answer", "kind": "added", "directory": False} in found

    made = served.sandlot("snapshot", box, "solved")
    assert (made.returncode, made.stdout) == (0, "")
    assert made.stderr.startswith("made solved: ")
    taken = served.sandlot("snapshot", box, "solved")
    assert (taken.returncode, taken.stderr.splitlines()[0]) == (1, "error: there is an image solved already")

    twins = served.sandlot("fork", box, "-n", "2").stdout.split()
    assert len(set(twins)) == 2
    for each in twins:
        assert served.sandlot("exec", each, "cat", "/root/answer").stdout == "solved\n"

    assert served.sandlot("reset", box).stderr == f"reset {box}\n"
    assert served.sandlot("exec", box, "cat", "/root/answer").returncode == 1
    assert served.sandlot("reset", box, "solved").returncode == 0
    assert served.sandlot("exec", box, "cat", "/root/answer").stdout == "solved\n"

    assert served.sandlot("pause", *twins).stderr == "".join(f"paused {each}\n" for each in twins)
    states = {each["id"]: each["state"] for each in json.loads(served.sandlot("ls", "--json").stdout)}
    assert [states[each] for each in (*twins, box)] == ["paused", "paused", "running"]
    assert served.sandlot("resume", *twins, "--json").returncode == 0
    assert served.sandlot("rm", *twins).returncode == 0
    assert served.sandlot("image", "rm", "solved").returncode == 0


def test_an_id_that_never_was_and_one_that_has_ended_are_told_apart(served: Server) -> None:
    box = served.sandlot("create").stdout.strip()
    unknown = served.sandlot("exec", "sb-nope", "--", "true")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("error: there is no sandbox sb-nope\n\nhint: `sandlot ls`")
    some = served.sandlot("rm", "sb-nope", box)
    assert some.returncode == 1
    assert f"removed {box}\n" in some.stderr and "there is no sandbox sb-nope" in some.stderr
    for words in (("exec", box, "true"), ("pause", box), ("fork", box), ("diff", box), ("snapshot", box, "x")):
        ended = served.sandlot(*words)
        assert (ended.returncode, ended.stdout) == (3, ""), words
        assert ended.stderr.startswith(f"error: sandbox {box} was ended on request ")
    assert served.sandlot("rm", box).returncode == 0, "its end is no news"


def test_wait_tells_how_it_ended(served: Server) -> None:
    box = served.sandlot("create", "--lifetime", "600").stdout.strip()
    late = served.sandlot("wait", box, "--timeout", "0.1")
    assert (late.returncode, late.stdout) == (1, "")
    assert late.stderr.startswith(f"error: sandbox {box} did not end within 0.1 s")
    text = "echo out; until [ -e /tmp/go ]; do sleep 0.02; done; exit 7"
    command = served.sandlot("exec", "-d", box, "--", "sh", "-c", text).stdout.strip()
    late = served.sandlot("wait", box, command, "--timeout", "0.01")
    assert (late.returncode, "did not finish within 0.01 s" in late.stderr) == (1, True)
    served.sandlot("exec", box, "touch", "/tmp/go")
    done = served.sandlot("wait", box, command, "--json")
    assert (done.returncode, json.loads(done.stdout)["stdout"]) == (7, "out\n")
    assert served.sandlot("wait", box, "c-nope").returncode == 1
    with served.started("wait", box) as waiting, served.started("wait", box, "--json") as other:
        assert served.sandlot("rm", box).returncode == 0
        assert waiting.communicate(timeout=20) == ("killed\n", "")
        assert json.loads(other.communicate(timeout=20)[0])["ending"] == "killed"
    short = served.sandlot("create", "--lifetime", "0.1").stdout.strip()
    assert served.sandlot("wait", short).stdout.startswith("lifetime")
    listed = [line.split() for line in served.sandlot("ls", "--all").stdout.splitlines()]
    assert [short, "host", "ended", "(lifetime)"] in [line[:4] for line in listed]
    assert short not in served.sandlot("ls").stdout


ABOUT_BOXES = {
    "create": (),
    "ls": (),
    "rm": ("--all",),
    "pause": ("sb-1",),
    "resume": ("sb-1",),
    "reset": ("sb-1",),
    "snapshot": ("sb-1", "name"),
    "fork": ("sb-1",),
    "diff": ("sb-1",),
    "exec": ("sb-1", "true"),
    "commands": ("sb-1",),
    "logs": ("sb-1", "c-1"),
    "kill": ("sb-1", "c-1"),
    "wait": ("sb-1",),
    "cp": ("README.md", "sb-1:/root"),
    "terminals": ("sb-1",),
    "shell": ("sb-1",),
}


@pytest.mark.parametrize("name", ABOUT_BOXES)
def test_without_a_server_it_says_how_to_start_one(name: str) -> None:
    assert name in COMMANDS
    done = sandlot(name, *ABOUT_BOXES[name], env={"SANDLOT_URL": "http://127.0.0.1:9"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no server answers at http://127.0.0.1:9\n\nhint: `sandlot serve` starts one\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("create", "--limit", "memory=lots"), "limits.memory: 'lots' is not a size"),
        (("create", "--limit", "memroy=1G"), "limits.memroy"),
        (("create", "--label", "job"), "--label job is not NAME=VALUE"),
        (("create", "--lifetime", "-1"), "lifetime"),
        (("rm",), "say which sandboxes"),
        (("rm", "--all", "sb-1"), "say which sandboxes"),
        (("fork", "sb-1", "-n", "0"), "--count"),
        (("kill", "sb-1", "c-1", "--signal", "NOPE"), "there is no signal NOPE"),
        (("exec", "-d", "-i", "sb-1", "cat"), "no standard input"),
        (("exec", "sb-1"), "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_words_are_2_and_say_which(served: Server, words: tuple[str, ...], said: str) -> None:
    done = served.sandlot(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and said in done.stderr

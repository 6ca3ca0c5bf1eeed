"""Promises of words that are wrong, of every command that takes them:

1. What no server can know is said in a sentence, with the status of a wrong request or of what is missing: no
   traceback, and nothing about a server of another version.
2. Options that do not go together are refused, not let go.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.support.cli import Server, sandlot

_BYTES = os.fsdecode(b"sb-\xff")
_NONE = "error: there is no sandbox "


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        *(((*words[:1], _BYTES, *words[1:]), 1, _NONE) for words in (("exec", "true"), ("rm",), ("diff",), ("wait",))),
        (("cp", f"{_BYTES}:/etc/hosts", "/tmp"), 1, _NONE),
        *(
            ((*words[:1], "", *words[1:]), 1, f"{_NONE}''")
            for words in (("exec", "true"), ("rm",), ("diff",), ("wait",))
        ),
        (("wait", "../.."), 1, f"{_NONE}../.."),
        (("rm", ".."), 1, f"{_NONE}.."),
        (("wait", "{box}", "../.."), 1, "error: there is no command ../.. in this sandbox"),
        (("wait", "{box}", ""), 1, "error: there is no command '' in this sandbox"),
        (("shell", "{box}", "--json"), 2, "error: a terminal has no `--json`"),
        (("shell", "{box}", "--attach", "t-1", "-w", "/", "sh"), 2, "error: `--attach` comes back"),
        (("shell", "{box}", "--attach", "t-1", "-u", "0"), 2, "error: `--attach` comes back"),
        (("ls", "--api-key", "a\nb"), 2, "error: the API key has a letter that no key has"),
        (("exec", "{box}", "-u", "9" * 5000, "true"), 2, "error: user: '99999"),
        (
            ("exec", "{box}", "-u", "a b", "true"),
            2,
            "error: user: 'a b' is no user: a number from 0 to 65535, or a name",
        ),
        (("exec", "{box}", "-u", "70000", "true"), 2, "error: user: 70000 is no user"),
        (
            ("cp", "-u", "nobody-of-that-name", "/etc/hosts", "{box}:/root"),
            2,
            "error: sandbox {box} has no user nobody-of",
        ),
        (("cp", "--json", "{box}:/etc/hosts", "-"), 2, "error: what is copied goes to standard output"),
        (("kill", "{box}", "c-1", "-s", "9" * 5000), 2, "error: there is no signal 99999"),
        (("image", "inspect", ""), 1, "error: there is no image without a name"),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, tuple) else "",
)
def test_a_word_that_is_wrong_is_said_in_a_sentence(
    served: Server, box: str, words: tuple[str, ...], status: int, said: str
) -> None:
    done = served.sandlot(*(word.replace("{box}", box) for word in words))
    assert (done.returncode, done.stdout) == (status, ""), done.stderr[-2000:]
    assert done.stderr.startswith(said.replace("{box}", box)), done.stderr[-2000:]
    assert "Traceback" not in done.stderr and len(done.stderr) < 1000


def test_a_label_of_any_bytes_is_one_that_no_sandbox_has(served: Server, box: str) -> None:
    found = served.sandlot("ls", "--json", "--label", os.fsdecode(b"\xff=1"))
    assert (found.returncode, found.stdout, found.stderr) == (0, "[]\n", "")


def test_a_copy_can_be_read_by_a_script_and_given_to_a_user_by_name(served: Server, box: str) -> None:
    done = served.sandlot("cp", "--json", "-u", "root", "/etc/hosts", f"{box}:/root/h")
    size = os.stat("/etc/hosts").st_size
    assert json.loads(done.stdout) == {"from": "/etc/hosts", "to": f"{box}:/root/h", "bytes": size}
    assert (done.returncode, done.stderr) == (0, "")
    own = "echo me:x:1000:1000::/:/bin/sh >>/etc/passwd"
    assert served.sandlot("exec", box, "--", "sh", "-c", own).returncode == 0
    done = served.sandlot("cp", "-u", "me", "/etc/hosts", f"{box}:/root/theirs")
    if done.returncode == 0:  # a host that gives a sandbox one id has no other user
        assert served.sandlot("exec", box, "stat", "-c", "%u", "/root/theirs").stdout == "1000\n"


def test_keys_that_are_taken_back_can_be_read_by_a_script(tmp_path_factory: pytest.TempPathFactory) -> None:
    state = ("--state-dir", str(tmp_path_factory.mktemp("keys")))
    made = json.loads(sandlot("keys", "create", "--operator", "--json", *state).stdout)
    done = sandlot("keys", "revoke", made["id"], "--json", *state)
    assert (json.loads(done.stdout), done.stderr) == ([{"id": made["id"]}], "")

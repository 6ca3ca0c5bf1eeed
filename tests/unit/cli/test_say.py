"""Promises of what is printed:

1. Colour is for a terminal only, and for none where NO_COLOR is set; the words are the same without it.
2. A name that somebody chose inside a sandbox cannot speak to the terminal.
3. `--json` prints a value that any program reads, names that are not UTF-8 too.
4. Whoever reads stdout or stderr may leave: no traceback, whatever was being said.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess

import pytest

from sandlot.cli import say
from tests.support.cli import CLEAN, COMMAND, Server


def on_terminal(server: Server, *words: str, **env: str) -> str:
    """What a person sees: both streams on one terminal."""
    ours, theirs = pty.openpty()
    environment = {**CLEAN, "SANDLOT_URL": server.url, "TERM": "xterm", **env}
    with subprocess.Popen([*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65536):
                seen += piece
        except OSError:  # a terminal's word for the end
            pass
        running.wait(20)
    os.close(ours)
    return seen.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_colour_is_for_a_terminal(served: Server, box: str) -> None:
    served.sandlot("exec", box, "touch", "/root/new")
    for words in (("ls",), ("diff", box), ("exec", "sb-nope", "true"), ("doctor",)):
        piped = served.sandlot(*words)
        coloured = on_terminal(served, *words)
        assert "\x1b[1;3" in coloured, words
        assert "\x1b" not in piped.stdout + piped.stderr
        without = on_terminal(served, *words, NO_COLOR="1")
        assert "\x1b" not in without
        ages = re.compile(r"\d+ s")
        assert ages.sub("", plain(coloured)) == ages.sub("", without) == ages.sub("", piped.stdout + piped.stderr)


def test_a_command_s_own_output_is_not_touched(served: Server, box: str) -> None:
    assert on_terminal(served, "exec", box, "--", "printf", "\\033[31mred\\033[0m\\n") == "\x1b[31mred\x1b[0m\n"


def test_a_name_from_inside_cannot_speak_to_the_terminal(served: Server, box: str) -> None:
    evil = "printf x > \"$(printf '/root/a\\033]0;owned\\007\\nb')\"; printf x > \"$(printf '/root/\\377')\""
    assert served.sandlot("exec", box, "--", "sh", "-c", evil).returncode == 0
    shown = served.sandlot("diff", box).stdout
    assert r"A /root/a\x1b]0;owned\x07\nb" + "\n" in shown
    assert "A /root/\\xff\n" in shown
    found = [each["path"] for each in json.loads(served.sandlot("diff", box, "--json").stdout)]
    assert {"/root/a\x1b]0;owned\x07\nb", "/root/\udcff"} <= set(found)
    made = served.sandlot("create", "-l", "job=\x1b[2J").stdout.strip()
    assert "job=\\x1b[2J" in served.sandlot("ls").stdout
    served.sandlot("rm", made)
    assert say.clean("a\tb\nc\x9b\x7f é") == "a\tb\nc\\x9b\\x7f é"


@pytest.mark.parametrize("words", ["ls", "ls --json", "diff {box}", "exec {box} nope", "exec sb-nope true", "--help"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_who_has_left_gets_no_traceback(served: Server, box: str, words: str, stream: str) -> None:
    gone, ours = os.pipe()
    os.close(gone)
    with served.started(*words.format(box=box).split(), **{stream: ours}) as running:
        os.close(ours)
        out, err = running.communicate(timeout=20)
    assert "Traceback" not in f"{out}{err}" and "Exception" not in f"{out}{err}"
    assert running.returncode in (0, 1, 127)

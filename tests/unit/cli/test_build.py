"""Promises of `sandlot image build`, run as a person runs it:

1. A line for each step on stderr, `cached` or how long it took; `--json` is one object on stdout; sandboxes start from
   the image, without a network.
2. A command that fails says its line, its code and the end of its output; wrong words are status 2.
3. Ctrl-C ends it with 130 and leaves the steps before.
4. It builds on a server as it does here; the server's `--allow-network` decides about the network.
5. What docs/guides/build-an-image.md shows is what happens.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandlot
from tests.support.server import Server

COMMAND = [sys.executable, "-c", "from sandlot.cli.main import main; main()"]
ENV = {**os.environ, "PYTHONPATH": str(Path(sandlot.__file__).parents[1])}  # this one, from any directory
GUIDE = Path(__file__).parents[3] / "docs/guides/build-an-image.md"


@pytest.fixture
def folder(tmp_path: Path, native_reason: str | None) -> Iterator[Path]:
    if native_reason:
        pytest.skip(native_reason)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a").write_text("a\n")
    yield tmp_path / "work"


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    state = [] if "--url" in words else ["--state-dir", str(folder.parent / "state")]
    at = words.index("--") if "--" in words else len(words)
    command = [*COMMAND, *words[:at], *state, *words[at:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=ENV)


def test_a_line_for_each_step(folder: Path) -> None:
    (folder / "Dockerfile").write_text("FROM host\nARG WHO\nCOPY a /srv/\nRUN echo $WHO >> /srv/a; echo said\n")
    words = ("image", "build", "Dockerfile", "--name", "made", "--build-arg", "WHO=you")
    first = cli(folder, *words, "-v")
    assert (first.returncode, first.stdout) == (0, ""), first
    lines = first.stderr.splitlines()
    assert re.fullmatch(r"\[1/2\] COPY a /srv/  \d\.\d s", lines[0])
    assert re.fullmatch(r"\[2/2\] RUN echo \$WHO >> /srv/a; echo said  \d\.\d s", lines[1])
    assert lines[2] == "said"
    assert lines[3].startswith("built made: 0.0 MB over host in ")
    again = cli(folder, *words, "--json")
    assert again.stderr == "[1/2] COPY a /srv/  cached\n[2/2] RUN echo $WHO >> /srv/a; echo said  cached\n"
    found = json.loads(again.stdout)
    assert (found["name"], found["kind"], [step["cached"] for step in found["steps"]]) == (
        "made",
        "built",
        [True, True],
    )
    assert cli(folder, "run", "--image", "made", "--", "cat", "/srv/a").stdout == "a\nyou\n"
    assert "made" in cli(folder, "image", "list").stdout


def test_what_goes_wrong_is_said(folder: Path) -> None:
    (folder / "Dockerfile").write_text("FROM host\nRUN echo so far; exit 7\n")
    failed = cli(folder, "image", "build", "Dockerfile", "--name", "made")
    assert failed.returncode == 1
    assert failed.stderr == (
        "error: Dockerfile:2: `echo so far; exit 7` exited with 7; the end of what it wrote:\nso far\n\n"
        "hint: commands of a build have no network; for one that needs it: `--network host`\n"
    )
    (folder / "wrong.toml").write_text("comands = []\n")
    for words, said in (
        (("Dockerfile",), "does not say what the image is called"),
        (("none", "--name", "x"), "there is no file none"),
        (("wrong.toml",), "did you mean `commands`"),
        (("Dockerfile", "--name", "x", "--build-arg", "A"), "--build-arg A has no value"),
        (("Dockerfile", "--name", "x", "--memory", "lots"), "'lots' is not a size"),
        (("Dockerfile", "--name", "x", "--network", "bridge"), "hint: `sandlot image build --help`"),
    ):
        done = cli(folder, "image", "build", *words)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert said in done.stderr
    (folder / "Dockerfile").write_text("FROM host\nCOPY a /\n")
    (folder / "Dockerfile.dockerignore").write_text("a\n")
    failed = cli(folder, "image", "build", "Dockerfile", "--name", "made")
    assert failed.stderr.startswith("error: Dockerfile:2: there is no `a`"), failed


def test_ctrl_c_leaves_the_steps_before(folder: Path) -> None:
    (folder / "Dockerfile").write_text("FROM host\nRUN echo fine\nRUN sleep 6051\n")
    words = ("image", "build", "Dockerfile", "--name", "made", "--state-dir", str(folder.parent / "state"))
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True, cwd=folder, env=ENV) as running:
        assert running.stderr is not None
        assert running.stderr.readline().startswith("[1/2] RUN echo fine")
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        assert (running.wait(30), running.stderr.read()) == (130, "")
    assert cli(folder, "image", "list").stderr == "there are none\n"
    assert list((folder.parent / "state").glob("node-*")) == []
    (folder / "Dockerfile").write_text("FROM host\nRUN echo fine\n")
    assert "cached" in cli(folder, "image", "build", "Dockerfile", "--name", "made").stderr


async def test_it_builds_on_a_server(folder: Path, tmp_path: Path) -> None:
    (folder / "Dockerfile").write_text("FROM host\nCOPY a /a\nRUN cat /a /etc/resolv.conf > /b\n")
    words = ("image", "build", "Dockerfile", "--name", "made")
    async with Server(tmp_path / "server") as server:
        where = ("--url", server.url)
        refused = await asyncio.to_thread(cli, folder, *words, "--network", "host", *where)
        assert refused.returncode == 1
        assert "error: Dockerfile:3: this server gives no sandbox the network 'host'" in refused.stderr
        built = await asyncio.to_thread(cli, folder, *words, *where)
        assert built.returncode == 0, built
        assert "[1/2] COPY a /a  cached" in built.stderr
        ran = await asyncio.to_thread(cli, folder, "run", "--image", "made", *where, "--", "cat", "/b")
        assert ran.stdout == "a\n"
    async with Server(tmp_path / "server", "--allow-network", "host") as server:
        built = await asyncio.to_thread(cli, folder, *words, "--no-cache", "--network", "host", "--url", server.url)
        assert built.returncode == 0, built


def test_the_guide_is_true(folder: Path) -> None:
    blocks = re.findall(r"```(\w+) ?(\S*)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) > 4
    for kind, name, text in blocks:
        if name:
            (folder / name).write_text(text)
        elif kind == "console":
            for part in text.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                words = re.findall(r"'[^']*'|\S+", command)
                assert words[0] == "sandlot"
                done = cli(folder, *(word.strip("'") for word in words[1:]))
                said = re.sub(r"\d\.\d s", "0.0 s", done.stderr + done.stdout)
                assert said == re.sub(r"\d\.\d s", "0.0 s", output), (command, done)

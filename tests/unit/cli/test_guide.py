"""A promise of docs/guides/command-line.md: typed into a shell, its commands print what it shows. Ids, ages and times
differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.cli import CLEAN, Server

GUIDE = Path(__file__).parents[3] / "docs/guides/command-line.md"
MARK = "<<<next>>>"


def alike(text: str) -> list[str]:
    """Without what is another one each time."""
    text = re.sub(r"\b(sb|c)-[0-9a-f]{12,}", r"\1-…", text)
    text = re.sub(r"\b\d+(\.\d+)? s\b", "N s", text)
    return [re.sub(r" +", " ", line.rstrip()) for line in text.strip("\n").splitlines()]


def test_the_guide_shows_what_happens(served: Server, tmp_path: Path) -> None:
    program = tmp_path / "bin/sandlot"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom sandlot.cli.main import main\nmain()\n")
    program.chmod(0o755)
    shown = "".join(re.findall(r"^```console\n(.*?)^```", GUIDE.read_text(), re.M | re.S))
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.M)
    assert len(steps) > 20
    # A shell of its own for all of them; `$?` is of the command before, which the mark must not hide.
    script = "".join(f"{command}\nlast=$?; echo '{MARK}'; (exit $last)\n" for command, _ in steps)
    environment = {**CLEAN, "SANDLOT_URL": served.url, "PATH": f"{program.parent}:{CLEAN['PATH']}", "HOME": "/root"}
    done = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    printed = done.stdout.split(f"{MARK}\n")
    for (command, wanted), got in zip(steps, printed, strict=False):
        assert alike(got) == alike(wanted), command
    assert len(printed) == len(steps) + 1

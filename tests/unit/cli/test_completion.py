"""Promises of completion, asked as the scripts ask:

1. The script for each shell is one that the shell takes, and it completes commands, options and the ids of sandboxes.
2. Without a server it completes no id, says nothing, and is not waited for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cli import CLEAN, Server, sandlot


def completed(line: str, url: str) -> list[str]:
    """As the script for bash asks for the last word of a line."""
    words = line.split(" ")
    asking = {"_SANDLOT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = sandlot(env={**asking, "SANDLOT_URL": url})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_commands_options_and_ids_are_completed(served: Server, box: str) -> None:
    assert completed("sandlot sna", served.url) == ["snapshot"]
    assert set(completed("sandlot ", served.url)) >= {"run", "exec", "ls", "image", "train"}
    assert "--lifetime" in completed("sandlot create --l", served.url)
    assert completed("sandlot exec sb-", served.url) == [box]
    assert completed("sandlot rm " + box[:-2], served.url) == [box]
    assert completed(f"sandlot rm {box} sb-", served.url) == [], "it is named already"
    assert completed("sandlot image pu", served.url) == ["pull"]


def test_without_a_server_nothing_is_said() -> None:
    began = time.monotonic()
    assert completed("sandlot exec sb-", "http://127.0.0.1:9") == []
    assert completed("sandlot exec sb-", "http://192.0.2.1:9") == [], "which never answers"
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_takes(shell: str, tmp_path: Path) -> None:
    script = sandlot("completion", shell)
    assert (script.returncode, script.stderr) == (0, "")
    assert "_SANDLOT_COMPLETE" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script.stdout)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=20)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_with_it(served: Server, box: str, tmp_path: Path) -> None:
    program = tmp_path / "sandlot"
    program.write_text(f"#!{sys.executable}\nfrom sandlot.cli.main import main\nmain()\n")
    program.chmod(0o755)
    text = (
        f'PATH={tmp_path}:$PATH; eval "$(sandlot completion bash)"; COMP_WORDS=(sandlot exec sb-); COMP_CWORD=2; '
        "_sandlot_completion sandlot; echo ${COMPREPLY[@]}"
    )
    env = {**CLEAN, "SANDLOT_URL": served.url}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True, env=env)
    assert (done.stdout.strip(), done.stderr) == (box, "")

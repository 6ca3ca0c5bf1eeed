"""The `sandlot` command as a person or a script calls it: a process of its own, and a server for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandlot.node.ledger import STATE_DIR

COMMAND = [sys.executable, "-c", "from sandlot.cli.main import main; main()"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SANDLOT_") or name == STATE_DIR}


def sandlot(*words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**CLEAN, **(env or {})},
        **options,
    )


class Server:
    """A real `sandlot serve`."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=CLEAN,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        self.url = line.split()[-1]

    def sandlot(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command that is about this server."""
        env = options.pop("env", {})
        return sandlot(*words, env={"SANDLOT_URL": self.url, **env}, **options)

    def started(self, *words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """The same, to be left alone for a while."""
        for stream, default in (
            ("stdin", subprocess.DEVNULL),
            ("stdout", subprocess.PIPE),
            ("stderr", subprocess.PIPE),
        ):
            options.setdefault(stream, default)
        environment = {**CLEAN, "SANDLOT_URL": self.url, **(env or {})}
        return subprocess.Popen([*COMMAND, *words], text=True, env=environment, **options)

    def stop(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


def has_process(words: str) -> bool:
    """Whether a program with these arguments, `\\0` between them, runs on this host."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().rstrip(b"\0") == words.encode():
                return True
        except OSError:
            continue  # it ended while we looked
    return False


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)

"""A promise of docs/guides: every block of Python in them runs, and prints what its comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs/guides"


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{guide.stem}-{number}", text)
        for guide in sorted(GUIDES.glob("*.md"))
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.M | re.S), 1)
    ]


@pytest.mark.parametrize(("name", "text"), blocks(), ids=[name for name, _ in blocks()])
def test_a_block_prints_what_it_says(name: str, text: str, native_reason: str | None, tmp_path: Path) -> None:
    if native_reason:
        pytest.skip(native_reason)
    program = "from sandlot import *\n"
    if "await" in text:
        program += f"import asyncio\nasync def block():\n{textwrap.indent(text, '    ')}\nasyncio.run(block())"
    else:
        program += text
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # where `sandlot` is
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=here
    )
    wanted = [line.strip() for line in re.findall(r"#.*?\bprints: (.*)", text)]
    assert (done.returncode, done.stdout.splitlines()) == (0, wanted), done.stderr

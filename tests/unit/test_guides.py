"""A promise of docs/guides: every block of Python in them runs, and prints what its comments say."""

from __future__ import annotations

import asyncio
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import sandlot

GUIDES = Path(__file__).parents[2] / "docs/guides"


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{guide.stem}-{number}", text)
        for guide in sorted(GUIDES.glob("*.md"))
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.M | re.S), 1)
    ]


@pytest.mark.parametrize(("name", "text"), blocks(), ids=[name for name, _ in blocks()])
def test_a_block_prints_what_it_says(
    name: str, text: str, native_reason: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if native_reason:
        pytest.skip(native_reason)
    names = {each: getattr(sandlot, each) for each in sandlot.__all__}
    function = (
        f"async def block():\n{textwrap.indent(text, '    ')}"
        if "await" in text
        else f"def block():\n{textwrap.indent(text, '    ')}"
    )
    exec(compile(function, name, "exec"), names)
    result = names["block"]()
    if inspect.isawaitable(result):

        async def main() -> None:
            await result

        asyncio.run(main())
    wanted = [line.strip() for line in re.findall(r"#.*?\bprints: (.*)", text)]
    assert capsys.readouterr().out.splitlines() == wanted

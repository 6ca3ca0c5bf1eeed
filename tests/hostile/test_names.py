"""Attack: have the node trip over names: of files, directories, programs, arguments, environment: line breaks, bytes
that are no text, options, shell syntax, terminal codes, the longest that there are, deeper than a path can say.

Must hold: a name is only a name: it comes out as it went in, runs nothing, ends nothing, reaches no other file.
"""

from __future__ import annotations

import pytest

from sandlot.errors import InvalidRequest, SandlotError
from tests.support.hostile import PYTHON, Arena

PROMISE = "files"

NAMES = (
    "a\nb",
    "-rf",
    " ",
    "$(touch owned)",
    "; touch owned #",
    "`touch owned`",
    "*",
    "..a",
    "\\",
    "'\"",
    "%s%n",
    "\x1b]0;title\x07",
    "\u202etxt.exe",
    "\udcff\udcfe",  # bytes that are not UTF-8, as Python writes them
    "x" * 255,
)


async def test_names_of_files_are_only_names(arena: Arena) -> None:
    box = await arena.box()
    for number, name in enumerate(NAMES):
        text = f"{number}".encode()
        await box.write_file(f"/root/all/{name}", text)
        assert await box.read_file(f"/root/all/{name}") == text, name
    listed = "import os; print(*[open(b'/root/all/' + n).read() for n in os.listdir(b'/root/all')])"
    numbers = {int(word) for word in (await arena.python(listed, box=box)).stdout.split()}
    assert numbers == set(range(len(NAMES)))
    assert (await box.run("find / -name owned")).stdout == ""


@pytest.mark.control
async def test_control_a_name_that_is_pasted_into_shell_text_does_run(arena: Arena) -> None:
    box = await arena.box()
    for name in NAMES:
        if "touch" in name:
            await box.run(f"cat {name}")
            assert (await box.run("rm owned")).ok, name


async def test_names_of_directories_programs_and_arguments_are_only_names(arena: Arena) -> None:
    box = await arena.box()
    program = b'#!/bin/sh\nprintf \'%s\\n\' "$PWD" "$0" "$1" "$VALUE"\n'
    for name in NAMES:
        path = f"/root/dir/{name}/{name}"
        await box.write_file(path, program, mode=0o755)
        result = await box.run([path, name], cwd=f"/root/dir/{name}", env={"VALUE": name})
        said = f"/root/dir/{name}\n{path}\n{name}\n{name}\n"
        assert result.out.data == said.encode(errors="surrogateescape"), (name, result.stderr)
        missing = await box.run([f"{name}-not", name])
        assert missing.exit_code in (126, 127), name  # the longest is too long
        assert missing.stdout == "", name
    assert (await box.run("find / -name owned")).stdout == ""


async def test_what_is_no_path_is_refused(arena: Arena) -> None:
    box = await arena.box()
    for path in ("", "relative", "../up", "/root/a\0b", "\0"):
        with pytest.raises(InvalidRequest):
            await box.read_file(path)
        with pytest.raises(InvalidRequest):
            await box.write_file(path, b"")
    with pytest.raises(SandlotError):
        await box.write_file("/root/" + "x" * 256, b"")
    with pytest.raises(SandlotError):
        await box.read_file("/root" + "/x" * 4096)
    with pytest.raises(InvalidRequest):
        await box.run(["echo", "a\0b"])
    with pytest.raises(InvalidRequest):
        await box.run("true", env={"A": "b\0c"})
    assert (await box.run("echo lives")).stdout == "lives\n"


async def test_dots_lead_no_further_than_the_boxes_root(arena: Arena) -> None:
    box = await arena.box()
    await box.write_file("/mark", b"inside")
    assert await box.read_file("/root" + "/.." * 500 + "/mark") == b"inside"
    assert (
        await box.run("cd ../../../../..; cat mark; ls -id . .. | cut -d' ' -f1 | uniq | wc -l")
    ).stdout == "inside1\n"


DEEP = """
import os
made = 0
try:
    while made < 3000:
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
        made += 1
except OSError as error: print(error)
print(made)
"""


async def test_what_is_deeper_than_a_path_can_say_goes_with_the_box(arena: Arena) -> None:
    box = await arena.box()
    assert (await box.run([PYTHON, "-I", "-S", "-c", DEEP], cwd="/tmp")).stdout.splitlines()[-1] > "1000"
    stats = await box.stats()
    assert 1000 < stats.inodes <= arena.limits.inodes
    assert (await box.close()).ending == "exit"


@pytest.mark.control
async def test_control_with_fewer_inodes_it_is_less_deep(arena: Arena) -> None:
    result = await arena.python(DEEP, limits=arena.limits.model_copy(update={"inodes": 500}))
    assert int(result.stdout.split()[-1]) < 500

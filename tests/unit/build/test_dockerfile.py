"""Promises of reading a Dockerfile (pure: nothing is built):

1. The subset means what it means elsewhere: each line of the first table.
2. Anything else is an error that names file and line and says what to do: each line of the second.
3. A file that cannot be read is one clear error; `--build-arg` must name an ARG.
4. What the base image says counts: its environment in values, also where a first reading does not know it; its shell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandlot.api import NO_CONFIG, ImageConfig
from sandlot.build.dockerfile import parse, read
from sandlot.build.steps import Configure, Copy, Run, User, Workdir
from sandlot.errors import RecipeError

SH = ("/bin/sh", "-c")
BASE = ImageConfig(env={"PATH": "/bin", "HOME": "/root"})


def steps(text: str, **args: str) -> list[Any]:
    return [step.do for step in parse(f"FROM host\n{text}\n", "Dockerfile", args).steps(BASE)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN echo $HOME", [Run((*SH, "echo $HOME"))]),
        ('run ["make", "all"]', [Run(("make", "all"))]),
        ("RUN a && \\\n\n  # a comment\n  b", [Run((*SH, "a &&   b"))]),
        ("  # a comment\n\nRUN a \\  \nb", [Run((*SH, "a b"))]),
        ("RUN [ -d /x ] || true", [Run((*SH, "[ -d /x ] || true"))]),
        ('SHELL ["bash", "-ec"]\nRUN a', [Configure(shell=("bash", "-ec")), Run(("bash", "-ec", "a"))]),
        ("RUN a \\\\\nWORKDIR /b", [Run((*SH, "a \\\\")), Workdir("/b")]),
        ("RUN a \\\n\\\nb", [Run((*SH, "a b"))]),
        ("RUN printf 'a\x0cb\u2028c'\r\nRUN d", [Run((*SH, "printf 'a\x0cb\u2028c'")), Run((*SH, "d"))]),
        ("COPY a b /srv/", [Copy(("a", "b"), "/srv/")]),
        ('COPY ["with blank", "/srv"]', [Copy(("with blank",), "/srv")]),
        ("COPY --chown=7:7 --chmod=0640 a b", [Copy(("a",), "b", "7:7", 0o640)]),
        ("ADD a.txt .", [Copy(("a.txt",), ".", add=True)]),
        ("ENV A=1 B='x y' C=\"$A\"", [Configure(env={"A": "1", "B": "x y", "C": ""})]),
        ("ENV A=1\nENV B=$A-${A}2", [Configure(env={"A": "1"}), Configure(env={"B": "1-12"})]),
        ("ENV PATH=/opt/bin:$PATH", [Configure(env={"PATH": "/opt/bin:/bin"})]),
        ("ENV NAME one two", [Configure(env={"NAME": "one two"})]),
        (r"ENV A=\$HOME B='$HOME' C=a\ b", [Configure(env={"A": "$HOME", "B": "$HOME", "C": "a b"})]),
        (
            "ENV A=${X:-none} B=${HOME:+some} C=${HOME-x} D=${X+y}",
            [Configure(env={"A": "none", "B": "some", "C": "/root", "D": ""})],
        ),
        ("ENV A=${X:-${HOME}/b}", [Configure(env={"A": "/root/b"})]),
        ("ENV A=a$5b B=$$c D=${1}d E=$.", [Configure(env={"A": "ab", "B": "c", "D": "d", "E": "$."})]),
        ("LABEL a=b c.d='e f'", [Configure(labels={"a": "b", "c.d": "e f"})]),
        ("ARG V=3\nWORKDIR /v$V", [Workdir("/v3")]),
        ("ARG V=3\nRUN x", [Run((*SH, "x"), {"V": "3"})]),
        ("ARG V\nRUN x", [Run((*SH, "x"))]),
        ("ARG V=3\nENV V=4\nWORKDIR /$V", [Configure(env={"V": "4"}), Workdir("/4")]),
        ("USER node:node", [User("node:node")]),
        ("CMD a b", [Configure(cmd=(*SH, "a b"))]),
        ("CMD []", [Configure(cmd=())]),
        ('ENTRYPOINT ["/x"]', [Configure(entrypoint=("/x",), cmd=())]),
        ('CMD ["a"]\nENTRYPOINT ["/x"]', [Configure(cmd=("a",)), Configure(entrypoint=("/x",))]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_means_what_it_means_elsewhere(text: str, expected: list[Any]) -> None:
    assert steps(text) == expected


def test_arguments_and_the_escape_character() -> None:
    text = (
        "# escape=`\n# syntax=docker/dockerfile:1\nARG TAG=1\nFROM base:${TAG} AS only\nARG TAG\nRUN a `\n  b\nRUN c\n"
    )
    for args, base, run in (({}, "base:1", "1"), ({"TAG": "2"}, "base:2", "2")):
        build = parse(text, "Dockerfile", args)
        assert build.base == base
        first, second = build.steps(NO_CONFIG)
        assert first.do == Run((*SH, "a   b"), {"TAG": run})
        assert (first.where, first.text) == ("Dockerfile:6", "RUN a b")
        assert second.where == "Dockerfile:8"


@pytest.mark.parametrize(
    ("text", "line", "said", "hint"),
    [
        ("", 1, "there is no FROM", "FROM host"),
        ("RUN a\nFROM host", 1, "RUN stands before FROM", "FROM host"),
        ("FROM scratch", 1, "no image 'scratch'", "sandlot image list"),
        ("FROM host extra", 1, "FROM takes the name of one image", "FROM host"),
        ("FROM --platform=linux/arm64 host", 1, "--platform of FROM is not supported", "leave it out"),
        ("FROM host AS a\nFROM host", 2, "a second FROM", "file of its own"),
        ("FROM host\nCOPY --from=a /x /y", 2, "--from is not supported", "context"),
        ("FROM host\n\nEXPOSE 80", 3, "EXPOSE is not supported", "leave the line out"),
        ("FROM host\nVOLUME /x", 2, "VOLUME is not supported", "leave the line out"),
        ("FROM host\nHEALTHCHECK NONE", 2, "HEALTHCHECK is not supported", "leave the line out"),
        ("FROM host\nSTOPSIGNAL 9", 2, "STOPSIGNAL is not supported", "leave the line out"),
        ("FROM host\nONBUILD RUN x", 2, "ONBUILD is not supported", "leave the line out"),
        ("FROM host\nMAINTAINER me", 2, "MAINTAINER is not supported", "LABEL maintainer"),
        ("FROM host\nCOPPY a b", 2, "unknown instruction `COPPY`", "did you mean `COPY`"),
        ("FROM host\nRUN a &&\n  b", 3, "unknown instruction `B`", ""),
        ("FROM host\nRUN a \\\n\n&& c\n&& b", 5, "'&& b' is no instruction", "missing at the end of the line above"),
        ("FROM host\nRUN", 2, "RUN says nothing", "leave RUN out"),
        ("FROM host\nRUN --mount=type=cache,target=/x a", 2, "--mount of RUN is not supported", "leave it out"),
        ("FROM host\nRUN <<EOF\na\nEOF", 2, "here-documents are not supported", "COPY"),
        ("FROM host\nCOPY <<EOF /x\na\nEOF", 2, "here-documents are not supported", "COPY"),
        ("FROM host\nCOPY a", 2, "COPY takes sources and a target", "COPY src/ /srv/"),
        ("FROM host\nCOPY a b /c", 2, "2 sources go into a directory", "`/c/`"),
        ("FROM host\nCOPY --link a b", 2, "--link of COPY is not supported", "leave it out"),
        ("FROM host\nCOPY --chmod=u+x a b", 2, "--chmod=u+x is not a mode", "--chmod=755"),
        ("FROM host\nADD https://x/y /z", 2, "ADD of https://x/y is not supported", "--network host"),
        ("FROM host\nADD git@x:y /z", 2, "ADD of git@x:y is not supported", "--network host"),
        ("FROM host\nADD x.tar.gz /z", 2, "ADD does not unpack x.tar.gz", "tar -xf"),
        ("FROM host\nENV A", 2, "A has no value", "ENV A=…"),
        ("FROM host\nENV A=1 B", 2, "'B' is not of the form NAME=VALUE", "quotes"),
        ("FROM host\nENV A='x", 2, "a ' is never closed", "close it"),
        ("FROM host\nENV A=${B", 2, "${B is never closed", "${NAME}"),
        ("FROM host\nENV A=${}", 2, "holds no name", "${NAME}"),
        ("FROM host\nENV A=${B#x}", 2, "${B#x} is not supported", "${NAME:-word}"),
        ("FROM host\nENV A=${B:?x}", 2, "${B:?x} is not supported", "${NAME:-word}"),
        ("FROM host\nARG 1x", 2, "'1x' is no name of an argument", "ARG NAME"),
        ("FROM host\nENV A=\nWORKDIR $A", 3, "$A names no directory", "WORKDIR /srv"),
        ("FROM host\nCMD [1]", 2, "something that is no text", '["a", "1"]'),
        ('FROM host\nRUN ["a", null]', 2, "something that is no text", '["a", "1"]'),
        ("FROM host\nSHELL bash -c", 2, "SHELL is not in the JSON form", "SHELL ["),
        ("# escape=x\nFROM host", 1, "the escape character cannot be x", "backquote"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_an_error_with_its_line(text: str, line: int, said: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, "Dockerfile", {})
    assert caught.value.message.startswith(f"Dockerfile:{line}: "), caught.value.message
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("COPY a b $DEST", Copy(("a", "b"), "/srv/")),
        ("COPY --chmod=$MODE a b", Copy(("a",), "b", None, 0o755)),
        ("ARG D=$DEST\nCOPY a b $D", Copy(("a", "b"), "/srv/")),
        ("ENV D=$DEST\nCOPY a b $D", Copy(("a", "b"), "/srv/")),
        ("ARG DEST=/x\nCOPY a b $DEST", Copy(("a", "b"), "/srv/")),
        ("WORKDIR $DEST", Workdir("/srv/")),
        ("ENV ${NAME}=1", Configure(env={"N": "1"})),
    ],
)
def test_a_value_may_be_one_of_the_base(text: str, expected: Any) -> None:
    base = ImageConfig(env={"DEST": "/srv/", "MODE": "755", "NAME": "N"})
    assert parse(f"FROM x\n{text}", "Dockerfile", {}).steps(base)[-1].do == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("COPY a b $DEST", "2: 2 sources go into a directory"),
        ("COPY --chmod=$MODE a b", "2: --chmod= is not a mode"),
        ("WORKDIR $DEST", "2: $DEST names no directory"),
        ("ENV ${NAME}=1", "2: '${NAME}=1' is not of the form"),
    ],
)
def test_and_is_an_error_where_the_base_has_none(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(f"FROM x\n{text}", "Dockerfile", {}).steps(NO_CONFIG)
    assert caught.value.message.startswith(f"Dockerfile:{said}")


def test_the_shell_of_the_base_counts() -> None:
    base = ImageConfig(shell=("/bin/bash", "-ec"))
    run, cmd = parse("FROM x\nRUN a\nCMD b", "Dockerfile", {}).steps(base)
    assert (run.do, cmd.do) == (Run(("/bin/bash", "-ec", "a")), Configure(cmd=("/bin/bash", "-ec", "b")))


def test_a_build_argument_names_an_arg() -> None:
    with pytest.raises(RecipeError, match="unknown build argument `VERSOIN`") as caught:
        parse("FROM host\nARG VERSION", "Dockerfile", {"VERSOIN": "1"})
    assert "did you mean `VERSION`" in (caught.value.hint or "")


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, said in (
        (tmp_path / "none", "there is no file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "binary", "no text"),
    ):
        with pytest.raises(RecipeError, match=said):
            read(path, {})

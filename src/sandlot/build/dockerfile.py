"""The common subset of a Dockerfile, read into the steps of a build.

FROM, RUN, COPY, ADD of local files, ENV, ARG, WORKDIR, USER, LABEL, CMD, ENTRYPOINT, SHELL, with continuation lines,
comments, the escape directive and `${name:-word}`. It promises that whatever else is in the file is an error that names
its line and says what to do: nothing is passed over, for an image that lacks a line of its file is a wrong image.

A file is read twice: at once, so that its faults are found before anything is made, and again with what the base image
says: its environment, to which values may refer, and its shell. What is wrong with a value that refers to it is found
then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandlot.api import PATH, ImageConfig
from sandlot.build.context import no_archive
from sandlot.build.steps import Build, Configure, Copy, Run, Step, User, Workdir
from sandlot.config import unknown
from sandlot.errors import RecipeError

_DIRECTIVE = re.compile(r"#\s*([a-zA-Z]\w*)\s*=\s*(\S+)\s*")
_INSTRUCTION = re.compile(r"\s*([a-zA-Z]+)(?:\s+(.*?))?\s*", re.DOTALL)
_HERE = re.compile(r"(?:^|\s)\d*<<-?[\"']?[a-zA-Z_]")
_NAME = re.compile(r"[a-zA-Z_]\w*")
# The others are a shell's own, which are never set here.
_VARIABLE = re.compile(rf"{_NAME.pattern}|[0-9]+|[@*#?$!-]")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)")
_URL = re.compile(r"(?:[a-z]+://|git@)")
_ARCHIVE = re.compile(r".*\.(?:tar|tgz|tbz2?|txz|tar\.(?:gz|bz2|xz|zst))")
_MODE = re.compile(r"[0-7]{3,4}")

_REFUSED = {
    "EXPOSE": "leave the line out: a sandbox has no network in which a port could be exposed",
    "VOLUME": "leave the line out: what a sandbox sees of its host is said when it is made",
    "HEALTHCHECK": "leave the line out, and run the check as a command of the sandbox",
    "STOPSIGNAL": "leave the line out: the end of a sandbox is the end of everything in it",
    "ONBUILD": "leave the line out, and write it into the files that start from this image",
    "MAINTAINER": "write `LABEL maintainer=…` instead",
}


def read(path: Path, args: Mapping[str, str]) -> Build:
    """The build in a Dockerfile, with values for its ARGs. Raises RecipeError."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"there is no file {path}", "give the path of a Dockerfile, or of a recipe `*.toml`"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}", "give the path of a Dockerfile") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is no text", "give the path of a Dockerfile") from None
    return parse(text, path.name, args)


def parse(text: str, file: str, args: Mapping[str, str]) -> Build:
    """The same of a text that is called `file`."""
    first = _Reader(text, file, args, None)
    return Build(first.base, first.where, lambda base: tuple(_Reader(text, file, args, base).steps))


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    word: str  # the instruction, in capitals
    rest: str


class _Reader:
    """One reading of a file, from its first line to its last. `base` None: it is not known yet."""

    def __init__(self, text: str, file: str, given: Mapping[str, str], base: ImageConfig | None) -> None:
        self._file = file
        self._given = given
        self._line = _Line(1, "", "")
        self._escape = "\\"
        self._env = {"PATH": PATH, **base.env} if base else {}
        self._first = base is None
        self._known: set[str] = set()  # the variables whose value the base cannot change
        self._guessed = False  # this line has another
        self._args: dict[str, str] = {}  # in effect
        self._before: dict[str, str] = {}  # those in front of FROM
        self._declared: set[str] = set()
        self._shell = (base.shell if base else ()) or ("/bin/sh", "-c")
        self._has_cmd = False
        self.base = self.where = ""
        self.steps: list[Step] = []
        for line in self._lines(text.removeprefix("\ufeff")):
            self._line = line
            self._instruction(line)
        if not self.base:
            raise self._error("there is no FROM", "begin with the image to start from: `FROM host`")
        for name in given:
            if name not in self._declared:
                raise unknown("build argument", name, name, self._declared)

    def _error(self, what: str, hint: str | None = None) -> RecipeError:
        return RecipeError(f"{self._file}:{self._line.number}: {what}", hint)

    # -- lines ----------------------------------------------------------------------------------------------------

    def _lines(self, text: str) -> Iterator[_Line]:
        """Instructions, each on one line, without comments."""
        lines = text.split("\n")  # and at nothing else that Python takes for the end of one
        for line in lines:
            directive = _DIRECTIVE.fullmatch(line.strip())
            if directive is None:
                break
            if directive[1].lower() == "escape":
                if directive[2] not in ("\\", "`"):
                    raise self._error(f"the escape character cannot be {directive[2]}", "it is `\\` or a backquote")
                self._escape = directive[2]
        begun = 0
        parts: list[str] = []
        for number, line in enumerate(lines, 1):
            if line.lstrip().startswith("#") or not line.strip():
                continue
            begun = begun if parts else number
            whole = line.rstrip()
            goes_on = whole.endswith(self._escape) and not whole.endswith(2 * self._escape)  # two are one, escaped
            parts.append(whole.removesuffix(self._escape) if goes_on else whole)
            if not goes_on:
                yield self._read("".join(parts), begun)
                parts = []
        if parts:
            yield self._read("".join(parts), begun)

    def _read(self, line: str, number: int) -> _Line:
        found = _INSTRUCTION.fullmatch(line)
        self._line = _Line(number, "", "")
        if found is None:
            raise self._error(
                f"{line.strip()[:40]!r} is no instruction", "is a `\\` missing at the end of the line above?"
            )
        return _Line(number, found[1].upper(), found[2] or "")

    def _instruction(self, line: _Line) -> None:
        known: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": partial(self._pairs, "env"),
            "LABEL": partial(self._pairs, "labels"),
            "WORKDIR": self._workdir,
            "USER": self._user,
            "CMD": self._cmd,
            "ENTRYPOINT": self._entrypoint,
            "SHELL": self._set_shell,
        }
        if line.word in _REFUSED:
            raise self._error(f"{line.word} is not supported", _REFUSED[line.word])
        if line.word not in known:
            error = unknown("instruction", line.word, line.word, known)
            raise self._error(error.message, error.hint)
        if not line.rest:
            raise self._error(f"{line.word} says nothing", f"write what it is about after it, or leave {line.word} out")
        if not self.base and line.word not in ("FROM", "ARG"):
            raise self._error(f"{line.word} stands before FROM", "begin with the image to start from: `FROM host`")
        self._guessed = False
        known[line.word](line.rest)

    def _step(self, do: Run | Copy | Workdir | User | Configure) -> None:
        text = " ".join(f"{self._line.word} {self._line.rest}".split())
        self.steps.append(Step(f"{self._file}:{self._line.number}", text, do))

    # -- words ----------------------------------------------------------------------------------------------------

    def _words(self, text: str) -> list[str]:
        """Words as they are written, quotes and all."""
        words, word, quote, at = [], "", "", 0
        while at < len(text):
            letter = text[at]
            if letter == self._escape and quote != "'" and at + 1 < len(text):
                word += text[at : at + 2]
                at += 2
                continue
            if letter == quote:
                quote = ""
            elif not quote and letter in "'\"":
                quote = letter
            if letter.isspace() and not quote:
                words.append(word)
                word = ""
            else:
                word += letter
            at += 1
        return [each for each in (*words, word) if each]

    def _expanded(self, text: str, values: Mapping[str, str] | None = None) -> str:
        """A word without its quotes, its variables replaced."""
        values = {**self._args, **self._env} if values is None else values
        said, quote, at = "", "", 0
        while at < len(text):
            letter = text[at]
            at += 1
            if letter == quote:
                quote = ""
            elif not quote and letter in "'\"":
                quote = letter
            elif letter == self._escape and quote != "'" and at < len(text):
                kept = quote and text[at] not in f'"${self._escape}'
                said += (letter if kept else "") + text[at]
                at += 1
            elif letter == "$" and quote != "'":
                value, at = self._variable(text, at, values)
                said += value
            else:
                said += letter
        if quote:
            raise self._error(f"a {quote} is never closed", "close it on the same line")
        return said

    def _variable(self, text: str, at: int, values: Mapping[str, str]) -> tuple[str, int]:
        """The value of what follows a `$`, and where it ends."""
        braced = text[at : at + 1] == "{"
        name = _VARIABLE.match(text, at + braced)
        if name is None:
            if braced:
                raise self._error(f"{text[at - 1 :]!r} holds no name", "write `${NAME}`, or `\\$` for a dollar sign")
            return "$", at
        at = name.end()
        if not braced:
            return self._value(name[0], values), at
        depth, end = 1, at
        while end < len(text):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                break
            end += 1
        else:
            raise self._error(f"${{{name[0]} is never closed", "write `${NAME}`")
        form = re.fullmatch(r"(:?[-+])?(.*)", text[at:end], re.DOTALL)
        if form is None or (form[1] is None and form[2]):
            raise self._error(
                f"${{{text[at - len(name[0]) : end]}}} is not supported", "write `${NAME:-word}` or `${NAME:+word}`"
            )
        value = self._value(name[0], values)
        if form[1] is None:
            return value, end + 1
        there = bool(value) if form[1].startswith(":") else name[0] in values
        word = partial(self._expanded, form[2], values)
        if form[1].endswith("-"):
            return value if there else word(), end + 1
        return word() if there else "", end + 1

    def _value(self, name: str, values: Mapping[str, str]) -> str:
        self._guessed |= self._first and name not in self._known
        return values.get(name, "")

    def _list(self, text: str) -> tuple[str, ...] | None:
        """The words of the JSON form; None: it is not that."""
        if not text.startswith("["):
            return None
        try:
            found = json.loads(text)
        except ValueError:
            return None  # as Docker reads it: a shell's `[`
        if not all(isinstance(each, str) for each in found):
            raise self._error("the JSON form has something that is no text", 'write `["a", "1"]`')
        return tuple(found)

    def _flags(self, text: str) -> tuple[dict[str, str], str]:
        flags = {}
        while (found := _FLAG.match(text)) is not None:
            flags[found[1]] = self._expanded(found[2] or "")
            text = text[found.end() :]
        return flags, text

    def _no_flags(self, text: str) -> str:
        flags, rest = self._flags(text)
        for name in flags:
            raise self._error(f"--{name} of {self._line.word} is not supported", "leave it out")
        return rest

    def _no_here_document(self, text: str) -> None:
        if _HERE.search(text):
            raise self._error("here-documents are not supported", "put the text into a file beside it, and COPY that")

    # -- instructions ---------------------------------------------------------------------------------------------

    def _from(self, text: str) -> None:
        if self.base:
            raise self._error(
                "a second FROM: builds of several stages are not supported",
                "build each stage from a file of its own; the next one may start FROM its name",
            )
        words = [self._expanded(word, self._before) for word in self._words(self._no_flags(text))]
        if len(words) != 1 and not (len(words) == 3 and words[1].lower() == "as"):
            raise self._error("FROM takes the name of one image", "write `FROM host`")
        if words[0] in ("", "scratch"):
            raise self._error(
                f"there is no image {words[0]!r} to start from", "`sandlot image list` shows those there are"
            )
        self.base, self._args = words[0], {}
        self.where = f"{self._file}:{self._line.number}"

    def _arg(self, text: str) -> None:
        values = {**self._args, **self._env} if self.base else self._before
        for word in self._words(text):
            name, equals, default = word.partition("=")
            if not _NAME.fullmatch(name):
                raise self._error(f"{name!r} is no name of an argument", "write `ARG NAME` or `ARG NAME=default`")
            self._declared.add(name)
            value = self._given.get(name)
            if value is None:
                value = self._expanded(default, values) if equals else self._before.get(name)
            if value is not None:
                (self._args if self.base else self._before)[name] = value

    def _run(self, text: str) -> None:
        text = self._no_flags(text)
        self._no_here_document(text)
        self._step(Run(self._list(text) or (*self._shell, text), dict(self._args)))

    def _copy(self, text: str) -> None:
        flags, text = self._flags(text)
        for name in flags:
            if name == "from":
                raise self._error(
                    "--from is not supported: there is one stage", "COPY from the context, or start FROM that image"
                )
            if name not in ("chown", "chmod"):
                raise self._error(f"--{name} of {self._line.word} is not supported", "leave it out")
        self._no_here_document(text)
        words = [self._expanded(word) for word in self._list(text) or self._words(text)]
        if len(words) < 2:
            raise self._error(f"{self._line.word} takes sources and a target", "write `COPY src/ /srv/`")
        if self._guessed:
            return
        *sources, target = words
        if len(sources) > 1 and not target.endswith(("/", "/.")) and target != ".":
            raise self._error(f"{len(sources)} sources go into a directory", f"write `{target}/`")
        for source in sources if self._line.word == "ADD" else ():
            if _URL.match(source):
                raise self._error(
                    f"ADD of {source} is not supported", "RUN a program that loads it, with `--network host`"
                )
            if _ARCHIVE.fullmatch(source):
                raise self._error(*no_archive(source))
        chmod = flags.get("chmod")
        if chmod is not None and not _MODE.fullmatch(chmod):
            raise self._error(f"--chmod={chmod} is not a mode", "write it in octal digits: `--chmod=755`")
        mode = None if chmod is None else int(chmod, 8)
        self._step(Copy(tuple(sources), target, flags.get("chown"), mode, add=self._line.word == "ADD"))

    def _pairs(self, which: str, text: str) -> None:
        words = self._words(text)
        if "=" in words[0]:
            found = dict(map(self._pair, words))
        elif len(words) > 1:  # the form of old: one name, and the rest of the line
            found = {self._expanded(words[0]): self._expanded(text[len(words[0]) :].strip())}
        else:
            raise self._error(f"{words[0]} has no value", f"write `{self._line.word} {words[0]}=…`")
        if which == "env":
            self._env |= found
            self._known = self._known - found.keys() if self._guessed else self._known | found.keys()
            self._step(Configure(env=found))
        else:
            self._step(Configure(labels=found))

    def _pair(self, word: str) -> tuple[str, str]:
        name, equals, value = word.partition("=")
        name = self._expanded(name)
        if not equals or not (name or self._guessed):
            raise self._error(f"{word!r} is not of the form NAME=VALUE", "a value with blanks wants quotes")
        return name, self._expanded(value)

    def _workdir(self, text: str) -> None:
        path = self._expanded(text)
        if not path and not self._guessed:
            raise self._error(f"{text} names no directory", "write `WORKDIR /srv`; are the variables in it set?")
        self._step(Workdir(path))

    def _user(self, text: str) -> None:
        self._step(User(self._expanded(text)))

    def _cmd(self, text: str) -> None:
        self._has_cmd = True
        self._step(Configure(cmd=self._command(text)))

    def _entrypoint(self, text: str) -> None:
        # What the base image says as CMD are words for an entrypoint that is not there any more.
        self._step(Configure(entrypoint=self._command(text), cmd=None if self._has_cmd else ()))

    def _command(self, text: str) -> tuple[str, ...]:
        listed = self._list(text)
        return (*self._shell, text) if listed is None else listed

    def _set_shell(self, text: str) -> None:
        listed = self._list(text)
        if not listed:
            raise self._error("SHELL is not in the JSON form", 'write `SHELL ["/bin/bash", "-c"]`')
        self._shell = listed
        self._step(Configure(shell=listed))

"""A small `sh` for boxes in memory: what `run("some text")` and `Sandbox.shell` start on a fake driver.

It runs commands one after another (newline, `;`, `&&`, `||`), with quotes, `$name`, `$?`, assignments, the redirections
`<`, `>`, `>>`, `2>` and `>&`, and `: . cd eval exec exit export printf pwd read set trap unset`; other commands are the
driver's programs. It promises to say so, with status 2, where a text wants more than that: pipes, jobs, `if`, loops,
functions, here-documents, `$( )`, `$1`, `~`, globs, options, traps. Nothing more of that text is run. It never starts a
process, and has no terminal: an interrupt ends it.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sandlot.drivers.base import Spawn

if TYPE_CHECKING:
    from sandlot.drivers.fake import Context

# What other shells would do something with, and this one does not.
_UNKNOWN_WORDS = {
    *("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac"),
    *("function", "select", "time", "{", "}", "!", "[["),
}
_LOOP = re.compile(r'while IFS= read -r (\w+) <(\S+); do eval "\$\1"; done')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


class _Unknown(Exception):
    """The text wants what this shell has not."""


class _Exit(Exception):
    """Of the shell."""


@dataclass(slots=True)
class _Word:
    """Its parts: text, and names whose values are put in their place; what is quoted is not split at blanks."""

    parts: list[tuple[str, bool, bool]] = field(default_factory=list)  # text, is it a name, is it quoted

    def plain(self) -> str:
        """Of a word without quotes and names, else ""."""
        return (
            "" if any(name or quoted for _, name, quoted in self.parts) else "".join(text for text, _, _ in self.parts)
        )


def _tokens(text: str) -> Iterator[_Word | str]:
    """Words, and operators as they are."""
    at, word = 0, None
    while at < len(text):
        letter = text[at]
        if letter in " \t\n;&|<>()#`" or text.startswith("$(", at):
            if letter == "#" and word is not None:
                word.parts.append(("#", False, False))
                at += 1
                continue
            fd = word.plain() if word is not None and letter in "<>" else ""
            if fd.isdigit() and fd not in ("0", "1", "2"):
                raise _Unknown(f"descriptor {fd}")
            if word is not None and fd not in ("0", "1", "2"):
                yield word
            word = None
            if letter in " \t":
                at += 1
            elif letter == "#":
                at = text.find("\n", at) if "\n" in text[at:] else len(text)
            elif found := re.compile(r"&&|\|\||>>|>&|[;\n<>]").match(text, at):
                if found.group() == "<" and text.startswith("<<", at):
                    raise _Unknown("<<")
                yield (fd if fd in ("0", "1", "2") else "") + found.group()
                at = found.end()
            else:
                raise _Unknown(letter)
            continue
        word = word or _Word()
        if letter == "\\":
            if text[at + 1 : at + 2] != "\n":
                word.parts.append((text[at + 1 : at + 2], False, True))
            at += 2
        elif letter == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise _Unknown("a quote that never closes")
            word.parts.append((text[at + 1 : end], False, True))
            at = end + 1
        elif letter == '"':
            at = _quoted(text, at + 1, word)
        elif letter == "$":
            at = _name(text, at, word, quoted=False)
        elif letter in "*?[" or (letter == "~" and word.parts[-1:] in ([], [("=", False, False)])):
            raise _Unknown(letter)
        else:
            word.parts.append((letter, False, False))
            at += 1
    if word is not None:
        yield word


def _quoted(text: str, at: int, word: _Word) -> int:
    word.parts.append(("", False, True))
    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and text[at + 1 : at + 2] in ("$", '"', "\\", "`"):
            word.parts.append((text[at + 1], False, True))
            at += 2
        elif text[at] == "$":
            at = _name(text, at, word, quoted=True)
        elif text[at] == "`":
            raise _Unknown("`")
        else:
            word.parts.append((text[at], False, True))
            at += 1
    if at >= len(text):
        raise _Unknown("a quote that never closes")
    return at + 1


def _name(text: str, at: int, word: _Word, *, quoted: bool) -> int:
    found = re.compile(r"\$(\?|\$|[A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\}").match(text, at)
    if found is None:
        if text[at + 1 : at + 2] in ("(", "{"):
            raise _Unknown(text[at : at + 2])
        if re.match(r"[0-9@#*!-]", text[at + 1 :]):
            raise _Unknown(text[at : at + 2])
        word.parts.append(("$", False, quoted))
        return at + 1
    word.parts.append((found.group(1) or found.group(2), True, quoted))
    return found.end()


class _Shell:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.variables = dict(context.env)
        self.exported = set(context.env)
        self.cwd = context.cwd
        self.status = 0
        self.fds = [os.dup(fd) for fd in (context.stdin, context.stdout, context.stderr)]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    async def say(self, fd: int, text: str) -> None:
        out = replace(self.context, stdout=fd)
        await out.write(text.encode(errors="surrogateescape"))

    async def run(self, text: str) -> None:
        """All of it. Raises _Exit."""
        loop = _LOOP.fullmatch(text.strip().rpartition("\n")[2])
        if loop is not None:  # how a shell that is told what to do goes on
            await self.run(text.strip().rpartition("\n")[0])
            while await self._read([loop.group(1)], loop.group(2)):
                await self.run(self.variables[loop.group(1)])
            return
        try:
            commands = list(_commands(list(_tokens(text))))
        except _Unknown as error:
            self.status = 2
            await self.say(self.fds[2], f"sh: a fake box has no {error}\n")
            return
        for joint, words, redirections in commands:
            if (joint == "&&" and self.status) or (joint == "||" and not self.status):
                continue
            try:
                await self._command(words, redirections)
            except _Unknown as error:
                self.status = 2
                await self.say(self.fds[2], f"sh: a fake box has no {error}\n")
                return
            except OSError as error:
                self.status = 1
                await self.say(self.fds[2], f"sh: {error.filename or ''}: {error.strerror}\n")

    async def _command(self, words: list[_Word], redirections: list[tuple[str, _Word]]) -> None:
        assigned: dict[str, str] = {}
        while words and (found := re.match(r"([A-Za-z_]\w*)=", _leading(words[0]))):
            rest = _Word(list(words[0].parts))
            _cut(rest, found.end())
            assigned[found.group(1)] = "".join(value for value, _ in self._values(rest))
            words = words[1:]
        argv = [argument for word in words for argument in self._expanded(word)]
        fds = list(self.fds)
        opened: list[int] = []
        try:
            for operator, word in redirections:
                await self._redirect(operator, "".join(value for value, _ in self._values(word)), fds, opened)
            if argv[:1] == ["exec"] and len(argv) == 1:
                kept = [os.dup(fd) for fd in fds]
                self.close()
                self.fds = kept
                self.status = 0
            elif not argv:
                self.variables |= assigned
                self.status = 0
            else:
                self.status = await self._call(argv, assigned, fds)
        finally:
            for fd in opened:
                os.close(fd)

    async def _redirect(self, operator: str, target: str, fds: list[int], opened: list[int]) -> None:
        number = int(operator[0]) if operator[0].isdigit() else (0 if "<" in operator else 1)
        kind = operator.lstrip("012")
        if kind == ">&":
            if target not in ("0", "1", "2"):
                raise _Unknown(f"`>&{target}`")
            fds[number] = fds[int(target)]
            return
        flags = {
            "<": os.O_RDONLY,
            ">": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
            ">>": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        }
        path = posixpath.join(self.cwd, target)
        fd = await self.context.box.open(path, flags[kind] | os.O_NONBLOCK, user=self.context.user)
        opened.append(fd)
        fds[number] = fd

    async def _call(self, argv: list[str], assigned: dict[str, str], fds: list[int]) -> int:
        match argv:
            case [":", *_] | ["trap", ":", *_]:
                return 0
            case ["set" | "trap", *_]:
                raise _Unknown(f"`{' '.join(argv[:2])}`")
            case ["export" | "unset" | "printf", option, *_] if option.startswith("-"):
                raise _Unknown(f"`{argv[0]} {option}`")
            case ["cd", *where]:
                return await self._cd(where[0] if where else self.variables.get("HOME", "/"), fds[2])
            case ["pwd"]:
                await self.say(fds[1], self.cwd + "\n")
                return 0
            case ["exit", *code]:
                if code and not re.fullmatch(r"[0-9]{1,9}", code[0]):
                    self.status = 2
                    await self.say(fds[2], f"sh: exit: {code[0]} is no number\n")
                elif code:
                    self.status = int(code[0]) & 255
                raise _Exit
            case ["eval", *words]:
                await self._within(" ".join(words), fds)
                return self.status
            case [".", path]:
                await self._within(await self._file(path), fds)
                return self.status
            case ["export", *names]:
                for each in names:
                    name, equals, value = each.partition("=")
                    self.variables |= {name: value} if equals else {}
                    self.exported.add(name)
                return 0
            case ["unset", *names]:
                for name in names:
                    self.variables.pop(name, None)
                return 0
            case ["read", *names]:
                names = names[names[:1] == ["-r"] :]
                if names[:1] and names[0].startswith("-"):
                    raise _Unknown(f"`read {names[0]}`")
                line = await _line(replace(self.context, stdin=fds[0]))
                self._take(line, names)
                return 0 if line.endswith("\n") else 1
            case ["printf", form, *words]:
                await self.say(fds[1], _formatted(form, words))
                return 0
            case ["exec", *command]:
                self.status = await self._program(command, assigned, fds)
                raise _Exit
        return await self._program(argv, assigned, fds)

    async def _within(self, text: str, fds: list[int]) -> None:
        """In this shell, with other descriptors meanwhile, unless it opens some for good."""
        if fds == self.fds:
            await self.run(text)
            return
        before, self.fds = self.fds, [os.dup(fd) for fd in fds]
        try:
            await self.run(text)
        finally:
            self.close()
            self.fds = before

    async def _program(self, argv: list[str], assigned: dict[str, str], fds: list[int]) -> int:
        env = {name: value for name, value in self.variables.items() if name in self.exported} | assigned
        what = Spawn(tuple(argv), env, self.cwd, self.context.user)
        process = await self.context.box.spawn(what, fds[0], fds[1], fds[2])
        try:
            ended = await process.wait()
        except BaseException:
            await process.kill_tree()
            raise
        if ended.error is not None:
            await self.say(fds[2], f"sh: {argv[0]}: {os.strerror(ended.error)}\n")
            return 127
        return ended.code if ended.code is not None else 128 + (ended.signal or 0)

    async def _cd(self, where: str, err: int) -> int:
        path = posixpath.normpath(posixpath.join(self.cwd, where))
        try:
            os.close(await self.context.box.open(path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            await self.say(err, f"sh: cd: {where}: {error.strerror}\n")
            return 1
        self.cwd = self.variables["PWD"] = path
        return 0

    async def _file(self, path: str) -> str:
        fd = await self.context.box.open(posixpath.join(self.cwd, path), os.O_RDONLY)
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="surrogateescape")
        finally:
            os.close(fd)

    async def _read(self, names: list[str], path: str) -> bool:
        fd = await self.context.box.open(posixpath.join(self.cwd, path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            line = await _line(replace(self.context, stdin=fd))
        finally:
            os.close(fd)
        self._take(line, names)
        return line.endswith("\n")

    def _take(self, line: str, names: list[str]) -> None:
        words = [line.rstrip("\n")] if len(names) == 1 else line.split(None, max(0, len(names) - 1))
        for number, name in enumerate(names):
            self.variables[name] = words[number].rstrip("\n") if number < len(words) else ""

    def _values(self, word: _Word) -> Iterator[tuple[str, bool]]:
        own = {"?": str(self.status), "$": "2", "PWD": self.cwd}
        for text, is_name, quoted in word.parts:
            yield (own.get(text, self.variables.get(text, "")) if is_name else text), quoted or not is_name

    def _expanded(self, word: _Word) -> list[str]:
        """One argument, or what a value without quotes is split into."""
        found, some = [""], any(quoted for _, _, quoted in word.parts)
        for value, whole in self._values(word):
            if whole:
                found[-1] += value
                continue
            pieces = re.split(r"[ \t\n]+", value)
            found[-1] += pieces[0]
            found += pieces[1:]
        return found if some else [argument for argument in found if argument]


def _commands(tokens: list[_Word | str]) -> Iterator[tuple[str, list[_Word], list[tuple[str, _Word]]]]:
    """What joins it to the one before, its words, its redirections."""
    words: list[_Word] = []
    redirections: list[tuple[str, _Word]] = []
    joint, at = ";", 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if isinstance(token, _Word):
            if not words and token.plain() in _UNKNOWN_WORDS:
                raise _Unknown(f"`{token.plain()}`")
            words.append(token)
        elif token in ("\n", ";", "&&", "||"):
            if words or redirections:
                yield joint, words, redirections
            elif token != "\n":
                raise _Unknown(f"`{token}` there")
            joint, words, redirections = token, [], []
        else:
            target = tokens[at] if at < len(tokens) else "\n"
            at += 1
            if isinstance(target, str):
                raise _Unknown(f"`{token}` without a file")
            redirections.append((token, target))
    if words or redirections:
        yield joint, words, redirections


def _leading(word: _Word) -> str:
    """What it begins with that is neither quoted nor a name."""
    text = ""
    for part, is_name, quoted in word.parts:
        if is_name or quoted:
            break
        text += part
    return text


def _cut(word: _Word, size: int) -> None:
    """Take so many letters, each a part of its own, off its beginning."""
    del word.parts[:size]


def _formatted(form: str, words: list[str]) -> str:
    """The form again and again, until no word is left."""

    def one(match: re.Match[str]) -> str:
        found = match.group()
        if found == "%s":
            return words.pop(0) if words else ""
        if found.startswith("%"):
            if found != "%%":
                raise _Unknown(f"`printf {found}`")
            return "%"
        if found[1:] not in _ESCAPES and found[1:].isalnum():
            raise _Unknown(f"`printf {found}`")
        return _ESCAPES.get(found[1:], found)

    text, before = "", len(words) + 1
    while len(words) < before and (words or not text):
        before = len(words)
        text += re.sub(r"%.?|\\0[0-7]|\\.", one, form)
    return text


async def _line(context: Context) -> str:
    """Byte by byte, for what follows is another's to read."""
    line = b""
    while not line.endswith(b"\n") and (byte := await context.read(1)):
        line += byte
    return line.decode(errors="surrogateescape")


async def sh(context: Context) -> int:
    """`sh -c TEXT`, `sh FILE`, or a text on standard input."""
    shell = _Shell(context)
    try:
        match context.argv[1:]:
            case ["-c", text, *_]:
                await shell.run(text)
            case [path]:
                await shell.run(await shell._file(path))
            case []:
                while line := await _line(context):
                    await shell.run(line)
            case _:
                await shell.say(context.stderr, "sh: a fake box runs `sh -c TEXT` and `sh FILE`\n")
                shell.status = 2
    except _Exit:
        pass
    except OSError as error:
        with suppress(BrokenPipeError):
            await shell.say(context.stderr, f"sh: {error.strerror}\n")
        return 127
    finally:
        shell.close()
    return shell.status

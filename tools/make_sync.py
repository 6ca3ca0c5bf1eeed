"""Write src/sandlot/sync.py, the blocking twin of sandbox.py. `--check` says whether it is up to date instead.

Read from the syntax trees of `Sandbox`, `Command`, `Shell` and `Terminal`: each public method becomes one that waits
for the original on a loop in a background thread, with the same signature and docstring. Nothing is kept by hand.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src/sandlot/sandbox.py"
TARGET = SOURCE.with_name("sync.py")

HEAD = '''"""The blocking twin of sandbox.py: the same calls without `async`. Written by tools/make_sync.py only.

All SyncSandboxes of a process share one event loop in one background thread, which is started by the first of them and
ends, with every sandbox that is still open, when the interpreter exits. Calls may come from any thread. A process that
forks starts anew in the child: sandboxes made before belong to the parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from sandlot.api import (
    EVERY,
    REPLAY,
    Change,
    Chunk,
    CommandInfo,
    FileEvent,
    FileInfo,
    FilesFound,
    ImageInfo,
    Info,
    Limits,
    NodeAPI,
    Profile,
    Progress,
    RunResult,
    ShellOutput,
    ShellResult,
    State,
    Stats,
    Target,
    TerminalEnd,
    TerminalInfo,
    TextFound,
    Volume,
)
from sandlot.errors import SandlotError
from sandlot.sandbox import Command, Sandbox, Shell, Terminal

T = TypeVar("T")

# Seconds that ending the sandboxes which are still open may take when the interpreter exits.
_EXIT_SECONDS = 30.0


class _Background:
    """The thread and its loop; both None until they are needed."""

    lock = threading.Lock()
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop:
        with cls.lock:
            if cls.loop is None:
                cls.loop = asyncio.new_event_loop()
                cls.thread = threading.Thread(target=cls.loop.run_forever, name="sandlot", daemon=True)
                cls.thread.start()
            return cls.loop

    @classmethod
    def stop(cls) -> None:
        if cls.loop is None or cls.thread is None:
            return
        asyncio.run_coroutine_threadsafe(cls.loop.shutdown_asyncgens(), cls.loop).result(_EXIT_SECONDS)
        cls.loop.call_soon_threadsafe(cls.loop.stop)
        cls.thread.join(_EXIT_SECONDS)
        cls.loop.close()
        cls.forget()

    @classmethod
    def forget(cls) -> None:
        cls.lock = threading.Lock()
        cls.loop = cls.thread = None


atexit.register(_Background.stop)
os.register_at_fork(after_in_child=_Background.forget)


def _wait(work: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(work, _Background.running())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C while waiting: the work is given up too
        raise


_END = object()


def _iterate(items: AsyncIterator[T]) -> Iterator[T]:
    async def following() -> Any:
        return await anext(items, _END)

    async def close() -> None:
        await items.aclose()  # type: ignore[attr-defined]

    try:
        while (item := _wait(following())) is not _END:
            yield item
    finally:
        _wait(close())


class SyncSandbox:
    """One isolated Linux box: `with SyncSandbox.create() as box: print(box.run("uname").stdout)`."""

    def __init__(self, inner: Sandbox) -> None:
        """Use `create`."""
        self._inner = inner
        self.id = inner.id
        self.losses = inner.losses

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
'''

COMMAND = '''

class SyncCommand:
    """A command that runs in a sandbox by itself."""

    def __init__(self, inner: Command) -> None:
        """Use `SyncSandbox.start`."""
        self._inner = inner
        self.id = inner.id
'''

SHELL = '''

class SyncShell:
    """A bash in a sandbox, which keeps its directory, variables, functions, options and jobs."""

    def __init__(self, inner: Shell) -> None:
        """Use `SyncSandbox.shell`."""
        self._inner = inner
        self.id = inner.id
        self.lacks = inner.lacks

    def __enter__(self) -> SyncShell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
'''

TERMINAL = '''

class SyncTerminal:
    """A program on a terminal in a sandbox, which sees what is written here as typed."""

    def __init__(self, inner: Terminal) -> None:
        """Use `SyncSandbox.terminal`."""
        self._inner = inner
        self.id = inner.id

    @property
    def end(self) -> TerminalEnd | None:
        """Why no more comes, once all was read."""
        return self._inner.end

    def __enter__(self) -> SyncTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
'''


def twin(method: ast.AsyncFunctionDef, source: list[str]) -> str:
    """The blocking form of one method, as source text."""
    is_class = bool(method.decorator_list)
    positional = [argument.arg for argument in method.args.args[1:]]
    named = [f"{argument.arg}={argument.arg}" for argument in method.args.kwonlyargs]
    named += [f"**{argument.arg}" for argument in (method.args.kwarg,) if argument]
    passed = "".join(f"                {argument},\n" for argument in positional + named)
    call = f"{'Sandbox' if is_class else 'self._inner'}.{method.name}(" + (
        f"\n{passed}            )" if passed else ")"
    )
    docstring = method.body[0]
    head = source[method.lineno - 1 : docstring.end_lineno]  # signature and docstring, as they are written
    head[0] = head[0].replace("async def", "def")
    returns = ast.unparse(method.returns) if method.returns else "None"
    waited = f"_wait(\n            {call}\n        )"
    if returns == "Sandbox":
        waited = f"cls({waited})"
        head = [line.replace("-> Sandbox:", "-> SyncSandbox:") for line in head]
    if returns == "list[Sandbox]":
        waited = f"[SyncSandbox(each) for each in {waited}]"
        head = [line.replace("-> list[Sandbox]:", "-> list[SyncSandbox]:") for line in head]
    if returns == "list[Sandbox | SandlotError]":
        waited = f"[SyncSandbox(each) if isinstance(each, Sandbox) else each for each in {waited}]"
        head = [line.replace("-> list[Sandbox |", "-> list[SyncSandbox |") for line in head]
    if returns in ("Shell", "Command", "Terminal"):
        waited = f"Sync{returns}({waited})"
        head = [line.replace(f"-> {returns}:", f"-> Sync{returns}:") for line in head]
    if returns.startswith("AsyncIterator["):
        head = [line.replace("-> AsyncIterator[", "-> Iterator[") for line in head]
        return "\n".join([*head, f"        yield from _iterate(\n            {call}\n        )"])
    lines = ["    @classmethod"] if is_class else []
    return "\n".join([*lines, *head, f"        {'' if returns == 'None' else 'return '}{waited}"])


def generated() -> str:
    text = SOURCE.read_text()
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = []
    for head, name in ((HEAD, "Sandbox"), (COMMAND, "Command"), (SHELL, "Shell"), (TERMINAL, "Terminal")):
        methods = [
            node for node in classes[name].body if isinstance(node, ast.AsyncFunctionDef) and node.name[0] != "_"
        ]
        parts += [head, *(f"\n{twin(method, text.splitlines())}\n" for method in methods)]
    return "".join(parts)


def main() -> int:
    text = generated()
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text() == text:
            return 0
        print("error: src/sandlot/sync.py is not what it is generated to be\n", file=sys.stderr)
        print("hint: `python tools/make_sync.py`", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

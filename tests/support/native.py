"""Real boxes for tests of the native driver: what makes them, and a way to run a command without a node."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from sandlot.api import SandboxSpec
from sandlot.drivers.base import Exit, Spawn
from sandlot.drivers.images import interpreter_prefix
from sandlot.drivers.native.box import NativeBox
from sandlot.drivers.native.driver import NativeDriver

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
PYTHON = f"{interpreter_prefix()}/bin/python3"


@dataclass
class Boxes:
    """Makes boxes that end with the test."""

    driver: NativeDriver
    made: list[NativeBox] = field(default_factory=list)
    count: int = 0

    async def __call__(self, spec: SandboxSpec | None = None, named: frozenset[str] = frozenset()) -> NativeBox:
        self.count += 1
        box = await self.driver.create(f"box-{self.count}", spec or SandboxSpec(), named)
        self.made.append(box)
        return box


Result = tuple[Exit, str]


async def sh(box: NativeBox, *argv: str, user: int = 0, seconds: float = 20) -> Result:
    """Run argv (or one shell text) in the box: how it ended, and what it wrote."""
    if len(argv) == 1:
        argv = ("sh", "-c", argv[0])
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        process = await box.spawn(Spawn(argv, ENV, "/root" if user == 0 else "/", user), null, write, write)
    finally:
        os.close(null)
        os.close(write)
    reading = asyncio.create_task(asyncio.to_thread(read_all, read))
    try:
        async with asyncio.timeout(seconds):
            ended = await process.wait()
    finally:
        await process.kill_tree()
        output = await reading
        await process.release()
    return ended, output.decode(errors="replace")


async def first_line(box: NativeBox, *argv: str) -> str:
    """Run argv until it has written a line, then kill it with all its descendants and wait until it is gone."""
    read, write = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    process = await box.spawn(Spawn(argv, ENV, "/"), null, write, write)
    os.close(null)
    os.close(write)
    with os.fdopen(read) as output:
        line = await asyncio.to_thread(output.readline)
        await process.kill_tree()
        await asyncio.to_thread(output.read)  # the end of the pipe: nobody holds it any more
    await process.wait()
    await process.release()
    return line


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


async def python(box: NativeBox, program: str, *arguments: str, user: int = 0) -> Result:
    """Run a Python program in the box."""
    return await sh(box, PYTHON, "-I", "-S", "-c", program, *arguments, user=user)

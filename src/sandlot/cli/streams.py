"""The standard streams of this program, read and written while its event loop goes on.

It promises that neither waiting for a person to type nor for a slow reader holds up the loop, so that a Ctrl-C is
always heard, and that no thread is left waiting in a read when the program wants to end. It never makes a descriptor
non-blocking: that would be so for every program that shares the terminal.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import AsyncIterator, Callable
from typing import Any

from sandlot.errors import HostFault, InvalidRequest

# A write of so many bytes to a pipe that is ready never waits (PIPE_BUF).
_SURE = 4096
_PIECE = 1 << 18


async def pieces(fd: int = 0) -> AsyncIterator[bytes]:
    """What can be read there, as it comes. Raises InvalidRequest."""
    loop = asyncio.get_running_loop()
    while True:
        await _until(fd, select.POLLIN, loop.add_reader, loop.remove_reader)
        try:
            piece = os.read(fd, _PIECE)
        except BlockingIOError:  # somebody else was faster
            continue
        except OSError as error:  # a directory, perhaps
            raise InvalidRequest(f"standard input cannot be read: {error.strerror}") from None
        if not piece:
            return
        yield piece


async def write(fd: int, data: bytes) -> None:
    """All of it. Raises BrokenPipeError (nobody reads there any more), HostFault."""
    loop = asyncio.get_running_loop()
    left = memoryview(data)
    size = len(data) if stat.S_ISREG(os.fstat(fd).st_mode) else _SURE
    while left:
        await _until(fd, select.POLLOUT, loop.add_writer, loop.remove_writer)
        try:
            left = left[os.write(fd, left[:size]) :]
        except BlockingIOError:  # somebody made it so, and it has less room than that
            size = max(1, size // 2)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise HostFault(f"the output could not be written: {error.strerror}") from None


async def _until(fd: int, event: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    """Returns when that would not wait."""
    now = select.poll()
    now.register(fd, event)
    if now.poll(0):
        return
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)

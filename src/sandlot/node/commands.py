"""Commands in a box, from their first descriptor to their result.

Owns the streams of each while it runs. It promises that the memory of one is bounded by its output cap, that at its
timeout, and when its caller is cancelled, the whole tree is dead before anybody is told, and that what it needs to end
well in another node is held by the box. It never decides which sandbox, or who may wait: that is `node.py`.

    Commands.run        waits for: the start (the driver), then as complete
    Commands.complete   waits for: the process's exit (the driver), or the run's timeout
      its output        moved to its log as it comes by the loop's readiness callbacks, no task, no thread
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from sandlot.aio import deadline, shielded
from sandlot.api import Run, RunResult
from sandlot.drivers.base import Exit, Hold, Process, Spawn
from sandlot.errors import Conflict, HostFault
from sandlot.node import users
from sandlot.node.live import About, Command, Live, clock
from sandlot.node.streams import LEAST_LOSSLESS, Input, Stream, input_file

# Deadline in seconds of what a driver is asked on the way. It is far above what was ever measured (milliseconds): past
# it the host is in trouble, and the caller is better told than kept.
STEP_SECONDS = 30.0


def fingerprint(run: Run) -> str:
    """Tells two commands apart."""
    words = json.dumps((run.argv, run.env, run.cwd, run.user, run.stdin_open)).encode()
    return hashlib.sha256(words + run.stdin).hexdigest()[:16]


class Commands:
    """Runs commands in the boxes of a node."""

    def __init__(self, holds: bool, in_background: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`holds`: another node may come to complete what this one began. Raises OSError."""
        self._holds = holds
        self._in_background = in_background
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._null)

    async def drop(self, command: Command) -> None:
        """End a command whose result nobody can get any more."""
        try:
            await _kill(command.process)
            await command.process.release()
        finally:
            command.close()

    async def run(self, live: Live, run: Run, same: str = "") -> RunResult:
        """`same` is its fingerprint, where it has a key."""
        box = live.box
        user, cwd, env = live.place(run, await users.person(box, run.user))
        theirs: list[int] = []
        streams: list[Stream] = []
        outcome = -1
        feed: Input | None = None
        try:
            cap = live.spec.limits.output if run.output_cap is None else run.output_cap
            if run.lossless:
                cap = max(cap, LEAST_LOSSLESS)
            for _ in range(2):
                stream, end = Stream.new(cap)
                streams.append(stream)
                theirs.append(end)
                if run.lossless:
                    stream.wait_for_followers()
            out, err = streams
            stdin = self._null
            if run.stdin_open:
                feed = Input()
                stdin = feed.theirs
                theirs.append(stdin)
            elif run.stdin:
                stdin = input_file(run.stdin)
                theirs.append(stdin)
            words = (run.key, same, run.argv[0], cwd, clock(), run.timeout, cap)
            about = About(*words, dies_alone=run.kill_on_disconnect, lossless=run.lossless)
            hold = None
            if self._holds:
                held: tuple[int, ...] = (out.pipe, out.log, err.pipe, err.log)
                if run.key is not None:
                    outcome = os.memfd_create("sandlot-outcome", os.MFD_CLOEXEC)
                    held += (outcome,)
                hold = Hold(held, about.write())
            async with deadline(STEP_SECONDS, f"starting {run.argv[0]} in sandbox {live.id}"):
                process = await box.spawn(Spawn(run.argv, env, cwd, user), stdin, theirs[0], theirs[1], hold)
        except BaseException:
            for stream in streams:
                stream.close()
            if outcome >= 0:
                os.close(outcome)
            if feed is not None:
                feed.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        command = Command(box, process, out, err, about, outcome, feed)
        if run.key is not None:
            live.keyed.started(run.key, command)
        if feed is not None and run.stdin:
            self._in_background(_feed(feed, run.stdin))
        return await self.complete(live, command)

    async def complete(self, live: Live, command: Command) -> RunResult:
        """The result of a command that was started, here or by the node before this one."""
        try:
            if not command.is_over:
                await self._finish(live, command)
            out, err = command.out.output(), command.err.output()
            if command.about.key is None:
                await command.process.release()
        finally:
            command.close()
        # Every field is ours and right: validation would only cost time here.
        return RunResult.model_construct(out=out, err=err, **command.outcome)

    async def _finish(self, live: Live, command: Command) -> None:
        """Wait for its end: then its outcome is known, and all that it said is in its logs."""
        process, err, about = command.process, command.err, command.about
        left = None if about.timeout is None else max(0.0, about.started_at + about.timeout - clock())
        try:
            ended = await _wait(command, left)
        except BaseException:
            await shielded(process.release())
            raise
        if ended.signal is not None and command.box.death.done():
            if live.box is not command.box:
                raise Conflict(f"sandbox {live.id} was reset while {about.argv0} ran in it")
            raise HostFault(f"sandbox {live.id} ended while {about.argv0} ran in it")
        command.out.drain()
        err.drain()
        if ended.error is not None and not err.total:  # else the node before this one said it
            err.say(not_started(about.argv0, about.cwd, ended))
        command.learn(
            exit_code=exit_code(ended),
            signal=ended.signal,
            oom=ended.oom,
            seconds=clock() - about.started_at,
            cpu_seconds=ended.cpu_seconds,
        )


async def _wait(command: Command, timeout: float | None) -> Exit:
    """How it ended, or was ended: that is written down. On cancellation the whole tree is killed first."""
    process = command.process
    try:
        async with asyncio.timeout(timeout):
            return await process.wait()
    except TimeoutError:
        command.learn(timed_out=True)  # first: a node that comes after this one sees only that it was killed
        await _kill(process)
        return await process.wait()
    except asyncio.CancelledError:
        await shielded(_kill(process))
        raise


async def _kill(process: Process) -> None:
    async with deadline(STEP_SECONDS, "killing a command"):
        await process.kill_tree()
        await process.wait()


async def _feed(feed: Input, data: bytes) -> None:
    with suppress(BrokenPipeError):
        await feed.write(data)


def exit_code(ended: Exit) -> int:
    if ended.code is not None:
        return ended.code
    if ended.signal is not None:
        return 128 + ended.signal
    return 127 if ended.error == errno.ENOENT else 126


def not_started(program: str, cwd: str, ended: Exit) -> str:
    """Why, as a line for whoever waits for its output."""
    reason = os.strerror(ended.error or 0)
    if ended.error_step == "chdir":
        return f"sandlot: working directory {cwd}: {reason}\n"
    if ended.error == errno.ENOENT:
        return f"sandlot: {program}: command not found\n"
    if ended.error == errno.E2BIG:
        reason += (
            " (a word may have 128 KiB, all of them and the environment 2 MiB: use a file, standard input, a shell)"
        )
    return f"sandlot: {program}: cannot be executed: {reason}\n"

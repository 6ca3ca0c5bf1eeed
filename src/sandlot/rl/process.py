"""An object in a process of its own, called as if it were here.

Owns the child process, its channel and its end. Many calls may be in flight, each for at most `patience` seconds; an
error comes back as the SandlotError it was, anything else as a TrainingFault that names the part. When the child dies,
pending and later calls say so. When this process dies, however it dies, the channel closes, and the child ends when its
event loop next turns; only the making of its object holds that loop. A method that is a coroutine runs in it and is
cancelled when its call is; a plain one runs in the child's one worker thread and goes on to its end, for nobody then,
but does not hold up the end of the process.

Frames on the channel, a socket pair: 8 bytes of length, then a pickle. Both ends are the same installation and nothing
else can write to it.

    parent → child   (call id, what, name, args, kwargs)    what: "make" the object, "function", "method", "cancel"
    child  → parent  (call id, worked, value or error)   error: as on the wire of the HTTP API

A part on another host will be a Ray actor behind the same few methods.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import itertools
import os
import pickle
import signal
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sandlot.aio import deadline
from sandlot.config import locate
from sandlot.errors import DeadlineExceeded, HostFault, SandlotError, TrainingFault, from_wire

# glibc otherwise gives each large tensor's pages back to the kernel and faults them in again: 8-20 % of all CPU time.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",  # a part reads the folder it is given and asks nobody
}
PATIENCE_SECONDS = 600.0  # for one call, unless told otherwise: the largest step of a small model takes a few
CLOSE_SECONDS = 10.0  # for a child to end after its channel has closed; then it is killed


class Child:
    """A process that holds one object. `name` is what messages call it; its stderr goes to the file `log`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, patience: float) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._patience = patience
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._fault: TrainingFault | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]

    @classmethod
    async def start(
        cls, name: str, log: Path, threads: int = 1, preload: str = "", patience: float = PATIENCE_SECONDS
    ) -> Child:
        """Start the process; it imports the module `preload` while its parent does something else."""
        here, there = socket.socketpair()
        code = "import sys; from sandlot.rl.process import serve; serve(int(sys.argv[1]), sys.argv[2])"
        try:
            with there, log.open("ab") as stderr:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # a `queue.py` where the run was started is not the library's
                    "-c",
                    code,
                    str(there.fileno()),
                    preload,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=(there.fileno(),),
                    env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends its children in order
                )
            child = cls(name, process, log, patience)
            child._reader, child._writer = await asyncio.open_connection(sock=here)
        except BaseException:
            here.close()
            raise
        child._reading = asyncio.ensure_future(child._read())
        return child

    async def make(self, entry: str, *args: Any) -> Any:
        """Make the object that `entry` names (`module:Class`) there. What comes back has its methods, as awaitables."""
        await self._call("make", entry, args, {})
        return _Methods(self)

    async def function(self, entry: str, *args: Any, **kwargs: Any) -> Any:
        """Call a plain function (`module:name` or `/path/file.py:name`) there."""
        return await self._call("function", entry, args, kwargs)

    async def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object there."""
        return await self._call("method", name, args, kwargs)

    async def close(self) -> None:
        """End the process. Idempotent; when this returns it is gone."""
        if self._fault is None:
            self._fault = TrainingFault(f"the {self.name} process was closed")
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _call(self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fault is not None:
            raise self._fault
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self._writer.write(_frame((number, what, name, args, kwargs)))
            what_waits, hint = f"`{name}` in the {self.name} process", f"its last words are in {self._log}"
            async with deadline(self._patience, what_waits, f"raise `rollout.patience` if it is only slow; {hint}"):
                return await answer
        except (asyncio.CancelledError, DeadlineExceeded):
            if self._process.returncode is None:  # an answer that is on its way already makes it no difference
                self._writer.write(_frame((number, "cancel", "", (), {})))
            raise
        finally:
            self._pending.pop(number, None)

    async def _read(self) -> None:
        try:
            while True:
                number, worked, value = await _receive(self._reader)
                answer = self._pending.pop(number, None)
                if answer is None or answer.done():
                    continue  # its caller was cancelled
                if worked:
                    answer.set_result(value)
                else:
                    answer.set_exception(from_wire(value, 500))
        except (asyncio.IncompleteReadError, OSError):
            status = await self._process.wait()
        except Exception as error:  # the top of this task: an answer that cannot be unpickled here
            self._fault = TrainingFault(f"what the {self.name} process answers cannot be read: {error}")
            self._process.kill()
            status = await self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
        hint = f"its last words are in {self._log}"
        if status == -signal.SIGKILL:
            hint = f"the kernel kills so when memory runs out: see `dmesg`; {hint}"
        if self._fault is None:
            self._fault = TrainingFault(f"the {self.name} process died: {how}", hint)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._fault)
        self._pending.clear()


class _Methods:
    """Any method name, as a coroutine function that calls it in the child."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._child.method, name)


def _frame(value: Any) -> bytes:
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(8, "big") + body


async def _receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(size))


# --- the child -----------------------------------------------------------------------------------------------------


def serve(descriptor: int, preload: str) -> None:
    """What the child process does: answer its parent until the channel closes."""
    status = 1
    try:
        asyncio.run(_Server(socket.socket(fileno=descriptor)).run(preload))
        status = 0
    except BaseException:  # the top of the process: its log is where the parent points to
        traceback.print_exc()
    finally:
        # Whatever a library's threads still do: nobody waits for the result. A worker thread would hold the exit up.
        sys.stderr.flush()
        os._exit(status)


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._object: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, preload: str) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        if preload:
            self._worker.submit(locate, f"{preload}:__name__")
        while True:
            try:
                number, what, name, args, kwargs = await _receive(reader)
            except (asyncio.IncompleteReadError, OSError):
                return
            if what == "cancel":
                if task := self._tasks.get(number):
                    task.cancel()
            else:
                self._tasks[number] = asyncio.ensure_future(self._answer(number, what, name, args, kwargs))

    async def _answer(self, number: int, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            answer = _frame((number, True, await self._do(what, name, args, kwargs)))
        except asyncio.CancelledError:
            answer = _frame((number, False, TrainingFault("cancelled").to_wire()))
        except Exception as error:  # the top of a call: it is recorded here and raised at the caller
            answer = _frame((number, False, _as_sandlot(error, name).to_wire()))
        finally:
            del self._tasks[number]
        self._writer.write(answer)

    async def _do(self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if what == "method":
            call = getattr(self._object, name)
        else:
            call = await loop.run_in_executor(self._worker, locate, name)
        if inspect.iscoroutinefunction(call):
            return await call(*args, **kwargs)
        if what == "make":
            # In the loop's own thread: the object may start tasks. Nothing else is being answered yet.
            self._object = call(*args, **kwargs)
            return None
        return await loop.run_in_executor(self._worker, partial(call, *args, **kwargs))


def _as_sandlot(error: Exception, name: str) -> SandlotError:
    if isinstance(error, SandlotError):
        return error
    traceback.print_exc()
    hint = "free some space or descriptors, then `--resume` the run"
    if isinstance(error, OSError) and error.errno is not None:
        where = f" ({error.filename})" if error.filename else ""
        return HostFault(f"{name}: {error.strerror}{where}", hint)
    if os.strerror(errno.ENOSPC) in str(error):  # safetensors tells the kernel's word as text only
        return HostFault(f"{name}: {error}", hint)
    return TrainingFault(f"{name}: {type(error).__name__}: {error}")

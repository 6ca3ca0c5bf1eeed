"""Sandlot's sandboxes in Inspect (`pip install inspect-ai`): `sandbox="sandlot"` in a task.

It owns the sandboxes of each sample, from `sample_init` to `sample_cleanup`. They live on the server that SANDLOT_URL
names (with the key in SANDLOT_API_KEY), else in the process of the eval. It promises that a sandbox which a sample was
given is ended with it, also after an error and ^C, and that the server ends it when not even that can be seen to; that
a command is run once, whatever becomes of it, and is dead with its whole tree at its timeout. Files are read and
written by commands of the sandbox's own user, who then may what its commands may.

Inspect loads this module by its entry point. Nothing else of sandlot knows it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import posixpath
import shlex
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, overload

import anyio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util import concurrency as at_once
from inspect_ai.util._subprocess import max_subprocesses_context_var
from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from typing_extensions import override

from sandlot.api import MOST_OUTPUT, Output, RunResult, SandboxSpec, User
from sandlot.errors import (
    Conflict,
    DeadlineExceeded,
    HostFault,
    InvalidRequest,
    NotFound,
    SandboxEnded,
    SandlotError,
    Unreachable,
    Unsupported,
    invalid,
)
from sandlot.sandbox import Command, Sandbox, open_node

logger = logging.getLogger(__name__)

# What the sandboxes of an eval are told apart by on a server: the task's name, the sample's, and its own.
_LABELS = ("inspect", "inspect.sample", "inspect.sandbox")

# Seconds without work after which a server ends a sandbox whose eval was killed, unless the task says otherwise. Longer
# than a model that is overloaded makes a sample wait.
_IDLE_SECONDS = 4 * 3600.0

# Bytes of standard input that go with a command; more is fed to it as it reads.
_INLINE_BYTES = 1 << 20

# A file is read in pieces of this size, in blocks of `dd`.
_BLOCK = 1 << 20
_PIECE = 32 * _BLOCK

# Seconds that reading or writing a file may take, a named pipe's too.
_FILE_SECONDS = 600.0

# An image's PATH may lead where the user of the sandbox writes; these commands are not the user's.
_SCRIPT = "PATH=/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\nunset CDPATH\n"
_WRITE = 'mkdir -p "${1%/*}/" && exec cat >"$1"'
_READ = 'if [ -d "$1" ]; then echo "$1: Is a directory" >&2; exit 1; fi\nexec <"$1"\n'
_HEAD = _READ + 'exec head -c "$2"'
_REST = _READ + f'exec dd bs={_BLOCK} skip="$2" count="$3" 2>/dev/null'
_MAKE = '[ -d "$1" ] || { mkdir -p "$1" && chown "$2" "$1"; }'

# What programs say of an errno, in small letters; the last three are words of `dash` and busybox.
_ERRNOS = {os.strerror(number).lower(): number for number in errno.errorcode} | {
    "no such file": errno.ENOENT,
    "directory nonexistent": errno.ENOENT,
    "nonexistent directory": errno.ENOENT,
}


class SandlotSandbox(SandboxSpec):
    """One sandbox of a sample: what a `SandboxSpec` says, and whose it is."""

    user: User | None = Field(
        default=None,
        description="who runs commands and owns files that name nobody, by number or name; None: the image's, else "
        "root. A `cwd` that is named and missing is made, and is this user's",
    )

    @model_serializer(mode="wrap")
    def _what_was_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A limit that is named means more than the same number by default, in a log that an eval is retried from too.
        fields: dict[str, Any] = {name: value for name, value in handler(self).items() if name in self.model_fields_set}
        if "limits" in fields:
            named = self.limits.model_fields_set
            fields["limits"] = {name: value for name, value in fields["limits"].items() if name in named}
        return fields

    def __hash__(self) -> int:  # Inspect keeps configs in sets; this one holds dictionaries
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))


class SandlotConfig(SandlotSandbox):
    """The sandboxes of a sample, as `SandboxEnvironmentSpec("sandlot", SandlotConfig(…))` or a file has them."""

    others: dict[str, SandlotSandbox] = Field(
        default_factory=dict, description="more sandboxes of the sample, by name: `sandbox(name)`"
    )


class CommandTimeout(TimeoutError):
    """A command was killed at its timeout. `truncated_output`, for which Inspect looks, is what it had said."""

    def __init__(self, message: str, truncated_output: str) -> None:
        super().__init__(message)
        self.truncated_output = truncated_output


@sandboxenv(name="sandlot")
class SandlotEnvironment(SandboxEnvironment):
    """One sandbox of one sample."""

    def __init__(self, box: Sandbox, url: str | None, user: int | str | None, directory: str) -> None:
        super().__init__()
        self._box = box
        self._url = url
        self._user = user
        self._directory = directory

    # Life.

    @override
    @classmethod
    def config_files(cls) -> list[str]:
        return ["sandlot.toml", "sandlot.yaml"]

    @override
    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return _checked(config)

    @override
    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """What no sample could run with is found out here, once: no server, no such image, a limit that the host cannot
        keep. Images are pulled meanwhile."""
        await _close(await cls.sample_init(task_name, config, {}))

    @override
    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: Mapping[str, Any]
    ) -> dict[str, SandboxEnvironment]:
        server = _server()
        read = _config(config)
        sample = str(metadata.get("__sample_id__", ""))
        made: dict[str, SandboxEnvironment] = {}
        try:
            for name, wanted in {"default": read, **read.others}.items():
                labels = dict(zip(_LABELS, (task_name, sample, name), strict=True))
                made[name] = await cls._make(wanted, labels, *server)
        except SandlotError as error:
            await _close(made)
            raise RuntimeError(_words(error)) from error  # Inspect shows an error's first line, and knows of no hint
        except BaseException:
            await _close(made)
            raise
        return made

    @classmethod
    async def _make(
        cls, wanted: SandlotSandbox, labels: dict[str, str], url: str | None, key: str | None
    ) -> SandlotEnvironment:
        fields = {name: getattr(wanted, name) for name in wanted.model_fields_set & set(SandboxSpec.model_fields)}
        fields["labels"] = {**labels, **wanted.labels}
        if url is not None and not {"idle_timeout", "lifetime"} & wanted.model_fields_set:
            fields["idle_timeout"] = _IDLE_SECONDS
        box = await Sandbox.create(**fields, url=url, api_key=key)
        environment = cls(box, url, wanted.user, "/")
        try:
            if wanted.cwd is not None:
                owner = "0" if wanted.user is None else str(wanted.user)
                _worked(await box.run(("/bin/sh", "-c", _MAKE, "sh", wanted.cwd, owner), user=0, cwd="/"))
            # Also: that user is there, and may work there. Inspect itself needs a shell.
            environment._directory = _worked(await box.run(("/bin/sh", "-c", "pwd"), user=wanted.user)).stdout[:-1]
        except BaseException:
            await _close({"": environment})
            raise
        return environment

    @override
    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        await _close(environments)

    @override
    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        url, _ = _server()
        if not cleanup and url is not None:
            print(f"The sandboxes of {url} are kept. End them with: inspect sandbox cleanup sandlot")

    @override
    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """End the sandboxes of evals on the server, or one of them."""
        url, key = _server()
        if url is None:
            print("Sandboxes of an eval without a server end with its process. SANDLOT_URL names no server.")
            return
        node = await open_node(url, key)
        try:
            ours = [info.id for info in await node.list() if _LABELS[0] in info.labels]
            if id is not None and id not in ours:
                raise RuntimeError(f"there is no sandbox {id} of an eval at {url}")
            for each in ours if id is None else [id]:
                await node.destroy(each)
                print(f"ended {each}")
        finally:
            await node.close()

    # Work.

    @override
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """As the base class says. Nothing is retried: at a timeout it is the command that took too long."""
        if any("\0" in word for word in cmd):
            raise ValueError("embedded null byte")  # in the words that Inspect tells a model of
        cap = min(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, MOST_OUTPUT)
        try:
            async with self._turn(concurrency):
                with _in_words_of_inspect():
                    result = await self._run(
                        cmd,
                        b"" if input is None else input.encode() if isinstance(input, str) else input,
                        cwd=self._path(cwd or ""),
                        env=env or {},
                        user=user or self._user,
                        timeout=timeout,
                        output_cap=cap,
                    )
        except InvalidRequest as error:  # nothing was started: there is no such user, for example
            return ExecResult(False, 126, "", f"sandlot: {_words(error)}\n")
        if result.timed_out:
            said = _kept(result.out) + _kept(result.err)
            raise CommandTimeout(f"{cmd[0]} was killed: it ran longer than {timeout} s", said)
        if result.exit_code == 126 and result.stderr == f"sandlot: {cmd[0]}: cannot be executed: Permission denied\n":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cmd[0])
        if result.out.truncated or result.err.truncated:
            limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR if cap < MOST_OUTPUT else f"{cap >> 20} MiB"
            raise OutputLimitExceededError(limit, _kept(result.out) + _kept(result.err))
        return ExecResult(result.ok, result.exit_code, result.stdout, result.stderr)

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        result = await self._script(_WRITE, file, data=data)
        if not result.ok:
            raise _file_error(result, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = b""
        while True:
            size = min(_PIECE, limit + 1 - len(data))
            blocks = -(-size // _BLOCK)
            if not data:
                result = await self._script(_HEAD, file, str(size))
            else:
                result = await self._script(_REST, file, str(len(data) // _BLOCK), str(blocks))
            if not result.ok:
                error = _file_error(result, file)
                raise FileNotFoundError(errno.ENOENT, *error.args[1:]) if error.errno == errno.ENOTDIR else error
            data += result.out.data
            if len(data) > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            if len(result.out.data) < _PIECE:
                return data.decode() if text else data

    @override
    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        if self._url is None:
            raise NotImplementedError("only its own process can reach this sandbox: name a server with SANDLOT_URL")
        try:
            info = await self._box.info()
        except SandlotError as error:
            raise ConnectionError(_words(error)) from error
        if info.state == "ended":
            raise ConnectionError(f"sandbox {info.id} has ended")
        whose = user or self._user
        named = [] if whose is None else ["--user", str(whose)]
        command = shlex.join(["sandlot", "shell", "--url", self._url, *named, self._box.id])
        return SandboxConnection(type="sandlot", command=command, container=self._box.id)

    @override
    def default_polling_interval(self) -> float:
        return 0.2  # a command takes a few milliseconds

    def _path(self, file: str) -> str:
        return posixpath.join(self._directory, file)

    @asynccontextmanager
    async def _turn(self, limited: bool) -> AsyncIterator[None]:
        """A command in a sandbox of this process is one of the subprocesses that Inspect counts."""
        if not limited or self._url is not None:
            yield
            return
        async with at_once("subprocesses", max_subprocesses_context_var.get(), resizable=True):
            yield

    async def _script(self, text: str, file: str, *words: str, data: bytes = b"") -> RunResult:
        """Run a script of ours, about a file, as the sandbox's user."""
        if "\0" in file:
            raise ValueError("embedded null byte")
        argv = ("/bin/sh", "-c", _SCRIPT + text, "sh", self._path(file), *words)
        with _in_words_of_inspect():
            result = await self._run(
                argv,
                data,
                cwd="/",
                env={"LC_ALL": "C"},  # in which errors are said
                user=self._user,
                timeout=_FILE_SECONDS,
                output_cap=_PIECE + _BLOCK,
            )
        if result.timed_out:
            raise TimeoutError(f"{file} could not be read or written within {_FILE_SECONDS:g} s")
        return result

    async def _run(self, argv: list[str] | tuple[str, ...], data: bytes, **how: Any) -> RunResult:
        """One command, to its end, or to that of who waits for it."""
        if len(data) <= _INLINE_BYTES:
            return await self._box.run(argv, stdin=data, **how)
        command = await self._box.start(argv, stdin_open=True, **how)
        waiting = asyncio.ensure_future(command.wait())
        feeding = asyncio.ensure_future(_feed(command, data))
        try:
            # Both end when the command does, for then it takes no more.
            await asyncio.wait((waiting, feeding), return_when=asyncio.FIRST_EXCEPTION)
            if not waiting.done():
                feeding.result()
            return waiting.result()
        finally:
            with anyio.CancelScope(shield=True):
                ended = waiting.done()
                for task in (waiting, feeding):
                    task.cancel()
                await asyncio.wait((waiting, feeding))
                if not ended:
                    with suppress(SandlotError):  # it went with its sandbox, or the server with both
                        await command.kill()


async def _feed(command: Command, data: bytes) -> None:
    with suppress(Conflict):  # it does not want all of it
        for start in range(0, len(data), _INLINE_BYTES):
            await command.write(data[start : start + _INLINE_BYTES])
        await command.write(b"", end=True)


async def _close(environments: Mapping[str, SandboxEnvironment]) -> None:
    """End them, also where Inspect is being cancelled."""
    with anyio.CancelScope(shield=True):
        for environment in environments.values():
            box = environment.as_type(SandlotEnvironment)._box
            try:
                await box.close()
            except SandlotError as error:  # no reason to lose what the sample has come to
                logger.warning("sandbox %s was not ended: %s", box.id, _words(error))


def _server() -> tuple[str | None, str | None]:
    """The server's address and its key. Raises RuntimeError on trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("sandlot needs Inspect's asyncio backend: unset INSPECT_ASYNC_BACKEND") from None
    return os.environ.get("SANDLOT_URL") or None, os.environ.get("SANDLOT_API_KEY") or None


def _config(config: SandboxEnvironmentConfigType | None) -> SandlotConfig:
    """Raises RuntimeError."""
    if config is None:
        return SandlotConfig()
    if isinstance(config, SandlotConfig):
        return config
    if not isinstance(config, str):
        raise RuntimeError(f"a {type(config).__name__} does not configure sandlot: give it a SandlotConfig or a file")
    try:
        text = Path(config).read_text(encoding="utf-8")
        if config.endswith(".toml"):
            found = tomllib.loads(text)
        elif config.endswith((".yaml", ".yml")):
            import yaml  # which Inspect brings

            found = yaml.safe_load(text) or {}
        else:
            raise RuntimeError(f"{config} is neither a .toml nor a .yaml file")
        return _checked(found)
    except OSError as error:
        raise RuntimeError(f"{config} cannot be read: {error.strerror}") from None
    except (SandlotError, ValueError) as error:
        raise RuntimeError(f"{config}: {error}") from None


def _checked(fields: object) -> SandlotConfig:
    try:
        return SandlotConfig.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None


@contextmanager
def _in_words_of_inspect() -> Iterator[None]:
    try:
        yield
    except (SandboxEnded, NotFound, Unreachable, HostFault, DeadlineExceeded) as error:
        raise SandboxUnavailableError(_words(error)) from error
    except Unsupported as error:
        raise SandboxUserUnsupportedError(_words(error)) from error


def _words(error: SandlotError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _worked(result: RunResult) -> RunResult:
    """Of a command without which a sandbox is of no use."""
    if not result.ok:
        raise RuntimeError(f"the sandbox cannot be used: {result.stderr.strip()}")
    return result


def _kept(output: Output) -> str:
    """What was kept of it, with a word about what was not."""
    if not output.truncated:
        return output.text
    half = len(output.data) // 2  # as the node cuts it: head and tail
    head, tail = output.data[:half].decode(errors="replace"), output.data[half:].decode(errors="replace")
    return f"{head}\n[{output.total - len(output.data)} bytes were left out]\n{tail}"


def _file_error(result: RunResult, file: str) -> OSError:
    """What a program said of a file, as the exception that Python has for it."""
    said = result.stderr.strip()
    words = said.rpartition(": ")[2].lower()
    if words in _ERRNOS:
        return OSError(_ERRNOS[words], os.strerror(_ERRNOS[words]), file)
    return OSError(errno.EIO, said or f"exit status {result.exit_code}", file)

"""HttpNode: NodeAPI over HTTP, for sandboxes that live on a server.

It owns its connections, and one listener of this process where an in-process application answers for a sandbox. It
promises the node's own results and errors, that every call has a deadline, and that a create which is cancelled leaves
nothing on the server. It never retries a request that may have run, unless that is a create, to which it gives a key,
a run that has one, or one that only waits or follows: these the server does once however often it is asked, and that it
was killed and started again meanwhile, or was away when they began, is not noticed. A word that no server can know, as
an empty id, is not sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar
from urllib.parse import quote_from_bytes, urlencode, urlsplit

import aiohttp
import yarl
from pydantic import TypeAdapter, ValidationError

from sandlot import asgi, packing
from sandlot.aio import deadline, shielded
from sandlot.api import (
    EVERY,
    MOST_FRAME_BYTES,
    MOST_READ,
    MOST_REPLAY,
    REPLAY,
    AsgiApp,
    Capability,
    Change,
    Chunk,
    CommandInfo,
    Ending,
    FileEvent,
    FileInfo,
    FilesFound,
    Filter,
    ImageConfig,
    ImageInfo,
    Info,
    Made,
    Message,
    OpenFile,
    Page,
    PoolInfo,
    PullProgress,
    Run,
    RunResult,
    SandboxSpec,
    Scope,
    ShellInfo,
    ShellOutput,
    ShellResult,
    ShellRun,
    ShellSpec,
    Stats,
    Target,
    TerminalInfo,
    TerminalLink,
    TerminalSpec,
    TextFound,
    Upstream,
    from_json,
    is_reference,
    to_json,
)
from sandlot.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    SandlotError,
    Unreachable,
    Unsupported,
    from_wire,
    no_sandbox,
)
from sandlot.links import SocketLink

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds. The server has deadlines of its own (60 to make a sandbox, 30 for any other step); these are a little longer,
# so that it is the server's own words that arrive.
_CONNECT_SECONDS = 10.0
_CREATE_SECONDS = 70.0
_STEP_SECONDS = 40.0
_COPY_SECONDS = 1830.0
_IMPORT_SECONDS = 3630.0

# How long what can be asked again waits for a server that does not answer, and how often it looks (seconds).
_AWAY_SECONDS = 60.0
_AWAY_STEP = 0.25
# One that is only started again is back before this.
_SILENT_SECONDS = 3.0
# An attempt that took longer than connecting may take found a server there, and waited for the command.
_HELD_SECONDS = _CONNECT_SECONDS + 5.0

_JSON, _BINARY = "application/json", "application/octet-stream"
Content = str | bytes | AsyncIterator[bytes] | None

# A connection that takes a large body more slowly than this is taken for a broken one (bytes a second).
_SLOWEST = 1 << 18

# What of an answer waits to be read: of 50 MB, the default of 64 kB would wake its reader four times as often (bytes).
_BUFFER = 1 << 18

# An idle connection is dropped here before the server would do it (asgi.KEEP_ALIVE_SECONDS).
_IDLE_SECONDS = 30.0

# Errors of a request that nobody has received.
_NOBODY = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

_SPEC = TypeAdapter(SandboxSpec)
_RUN = TypeAdapter(Run)
_INFO = TypeAdapter(Info)
_STATS = TypeAdapter(Stats)
_INFOS = TypeAdapter(list[Info])
_MADE = TypeAdapter(list[Made])
_IMAGE = TypeAdapter(ImageInfo)
_IMAGES = TypeAdapter(list[ImageInfo])
_CHANGES = TypeAdapter(list[Change])
_POOLS = TypeAdapter(list[PoolInfo])
_RESULT = TypeAdapter(RunResult)
_COMMAND = TypeAdapter(CommandInfo)
_COMMANDS = TypeAdapter(list[CommandInfo])
_CHUNK = TypeAdapter(Chunk)
_UPSTREAM = TypeAdapter(Upstream)
_SHELL_SPEC = TypeAdapter(ShellSpec)
_SHELL = TypeAdapter(ShellInfo)
_SHELLS = TypeAdapter(list[ShellInfo])
_SHELL_RUN = TypeAdapter(ShellRun)
_SHELL_RESULT = TypeAdapter(ShellResult)
_SHELL_OUTPUT = TypeAdapter(ShellOutput)
_FILE = TypeAdapter(FileInfo)
_FILES = TypeAdapter(list[FileInfo])
_FILES_FOUND = TypeAdapter(FilesFound)
_TEXT_FOUND = TypeAdapter(TextFound)
_FILE_EVENT = TypeAdapter(FileEvent)
_TERMINAL_SPEC = TypeAdapter(TerminalSpec)
_TERMINAL = TypeAdapter(TerminalInfo)
_TERMINALS = TypeAdapter(list[TerminalInfo])
_BOOL = TypeAdapter(bool)
_CAPABILITIES = TypeAdapter(list[Capability])
_COUNTS = TypeAdapter(dict[str, int])


class HttpNode:
    """The node behind `sandlot serve` at `url`. Nothing is connected before the first call."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            host = urlsplit(url).hostname
            self._url = yarl.URL(url.rstrip("/"))
        except ValueError as error:
            raise InvalidRequest(f"{url!r} is not a URL: {error}") from None
        if self._url.scheme not in ("http", "https") or not host:
            raise InvalidRequest(f"{url!r} is not the URL of a server", "write it as `http://127.0.0.1:8750`")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest("the API key has a letter that no key has", "is it whole, and without a line's end?")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None  # made by the first call, for it belongs to that one's loop
        self._handlers: _Handlers | None = None
        self._met = False  # whether the server was ever there: one that never was is not waited for
        self._had: set[str] = set()  # images that the server had once: it is not asked again before each create

    async def create(self, spec: SandboxSpec) -> Info:
        await self._have(spec.image)
        # Only what the caller set is sent: a limit that is named means more than the same number by default.
        content = to_json(_SPEC, _keyed(spec), only_set=True)

        async def ask() -> list[Info]:
            path = "/v1/sandboxes"
            return [await self._call("POST", path, _INFO, "making a sandbox", _CREATE_SECONDS, content=content)]

        (info,) = await self._made(ask, _ids, undone=spec.key is None)
        return info

    async def create_many(self, spec: SandboxSpec, count: int) -> list[Made]:
        await self._have(spec.image)
        content = b'{"count":%d,"spec":%b}' % (count, to_json(_SPEC, _keyed(spec), only_set=True))

        async def ask() -> list[Made]:
            path, what = "/v1/sandboxes/batch", f"making {count} sandboxes"
            return await self._call("POST", path, _MADE, what, _COPY_SECONDS, content=content)

        return await self._made(ask, _ids, undone=spec.key is None)

    async def _made(
        self, ask: Callable[[], Awaitable[list[T]]], ids: Callable[[list[T]], list[str]], undone: bool
    ) -> list[T]:
        """What a create that can be asked again gives. Who gives up leaves nothing, unless another may ask with the
        same key."""
        unwanted = asyncio.Event()
        asking = asyncio.ensure_future(self._again(ask, patient=False, unwanted=unwanted))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            unwanted.set()
            await shielded(self._undo(asking, ids if undone else lambda _: []))
            raise

    async def _again(
        self, ask: Callable[[], Awaitable[T]], *, patient: bool = True, unwanted: asyncio.Event | None = None
    ) -> T:
        """What `ask` gives, which is asked again for a minute while the server is away, counted from when it was last
        there. Not `patient`: one that never was there will not be."""
        away = _Away()
        while True:
            asked_at = asyncio.get_running_loop().time()
            try:
                return await ask()
            except Unreachable as error:
                if (
                    (self._never_met(error) and not patient)
                    or away.too_long(asked_at)
                    or (unwanted is not None and unwanted.is_set())
                ):
                    raise
            await asyncio.sleep(_AWAY_STEP)  # nobody can say when a server that is gone will be back

    def _never_met(self, error: Unreachable) -> bool:
        return not self._met and isinstance(error.__context__, _NOBODY)

    async def page(self, wanted: Filter = EVERY, cursor: str | None = None, limit: int = 100) -> Page:
        asked: list[tuple[str, str]] = [("state", state) for state in wanted.states]
        asked += [("label", name if value is None else f"{name}={value}") for name, value in wanted.labels.items()]
        one = {"image": wanted.image, "tenant": wanted.tenant, "cursor": cursor, "limit": str(limit)}
        asked += [(name, value) for name, value in one.items() if value is not None]
        path = f"/v1/sandboxes?{'&'.join(f'{name}={_quoted(value)}' for name, value in asked)}"
        answer, body = await self._answer("GET", path, "listing the sandboxes")
        following = answer.links["next"]["url"] if "next" in answer.links else None
        after = following.query["cursor"] if isinstance(following, yarl.URL) else None
        infos: list[Info] = self._read(_INFOS, body)
        return Page(sandboxes=tuple(infos), next=after)

    async def wait_ended(self, sandbox_id: str, timeout: float | None = None) -> Info:
        path = _path(sandbox_id, "wait" if timeout is None else f"wait?timeout={timeout!r}")
        seconds = None if timeout is None else timeout + _STEP_SECONDS

        async def ask() -> Info:
            return await self._call("GET", path, _INFO, f"waiting for the end of {sandbox_id}", seconds)

        return await self._again(ask)

    async def _have(self, image: str) -> None:
        """Let the server pull an image that it would pull by itself: how long that takes nobody knows, and who gives up
        meanwhile ends it."""

        async def ask() -> None:
            try:
                await self.image(image)
            except NotFound:
                async for _ in self.pull_image(image):
                    pass

        if is_reference(image) and image not in self._had:
            await self._again(ask, patient=False)
            self._had.add(image)

    async def _undo(self, asking: asyncio.Future[list[T]], ids: Callable[[list[T]], list[str]]) -> None:
        """Wait for a create that nobody wants any more, and destroy what it made."""
        await asyncio.wait((asking,))
        if not asking.cancelled() and asking.exception() is None:
            for sandbox_id in ids(asking.result()):
                await self.destroy(sandbox_id)

    async def info(self, sandbox_id: str) -> Info:
        return await self._call("GET", _path(sandbox_id), _INFO, f"asking about {sandbox_id}")

    async def reset(self, sandbox_id: str, image: str | None = None) -> Info:
        path = _path(sandbox_id, "reset")
        content = json.dumps({"image": image})
        if image is not None:
            await self._have(image)
        return await self._call("POST", path, _INFO, f"resetting {sandbox_id}", _CREATE_SECONDS, content=content)

    async def snapshot(self, sandbox_id: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        path = _path(sandbox_id, "snapshot")
        content = json.dumps({"name": name, "config": config.model_dump() if config else None})
        return await self._call("POST", path, _IMAGE, f"snapshot of {sandbox_id}", _COPY_SECONDS, content=content)

    async def fork(self, sandbox_id: str, count: int = 1) -> list[Info]:
        path = _path(sandbox_id, "fork")
        content = json.dumps({"count": count})
        return await self._call("POST", path, _INFOS, f"forking {sandbox_id}", _COPY_SECONDS, content=content)

    async def diff(self, sandbox_id: str) -> list[Change]:
        return await self._call("GET", _path(sandbox_id, "diff"), _CHANGES, f"diff of {sandbox_id}", _COPY_SECONDS)

    async def pause(self, sandbox_id: str) -> Info:
        return await self._call("POST", _path(sandbox_id, "pause"), _INFO, f"pausing {sandbox_id}")

    async def resume(self, sandbox_id: str) -> Info:
        return await self._call("POST", _path(sandbox_id, "resume"), _INFO, f"resuming {sandbox_id}")

    async def images(self) -> list[ImageInfo]:
        return await self._call("GET", "/v1/images", _IMAGES, "listing images")

    async def image(self, name: str) -> ImageInfo:
        return await self._call("GET", _image(name), _IMAGE, f"asking about the image {name}")

    async def pull_image(self, reference: str) -> AsyncGenerator[PullProgress, None]:
        content = json.dumps({"reference": reference})
        lines = self._lines("POST", "/v1/images/pull", f"pulling {reference}", _STEP_SECONDS, content=content)
        async for line in lines:
            yield PullProgress.model_validate_json(line)

    async def import_image(self, name: str, path: Path) -> ImageInfo:
        def opened() -> BinaryIO:
            if not path.is_dir():
                return path.open("rb")
            packing.check_image(path)
            return packing.packed(path)

        try:
            file = await asyncio.to_thread(opened)
        except OSError as error:
            raise NotFound(f"{path} cannot be read: {error.strerror}") from error
        with file:
            work = self._send(
                "PUT", _image(name), f"importing {path}", _IMPORT_SECONDS, content=_pieces(file), kind=_BINARY
            )
            try:
                return _IMAGE.validate_json(await work)
            except OSError as error:
                raise NotFound(f"{error.filename or path} cannot be read: {error.strerror or error}") from error

    async def prune_images(self) -> list[ImageInfo]:
        return await self._call("POST", "/v1/images/prune", _IMAGES, "deleting images that nobody uses", _COPY_SECONDS)

    async def tag_image(self, image: str, name: str, config: ImageConfig | None = None) -> ImageInfo:
        path = f"{_image(image)}/tag"
        content = json.dumps({"name": name, "config": config.model_dump() if config else None})
        return await self._call("POST", path, _IMAGE, f"naming the image {name}", _COPY_SECONDS, content=content)

    async def delete_image(self, name: str) -> None:
        await self._send("DELETE", _image(name), f"deleting {name}", _COPY_SECONDS)

    async def export_image(self, name: str) -> AsyncIterator[bytes]:
        async with self._stream("GET", f"{_image(name)}/tar", f"exporting {name}", _COPY_SECONDS) as answer:
            async for chunk in answer.content.iter_any():
                yield chunk

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        doing: str,
        silence: float | None,
        *,
        seconds: float | None = None,
        content: Content = None,
        kind: str = _JSON,
        part: str | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is read as it comes: a piece at least every `silence` seconds, all of it within `seconds`. One
        to `part`, the range of a file that is wanted, may say that there is no such (416)."""
        url = yarl.URL(f"{self._url}{path}", encoded=True)
        source = _Source(content) if isinstance(content, AsyncIterator) else None
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS, sock_read=silence)
        headers = {"Content-Type": kind} | ({"Range": part} if part else {})
        try:
            async with self._connections().request(
                method, url, data=source or content, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                self._met = True
                if not answer.ok and not (part and answer.status == 416):
                    raise _refusal(answer, await answer.read())
                yield answer
        except aiohttp.ClientSSLError as error:
            said = f"the certificate of {self._url} is not one that is trusted here: {type(error).__name__}"
            raise Unreachable(said, "a certificate of your own house is named by SSL_CERT_FILE") from None
        except _NOBODY:
            raise Unreachable(f"no server answers at {self._url}", "`sandlot serve` starts one") from None
        except TimeoutError:
            raise DeadlineExceeded(f"{doing} did not finish within {seconds or silence:g} s") from None
        except aiohttp.ClientError as error:
            self._met = True
            if source is not None and source.failed is not None:
                raise source.failed from None
            broke = f"the server at {self._url} broke the connection while {doing}: {type(error).__name__}"
            raise Unreachable(broke, "look at what `sandlot serve` printed") from None

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Whom this system trusts, or what SSL_CERT_FILE names: a server may have a certificate of its own house.
            trusted = ssl.create_default_context() if self._url.scheme == "https" else True
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=trusted)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers, read_bufsize=_BUFFER
            )
        return self._session

    async def pools(self) -> list[PoolInfo]:
        return await self._call("GET", "/v1/pools", _POOLS, "asking for the warm pools")

    async def stats(self, sandbox_id: str) -> Stats:
        return await self._call("GET", _path(sandbox_id, "stats"), _STATS, f"asking what {sandbox_id} uses")

    async def run(self, sandbox_id: str, run: Run) -> RunResult:
        # Start, the command itself, and killing it at its timeout.
        seconds = None if run.timeout is None else run.timeout + 2 * _STEP_SECONDS
        content = to_json(_RUN, run, only_set=True)
        doing = f"running {run.argv[0]} in {sandbox_id}"
        return await self._asked(run.key, _path(sandbox_id, "run"), _RESULT, doing, seconds, content)

    async def _asked(
        self, key: str | None, path: str, answer: TypeAdapter[T], doing: str, seconds: float | None, content: bytes
    ) -> T:
        """What is done once however often it is asked for, if it has a key: so it is asked for again."""

        async def ask() -> T:
            return await self._call("POST", path, answer, doing, seconds, content=content)

        return await (ask() if key is None else self._again(ask))

    async def launch(self, sandbox_id: str, run: Run) -> CommandInfo:
        content = to_json(_RUN, run, only_set=True)
        what = f"starting {run.argv[0]} in {sandbox_id}"
        return await self._asked(run.key, _path(sandbox_id, "commands"), _COMMAND, what, _STEP_SECONDS, content)

    async def commands(self, sandbox_id: str) -> list[CommandInfo]:
        return await self._call("GET", _path(sandbox_id, "commands"), _COMMANDS, f"listing commands of {sandbox_id}")

    async def wait(self, sandbox_id: str, command_id: str) -> RunResult:
        path = _command_path(sandbox_id, command_id, "wait")

        async def ask() -> RunResult:
            return await self._call("GET", path, _RESULT, f"waiting for command {command_id}", None)

        return await self._again(ask, patient=False)

    async def follow(self, sandbox_id: str, command_id: str, out: int = 0, err: int = 0) -> AsyncGenerator[Chunk, None]:
        at = {"out": out, "err": err}
        away = _Away()
        while True:
            asked_at = asyncio.get_running_loop().time()
            path = _command_path(sandbox_id, command_id, f"output?{urlencode(at)}")
            try:
                async with aclosing(self._lines("GET", path, f"following command {command_id}", None)) as lines:
                    async for line in lines:
                        chunk = from_json(_CHUNK, line)
                        at[chunk.stream] = chunk.offset + len(chunk.data)
                        away = _Away()  # it is there
                        yield chunk
                return
            except Unreachable as error:
                if self._never_met(error) or away.too_long(asked_at):
                    raise
            await asyncio.sleep(_AWAY_STEP)

    async def _lines(
        self, method: str, path: str, doing: str, silence: float | None, content: Content = None
    ) -> AsyncGenerator[bytes, None]:
        """The lines of an answer, as they come: an error that comes in the middle is the last one."""
        left = b""
        async with self._stream(method, path, doing, silence, content=content) as answer:
            async for piece in answer.content.iter_any():
                *lines, left = (left + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b'{"error"'):
                        raise from_wire(json.loads(line), 500)
                    yield line

    async def signal(self, sandbox_id: str, command_id: str, number: int) -> None:
        path = _command_path(sandbox_id, command_id, "signal")
        await self._send("POST", path, f"signalling command {command_id}", content=json.dumps({"number": number}))

    async def write_stdin(self, sandbox_id: str, command_id: str, data: bytes, end: bool = False) -> None:
        path = _command_path(sandbox_id, command_id, f"stdin?end={str(end).lower()}")
        # As long as the command takes to read it.
        await self._send("POST", path, f"writing to command {command_id}", None, content=data, kind=_BINARY)

    async def open_shell(self, sandbox_id: str, spec: ShellSpec = ShellSpec()) -> ShellInfo:  # noqa: B008
        content = to_json(_SHELL_SPEC, spec, only_set=True)
        return await self._call(
            "POST", _path(sandbox_id, "shells"), _SHELL, f"opening a shell in {sandbox_id}", content=content
        )

    async def shells(self, sandbox_id: str) -> list[ShellInfo]:
        return await self._call("GET", _path(sandbox_id, "shells"), _SHELLS, f"listing the shells of {sandbox_id}")

    async def run_in_shell(self, sandbox_id: str, shell_id: str, run: ShellRun) -> ShellResult:
        # In a queue it may wait for as long as those before it take.
        seconds = None if run.timeout is None or run.queue else run.timeout + 2 * _STEP_SECONDS
        content = to_json(_SHELL_RUN, run, only_set=True)
        path = _shell_path(sandbox_id, shell_id, "run")
        doing = f"running a text in shell {shell_id}"
        return await self._asked(run.key, path, _SHELL_RESULT, doing, seconds, content)

    async def shell_output(self, sandbox_id: str, shell_id: str, command_id: str) -> ShellOutput:
        path = _shell_path(sandbox_id, shell_id, f"commands/{_name(command_id, 'command')}")
        return await self._call("GET", path, _SHELL_OUTPUT, f"asking what command {command_id} wrote")

    async def interrupt_shell(self, sandbox_id: str, shell_id: str) -> bool:
        path = _shell_path(sandbox_id, shell_id, "interrupt")
        return await self._call("POST", path, _BOOL, f"interrupting shell {shell_id}")

    async def close_shell(self, sandbox_id: str, shell_id: str) -> None:
        await self._send("DELETE", _shell_path(sandbox_id, shell_id), f"closing shell {shell_id}")

    async def open_terminal(self, sandbox_id: str, spec: TerminalSpec = TerminalSpec()) -> TerminalInfo:  # noqa: B008
        content = to_json(_TERMINAL_SPEC, spec, only_set=True)
        what = f"opening a terminal in {sandbox_id}"
        return await self._call("POST", _path(sandbox_id, "terminals"), _TERMINAL, what, content=content)

    async def terminals(self, sandbox_id: str) -> list[TerminalInfo]:
        what = f"listing the terminals of {sandbox_id}"
        return await self._call("GET", _path(sandbox_id, "terminals"), _TERMINALS, what)

    async def attach_terminal(
        self, sandbox_id: str, terminal_id: str, *, replay: int = REPLAY, watch: bool = False
    ) -> TerminalLink:
        if not 0 <= replay <= MOST_REPLAY:
            raise InvalidRequest(f"{replay} bytes cannot be replayed", f"0 to {MOST_REPLAY} can")
        asked = f"?replay={replay}&watch={str(watch).lower()}"
        url = yarl.URL(f"{self._url}{_terminal_path(sandbox_id, terminal_id)}{asked}", encoded=True)
        try:
            async with deadline(_STEP_SECONDS, f"attaching to terminal {terminal_id}"):
                socket = await self._connections().ws_connect(
                    url, max_msg_size=MOST_FRAME_BYTES, heartbeat=_IDLE_SECONDS
                )
        except aiohttp.WSServerHandshakeError as error:
            await self._explain(sandbox_id, terminal_id, error.status)
        except (aiohttp.ClientError, OSError):
            raise Unreachable(f"no server answers at {self._url}", "`sandlot serve` starts one") from None
        return SocketLink(socket)

    async def _explain(self, sandbox_id: str, terminal_id: str, status: int) -> NoReturn:
        """Raise why nobody can attach to a terminal: what a refused WebSocket says is not passed on."""
        if terminal_id not in [info.id for info in await self.terminals(sandbox_id)]:
            raise NotFound(f"sandbox {sandbox_id} has no terminal {terminal_id}", "a reset ends terminals: open one")
        if status == Forbidden.status:
            raise Forbidden("this key may watch a terminal, and not type there", "attach with `watch=True`")
        raise Conflict(f"terminal {terminal_id} of {sandbox_id} takes no more", "too many watch it, or it was closed")

    async def close_terminal(self, sandbox_id: str, terminal_id: str) -> None:
        await self._send("DELETE", _terminal_path(sandbox_id, terminal_id), f"closing terminal {terminal_id}")

    async def read_file(self, sandbox_id: str, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            await self.stat_file(sandbox_id, path, True)
            return b""
        async with self._contents(sandbox_id, path, offset, length) as answer:
            if answer.status == 416:  # there is nothing behind the offset
                return b""
            if (answer.content_length or 0) > MOST_READ:
                raise InvalidRequest(
                    f"{path} is larger than {MOST_READ >> 20} MiB", "read it in parts, or as a stream: `download`"
                )
            return await answer.read()

    @asynccontextmanager
    async def open_file(self, sandbox_id: str, path: str) -> AsyncIterator[OpenFile]:
        info = await self.stat_file(sandbox_id, path, True)
        if info.kind != "file":
            kind = info.kind if info.kind == "directory" else "device, pipe or socket"
            raise InvalidRequest(f"{path} is a {kind}, not a regular file")
        yield _RemoteFile(self, sandbox_id, info)

    @asynccontextmanager
    async def _contents(
        self, sandbox_id: str, path: str, offset: int, length: int | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if offset < 0 or (length is not None and length < 0):
            raise InvalidRequest(f"{offset} and {length} are no part of a file", "an offset and a length are 0 or more")
        last = "" if length is None else str(offset + length - 1)
        part = f"bytes={offset}-{last}" if offset or last else None
        url = _files(sandbox_id, "", path=path)
        async with self._stream("GET", url, f"reading {path} of {sandbox_id}", _STEP_SECONDS, part=part) as answer:
            yield answer

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        data: bytes | AsyncIterator[bytes],
        mode: int = 0o644,
        append: bool = False,
    ) -> None:
        await self._send(
            "POST" if append else "PUT",
            _files(sandbox_id, "", path=path, mode=mode),
            f"writing {path} of {sandbox_id}",
            _STEP_SECONDS if isinstance(data, bytes) else _COPY_SECONDS,
            content=data,
            kind=_BINARY,
        )

    async def stat_file(self, sandbox_id: str, path: str, follow: bool = False) -> FileInfo:
        url = _files(sandbox_id, "stat", path=path, follow=follow)
        return await self._call("GET", url, _FILE, f"looking at {path} of {sandbox_id}")

    async def list_files(self, sandbox_id: str, path: str) -> list[FileInfo]:
        return await self._call("GET", _files(sandbox_id, "list", path=path), _FILES, f"listing {path} of {sandbox_id}")

    async def glob_files(self, sandbox_id: str, pattern: str, limit: int = 10_000) -> FilesFound:
        url = _files(sandbox_id, "glob", pattern=pattern, limit=limit)
        return await self._call("GET", url, _FILES_FOUND, f"looking through {sandbox_id}", _COPY_SECONDS)

    async def find_text(
        self,
        sandbox_id: str,
        text: str,
        path: str = "/",
        *,
        names: str = "**",
        regex: bool = False,
        ignore_case: bool = False,
        limit: int = 1000,
    ) -> TextFound:
        flags = {"regex": regex, "ignore_case": ignore_case}
        url = _files(sandbox_id, "find", text=text, path=path, names=names, limit=limit, **flags)
        return await self._call("GET", url, _TEXT_FOUND, f"looking through {path} of {sandbox_id}", _COPY_SECONDS)

    async def make_directory(self, sandbox_id: str, path: str, mode: int = 0o755, parents: bool = True) -> None:
        url = _files(sandbox_id, "directory", path=path, mode=mode, parents=parents)
        await self._send("PUT", url, f"making {path} of {sandbox_id}")

    async def move_file(self, sandbox_id: str, path: str, to: str, replace: bool = False) -> None:
        url = _files(sandbox_id, "move", path=path, to=to, replace=replace)
        await self._send("POST", url, f"moving {path} of {sandbox_id}", _COPY_SECONDS)

    async def remove_file(self, sandbox_id: str, path: str, recursive: bool = False) -> None:
        url = _files(sandbox_id, "", path=path, recursive=recursive)
        await self._send("DELETE", url, f"removing {path} of {sandbox_id}", _COPY_SECONDS)

    async def change_file(
        self, sandbox_id: str, path: str, mode: int | None = None, user: int | None = None, group: int | None = None
    ) -> None:
        asked = {"mode": mode, "user": user, "group": group}
        words = {name: number for name, number in asked.items() if number is not None}
        await self._send("PATCH", _files(sandbox_id, "", path=path, **words), f"changing {path} of {sandbox_id}")

    async def watch_files(self, sandbox_id: str, path: str, recursive: bool = False) -> AsyncGenerator[FileEvent, None]:
        url = _files(sandbox_id, "watch", path=path, recursive=recursive)
        async with aclosing(self._lines("GET", url, f"watching {path} of {sandbox_id}", None)) as lines:
            async for line in lines:
                yield from_json(_FILE_EVENT, line)

    async def download(self, sandbox_id: str, path: str) -> AsyncGenerator[bytes, None]:
        url = _path(sandbox_id, f"tree?{_query(path=path)}")
        async with self._stream("GET", url, f"reading {path} of {sandbox_id}", _COPY_SECONDS) as answer:
            async for chunk in answer.content.iter_any():
                yield chunk

    async def upload(self, sandbox_id: str, path: str, tar: AsyncIterator[bytes], user: int = 0) -> None:
        await self._send(
            "PUT",
            _path(sandbox_id, f"tree?{_query(path=path, user=user)}"),
            f"unpacking files at {path} of {sandbox_id}",
            _COPY_SECONDS,
            content=tar,
            kind="application/x-tar",
        )

    async def route(self, sandbox_id: str, port: int, target: Target) -> None:
        key = None
        if not isinstance(target, Upstream):
            if self._handlers is None:
                self._handlers = _Handlers(self._url)
            key, target = await self._handlers.add(sandbox_id, target)
        try:
            await self._send(
                "POST",
                _path(sandbox_id, f"routes/{port}"),
                f"routing port {port} of {sandbox_id}",
                content=to_json(_UPSTREAM, target),
            )
        except BaseException:
            if self._handlers is not None and key is not None:
                self._handlers.remove_key(key)
            raise

    async def destroy(self, sandbox_id: str, ending: Ending = Ending.EXIT) -> Info:
        if self._handlers is not None:
            self._handlers.remove(sandbox_id)
        return await self._call("DELETE", _path(sandbox_id, f"?ending={ending.value}"), _INFO, f"ending {sandbox_id}")

    async def capabilities(self) -> list[Capability]:
        return await self._call("GET", "/v1/capabilities", _CAPABILITIES, "asking what the host can do")

    async def counts(self) -> dict[str, int]:
        return await self._call("GET", "/v1/ledger", _COUNTS, "asking for the ledger")

    async def close(self) -> None:
        if self._handlers is not None:
            self._handlers.close()
        if self._session is not None:
            await self._session.close()

    async def list(self) -> list[Info]:
        found: list[Info] = []
        page = await self.page(limit=1000)
        found += page.sandboxes
        while page.next is not None:
            page = await self.page(cursor=page.next, limit=1000)
            found += page.sandboxes
        return found

    async def _call(
        self,
        method: str,
        path: str,
        answer: TypeAdapter[T],
        doing: str,
        seconds: float | None = _STEP_SECONDS,
        *,
        content: Content = None,
    ) -> T:
        return self._read(answer, await self._send(method, path, doing, seconds, content=content))

    def _read(self, answer: TypeAdapter[T], body: bytes) -> T:
        try:
            return from_json(answer, body)
        except ValidationError:
            raise SandlotError(
                f"what answers at {self._url} is not a Sandlot server of this version",
                "compare `sandlot version` on both sides",
            ) from None

    async def _send(
        self,
        method: str,
        path: str,
        doing: str,
        seconds: float | None = _STEP_SECONDS,
        *,
        content: Content = None,
        kind: str = _JSON,
    ) -> bytes:
        return (await self._answer(method, path, doing, seconds, content=content, kind=kind))[1]

    async def _answer(
        self,
        method: str,
        path: str,
        doing: str,
        seconds: float | None = _STEP_SECONDS,
        *,
        content: Content = None,
        kind: str = _JSON,
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """An answer, and what is in it."""
        if seconds is not None and isinstance(content, bytes):
            seconds += len(content) / _SLOWEST
        async with self._stream(method, path, doing, None, seconds=seconds, content=content, kind=kind) as answer:
            return answer, await answer.read()


def _keyed(spec: SandboxSpec) -> SandboxSpec:
    """The same with a key of its own, if it has none: so that it can be asked for again."""
    return spec if spec.key is not None else spec.model_copy(update={"key": secrets.token_hex(16)})


def _ids(made: Sequence[Info | Made]) -> list[str]:
    """Of those that were made."""
    infos = (each.sandbox if isinstance(each, Made) else each for each in made)
    return [info.id for info in infos if info is not None]


class _Source:
    """What is sent piece by piece, and what went wrong with it here."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self.failed: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._pieces:
                yield piece
        except Exception as error:
            self.failed = error
            raise


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> SandlotError:
    """The server's own error."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    error = from_wire(said, answer.status)
    after = answer.headers.get("Retry-After", "")
    if isinstance(error, QuotaExceeded) and after.isdecimal():
        error.retry_after = float(after)
    return error


def _image(name: str) -> str:
    if not name:
        raise NotFound("there is no image without a name", "`sandlot image list` shows those that there are")
    return f"/v1/images/{_quoted(name)}"


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, 1 << 20):
        yield piece


def _path(sandbox_id: str, rest: str = "") -> str:
    """Raises NotFound: it is none that a sandbox could have."""
    if not _is_name(sandbox_id):
        raise no_sandbox(sandbox_id)
    slash = "/" if rest and rest[0] != "?" else ""
    return f"/v1/sandboxes/{_quoted(sandbox_id)}{slash}{rest}"


def _command_path(sandbox_id: str, command_id: str, rest: str) -> str:
    return _path(sandbox_id, f"commands/{_name(command_id, 'command')}/{rest}")


def _shell_path(sandbox_id: str, shell_id: str, rest: str = "") -> str:
    return _path(sandbox_id, f"shells/{_name(shell_id, 'shell')}") + (f"/{rest}" if rest else "")


def _terminal_path(sandbox_id: str, terminal_id: str) -> str:
    return _path(sandbox_id, f"terminals/{_name(terminal_id, 'terminal')}")


def _name(name: str, what: str) -> str:
    """A part of a path. Raises NotFound: it is none that anything could have."""
    if not _is_name(name):
        raise NotFound(f"there is no {what} {name or repr(name)} in this sandbox")
    return _quoted(name)


def _is_name(name: str) -> bool:
    """Whether it is a part of a path by itself, and not another path."""
    return name not in ("", ".", "..") and "/" not in name


def _files(sandbox_id: str, rest: str, **words: str | int) -> str:
    return _path(sandbox_id, f"files/{rest}?{_query(**words)}" if rest else f"files?{_query(**words)}")


def _query(**words: str | int) -> str:
    """Words of a URL. Raises InvalidRequest."""
    said = {name: word if isinstance(word, str) else str(word).lower() for name, word in words.items()}
    return "&".join(f"{name}={_quoted(word)}" for name, word in said.items())


def _quoted(word: str) -> str:
    """Raises InvalidRequest."""
    try:
        return quote_from_bytes(word.encode("utf-8", "surrogateescape"), safe="")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{word!r} is not text, nor the name of a file as `os.fsdecode` gives it") from None


class _Away:
    """A server that does not answer, which a person is told when it lasts."""

    def __init__(self) -> None:
        self._until: float | None = None
        self._said = False

    def too_long(self, asked_at: float) -> bool:
        """Whether it is given up, after another attempt that began then."""
        now = asyncio.get_running_loop().time()
        if self._until is None or now - asked_at > _HELD_SECONDS:  # it was there: its minute begins now
            self._until = now + _AWAY_SECONDS
        if not self._said and now > self._until - _AWAY_SECONDS + _SILENT_SECONDS:
            self._said = True
            _log.warning("the server does not answer; it is asked again for %.0f s", self._until - now)
        return now >= self._until


class _RemoteFile:
    """`api.OpenFile` of a server: whatever has the path when it is read."""

    def __init__(self, node: HttpNode, sandbox_id: str, info: FileInfo) -> None:
        self._node = node
        self._sandbox_id = sandbox_id
        self._path = info.path
        self.size = info.size
        self.etag: str | None = info.etag

    async def chunks(self, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        if length == 0:
            return
        async with self._node._contents(self._sandbox_id, self._path, offset, length) as answer:
            if answer.status != 416:  # which says that there is nothing behind the offset
                async for chunk in answer.content.iter_any():
                    yield chunk


class _Handlers:
    """Applications of this process that answer for sandboxes elsewhere: one listener, told apart by a random key that
    only the server holds."""

    def __init__(self, server: yarl.URL) -> None:
        if server.host not in ("127.0.0.1", "localhost", "::1"):
            raise Unsupported(
                f"the server {server.host} cannot reach an application of this process",
                "serve it at a URL that the server reaches, and route to `Upstream(url=…)`",
            )
        self._apps: dict[str, tuple[str, AsgiApp]] = {}  # key → sandbox, application
        self._served: asyncio.Future[tuple[asgi.Served, int]] | None = None

    async def add(self, sandbox_id: str, app: AsgiApp) -> tuple[str, Upstream]:
        """The key of a new entry and the upstream that leads to it."""
        if self._served is None or (self._served.done() and self._served.exception() is not None):
            self._served = asyncio.ensure_future(self._listen())
        _, port = await asyncio.shield(self._served)
        key = secrets.token_urlsafe(24)
        self._apps[key] = (sandbox_id, app)
        return key, Upstream(url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"})

    def remove(self, sandbox_id: str) -> None:
        for key in [key for key, (owner, _) in self._apps.items() if owner == sandbox_id]:
            del self._apps[key]

    def remove_key(self, key: str) -> None:
        self._apps.pop(key, None)

    def close(self) -> None:
        self._apps.clear()
        if self._served is not None and self._served.done() and self._served.exception() is None:
            self._served.result()[0].close()

    async def _listen(self) -> tuple[asgi.Served, int]:
        asgi.require()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        return await asgi.serve(listener, self._answer), listener.getsockname()[1]

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        entry = self._apps.get(given.removeprefix(b"Bearer ").decode("latin-1"))
        if entry is not None:
            # The key is between the server and this process: the application sees what it would in its own box.
            headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            await entry[1]({**scope, "headers": headers}, receive, send)
            return
        error = NotFound("nothing answers for this sandbox any more")
        start: Message = {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(b"content-type", b"application/json")],
        }
        await send(start)
        await send({"type": "http.response.body", "body": json.dumps(error.to_wire()).encode()})

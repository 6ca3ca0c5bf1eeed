"""HttpNode: NodeAPI over HTTP, for sandboxes that live on a server.

It owns its connections, and one listener of this process where an in-process application answers for a sandbox. It
promises the node's own results and errors, that every call has a deadline, and that a create which is cancelled leaves
nothing on the server. It never retries a request that may have run, unless that is a run with a key, which the server
starts once however often it is asked: then a server that is killed and started again is not noticed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, quote_from_bytes, urlsplit

import aiohttp
import yarl
from pydantic import TypeAdapter, ValidationError

from sandlot import asgi, packing
from sandlot.aio import shielded
from sandlot.api import (
    AsgiApp,
    Capability,
    Change,
    Chunk,
    CommandInfo,
    Ending,
    ImageConfig,
    ImageInfo,
    Info,
    Message,
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
    Upstream,
    from_json,
    is_reference,
    to_json,
)
from sandlot.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    SandlotError,
    Unreachable,
    Unsupported,
    from_wire,
)

T = TypeVar("T")

# Seconds. The server has deadlines of its own (60 to make a sandbox, 30 for any other step); these are a little longer,
# so that it is the server's own words that arrive.
_CONNECT_SECONDS = 10.0
_CREATE_SECONDS = 70.0
_STEP_SECONDS = 40.0
_COPY_SECONDS = 1830.0
_IMPORT_SECONDS = 3630.0

# How long a run with a key waits for a server that does not answer, and how often it looks (seconds).
_AWAY_SECONDS = 60.0
_AWAY_STEP = 0.25
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

_SPEC = TypeAdapter(SandboxSpec)
_RUN = TypeAdapter(Run)
_INFO = TypeAdapter(Info)
_STATS = TypeAdapter(Stats)
_INFOS = TypeAdapter(list[Info])
_IMAGE = TypeAdapter(ImageInfo)
_IMAGES = TypeAdapter(list[ImageInfo])
_CHANGES = TypeAdapter(list[Change])
_POOLS = TypeAdapter(list[PoolInfo])
_RESULT = TypeAdapter(RunResult)
_COMMAND = TypeAdapter(CommandInfo)
_COMMANDS = TypeAdapter(list[CommandInfo])
_CHUNK = TypeAdapter(Chunk)
_SHELL = TypeAdapter(ShellInfo)
_SHELLS = TypeAdapter(list[ShellInfo])
_SHELL_RUN = TypeAdapter(ShellRun)
_SHELL_RESULT = TypeAdapter(ShellResult)
_SHELL_OUTPUT = TypeAdapter(ShellOutput)
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
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None  # made by the first call, for it belongs to that one's loop
        self._handlers: _Handlers | None = None
        self._had: set[str] = set()  # images that the server had once: it is not asked again before each create

    async def create(self, spec: SandboxSpec) -> Info:
        await self._have(spec.image)
        # Only what the caller set is sent: a limit that is named means more than the same number by default.
        asking = asyncio.ensure_future(
            self._call(
                "POST",
                "/v1/sandboxes",
                _INFO,
                "making a sandbox",
                _CREATE_SECONDS,
                content=to_json(_SPEC, spec, only_set=True),
            )
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            await shielded(self._undo(asking))
            raise

    async def _have(self, image: str) -> None:
        """Let the server pull an image that it would pull by itself: how long that takes nobody knows, and who gives up
        meanwhile ends it."""
        if is_reference(image) and image not in self._had:
            try:
                await self.image(image)
            except NotFound:
                async for _ in self.pull_image(image):
                    pass
            self._had.add(image)

    async def _undo(self, asking: asyncio.Future[Info]) -> None:
        """Wait for a create that nobody wants any more, and destroy what it made."""
        await asyncio.wait((asking,))
        if not asking.cancelled() and asking.exception() is None:
            await self.destroy(asking.result().id)

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
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is read as it comes: a piece at least every `silence` seconds, all of it within `seconds`."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers, read_bufsize=_BUFFER
            )
        url = yarl.URL(f"{self._url}{path}", encoded=True)
        source = _Source(content) if isinstance(content, AsyncIterator) else None
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS, sock_read=silence)
        headers = {"Content-Type": kind}
        try:
            async with self._session.request(
                method, url, data=source or content, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if not answer.ok:
                    raise _refusal(answer.status, await answer.read())
                yield answer
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise Unreachable(f"no server answers at {self._url}", "`sandlot serve` starts one") from None
        except TimeoutError:
            raise DeadlineExceeded(f"{doing} did not finish within {seconds or silence:g} s") from None
        except aiohttp.ClientError as error:
            if source is not None and source.failed is not None:
                raise source.failed from None
            broke = f"the server at {self._url} broke the connection while {doing}: {type(error).__name__}"
            raise Unreachable(broke, "look at what `sandlot serve` printed") from None

    async def pools(self) -> list[PoolInfo]:
        return await self._call("GET", "/v1/pools", _POOLS, "asking for the warm pools")

    async def stats(self, sandbox_id: str) -> Stats:
        return await self._call("GET", _path(sandbox_id, "stats"), _STATS, f"asking what {sandbox_id} uses")

    async def run(self, sandbox_id: str, run: Run) -> RunResult:
        # Start, the command itself, and killing it at its timeout.
        seconds = None if run.timeout is None else run.timeout + 2 * _STEP_SECONDS
        content = to_json(_RUN, run, only_set=True)
        loop = asyncio.get_running_loop()
        until: float | None = None  # while the server is away
        while True:
            asked_at = loop.time()
            try:
                return await self._call(
                    "POST",
                    _path(sandbox_id, "run"),
                    _RESULT,
                    f"running {run.argv[0]} in {sandbox_id}",
                    seconds,
                    content=content,
                )
            except Unreachable:
                now = loop.time()
                if until is None or now - asked_at > _HELD_SECONDS:  # it was there: its minute begins now
                    until = now + _AWAY_SECONDS
                if run.key is None or now >= until:
                    raise
            await asyncio.sleep(_AWAY_STEP)  # nobody can say when a server that is gone will be back

    async def launch(self, sandbox_id: str, run: Run) -> CommandInfo:
        content = to_json(_RUN, run, only_set=True)
        what = f"starting {run.argv[0]} in {sandbox_id}"
        return await self._call("POST", _path(sandbox_id, "commands"), _COMMAND, what, content=content)

    async def commands(self, sandbox_id: str) -> list[CommandInfo]:
        return await self._call("GET", _path(sandbox_id, "commands"), _COMMANDS, f"listing commands of {sandbox_id}")

    async def wait(self, sandbox_id: str, command_id: str) -> RunResult:
        path = _command_path(sandbox_id, command_id, "wait")
        return await self._call("GET", path, _RESULT, f"waiting for command {command_id}", None)

    async def follow(self, sandbox_id: str, command_id: str, out: int = 0, err: int = 0) -> AsyncIterator[Chunk]:
        path = _command_path(sandbox_id, command_id, f"output?out={out}&err={err}")
        async for line in self._lines("GET", path, f"following command {command_id}", None):
            yield from_json(_CHUNK, line)

    async def _lines(
        self, method: str, path: str, doing: str, silence: float | None, content: Content = None
    ) -> AsyncIterator[bytes]:
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
        content = spec.model_dump_json(exclude_unset=True)
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
        return await self._call(
            "POST", path, _SHELL_RESULT, f"running a text in shell {shell_id}", seconds, content=content
        )

    async def shell_output(self, sandbox_id: str, shell_id: str, command_id: str) -> ShellOutput:
        path = _shell_path(sandbox_id, shell_id, f"commands/{quote(command_id, safe='')}")
        return await self._call("GET", path, _SHELL_OUTPUT, f"asking what command {command_id} wrote")

    async def interrupt_shell(self, sandbox_id: str, shell_id: str) -> bool:
        path = _shell_path(sandbox_id, shell_id, "interrupt")
        return await self._call("POST", path, _BOOL, f"interrupting shell {shell_id}")

    async def close_shell(self, sandbox_id: str, shell_id: str) -> None:
        await self._send("DELETE", _shell_path(sandbox_id, shell_id), f"closing shell {shell_id}")

    async def read_file(self, sandbox_id: str, path: str) -> bytes:
        return await self._send("GET", _file_path(sandbox_id, path), f"reading {path} of {sandbox_id}")

    async def write_file(self, sandbox_id: str, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._send(
            "PUT",
            f"{_file_path(sandbox_id, path)}&mode={mode}",
            f"writing {path} of {sandbox_id}",
            content=data,
            kind=_BINARY,
        )

    async def upload(self, sandbox_id: str, path: str, tar: AsyncIterator[bytes], user: int = 0) -> None:
        await self._send(
            "PUT",
            _path(sandbox_id, f"tree?path={_query(path)}&user={user}"),
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
                content=target.model_dump_json(),
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
        return await self._call("GET", "/v1/sandboxes", _INFOS, "listing the sandboxes")

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
        body = await self._send(method, path, doing, seconds, content=content)
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
        if seconds is not None and isinstance(content, bytes):
            seconds += len(content) / _SLOWEST
        async with self._stream(method, path, doing, None, seconds=seconds, content=content, kind=kind) as answer:
            return await answer.read()


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


def _refusal(status: int, body: bytes) -> SandlotError:
    """The server's own error."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    return from_wire(said, status)


def _image(name: str) -> str:
    return f"/v1/images/{quote(name, safe='')}"


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, 1 << 20):
        yield piece


def _path(sandbox_id: str, rest: str = "") -> str:
    slash = "/" if rest and rest[0] != "?" else ""
    return f"/v1/sandboxes/{quote(sandbox_id, safe='')}{slash}{rest}"


def _command_path(sandbox_id: str, command_id: str, rest: str) -> str:
    return _path(sandbox_id, f"commands/{quote(command_id, safe='')}/{rest}")


def _shell_path(sandbox_id: str, shell_id: str, rest: str = "") -> str:
    return _path(sandbox_id, f"shells/{quote(shell_id, safe='')}") + (f"/{rest}" if rest else "")


def _file_path(sandbox_id: str, path: str) -> str:
    return _path(sandbox_id, f"files?path={_query(path)}")


def _query(path: str) -> str:
    """The name of a file, of any bytes, as a value in a URL."""
    try:
        return quote_from_bytes(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidRequest(f"{path!r} is not text, nor the name of a file as `os.fsdecode` gives it") from None


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

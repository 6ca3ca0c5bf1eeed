"""The HTTP application over a node: who may call, how big a body may be, and how an error looks.

It promises that every error is `{"error": {"code", "message", "hint", "request_id"}}` with a fitting status, that
nobody without a key (or, where there is no key, nobody but a program of this machine) is let in, and that a body over
the limit is refused while it arrives. It never makes a node, binds a port or ends: that is `cli/serve.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from sandlot.api import AsgiApp, Message, NodeAPI, Scope
from sandlot.errors import Forbidden, InvalidRequest, NotFound, QuotaExceeded, SandlotError, Unauthorized
from sandlot.node.keyed import ONLY_LOOKS
from sandlot.server import ready, v1
from sandlot.server.document import Api
from sandlot.server.keys import ANYBODY, Caller, Keys, retry_after
from sandlot.server.metrics import Metrics
from sandlot.server.observe import Observe, Work, refuse
from sandlot.server.spans import Spans
from sandlot.server.tenants import caller_of, told
from sandlot.server.volumes import AllowedVolumes

# Bytes of a request's body: 64 MiB of standard input, or 48 MiB of it as base64, and some words around it.
MOST_BODY_BYTES = (64 << 20) + (64 << 10)

# The same of an image: what is sent lies on the disk, not in memory.
MOST_IMAGE_BYTES = 64 << 30

LOOPBACK = ("127.0.0.1", "localhost", "::1")


# What whoever watches over a server asks, without a key.
OPEN = ("/healthz", "/readyz")


def create_app(
    node: NodeAPI,
    api_key: str | None = None,
    volumes: AllowedVolumes | None = None,
    networks: frozenset[str] = frozenset({"none"}),
    spool: Path | None = None,
    keys: Keys | None = None,
    *,
    places: Sequence[Path] = (),
    spans: Spans | None = None,
) -> FastAPI:
    """The application. With `api_key`, or if there are `keys`, each request but those that are OPEN must bring one as a
    bearer token. Of the host's files callers may mount what is in `volumes`; None: nothing. Sandboxes may have one of
    `networks`. Images that are sent wait in `spool`; None: where temporary files are. It is ready while `places`
    have room."""
    app = Api(
        title="Sandlot",
        description="Isolated Linux boxes over HTTP.",
        version=version("sandlot"),
        docs_url=None,  # their page loads scripts from a third party; the document itself is at /openapi.json
        redoc_url=None,
        redirect_slashes=False,  # to where no error of ours is
    )
    app.state.node = node
    app.state.volumes = volumes or AllowedVolumes.named()
    app.state.networks = networks
    app.state.spool = spool
    app.state.places = places
    app.state.work, app.state.metrics = Work(), Metrics()
    app.state.keys = keys = keys or Keys(full=api_key)
    app.include_router(v1.router)
    app.add_api_route("/healthz", _healthz, methods=["GET"])
    app.add_api_route("/readyz", _readyz, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"], response_class=PlainTextResponse)
    app.add_exception_handler(SandlotError, _sandlot_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(WebSocketRequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.router.default = _nowhere
    app.add_middleware(Guard, keys=keys)
    app.add_middleware(Observe, work=app.state.work, metrics=app.state.metrics, spans=spans)
    return app


async def _healthz() -> dict[str, str]:
    """Whether this server answers."""
    return {"status": "ok"}


async def _readyz(request: Request) -> dict[str, str]:
    """Whether this server should be sent requests."""
    await asyncio.to_thread(ready.check, request.app.state.work.draining, request.app.state.places)
    return {"status": "ready"}


async def _metrics(request: Request) -> Response:
    """The server's numbers, as Prometheus reads them."""
    if caller_of(request).tenant is not None:
        raise Forbidden("these numbers are about every tenant's sandboxes", "who runs the server can read them")
    node: NodeAPI = request.app.state.node
    text = request.app.state.metrics.text(await node.counts(), await node.pools())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def _nowhere(scope: Scope, receive: object, send: object) -> None:
    """Where there is no route, for a WebSocket too, which would be closed without a word."""
    raise HTTPException(404)


async def _sandlot_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SandlotError)
    request.state.error = error.code
    return _Escaped(told(error, request), error.status, _headers(error))


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError | WebSocketRequestValidationError)
    # The first part of a location is where it was (body, query, path): of no use to who wrote the request.
    said = [
        f"{'.'.join(map(str, e['loc'][1:])) or e['loc'][0]}: {e['msg'].removeprefix('Value error, ')}"
        for e in error.errors()
    ]
    return await _sandlot_error(request, InvalidRequest("; ".join(said), "the fields are described in /openapi.json"))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    asked = f"{request.scope.get('method', 'WebSocket')} {request.url.path}"
    if error.status_code == 404:
        return await _sandlot_error(request, NotFound(f"there is no {asked}", "the routes are in /openapi.json"))
    wrong = InvalidRequest(f"{asked}: {error.detail}", "the routes are in /openapi.json")
    request.state.error = wrong.code
    return _Escaped(told(wrong, request), error.status_code, error.headers)


class _Escaped(JSONResponse):
    """In ASCII: what an error says may hold the name of a file that is not UTF-8."""

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode()


class Guard:
    """The second layer: the caller's right to be here, and the size of what is sent."""

    def __init__(self, app: AsgiApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal: SandlotError | None = None
        try:
            caller = ANYBODY if scope["path"] in OPEN else self._caller(scope, headers)
            scope.setdefault("state", {})["caller"] = caller
            ONLY_LOOKS.set(not caller.may_run)
        except SandlotError as error:
            refusal = error
        if scope["type"] == "websocket":  # which a browser opens to any address, and only says for which page
            if refusal is None:
                await self._app(scope, receive, send)
            else:
                await refuse(refusal, scope, send, _headers(refusal))
            return
        length = headers.get(b"content-length", b"0")
        most = _most(scope["method"], scope["path"])
        if refusal is None and (not length.isdigit() or int(length) > most):
            refusal = _too_large(most)
        if refusal is not None:
            await refuse(refusal, scope, send, _headers(refusal))
            return
        received = 0
        started = False
        refusal = None

        async def counted() -> Message:  # a body without a length is measured as it comes
            nonlocal received, refusal
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                refusal = _too_large(most)
                raise refusal
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if refusal is not None and not started:
                return  # what whoever read the body makes of the refusal, which is answered below
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except InvalidRequest as error:
            if started:
                raise
            refusal = error
        if refusal is not None and not started:
            await refuse(refusal, scope, send)

    def _caller(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        """Raises Unauthorized, Forbidden, QuotaExceeded."""
        if self._keys.required:
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            caller = self._keys.caller(key) if kind.lower() == b"bearer" else None
            if caller is None:
                raise Unauthorized("this server wants its API key", "send `Authorization: Bearer KEY`")
            # A WebSocket's route says itself what it is good for: some only look.
            if not caller.may_run and scope.get("method", "GET") not in ("GET", "HEAD"):
                raise Forbidden("this key may look, and change nothing", "take one with the scope `run`")
            return caller
        # Without a key the loopback address is the protection, and a browser would carry a web page's requests past it:
        # to a name that resolves here (so the host must be ours) or across origins (so the origin must be).
        origin = headers.get(b"origin")
        if _is_ours(b"//" + headers.get(b"host", b"")) and (origin is None or _is_ours(origin)):
            return ANYBODY
        raise Unauthorized("only programs of this machine may call a server without a key", "`sandlot serve --api-key`")


def _is_ours(url: bytes) -> bool:
    """Whether it names this machine by its loopback address."""
    try:
        return urlsplit(url.decode("latin-1")).hostname in LOOPBACK
    except ValueError:  # it is no URL
        return False


def _most(method: str, path: str) -> float:
    """How large a request's body may be. A file or tree is never held here: it ends where the sandbox's disk does."""
    if method == "PUT" and path.startswith("/v1/images/"):
        return MOST_IMAGE_BYTES
    streamed = (method == "PUT" and path.endswith("/tree")) or (method in ("PUT", "POST") and path.endswith("/files"))
    return math.inf if streamed and path.startswith("/v1/sandboxes/") else MOST_BODY_BYTES


def _too_large(most: float) -> InvalidRequest:
    return InvalidRequest(f"the request's body is larger than {int(most) >> 20} MiB")


def _headers(error: SandlotError) -> dict[str, str]:
    """Those that an error has of its own."""
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    after = retry_after(error) if isinstance(error, QuotaExceeded) else None
    return {} if after is None else {"retry-after": after}

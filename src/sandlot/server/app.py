"""The HTTP application over a node: who may call, how big a body may be, and how an error looks.

It promises that every error is `{"error": {"code", "message", "hint"}}` with a fitting status, that nobody without the
key (or, where there is no key, nobody but a program of this machine) is let in, and that a body over the limit is
refused while it arrives. It never makes a node, binds a port or ends: that is `cli/serve.py`.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sandlot.api import AsgiApp, Message, NodeAPI, Scope
from sandlot.errors import InvalidRequest, NotFound, SandlotError
from sandlot.server import v1
from sandlot.server.volumes import AllowedVolumes

# Bytes of a request's body: a file of 64 MiB, or 48 MiB of standard input as base64, and some words around it.
MOST_BODY_BYTES = (64 << 20) + (64 << 10)

# The same of an image: what is sent lies on the disk, not in memory.
MOST_IMAGE_BYTES = 64 << 30

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Unauthorized(SandlotError):
    """The request does not carry this server's key."""

    code = "unauthorized"
    status = 401


def create_app(
    node: NodeAPI,
    api_key: str | None = None,
    volumes: AllowedVolumes | None = None,
    networks: frozenset[str] = frozenset({"none"}),
    spool: Path | None = None,
) -> FastAPI:
    """The application. With `api_key`, each request but /healthz must bring it as a bearer token. Of the host's files
    callers may mount what is in `volumes`; None: nothing. Sandboxes may have one of `networks`. Images that are sent
    wait in `spool`; None: where temporary files are."""
    app = FastAPI(
        title="Sandlot",
        description="Isolated Linux boxes over HTTP.",
        docs_url=None,  # their page loads scripts from a third party; the document itself is at /openapi.json
        redoc_url=None,
    )
    app.state.node = node
    app.state.volumes = volumes or AllowedVolumes.named()
    app.state.networks = networks
    app.state.spool = spool
    app.include_router(v1.router)
    app.add_api_route("/healthz", _healthz, methods=["GET"])
    app.add_exception_handler(SandlotError, _sandlot_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, api_key=api_key)
    return app


async def _healthz() -> dict[str, str]:
    """Whether this server answers."""
    return {"status": "ok"}


async def _sandlot_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SandlotError)
    return _Escaped(error.to_wire(), error.status)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # The first part of a location is where it was (body, query, path): of no use to who wrote the request.
    said = [
        f"{'.'.join(map(str, e['loc'][1:])) or e['loc'][0]}: {e['msg'].removeprefix('Value error, ')}"
        for e in error.errors()
    ]
    return await _sandlot_error(request, InvalidRequest("; ".join(said), "the fields are described in /openapi.json"))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return await _sandlot_error(request, NotFound(f"there is no {asked}", "the routes are in /openapi.json"))
    wire = InvalidRequest(f"{asked}: {error.detail}", "the routes are in /openapi.json").to_wire()
    return JSONResponse(wire, error.status_code, error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The framework raises it again after the answer is sent, so that the server's log has the traceback.
    said = f"the server failed at {request.method} {request.url.path}: {type(error).__name__}"
    return JSONResponse(SandlotError(said, "its log has the reason").to_wire(), 500)


class _Escaped(JSONResponse):
    """In ASCII: what an error says may hold the name of a file that is not UTF-8."""

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode()


class Guard:
    """The outermost layer: the caller's right to be here, and the size of what is sent."""

    def __init__(self, app: AsgiApp, api_key: str | None) -> None:
        self._app = app
        self._key = api_key.encode() if api_key else None

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = None if scope["path"] == "/healthz" else self._refusal(headers)
        length = headers.get(b"content-length", b"0")
        most = _most(scope["method"], scope["path"])
        if refusal is None and (not length.isdigit() or int(length) > most):
            refusal = _too_large(most)
        if refusal is not None:
            await _answer(refusal, send)
            return
        received = 0
        started = False

        async def counted() -> Message:  # a body without a length is measured as it comes
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise _too_large(most)
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except InvalidRequest as error:
            if started:
                raise
            await _answer(error, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> SandlotError | None:
        if self._key is not None:
            given = headers.get(b"authorization", b"")
            if hmac.compare_digest(given, b"Bearer " + self._key):
                return None
            return Unauthorized("this server wants its API key", "send `Authorization: Bearer KEY`")
        # Without a key the loopback address is the protection, and a browser would carry a web page's requests past it:
        # to a name that resolves here (so the host must be ours) or across origins (so the origin must be).
        host = urlsplit("//" + headers.get(b"host", b"").decode("latin-1")).hostname
        origin = headers.get(b"origin")
        if host in LOOPBACK and (origin is None or urlsplit(origin.decode("latin-1")).hostname in LOOPBACK):
            return None
        return Unauthorized(
            "only programs of this machine may call a server without a key", "`sandlot serve --api-key`"
        )


def _most(method: str, path: str) -> float:
    """How large a request's body may be. A tree is never held here: it ends where the sandbox's disk does."""
    if method == "PUT" and path.startswith("/v1/images/"):
        return MOST_IMAGE_BYTES
    return math.inf if method == "PUT" and path.endswith("/tree") else MOST_BODY_BYTES


def _too_large(most: float) -> InvalidRequest:
    return InvalidRequest(f"the request's body is larger than {int(most) >> 20} MiB")


async def _answer(error: SandlotError, send: Callable[[Message], Awaitable[None]]) -> None:
    body = json.dumps(error.to_wire()).encode()
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

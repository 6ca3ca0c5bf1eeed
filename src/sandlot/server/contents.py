"""How a file's bytes are answered over HTTP: whole or a range of them (RFC 9110), or not at all when the caller has
them. It promises that the file is let go of, however the answer ends, and that it is never held in memory whole."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from sandlot.api import Message, OpenFile, Scope
from sandlot.errors import InvalidRequest
from sandlot.server.tenants import told, while_let_in

_MEDIA = "application/octet-stream"
# What is answered in one go.
_AT_ONCE = 1 << 20


class _Streamed(StreamingResponse):
    """Lets go of the file when nothing more is sent, even if nothing was."""

    until_sent: Callable[[], Awaitable[None]]

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.until_sent()


async def answer(request: Request, file: OpenFile, let_go: Callable[[], Awaitable[None]]) -> Response:
    """What a request for it is answered; `let_go` of the file is called once, here or when it is sent."""
    headers = request.headers
    known = {"accept-ranges": "bytes"} | ({"etag": f'"{file.etag}"'} if file.etag else {})
    if file.etag and _names(headers.get("if-none-match", ""), file.etag):
        await let_go()
        return Response(status_code=304, headers=known)
    begin, end, status = 0, file.size, 200
    if_range = headers.get("if-range")
    if if_range is None or if_range == known.get("etag"):
        found = wanted(headers.get("range", ""), file.size)
        if found is not None and found[0] >= found[1]:
            await let_go()
            error = InvalidRequest(f"the file has {file.size} bytes, and none of those that were asked for")
            return Response(
                json.dumps(told(error, request)),
                416,
                {"content-range": f"bytes */{file.size}"},
                media_type="application/json",
            )
        if found is not None:
            (begin, end), status = found, 206
            known["content-range"] = f"bytes {begin}-{end - 1}/{file.size}"
    chunks = file.chunks(begin, end - begin)
    if end - begin <= _AT_ONCE:
        try:
            return Response(b"".join([chunk async for chunk in chunks]), status, known, media_type=_MEDIA)
        finally:
            await let_go()
    known["content-length"] = str(end - begin)
    streamed = _Streamed(while_let_in(request, chunks), status, known, media_type=_MEDIA)
    streamed.until_sent = let_go
    return streamed


def _names(tags: str, etag: str) -> bool:
    return tags.strip() == "*" or etag in re.findall(r'(?:W/)?"([^"]*)"', tags)


def wanted(header: str, size: int) -> tuple[int, int] | None:
    """The first byte that is asked for and the one after the last; none are left where the first is not before the
    other. None: all, for there is no range, several of them, or something else."""
    found = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", header.strip())
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found[1], found[2]
    if not first:
        return max(0, size - int(last)), size
    begin, end = int(first), min(size, int(last) + 1) if last else size
    return None if last and int(last) < begin else (begin, end)

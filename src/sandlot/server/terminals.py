"""A terminal over a WebSocket: its bytes in binary frames, both ways; all else in text frames of JSON.

    from the caller    {"resize": {"rows": 40, "columns": 120}}
    from the server    {"end": {"reason": "exit", "exit_code": 0}}, or an error as in any answer; then it is closed

It promises that who goes away is attached no more, that a caller who does not read makes the program wait, not this
process hold more, and that nothing is typed or seen with a key that was revoked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable

from fastapi import WebSocket
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from sandlot.api import Model, TerminalLink, TerminalSize
from sandlot.errors import Conflict, SandlotError, invalid
from sandlot.server.tenants import still_let_in, told

# Of a WebSocket's close frame.
_NORMAL, _POLICY = 1000, 1008


class _Told(Model):
    """A text frame from the caller."""

    resize: TerminalSize


async def serve(socket: WebSocket, attaching: Awaitable[TerminalLink]) -> None:
    """Until either side has gone, or its caller would be let in no more. Raises as attaching does."""
    link = await attaching
    tasks: list[asyncio.Task[None]] = []
    try:
        await socket.accept()
        telling = asyncio.create_task(_tell(socket, link))
        hearing = asyncio.create_task(_hear(socket, link))
        tasks += (telling, hearing)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        refused = next((error for task in done if (error := task.exception()) is not None), None)
        if isinstance(refused, Conflict):  # the terminal takes no more: what is left of its output comes, and its end
            await asyncio.wait((telling,))
        elif isinstance(refused, SandlotError):
            socket.state.error = refused.code
            telling.cancel()
            await asyncio.wait((telling,))
            await _end(socket, json.dumps(told(refused, socket)), _POLICY)
    except WebSocketDisconnect:
        pass
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await link.close()
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, SandlotError | WebSocketDisconnect):
            raise outcome


async def _tell(socket: WebSocket, link: TerminalLink) -> None:
    while data := await link.read():
        still_let_in(socket)
        await socket.send_bytes(data)
    if link.end is not None:
        await _end(socket, json.dumps({"end": link.end.model_dump()}), _NORMAL)


async def _hear(socket: WebSocket, link: TerminalLink) -> None:
    while (message := await socket.receive())["type"] == "websocket.receive":
        still_let_in(socket)
        data, text = message.get("bytes"), message.get("text")
        if data is not None:
            await link.write(data)
        elif text is not None:
            try:
                size = _Told.model_validate_json(text).resize
            except ValidationError as error:
                raise invalid(error) from None
            await link.resize(size.rows, size.columns)


async def _end(socket: WebSocket, last: str, code: int) -> None:
    await socket.send_text(last)
    await socket.close(code)

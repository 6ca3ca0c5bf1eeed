"""A TerminalLink over a WebSocket to a server.

It owns one connection, and promises that one which breaks is told as Unreachable, and that no more is held of what the
terminal writes than a few frames.
"""

from __future__ import annotations

import json

import aiohttp
from pydantic import ValidationError

from sandlot.api import MOST_FRAME_BYTES, TerminalEnd, TerminalSize
from sandlot.errors import Conflict, Unreachable, from_wire, invalid


class SocketLink:
    """What `HttpNode.attach_terminal` returns."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.end: TerminalEnd | None = None
        self._socket = socket
        self._closed = False  # from here

    async def read(self) -> bytes:
        if self.end is not None:
            return b""
        message = await self._socket.receive()
        if message.type == aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type == aiohttp.WSMsgType.TEXT:
            told = json.loads(message.data)
            if "end" not in told:
                raise from_wire(told, 400)
            self.end = TerminalEnd.model_validate(told["end"])
        elif not self._closed:
            raise Unreachable("the connection to the terminal broke", "its program goes on: attach again")
        return b""

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), MOST_FRAME_BYTES):
            await self._send(data[at : at + MOST_FRAME_BYTES])

    async def resize(self, rows: int, columns: int) -> None:
        try:
            size = TerminalSize(rows=rows, columns=columns)
        except ValidationError as error:
            raise invalid(error) from None
        await self._send(json.dumps({"resize": size.model_dump()}))

    async def _send(self, message: bytes | str) -> None:
        try:
            if self.end is None:
                if isinstance(message, bytes):
                    await self._socket.send_bytes(message)
                else:
                    await self._socket.send_str(message)
                return
        except (ConnectionError, aiohttp.ClientError):
            pass
        raise Conflict("the terminal takes no more from here", "what is read from it says why")

    async def close(self) -> None:
        self._closed = True
        self.end = self.end or TerminalEnd(reason="closed")
        await self._socket.close()

"""A layer as a plain tar, a piece at a time: gzip, zstd, or what is neither as it is. Never more than a piece of it is
in memory, whatever was packed. (By the standard library's zlib: `isal` takes half its time, and no pull was shorter by
it in bench/images.py, for whoever makes the files takes longer.)"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from sandlot.errors import BadImage, Unsupported

# What is read and given out at a time (bytes). Larger ones are no faster, smaller ones cost calls.
PIECE = 1 << 20

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # of zstd, after a first byte 0x50 to 0x5f
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x04\x22\x4d\x18": "lz4"}


def is_packed(head: bytes) -> bool:
    """Whether it is what `inflated` inflates, by its first four bytes."""
    return head.startswith(_GZIP) or _is_zstd(head)


def _is_zstd(head: bytes) -> bool:
    return head.startswith(_ZSTD) or (head[1:4] == _SKIPPABLE and head[0] >> 4 == 5)


def inflated(packed: BinaryIO, what: str) -> Iterator[bytes]:
    """The pieces of what is packed. Blocks. Raises BadImage when it breaks off or is damaged."""
    head = packed.read(PIECE)
    try:
        if head.startswith(_GZIP):
            yield from _gunzip(packed, head)
        elif _is_zstd(head):
            yield from _unzstd(packed, head)
        else:
            other = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
            if other is not None:
                raise Unsupported(f"{what} is packed by {other}", "pack it with gzip or zstd, or not at all")
            while head:
                yield head
                head = packed.read(PIECE)
    except EOFError:
        raise BadImage(f"{what} breaks off", "was it copied whole?") from None
    except zlib.error as error:
        raise BadImage(f"{what} is damaged: {error}") from error


def _gunzip(packed: BinaryIO, data: bytes) -> Iterator[bytes]:
    while data:  # one member after another, as `pigz` and `cat` make them
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while not member.eof:
            data = data or packed.read(PIECE)
            piece = member.decompress(data, PIECE)
            if not data and not piece and not member.eof:
                raise EOFError
            data = member.unconsumed_tail
            if piece:
                yield piece
        data = member.unused_data or packed.read(PIECE)
        while data and not data.strip(b"\0"):  # what fills up a block of a tape
            data = packed.read(PIECE)


def _unzstd(packed: BinaryIO, data: bytes) -> Iterator[bytes]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        while data:
            frame = zstd.ZstdDecompressor()
            while not frame.eof:
                if frame.needs_input:
                    data = data or packed.read(PIECE)
                    if not data:
                        raise EOFError
                piece = frame.decompress(data, PIECE)
                data = b""
                if piece:
                    yield piece
            data = frame.unused_data or packed.read(PIECE)
    except zstd.ZstdError as error:
        raise zlib.error(str(error)) from error

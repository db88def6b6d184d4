"""Frames between the service and its child processes: a big-endian u32 length, then that many bytes of UTF-8 JSON.

Invariants: a frame is one JSON object of at most MAX_FRAME_BYTES; what is no such thing is CorruptData, and the
connection is of no more use. What comes from a child is shorter than what goes to it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from rlharvest.errors import CorruptData

MAX_FRAME_BYTES = 16 << 20

MAX_ANSWER_BYTES = 64 << 10
"""Of a frame from a child."""

_LENGTH = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame of a message; raises CorruptData if it is too long."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise CorruptData(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def _length(head: bytes, most: int) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise CorruptData(f"a frame announces {length} bytes, over the limit of {most}")
    return int(length)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"a frame is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise CorruptData(f"a frame holds {type(message).__name__}, not an object")
    return message


def _no_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Block until a whole frame is there; None at the end of the stream."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _exactly(connection, _length(head, MAX_FRAME_BYTES))
    return None if body is None else _decode(body)


def _exactly(connection: socket.socket, n: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < n:
        part = connection.recv(min(n - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Wait for a whole frame of a child; None at the end of the stream."""
    try:
        length = _length(await reader.readexactly(_LENGTH.size), MAX_ANSWER_BYTES)
        return _decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

"""Frames: what goes in comes out, in any pieces; what is no frame is refused."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import CorruptData
from rlharvest_reward import frames

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_MESSAGES = st.lists(st.dictionaries(st.text(), _JSON, max_size=3), max_size=4)


@given(_MESSAGES, st.integers(1, 7))
def test_messages_survive_any_fragmentation(messages: list[dict[str, Any]], piece: int) -> None:
    data = b"".join(frames.encode(message) for message in messages)

    async def read_all() -> list[dict[str, Any]]:
        reader = asyncio.StreamReader()
        for at in range(0, len(data), piece):
            reader.feed_data(data[at : at + piece])
        reader.feed_eof()
        found = []
        while (message := await frames.read(reader)) is not None:
            found.append(message)
        return found

    assert asyncio.run(read_all()) == messages


def test_the_blocking_side_reads_the_same() -> None:
    ours, theirs = socket.socketpair()
    message = {"text": "é" * 500_000}
    with ours, theirs:
        writer = threading.Thread(target=ours.sendall, args=(frames.encode(message),))
        writer.start()
        assert frames.receive(theirs) == message
        writer.join()
        ours.close()
        assert frames.receive(theirs) is None


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\0\0\0\x01x", b"\0\0\0\x02[]", b"\0\0\0\x02\xff\xfe"],
    ids=["long", "text", "list", "bytes"],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        with pytest.raises(CorruptData):
            frames.receive(theirs)


def test_half_a_frame_is_the_end_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(frames.encode({"a": 1})[:-1])
        ours.close()
        assert frames.receive(theirs) is None

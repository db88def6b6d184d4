"""A flush is in the log once: a stream that takes a new one for an old one is found out, a retry is not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client
from rlharvest_rollout.buffer import Buffer
from rlharvest_rollout.publisher import FlushSwallowed, Publisher


class Stream:
    """A JetStream that answers each publication with the next of `answers`: an error, or whether it is a duplicate."""

    def __init__(self, *answers: Exception | bool) -> None:
        self.answers = list(answers)
        self.identities: list[str] = []

    async def publish(self, _subject: str, _payload: bytes, *, headers: dict[str, str], **_given: Any) -> Any:
        self.identities.append(headers["Nats-Msg-Id"])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(duplicate=answer, seq=1)


def publisher(stream: Stream) -> Publisher:
    client = SimpleNamespace(jetstream=lambda: stream, is_connected=True, max_payload=1 << 20)
    return Publisher(
        cast(Client, client),
        Buffer(100),
        job="rljob_1",
        worker="wkr_1",
        incarnation=2,
        numbers=itertools.count(1),
        flush_s=1.0,
        flush_tokens=10,
    )


async def test_a_flush_that_the_stream_swallows_is_an_error() -> None:
    """Its number was used before within the window of duplicates: its tokens would be lost in silence."""
    with pytest.raises(FlushSwallowed, match=r"wkr_1\.2:1"):
        await publisher(Stream(True)).finish()


async def test_a_retry_whose_first_try_arrived_is_done() -> None:
    """The acknowledgement was lost, not the message: the same bytes under the same id count once."""
    stream = Stream(TimeoutError(), True)
    await publisher(stream).finish()
    assert stream.identities == ["wkr_1.2:1", "wkr_1.2:1"]


async def test_numbers_never_repeat() -> None:
    stream = Stream(False, False)
    one = publisher(stream)
    await one.finish()
    await one.finish()
    assert stream.identities == ["wkr_1.2:1", "wkr_1.2:2"]

"""How many event streams are open: each holds a connection and asks SQL four times a second."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

RETRY_AFTER_S = 5


class Streams:
    """Counts the open streams of one process.

    Args:
        most: that may be open at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0

    def enter(self) -> None:
        """Take a place. Raises HTTPException: 503, there is none."""
        if self.open >= self.most:
            raise HTTPException(
                503,
                f"event streams: the limit of {self.most} is reached. Come again, read the events page by page, or set "
                "RLHARVEST_MOST_STREAMS.",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
        self.open += 1

    def leave(self) -> None:
        """Give the place back."""
        self.open -= 1


class CountedStream(StreamingResponse):
    """A stream that gives its place back when it ends, however it ends."""

    streams: Streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.streams.leave()

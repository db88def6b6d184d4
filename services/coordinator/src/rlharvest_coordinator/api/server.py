"""The web server of the API: uvicorn on h11, which answers also what it cannot read as the API answers everything.

Invariants: a request whose first line and headers exceed HEAD_BYTES is answered with 431 and the envelope, whether they came
at once (guard) or in pieces (here), and never with a reset: an answer to a client that still sends would be lost if the
connection were closed at once (RFC 9112, section 9.6), so what still comes is read and forgotten for LINGER_S at most.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from rlharvest_coordinator.api.errors import envelope
from rlharvest_coordinator.api.guard import HEAD_BYTES, head_too_large

LINGER_S = 5.0


class WebServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process stops in the order that it chooses."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connection(H11Protocol):
    """A connection of a client that may send what is no request."""

    _refused = False

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read; uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        answer = head_too_large() if large else envelope(400, "bad_request", f"{msg} ({error})")
        self._refused = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        # Nothing may follow an answer that has begun.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [*answer.raw_headers, CLOSE_HEADER]
            reason = STATUS_PHRASES[answer.status_code]
            head = h11.Response(status_code=answer.status_code, headers=headers, reason=reason)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def config(app: ASGIApp, **options: Any) -> uvicorn.Config:
    """Return how the application is served; `options` are uvicorn's."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=HEAD_BYTES,
        log_config=None,
        access_log=False,
        **options,
    )

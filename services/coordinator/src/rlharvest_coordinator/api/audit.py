"""A record of every call that may change something: who, what, of which job, from where, with what result.

Invariants: a record is written after the call, whatever came of it, into SQL and into the log (into the log alone where the
call samples, which changes nothing that is kept); it names a token and never holds one; callers without a good token are in
the log only, so that nobody can fill the database from outside. A fault of the database does not undo what the call did: the
log has the record then.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog
from rlharvest.clock import Clock
from rlharvest.credentials import Tokens, bearer
from rlharvest.errors import RlharvestError
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rlharvest_coordinator.api.guard import SAFE, session_of, session_value
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import audit
from rlharvest_coordinator.store.audit import Record

log = structlog.get_logger(__name__)

ANYONE, UNKNOWN = "anyone", "unknown"

_UNAUTHORISED = (401, 403)

_SAMPLES = ("create_completion", "create_chat_completion")
"""Actions of the gateway: there may be hundreds a second."""


@dataclass
class _Subject:
    name: str | None = None


_SUBJECT: ContextVar[_Subject | None] = ContextVar("audit subject", default=None)


def about(subject: str) -> None:
    """Say which job or worker the call in progress is about."""
    held = _SUBJECT.get()
    if held is not None:
        held.name = subject


def name_of(token: str) -> str:
    """Return the name of a token: the same for the same token, and of no use for finding it."""
    return "token-" + hmac.new(token.encode(), b"rlharvest audit", hashlib.sha256).hexdigest()[:12]


def caller(tokens: Tokens | None, authorization: str, cookie: str = "") -> str:
    """Return who calls, by an Authorization header or the cookie of a browser that has logged in."""
    if tokens is None:
        return ANYONE
    token = tokens.matching(bearer(authorization)) or tokens.matching(cookie, session_value)
    return name_of(token) if token is not None else UNKNOWN


async def keep(sessions: Sessions, record: Record) -> None:
    """Write a record."""
    log.info("api.audit", **record.model_dump(exclude={"at"}))
    if record.action in _SAMPLES:
        return
    try:
        await audit.append(sessions, record)
    except (SQLAlchemyError, OSError) as error:
        log.error("api.audit_not_kept", action=record.action, subject=record.subject, error=repr(error))


class Audit:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens | None) -> None:
        self.app = app
        self.tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE:
            await self.app(scope, receive, send)
            return
        status = 500
        subject = _Subject()
        held = _SUBJECT.set(subject)

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            _SUBJECT.reset(held)
            await self._record(scope, status, subject.name)

    async def _record(self, scope: Scope, status: int, subject: str | None) -> None:
        headers = Headers(scope=scope)
        who = caller(self.tokens, headers.get("authorization", ""), session_of(headers))
        endpoint = scope.get("endpoint")
        if status in _UNAUTHORISED or endpoint is None:
            log.warning("api.refused", method=scope["method"], path=scope["path"][:200], status=status, who=who)
            return
        context = scope["app"].state.context
        path = scope.get("path_params", {})
        record = Record(
            at=context.jobs.clock.time(),
            who=who,
            address=(scope.get("client") or ("",))[0],
            protocol="rest",
            action=getattr(endpoint, "__name__", "none"),
            subject=subject or path.get("job") or path.get("worker"),
            result=str(status),
            done=status < 400,
        )
        await keep(context.sessions, record)


@asynccontextmanager
async def grpc_call(
    sessions: Sessions,
    clock: Clock,
    tokens: Tokens | None,
    context: grpc.aio.ServicerContext[Any, Any],
    *,
    action: str,
    subject: str | None,
) -> AsyncIterator[None]:
    """Record a gRPC call, which runs inside; `subject` unless it turns out there (`about`)."""
    metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
    found = _Subject(subject)
    held = _SUBJECT.set(found)
    result = "OK"
    try:
        yield
    except RlharvestError as error:
        result = type(error).__name__
        raise
    except BaseException as error:
        result = f"failed ({type(error).__name__})"
        raise
    finally:
        _SUBJECT.reset(held)
        record = Record(
            at=clock.time(),
            who=caller(tokens, metadata.get("authorization", "")),
            address=context.peer(),
            protocol="grpc",
            action=action,
            subject=found.name,
            result=result,
            done=result == "OK",
        )
        await keep(sessions, record)

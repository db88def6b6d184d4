"""Errors as REST shows them: the envelope that OpenAI's clients read, on every route.

{"error": {"code": "not_found", "message": "there is no job …", "param": null, "type": "invalid_request_error"}}
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from rlharvest.errors import (
    Conflict,
    DataError,
    Fenced,
    InfrastructureError,
    InvalidField,
    LimitReached,
    NotFound,
    NotLeader,
    RlharvestError,
)
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from rlharvest_coordinator import sql
from rlharvest_coordinator.api.strict import StrictJSON
from rlharvest_coordinator.obstacles import REASONS, database_hinders, of_database

log = structlog.get_logger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str
    """One word for programs: invalid_value, not_found, conflict, not_leader, unavailable, …"""
    message: str
    """For people: the field, the value and the fix."""
    param: str | None
    """Dotted path of the field."""
    type: str
    """invalid_request_error, authentication_error or server_error."""


class ErrorBody(BaseModel):
    """The answer of a call that failed."""

    error: ErrorDetail


def envelope(
    status: int, code: str, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
) -> StrictJSON:
    """Return an error response."""
    kind = "authentication_error" if status == 401 else "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"code": code, "message": message, "param": param, "type": kind}}
    return StrictJSON(body, status, headers)


def response(error: RlharvestError) -> StrictJSON:
    """Return the response that an error of ours stands for."""
    message = str(error)
    match error:
        case InvalidField():
            return envelope(400, "invalid_value", message, param=error.field)
        case DataError():
            return envelope(400, "invalid_value", message)
        case NotFound():
            return envelope(404, "not_found", message, param=error.field)
        case Conflict():
            return envelope(409, "conflict", message)
        case NotLeader() | Fenced():
            return envelope(503, "not_leader", message, headers={"Retry-After": "1"})
        case LimitReached():
            return envelope(429, "limit_reached", message, headers={"Retry-After": "10"})
        case InfrastructureError():
            return envelope(503, "unavailable", message, headers={"Retry-After": "2"})
        case _:
            return envelope(500, "internal", message)


def install(app: FastAPI) -> None:
    """Make the app answer every error with the envelope."""

    async def ours(_request: Request, error: Exception) -> StrictJSON:
        assert isinstance(error, RlharvestError)
        return response(error)

    async def invalid(_request: Request, error: Exception) -> StrictJSON:
        assert isinstance(error, RequestValidationError)
        return response(first_problem(error))

    async def http(_request: Request, error: Exception) -> StrictJSON:
        assert isinstance(error, HTTPException)
        phrase = HTTPStatus(error.status_code).phrase
        code = phrase.lower().replace(" ", "_").replace("-", "_")
        detail = error.detail if error.detail != phrase else f"{phrase}: {_request.method} {_request.url.path}"
        return envelope(error.status_code, code, detail, headers=dict(error.headers or {}))

    async def gone(_request: Request, _error: Exception) -> StrictJSON:
        return envelope(400, "bad_request", "the client went away before the end of the body")

    async def database(request: Request, error: Exception) -> StrictJSON:
        if not database_hinders(error):
            return await unforeseen(request, error)
        log.warning("request.without_database", method=request.method, path=request.url.path, error=repr(error))
        obstacle = of_database(error)
        code = "database_full" if obstacle.reason == "DatabaseFull" else "unavailable"
        return envelope(503, code, f"{REASONS[obstacle.reason]}. Nothing was changed.", headers={"Retry-After": "5"})

    async def unforeseen(request: Request, error: Exception) -> StrictJSON:
        log.error("request.failed", method=request.method, path=request.url.path, exc_info=error)
        return envelope(500, "internal", "The server failed; its log says more.")

    app.add_exception_handler(RlharvestError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    for kind in sql.FAULTS:
        app.add_exception_handler(kind, database)
    app.add_exception_handler(Exception, unforeseen)


def first_problem(error: RequestValidationError) -> InvalidField:
    """Return the first thing wrong with a request, by its name in the request (`limit`, not `query.limit`)."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    field = ".".join(path[1:]) or path[0]
    value: Any = first.get("input")
    return InvalidField(field, value, first["msg"].removeprefix("Value error, "), "/docs describes every field.")

"""The web application: REST, the OpenAI mapping, the status page, behind one guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from rlharvest.credentials import Tokens
from rlharvest.health import Health
from rlharvest.jobs.model import JobSpec
from sqlalchemy import text

from rlharvest_coordinator.api import errors, guard
from rlharvest_coordinator.api.audit import Audit
from rlharvest_coordinator.api.context import Context
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.routes import audit, completions, events, fine_tuning, fleet, jobs, samples, service
from rlharvest_coordinator.api.streams import Streams
from rlharvest_coordinator.api.strict import StrictJSON
from rlharvest_coordinator.gateway.gateway import Gateway
from rlharvest_coordinator.live import LiveView
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.ui import pages

DESCRIPTION = """\
Post-train language models with reinforcement learning, on a small reserved trainer plus any number of preemptible
workers.

Lists are `{"object": "list", "data": [...], "has_more": ...}` and go on with `after`. Errors are
`{"error": {"code", "message", "param", "type"}}`. Send a token, if the server has one, as `Authorization: Bearer`.
"""


def create_app(
    settings: CoordinatorSettings,
    sessions: Sessions,
    live: LiveView,
    health: Health,
    *,
    gateway: Gateway | None = None,
    stopping: asyncio.Event | None = None,
    http: httpx.AsyncClient | None = None,
    root_path: str = "",
) -> FastAPI:
    """Return the application.

    Args:
        health: readiness checks; `sql` and `leading` are added to it unless it has them.
        gateway: samples completions; unset: no job runs here.
        stopping: set it when the process stops, so that event streams end.
        http: reaches the weight service; closed at the application's shutdown.
        root_path: prefix under which a proxy serves the application, e.g. `/rlharvest`.

    Raises:
        InvalidField: others could reach the API, and no token is set.
    """
    guard.check_exposure(settings)
    context = Context(
        settings=settings,
        sessions=sessions,
        live=live,
        health=health,
        jobs=Jobs(sessions, live, most=settings.most_jobs, checkpoints=settings.checkpoints),
        gateway=gateway or Gateway({}, sessions, epoch=lambda: live.epoch, most=settings.most_completions),
        streams=Streams(settings.most_streams),
        http=http or httpx.AsyncClient(timeout=5.0, verify=settings.tls.client),
        stopping=stopping or asyncio.Event(),
    )
    _add_checks(context)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        context.stopping.set()
        await context.http.aclose()

    app = _routes(settings.api_token, lifespan=lifespan, root_path=root_path)
    app.state.context = context
    return app


def describe() -> dict[str, Any]:
    """Return the OpenAPI description of every route, as /openapi.json has it."""
    return _routes(None).openapi()


def _routes(tokens: Tokens | None, **arguments: Any) -> FastAPI:
    app = FastAPI(
        title="rlharvest",
        version="1",
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        default_response_class=StrictJSON,
        generate_unique_id_function=_operation_id,
        separate_input_output_schemas=False,
        **arguments,
    )
    errors.install(app)
    app.add_middleware(guard.Guard, tokens=tokens)
    app.add_middleware(Audit, tokens=tokens)  # the last one is the outermost
    bearer = Depends(HTTPBearer(auto_error=False, description="The server's API token, if it has one."))
    for module in (jobs, events, samples, fleet, audit, fine_tuning, completions):
        app.include_router(module.router, dependencies=[bearer])
    app.include_router(service.router)
    pages.install(app, tokens=tokens)
    _describe_the_spec(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


def _add_checks(context: Context) -> None:
    async def database() -> str | None:
        async with context.sessions() as session:
            await session.execute(text("SELECT 1"))
        return None

    async def leading() -> str | None:
        return None if context.live.leading else "another coordinator leads"

    context.health.checks.setdefault("sql", database)
    context.health.checks.setdefault("leading", leading)


def _describe_the_spec(app: FastAPI) -> None:
    """Put the schema of a job into the description of the API: its routes read the body themselves, also as YAML."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        description = original()
        schemas = description["components"]["schemas"]
        if "JobSpec" not in schemas:
            spec = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(spec.pop("$defs"))
            schemas["JobSpec"] = spec
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # the way FastAPI documents to extend the description

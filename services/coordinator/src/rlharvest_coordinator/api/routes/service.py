"""/livez, /readyz, /metrics, /docs: the service itself."""

from __future__ import annotations

import html
from typing import Literal

import prometheus_client
from fastapi import APIRouter, Request, Response
from starlette.responses import HTMLResponse

from rlharvest_coordinator.api.context import Parts
from rlharvest_coordinator.api.resources import Resource
from rlharvest_coordinator.api.strict import StrictJSON

router = APIRouter(tags=["service"])


class Alive(Resource):
    """The event loop turns."""

    status: Literal["ok"] = "ok"


class Ready(Resource):
    """Whether it can do work."""

    status: Literal["ok", "unready"]
    failed: dict[str, str]
    """What does not work: name and one sentence."""


@router.get("/livez")
async def livez() -> Alive:
    """Whether the process is alive."""
    return Alive()


@router.get("/readyz", response_model=Ready, responses={503: {"model": Ready, "description": "Something is missing."}})
async def readyz(parts: Parts) -> Response:
    """Whether NATS, Redis and SQL answer and this coordinator leads; 503 with the names of what does not."""
    failed = await parts.health.failures()
    body = Ready(status="unready" if failed else "ok", failed=failed)
    return StrictJSON(body.model_dump(), 503 if failed else 200)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def prometheus() -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(
        prometheus_client.generate_latest(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST}
    )


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Show the reference of the API; every asset comes from this server."""
    root = html.escape(request.scope.get("root_path", ""))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>rlharvest API</title>'
        f'<link rel="stylesheet" href="{root}/static/swagger/swagger-ui.css">'
        f'<link rel="icon" href="{root}/static/icon.svg"></head>'
        f'<body data-root="{root}"><div id="swagger-ui"></div>'
        f'<script src="{root}/static/swagger/swagger-ui-bundle.js"></script>'
        f'<script src="{root}/static/docs.js"></script></body></html>'
    )
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})

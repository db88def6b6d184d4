"""Pages and static files. Everything a page loads comes from this server, scripts and styles only from files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from jinja2 import Environment, FileSystemLoader
from rlharvest.credentials import Tokens
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from rlharvest_coordinator.api.guard import COOKIE, session_value

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_SESSION_S = 30 * 86400


def install(app: FastAPI, *, tokens: Tokens | None) -> None:
    """Add the pages to the app; with tokens they can be logged in to."""
    templates = Environment(loader=FileSystemLoader(_HERE / "templates"), autoescape=True)

    def page(request: Request, name: str, status: int = 200, **values: object) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        text = templates.get_template(name).render(root=root, token=tokens is not None, **values)
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return HTMLResponse(text, status, headers)

    @app.get("/", include_in_schema=False)
    async def jobs_page(request: Request) -> HTMLResponse:
        return page(request, "jobs.html")

    @app.get("/jobs/{job}", include_in_schema=False)
    async def job_page(request: Request, job: str) -> HTMLResponse:
        return page(request, "job.html", job=job)

    @app.get("/login", include_in_schema=False)
    async def login_page(request: Request) -> Response:
        return page(request, "login.html") if tokens is not None else _home(request)

    @app.post("/login", include_in_schema=False)
    async def log_in(request: Request) -> Response:
        if tokens is None:
            raise HTTPException(404)
        given = parse_qs((await request.body()).decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not tokens.takes(given):
            return page(request, "login.html", 401, wrong=True)
        response = _home(request)
        response.set_cookie(
            COOKIE,
            session_value(given),
            max_age=_SESSION_S,
            path=f"{request.scope.get('root_path', '')}/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    app.mount("/static", StaticFiles(directory=_HERE / "static"), name="static")


def _home(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/", 303)

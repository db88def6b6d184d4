"""What a request must pass before it reaches a route: origin, token, size.

Invariants: with tokens, only /livez, /readyz, the log-in page and static files go without; they are compared in
constant time. Without a token only this machine is served, by a name of this machine, so that no web page can reach the API
through a name of its own (DNS rebinding). No page of another origin can change anything.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from rlharvest import credentials
from rlharvest.credentials import Tokens, bearer, is_loopback
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlharvest_coordinator.api.errors import envelope
from rlharvest_coordinator.api.strict import StrictJSON
from rlharvest_coordinator.settings import CoordinatorSettings

COOKIE = "rlharvest_session"
HEAD_BYTES = 1 << 16
"""Of a request's first line and headers."""
MAX_BODY_BYTES = 1 << 20
_FREE = ("/livez", "/readyz", "/login")
SAFE = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""


def check_exposure(settings: CoordinatorSettings) -> None:
    """Refuse to be reachable from elsewhere without a token, or with a weak one. Raises InvalidField."""
    credentials.check_exposure("api_host", settings.api_host, "api_token", settings.api_token)


def session_value(token: str) -> str:
    """Return the cookie of a browser that gave the token: it proves the token and does not contain it."""
    return hmac.new(token.encode(), b"rlharvest browser session", hashlib.sha256).hexdigest()


def is_session(cookie: str, tokens: Tokens) -> bool:
    """Whether a cookie was given for a token that is still good."""
    return tokens.matching(cookie, session_value) is not None


class Guard:
    """ASGI middleware; answers what must not pass itself."""

    def __init__(self, app: ASGIApp, *, tokens: Tokens | None, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.tokens = tokens
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = _path(scope)
        refusal = (
            _oversized(scope)
            or self._foreign(scope["method"], headers)
            or self._unknown(scope, path, headers)
            or _unstorable(scope, path)
        )
        length = headers.get("content-length", "0")
        if refusal is None and length.isdecimal() and int(length) > self.max_body_bytes:
            refusal = self._too_large()
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._limited(scope, receive, send)

    def _foreign(self, method: str, headers: Headers) -> ASGIApp | None:
        host = headers.get("host", "")
        if self.tokens is None and not is_loopback(_hostname(host)):
            return envelope(
                403, "forbidden", f"Host {host!r} is no name of this machine. Use 127.0.0.1, or set an API token.",
            )  # fmt: skip
        origin = headers.get("origin")
        if method not in SAFE and origin is not None and _netloc(origin) != host:
            return envelope(403, "forbidden", f"a page of {origin!r} may not change anything here")
        return None

    def _unknown(self, scope: Scope, path: str, headers: Headers) -> ASGIApp | None:
        if self.tokens is None or path in _FREE or path.startswith("/static/"):
            return None
        # Headers are read as Latin-1, whatever was sent.
        given = bearer(headers.get("authorization", "")).encode("latin-1").decode("utf-8", "replace")
        if self.tokens.takes(given) or is_session(session_of(headers), self.tokens):
            return None
        if scope["method"] in SAFE and "text/html" in headers.get("accept", ""):
            return RedirectResponse(f"{scope.get('root_path', '')}/login", 303)
        message = "A token is needed: send it as `Authorization: Bearer <token>`, or log in at /login."
        return envelope(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and cut it off when its body turns out larger than it may be."""
        seen = 0
        started = False

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body_bytes:
                raise _TooLarge
            return message

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except _TooLarge:
            if started:
                raise
            await self._too_large()(scope, receive, send)

    def _too_large(self) -> ASGIApp:
        message = f"the body is larger than {self.max_body_bytes} bytes; give large data as a path on the server"
        return envelope(413, "payload_too_large", message)


class _TooLarge(Exception):
    """The body is larger than it may be."""


def head_too_large() -> StrictJSON:
    """Return the answer to a request whose head exceeds HEAD_BYTES."""
    message = (
        f"the request's first line and headers are larger than {HEAD_BYTES} bytes; "
        "send what is long in the body, and leave out cookies and headers that are not needed"
    )
    return envelope(431, "head_too_large", message)


def _oversized(scope: Scope) -> ASGIApp | None:
    first = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    rest = sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"])
    return head_too_large() if first + rest > HEAD_BYTES else None


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _unstorable(scope: Scope, path: str) -> ASGIApp | None:
    """PostgreSQL has no NUL in any text, so nothing that is asked for with one can be there."""
    if path.startswith("/v1/") and ("\0" in path or b"%00" in scope.get("query_string", b"")):
        message = f"url = {path[:100]!r}: holds a NUL character. Leave it out."
        return envelope(400, "invalid_value", message, param="url")
    return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # a bracket that is not closed
        return ""


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def session_of(headers: Headers) -> str:
    """Return the cookie of a browser that has logged in, empty if there is none."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""

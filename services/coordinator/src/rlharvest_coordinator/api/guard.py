"""What a request must pass before it reaches a route: origin, token, size.

Invariants: with a token, only /livez, /readyz, the log-in page and static files go without; it is compared in constant
time. Without a token only this machine is served, by a name of this machine, so that no web page can reach the API
through a name of its own (DNS rebinding). No page of another origin can change anything.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from rlharvest.errors import InvalidField
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlharvest_coordinator.api.errors import envelope
from rlharvest_coordinator.settings import CoordinatorSettings

COOKIE = "rlharvest_session"
MAX_BODY_BYTES = 1 << 20
_FREE = ("/livez", "/readyz", "/login")
_SAFE = ("GET", "HEAD", "OPTIONS")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is of this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(settings: CoordinatorSettings) -> None:
    """Refuse to be reachable from elsewhere without a token. Raises InvalidField."""
    if settings.api_token is None and not is_loopback(settings.api_host):
        raise InvalidField(
            "api_host",
            settings.api_host,
            "others can reach this address, and no token is set",
            "Set RLHARVEST_API_TOKEN (or RLHARVEST_API_TOKEN_FILE), or listen on 127.0.0.1.",
        )


def session_value(token: str) -> str:
    """Return the cookie of a browser that gave the token: it proves the token and does not contain it."""
    return hmac.new(token.encode(), b"rlharvest browser session", hashlib.sha256).hexdigest()


class Guard:
    """ASGI middleware; answers what must not pass itself."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.token = token
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = _path(scope)
        refusal = self._foreign(scope["method"], headers) or self._unknown(scope, path, headers)
        length = headers.get("content-length", "0")
        if refusal is None and length.isdecimal() and int(length) > self.max_body_bytes:
            refusal = self._too_large()
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._limited(scope, receive, send)

    def _foreign(self, method: str, headers: Headers) -> ASGIApp | None:
        host = headers.get("host", "")
        if self.token is None and not is_loopback(_hostname(host)):
            return envelope(
                403, "forbidden", f"Host {host!r} is no name of this machine. Use 127.0.0.1, or set an API token.",
            )  # fmt: skip
        origin = headers.get("origin")
        if method not in _SAFE and origin is not None and urlsplit(origin).netloc != host:
            return envelope(403, "forbidden", f"a page of {origin!r} may not change anything here")
        return None

    def _unknown(self, scope: Scope, path: str, headers: Headers) -> ASGIApp | None:
        if self.token is None or path in _FREE or path.startswith("/static/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode()):
            return None
        cookie = _cookie(headers.get("cookie", ""))
        if hmac.compare_digest(cookie.encode(), session_value(self.token).encode()):
            return None
        if scope["method"] in _SAFE and "text/html" in headers.get("accept", ""):
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


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _hostname(host: str) -> str:
    return urlsplit(f"//{host}").hostname or ""


def _cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""

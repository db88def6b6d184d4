"""What stands before every route: token, origin, size; and errors that look the same everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import structlog
from rlharvest.credentials import Tokens
from rlharvest.errors import InvalidField
from rlharvest_coordinator.api import guard
from rlharvest_coordinator.settings import CoordinatorSettings

from .conftest import MakeApp, spec

TOKEN = "s3cret-tökén"


@pytest.fixture
async def locked(make_app: MakeApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(token=TOKEN), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rl.example") as http:
        yield http


def _envelope(reply: httpx.Response) -> dict[str, object]:
    error = reply.json()["error"]
    assert set(error) == {"code", "message", "param", "type"}
    assert error["message"]
    return dict(error)


async def test_with_a_token_only_health_and_log_in_go_without(locked: httpx.AsyncClient) -> None:
    for path in ("/v1/jobs", "/metrics", "/openapi.json", "/docs", "/", "/v1/none", "/livez/../v1/jobs"):
        reply = await locked.get(path)
        assert reply.status_code == 401, path
        assert _envelope(reply)["type"] == "authentication_error"
    for path, status in (("/livez", 200), ("/readyz", 200), ("/login", 200), ("/static/status.css", 200)):
        assert (await locked.get(path)).status_code == status, path
    for value in (f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", TOKEN):
        reply = await locked.get("/v1/jobs", headers={b"Authorization": value.encode()})
        assert reply.status_code == 401


async def test_the_token_opens(locked: httpx.AsyncClient) -> None:
    for scheme in ("Bearer", "bearer"):
        reply = await locked.get("/v1/jobs", headers={b"Authorization": f"{scheme} {TOKEN}".encode()})
        assert reply.status_code == 200


async def test_a_browser_logs_in_with_the_token(locked: httpx.AsyncClient) -> None:
    sent = await locked.get("/", headers={"Accept": "text/html"})
    assert (sent.status_code, sent.headers["location"]) == (303, "/login")
    assert (await locked.post("/login", data={"token": "wrong"})).status_code == 401
    reply = await locked.post("/login", data={"token": TOKEN})
    assert reply.status_code == 303
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert (await locked.get("/", headers={"Accept": "text/html"})).status_code == 200
    assert (await locked.get("/v1/jobs")).status_code == 200


async def test_without_a_token_only_names_of_this_machine_are_served(client: httpx.AsyncClient) -> None:
    for host, status in (
        ("evil.example", 403),
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("[::1]:1", 200),
        ("", 403),
    ):
        assert (await client.get("/v1/jobs", headers={"Host": host})).status_code == status, host


async def test_a_page_of_another_origin_changes_nothing(client: httpx.AsyncClient) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9"):
        reply = await client.post("/v1/jobs", json=spec(), headers={"Origin": origin})
        assert (reply.status_code, _envelope(reply)["code"]) == (403, "forbidden")
    assert (await client.post("/v1/jobs", json=spec(), headers={"Origin": "http://127.0.0.1"})).status_code == 201


async def test_a_large_body_is_cut_off(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    headers = {"Content-Type": "application/json"}
    for content in (b" " * (guard.MAX_BODY_BYTES + 1), chunks()):
        reply = await client.post("/v1/jobs", content=content, headers=headers)
        assert (reply.status_code, _envelope(reply)["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "param"),
    [
        ("GET", "/v1/none", 404, "not_found", None),
        ("GET", "/static/none.js", 404, "not_found", None),
        ("PUT", "/v1/jobs", 405, "method_not_allowed", None),
        ("GET", "/v1/jobs?limit=0", 400, "invalid_value", "limit"),
        ("GET", "/v1/jobs?limit=x", 400, "invalid_value", "limit"),
        ("GET", "/v1/jobs?after=rljob_none", 404, "not_found", None),
        ("GET", "/v1/jobs/rljob_none", 404, "not_found", None),
        ("GET", "/v1/jobs/rljob_none/events", 404, "not_found", None),
        ("GET", "/v1/jobs/rljob_none/samples", 404, "not_found", None),
        ("GET", "/v1/jobs/rljob_none/samples/x", 404, "not_found", None),
        ("GET", "/v1/jobs/rljob_none/checkpoints", 404, "not_found", None),
        ("GET", "/v1/jobs/rljob_none/metrics?max_points=0", 400, "invalid_value", "max_points"),
        ("DELETE", "/v1/jobs/rljob_none", 404, "not_found", None),
        ("POST", "/v1/jobs/rljob_none/cancel", 404, "not_found", None),
        ("GET", "/v1/workers/wkr_none", 404, "not_found", None),
        ("POST", "/v1/workers/wkr_none/drain", 404, "not_found", None),
        ("GET", "/v1/weights/rljob_none", 404, "not_found", None),
        ("GET", "/v1/fine_tuning/jobs/rljob_none", 404, "not_found", None),
        ("POST", "/login", 404, "not_found", None),
    ],
)
async def test_every_error_has_the_envelope(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str, param: str | None
) -> None:
    reply = await client.request(method, path)
    error = _envelope(reply)
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)


async def test_an_unforeseen_fault_says_nothing_of_the_inside(
    client: httpx.AsyncClient, live: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "here", None)
    reply = await client.get("/v1/workers")
    assert (reply.status_code, _envelope(reply)["code"]) == (500, "internal")
    assert "NoneType" not in reply.text


async def test_a_client_that_goes_away_is_no_fault_of_the_server(make_app: MakeApp) -> None:
    headers = [(b"host", b"127.0.0.1"), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "path": "/v1/jobs", "query_string": b"", "headers": headers}
    sent = []

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    with structlog.testing.capture_logs() as logged:
        await make_app()(scope, receive, send)
    assert sent[0]["status"] == 400
    assert "request.failed" not in {line["event"] for line in logged}


def test_an_address_for_others_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="RLHARVEST_API_TOKEN"):
        guard.check_exposure(CoordinatorSettings(data_dir=tmp_path, api_host="0.0.0.0"))
    strong = Tokens(["Zk3_u8Qe0vLw1sTnYcRb"])
    guard.check_exposure(CoordinatorSettings(data_dir=tmp_path, api_host="0.0.0.0", api_token=strong))
    with pytest.raises(InvalidField, match="weak"):
        guard.check_exposure(
            CoordinatorSettings(data_dir=tmp_path, api_host="0.0.0.0", api_token=Tokens(["rlharvest"]))
        )
    for host in ("::1", "localhost", "127.0.0.9"):
        guard.check_exposure(CoordinatorSettings(data_dir=tmp_path, api_host=host))


async def test_behind_a_proxy_prefix_every_address_has_it(make_app: MakeApp) -> None:
    transport = httpx.ASGITransport(make_app(root_path="/rl"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        reply = await http.post("/v1/jobs", json=spec())
        assert reply.headers["location"].startswith("/rl/v1/jobs/")
        page = (await http.get("/")).text
        assert 'href="/rl/static/status.css"' in page
        assert (await http.get("/rl/v1/jobs")).status_code == 200


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//", "\x00", "null"])
async def test_an_origin_that_is_none_changes_nothing(client: httpx.AsyncClient, origin: str) -> None:
    answer = await client.post("/v1/jobs", json={}, headers={"Origin": origin})
    assert answer.status_code == 403


async def test_a_host_that_is_none_is_no_name_of_this_machine(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/jobs", headers={"Host": "["})).status_code == 403


@pytest.mark.parametrize("url", ["/v1/jobs/a%00b", "/v1/jobs?after=%00", "/v1/workers/%00"])
async def test_what_no_database_can_hold_is_refused_before_it(client: httpx.AsyncClient, url: str) -> None:
    """PostgreSQL refuses NUL in text with an error of the whole query, which would be a fault of the server."""
    answer = await client.get(url)
    assert answer.status_code == 400
    assert "NUL" in answer.json()["error"]["message"]

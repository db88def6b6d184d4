"""The Python client: retries that never do a thing twice, errors of ours, streams cut anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.client import Client, lines, sse_events
from rlharvest.errors import Conflict, DataError, InfrastructureError, NotFound, NotLeader, Unavailable

Answer = Callable[[httpx.Request], httpx.Response]


def client(answer: Answer, **arguments: float) -> Client:
    return Client("http://test/prefix/", "tok", transport=httpx.MockTransport(answer), **arguments)


def envelope(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": f"said {code}", "param": None, "type": "t"}})


def test_calls_carry_prefix_and_token_and_quote_identifiers() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer tok"
        assert request.url.raw_path == b"/prefix/v1/jobs/a%2Fb"
        return httpx.Response(200, json={"id": "a/b"})

    with client(answer) as http:
        assert http.get_job("a/b") == {"id": "a/b"}


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_value", DataError),
        (401, "unauthorized", DataError),
        (404, "not_found", NotFound),
        (409, "conflict", Conflict),
        (413, "payload_too_large", DataError),
        (429, "limit_reached", InfrastructureError),
        (500, "internal", Unavailable),
        (503, "not_leader", NotLeader),
    ],
)
def test_errors_keep_the_servers_message(status: int, code: str, kind: type[Exception]) -> None:
    with client(lambda _: envelope(status, code), retry_s=0.0) as http, pytest.raises(kind, match=f"said {code}"):
        http.cancel("j")


def test_another_server_is_named_as_such() -> None:
    replies = [httpx.Response(200, text="hi"), httpx.Response(502, text="bad"), httpx.Response(200, json=[1])]
    while replies:
        with client(lambda _: replies.pop(), retry_s=0.0) as http, pytest.raises(Unavailable, match="rlharvest server"):
            http.get_job("j")


def test_a_lost_answer_is_asked_again_under_the_same_key() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if len(keys) == 1:
            raise httpx.ReadError("gone")
        return envelope(503, "not_leader") if len(keys) == 2 else httpx.Response(201, json={"id": "j"})

    with client(answer) as http:
        assert http.create_job({})["id"] == "j"
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_what_must_not_be_done_twice_is_sent_once() -> None:
    calls: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        raise httpx.ReadError("gone")

    with client(answer) as http:
        for act in (http.resume, http.delete):
            with pytest.raises(Unavailable, match="does not answer"):
                act("j")
    assert calls == ["POST", "DELETE"]


def test_lists_are_walked_page_by_page_up_to_the_limit() -> None:
    asked: list[tuple[str | None, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        parameters = request.url.params
        asked.append((parameters.get("after"), parameters.get("limit")))
        start = int(parameters.get("after") or -1) + 1
        data = [{"id": str(n)} for n in range(start, min(start + int(parameters["limit"]), 250))]
        return httpx.Response(200, json={"data": data, "has_more": start + len(data) < 250})

    with client(answer) as http:
        assert [job["id"] for job in http.list_jobs()] == [str(n) for n in range(250)]
        assert len(list(http.list_jobs(limit=130))) == 130
    assert asked == [(None, "100"), ("99", "100"), ("199", "100"), (None, "100"), ("99", "30")]


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1)), st.data())
def test_a_stream_is_read_the_same_however_it_is_cut(values: list[str], data: st.DataObject) -> None:
    text = "".join(f": c\nid: {n}\ndata: {value}\n\n" for n, value in enumerate(values)) + "data: unfinished"

    def chunks() -> Iterator[str]:
        at = 0
        while at < len(text):
            size = data.draw(st.integers(1, 9))
            yield text[at : at + size]
            at += size

    got = list(sse_events(lines(chunks())))
    assert [(event.id, event.data) for event in got] == [(str(n), value) for n, value in enumerate(values)]

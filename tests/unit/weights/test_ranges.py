"""Byte ranges: what is served for a request, and what a reply is good for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.weights.ranges import Span, Verdict, judge, parse_content_range, select

ETAG = '"abc"'


@given(st.integers(0, 10_000), st.integers(0, 12_000), st.integers(0, 12_000))
def test_a_closed_range_is_the_slice_of_the_file(size: int, first: int, last: int) -> None:
    data = bytes(index % 251 for index in range(size))
    span = select(size, ETAG, f"bytes={first}-{last}", None)
    if last < first:
        assert span == Span(0, size, partial=False)
    elif first >= size:
        assert span is None
    else:
        assert span is not None
        assert span.partial
        assert data[span.start : span.end] == data[first : last + 1]


@given(st.integers(0, 10_000), st.integers(0, 12_000))
def test_open_and_suffix_ranges(size: int, count: int) -> None:
    data = bytes(index % 251 for index in range(size))
    tail = select(size, ETAG, f"bytes=-{count}", None)
    if min(count, size) == 0:
        assert tail is None
    else:
        assert tail is not None
        assert data[tail.start : tail.end] == data[-count:]
    rest = select(size, ETAG, f"bytes={count}-", None)
    assert rest == (Span(count, size, partial=True) if count < size else None)


@pytest.mark.parametrize(
    "header", [None, "", "bytes", "bytes=-", "bytes=a-b", "items=0-3", "bytes=0-1,4-5", "bytes=5-2", "bytes=--3"]
)
def test_what_is_no_single_byte_range_gets_the_whole(header: str | None) -> None:
    assert select(10, ETAG, header, None) == Span(0, 10, partial=False)


@pytest.mark.parametrize(
    ("if_range", "partial"),
    [(ETAG, True), ('"other"', False), ('W/"abc"', False), ("Mon, 30 Nov 2026 10:00:00 GMT", False)],
)
def test_if_range_compares_strongly(if_range: str, partial: bool) -> None:
    span = select(10, ETAG, "bytes=2-3", if_range)
    assert span == (Span(2, 4, partial=True) if partial else Span(0, 10, partial=False))


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 100))
def test_no_header_breaks_the_server(range_header: str, if_range: str, size: int) -> None:
    span = select(size, ETAG, range_header, if_range)
    assert span is None or 0 <= span.start <= span.end <= size


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 50), st.integers(0, 1 << 20))
def test_content_range_round_trip(start: int, length: int, beyond: int) -> None:
    end, size = start + length, start + length + beyond
    assert parse_content_range(f"bytes {start}-{end - 1}/{size}") == (start, end, size)
    assert parse_content_range(f"bytes {start}-{end - 1}/*") == (start, end, None)


@pytest.mark.parametrize("text", ["", "bytes */10", "bytes 5-4/10", "bytes=0-1/2", "items 0-1/2", "bytes 0-/3"])
def test_other_content_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Content-Range"):
        parse_content_range(text)


@pytest.mark.parametrize(
    ("status", "headers", "verdict"),
    [
        (206, {"content-range": "bytes 10-19/100", "content-length": "10"}, Verdict.PART),
        (206, {"content-range": "bytes 10-19/*"}, Verdict.PART),
        (206, {"content-range": "bytes 9-19/100"}, Verdict.WRONG),
        (206, {"content-range": "bytes 10-18/100"}, Verdict.WRONG),
        (206, {"content-range": "bytes 10-19/99"}, Verdict.WRONG),
        (206, {"content-range": "bytes 10-19/100", "content-length": "9"}, Verdict.WRONG),
        (206, {"content-type": "multipart/byteranges; boundary=x"}, Verdict.WRONG),
        (206, {"content-range": "bytes 10-19/100", "content-encoding": "gzip"}, Verdict.WRONG),
        (200, {"content-length": "100"}, Verdict.WHOLE),
        (200, {"content-length": "100", "content-encoding": "identity"}, Verdict.WHOLE),
        (200, {}, Verdict.WHOLE),
        (200, {"content-length": "512", "content-type": "text/html"}, Verdict.WRONG),
        (200, {"content-encoding": "gzip"}, Verdict.WRONG),
        (416, {}, Verdict.WRONG),
        (302, {}, Verdict.WRONG),
        (403, {}, Verdict.WRONG),
        (404, {}, Verdict.GONE),
        (410, {}, Verdict.GONE),
        (429, {}, Verdict.LATER),
        (500, {}, Verdict.LATER),
        (503, {}, Verdict.LATER),
    ],
)
def test_verdicts(status: int, headers: dict[str, str], verdict: Verdict) -> None:
    assert judge(status, headers, start=10, end=20, size=100)[0] is verdict

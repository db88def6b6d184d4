"""HTTP byte ranges as values: what a server should send for a request, and whether what came is what was asked.

Pure functions. RFC 9110: a Range that is malformed, has another unit or asks for several ranges may be ignored (the
whole is sent); a Range whose If-Range does not match strongly is ignored; a range past the end is refused with 416.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.ASCII | re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """Bytes start … end-1 of a file; `partial` when a Range asked for them."""

    start: int
    end: int
    partial: bool


def select(size: int, etag: str, range_header: str | None, if_range: str | None) -> Span | None:
    """Return what to send of a file of `size` bytes; None: the range cannot be satisfied (416).

    Args:
        etag: the file's strong entity tag, with its quotes.
        range_header: Range of the request.
        if_range: If-Range of the request.
    """
    whole = Span(0, size, partial=False)
    if range_header is None or (if_range is not None and if_range.strip() != etag):
        return whole
    match = _RANGE.fullmatch(range_header)
    if match is None or match.groups() == ("", ""):
        return whole
    first, last = match.groups()
    if not first:
        length = min(int(last), size)
        return Span(size - length, size, partial=True) if length else None
    start = int(first)
    if last and int(last) < start:
        return whole
    if start >= size:
        return None
    return Span(start, min(int(last) + 1, size) if last else size, partial=True)


def parse_content_range(text: str) -> tuple[int, int, int | None]:
    """Return (start, end, size or None) of a Content-Range, end excluded; raise ValueError if it is none."""
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None or int(match[2]) < int(match[1]):
        raise ValueError(f"{text!r} is not a Content-Range of bytes")
    return int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])


class Verdict(Enum):
    """What a reply to a request for bytes start … end-1 is good for."""

    PART = auto()
    """The body is exactly the part."""
    WHOLE = auto()
    """The body is the whole file: the server ignores ranges."""
    GONE = auto()
    """The server does not have the file."""
    LATER = auto()
    """The server cannot answer now; ask again."""
    WRONG = auto()
    """The reply is not what was asked for."""


def judge(status: int, headers: Mapping[str, str], *, start: int, end: int, size: int) -> tuple[Verdict, str]:
    """Return the verdict on a reply's head and one sentence that says why.

    Args:
        headers: of the reply, names in lower case.
        start, end, size: the part asked for, end excluded, and the size of the file.
    """
    if status in (404, 410):
        return Verdict.GONE, f"status {status}"
    if status in (408, 425, 429) or status >= 500:
        return Verdict.LATER, f"status {status}"
    if status not in (200, 206):
        return Verdict.WRONG, f"status {status}"
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        return Verdict.WRONG, f"the body is encoded as {encoding!r} though identity was asked for"
    length = headers.get("content-length")
    expected = end - start if status == 206 else size
    if status == 206:
        try:
            found = parse_content_range(headers.get("content-range", ""))
        except ValueError as error:
            return Verdict.WRONG, f"status 206, but {error}"
        if found[:2] != (start, end) or found[2] not in (None, size):
            return Verdict.WRONG, f"Content-Range {headers['content-range']}, expected bytes {start}-{end - 1}/{size}"
    if length is not None and length.strip() != str(expected):
        kind = headers.get("content-type", "an unnamed type")
        return Verdict.WRONG, f"status {status} with {length} bytes of {kind}, expected {expected}"
    return (Verdict.PART if status == 206 else Verdict.WHOLE), f"status {status}"

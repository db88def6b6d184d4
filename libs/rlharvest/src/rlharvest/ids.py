"""Identifiers: a prefix that says the kind, then 26 characters that sort by time of making.

The 26 characters are Crockford base 32 of 48 bits of milliseconds and 80 random bits (the ULID layout), in lower case so
that they are also valid NATS subject tokens and container names.
"""

from __future__ import annotations

import secrets
import time
from typing import Literal

Kind = Literal["rljob", "resp", "ckpt", "wkr", "evt", "trn", "crd", "file"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(kind: Kind, *, now: float | None = None) -> str:
    """Return a new identifier such as `rljob_01k…`. `now` is seconds since 1970."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    number = milliseconds << 80 | secrets.randbits(80)
    return f"{kind}_{encode(number, 26)}"


def encode(number: int, characters: int) -> str:
    """Return the lowest 5 bits a character of a number, in Crockford base 32, lower case."""
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(5 * characters - 5, -1, -5))


def response_id(job: str, handle: int) -> str:
    """Return the public name of response `handle` of a job: `resp_<job's characters>_<handle>`."""
    return f"resp_{job.removeprefix('rljob_')}_{handle}"


def parse_response_id(response: str) -> tuple[str, int]:
    """Return (job id, handle) of a response's public name; raise ValueError if it is none."""
    prefix, _, rest = response.partition("_")
    job, _, handle = rest.rpartition("_")
    if prefix != "resp" or not job or not handle.isdecimal():
        raise ValueError(f"{response!r} is not a response id; one looks like resp_01k0…_17")
    return f"rljob_{job}", int(handle)

"""NATS as rlharvest uses it: subjects, streams, connecting.

Subjects are rlharvest.v1.<kind>.<job>.<who>; a token that does not apply is "_". What must not be lost goes through one of
the four streams below (JetStream, file-backed, `discard = new`: a full stream pushes back, it never forgets); everything
else is core NATS, whose truth lives elsewhere. proto/asyncapi.yaml describes the same, and a contract test ties the two.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Literal

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import NotFoundError

from rlharvest.errors import InvalidField, Unavailable

log = structlog.get_logger(__name__)

NO_JOB = "_"
MAX_PAYLOAD_BYTES = 1 << 20
"""NATS's default limit; a publisher splits or refers before it reaches it."""

Kind = Literal[
    "spans",
    "ledger",
    "score",
    "scored",
    "events",
    "groups",
    "acks",
    "resend",
    "lease",
    "assign",
    "abort",
    "rejoin",
    "drain",
    "beat",
    "version",
]

_TOKEN = re.compile(r"[A-Za-z0-9_\-]{1,100}|\*")


def subject(kind: Kind, job: str = NO_JOB, who: str = "coordinator") -> str:
    """Return the subject of a kind of message; `*` subscribes to any job or any sender."""
    for name, token in (("job", job), ("who", who)):
        if not _TOKEN.fullmatch(token):
            raise InvalidField(
                f"subject.{name}", token, "not a subject token", "Use letters, digits, '_' and '-', at most 100."
            )
    return f"rlharvest.v1.{kind}.{job}.{who}"


def parse_subject(text: str) -> tuple[str, str, str]:
    """Return (kind, job, who) of a subject; raise ValueError if it is not one of ours."""
    parts = text.split(".")
    if len(parts) != 5 or parts[:2] != ["rlharvest", "v1"]:
        raise ValueError(f"{text!r} is not a subject of rlharvest")
    return parts[2], parts[3], parts[4]


LEDGER = "RLHARVEST_LEDGER"
SCORES = "RLHARVEST_SCORES"
EVENTS = "RLHARVEST_EVENTS"
GROUPS = "RLHARVEST_GROUPS"

DUPLICATE_WINDOW_S = 120.0

STREAMS: dict[str, StreamConfig] = {
    # The ledger's log. No max_age: only what the ledger has applied is purged.
    LEDGER: StreamConfig(
        name=LEDGER,
        subjects=[subject("spans", "*", "*"), subject("ledger", "*", "*"), subject("scored", "*", "*")],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_bytes=8 << 30,
        duplicate_window=DUPLICATE_WINDOW_S,
    ),
    SCORES: StreamConfig(
        name=SCORES,
        subjects=[subject("score", "*", "*")],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_bytes=2 << 30,
        duplicate_window=DUPLICATE_WINDOW_S,
    ),
    # People's events and wake-ups: old ones may go.
    EVENTS: StreamConfig(
        name=EVENTS,
        subjects=[subject("events", "*", "*")],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=256 << 20,
        max_age=7 * 86400,
        duplicate_window=DUPLICATE_WINDOW_S,
    ),
    GROUPS: StreamConfig(
        name=GROUPS,
        subjects=[subject("groups", "*", "*")],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=256 << 20,
        max_age=86400,
        duplicate_window=DUPLICATE_WINDOW_S,
    ),
}


async def connect(
    url: str,
    name: str,
    *,
    timeout_s: float = 30.0,
    on_reconnect: Callable[[], None] | None = None,
) -> Client:
    """Connect and stay connected: reconnects for ever, finds a black-holed peer within 10 s.

    Args:
        name: of this client, as NATS's monitoring shows it, e.g. `rollout/wkr_…`.
        timeout_s: for the first connection.

    Raises:
        Unavailable: NATS did not answer in time; names the address.
    """

    client = Client()

    async def error(problem: Exception) -> None:
        log.warning("nats.error", client=name, error=repr(problem))

    async def disconnected() -> None:
        if client.is_closed or client.is_draining:
            return  # on purpose
        log.warning("nats.disconnected", client=name)

    async def reconnected() -> None:
        log.info("nats.reconnected", client=name)
        if on_reconnect is not None:
            on_reconnect()

    try:
        async with asyncio.timeout(timeout_s):
            while True:
                client = Client()
                try:
                    await client.connect(
                        url,
                        name=name,
                        allow_reconnect=True,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=0.25,  # type: ignore[arg-type]  # seconds; a fraction is fine
                        connect_timeout=2,
                        ping_interval=3,
                        max_outstanding_pings=2,
                        drain_timeout=10,
                        pending_size=64 << 20,
                        error_cb=error,
                        disconnected_cb=disconnected,
                        reconnected_cb=reconnected,
                    )
                    return client
                except (NatsError, OSError) as problem:
                    log.info("nats.waiting", client=name, url=url, error=repr(problem))
                    await asyncio.sleep(0.25)
    except TimeoutError as timeout:
        raise Unavailable(
            f"NATS does not answer at {url} after {timeout_s:g} s. Start it, or set RLHARVEST_NATS_URL."
        ) from timeout


async def ensure_streams(js: JetStreamContext) -> dict[str, StreamInfo]:
    """Create the streams that do not exist yet; return the information of all four."""
    found = {}
    for name, config in STREAMS.items():
        try:
            found[name] = await js.stream_info(name)
        except NotFoundError:
            found[name] = await js.add_stream(config)
    return found

"""NATS as rlharvest uses it: subjects, streams, connecting.

Subjects are rlharvest.v1.<kind>.<job>.<who>; a token that does not apply is "_". What must not be lost goes through one of
the four streams below (JetStream, file-backed, `discard = new`: a full stream pushes back, it never forgets); everything
else is core NATS, whose truth lives elsewhere. proto/asyncapi.yaml describes the same, and a contract test ties the two.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError

from rlharvest.errors import InvalidField, Unavailable
from rlharvest.repeats import Repeats

if TYPE_CHECKING:
    from rlharvest.accounts import Credential

log = structlog.get_logger(__name__)

NO_JOB = "_"
MAX_PAYLOAD_BYTES = 1 << 20
"""NATS's default limit; a publisher splits or refers before it reaches it."""

SAY_EVERY_S = 10.0
"""A connection that fails again and again is logged so often."""

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


def names_one(part: str) -> bool:
    """Whether a token of a subject names one job or sender: whoever puts another into a subject means nobody."""
    return part != "*" and _TOKEN.fullmatch(part) is not None


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

LEAST_STREAM_BYTES = 16 << 20
"""On a small disk streams are made smaller than STREAMS says, but not below this."""

_NO_RESOURCES, _NO_STORAGE = 10023, 10047
"""JetStream's error codes of a server that cannot set a stream's bytes aside."""

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
    credential: Credential | None = None,
    tls: ssl.SSLContext | None = None,
) -> Client:
    """Connect and stay connected: reconnects for ever, finds a black-holed peer within 10 s.

    Args:
        name: of this client, as NATS's monitoring shows it, e.g. `rollout/wkr_…`.
        timeout_s: for the first connection.
        credential: what to show to a server that asks who this is; read again at each connection.
        tls: for a URL that begins with tls://.

    Raises:
        Unavailable: NATS did not answer in time; names the address.
    """

    client = Client()
    refused = False
    repeats = Repeats(SAY_EVERY_S)

    async def error(problem: Exception) -> None:
        nonlocal refused
        refused = refused or "Authorization Violation" in str(problem)
        if (times := repeats.heard(type(problem).__name__, time.monotonic())) > 0:
            log.warning("nats.error", client=name, error=repr(problem), times=times)

    async def disconnected() -> None:
        if client.is_closed or client.is_draining:
            return  # on purpose
        log.warning("nats.disconnected", client=name)

    async def reconnected() -> None:
        log.info("nats.reconnected", client=name, more_errors=repeats.over())
        if on_reconnect is not None:
            on_reconnect()

    login: dict[str, Any] = {"tls": tls} if url.startswith("tls:") else {}
    if credential is not None:
        login |= {
            "user_jwt_cb": lambda: bytearray(credential.jwt.encode()),
            "signature_cb": credential.answer,
            "inbox_prefix": credential.inbox,
        }
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
                        **login,
                    )
                    repeats.over()
                    return client
                except (NatsError, OSError) as problem:
                    if (times := repeats.heard("waiting", time.monotonic())) > 0:
                        log.info("nats.waiting", client=name, url=url, error=repr(problem), times=times)
                    await asyncio.sleep(0.25)
    except TimeoutError as timeout:
        if refused:
            raise Unavailable(
                f"NATS at {url} does not know this client. Give it a credential of that server's account: "
                "RLHARVEST_NATS_CREDENTIALS or RLHARVEST_SECRETS_DIR."
            ) from timeout
        raise Unavailable(
            f"NATS does not answer at {url} after {timeout_s:g} s. Start it, or set RLHARVEST_NATS_URL."
        ) from timeout


async def ensure_streams(js: JetStreamContext) -> dict[str, StreamInfo]:
    """Create the streams that do not exist yet; return the information of all four.

    JetStream sets all of a stream's bytes aside when it is made. Where the disk has no room for that, streams are made
    smaller, down to LEAST_STREAM_BYTES, and the ledger's gives up half of its own for one that does not fit even so.
    """
    found: dict[str, StreamInfo] = {}
    for name, config in STREAMS.items():  # the ledger's, which is the largest, first
        while name not in found:
            try:
                found[name] = await js.stream_info(name)
            except NotFoundError:
                try:
                    found[name] = await _create(js, config)
                except APIError as error:
                    ledger = found.get(LEDGER)
                    if ledger is None or not _tight(error) or _bytes(ledger.config) // 2 < LEAST_STREAM_BYTES:
                        raise
                    half = STREAMS[LEDGER].evolve(max_bytes=_bytes(ledger.config) // 2)
                    found[LEDGER] = await js.update_stream(half)
    return found


async def _create(js: JetStreamContext, config: StreamConfig) -> StreamInfo:
    size = _bytes(config)
    while True:
        try:
            return await js.add_stream(config.evolve(max_bytes=size))
        except APIError as error:
            if not _tight(error) or size // 2 < LEAST_STREAM_BYTES:
                raise
        size //= 2
        log.warning("nats.stream_smaller", stream=config.name, bytes=size, wanted=_bytes(config))


def _tight(error: APIError) -> bool:
    return error.err_code in (_NO_RESOURCES, _NO_STORAGE)


def _bytes(config: StreamConfig) -> int:
    assert config.max_bytes is not None, "every stream is bounded"
    return config.max_bytes

"""The ledger in Redis or Valkey: books that survive the coordinator.

Log-structured: a commit appends the messages it applied, once, and notes in one hash which responses went into another
state; a book is rebuilt from the snapshot and the log. Tokens alone touch nothing but the log. Invariants: a commit names
the position before it, so a store that lost its tail is found at the next write (Diverged) and never patched over; a call
with a lower epoch than the last is refused (Fenced).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rlharvest.errors import Fenced, InfrastructureError, InvalidField
from rlharvest.ledger import snapshot
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import Kind
from rlharvest.ledger.record import apply as record_apply

log = structlog.get_logger(__name__)

_BYTES: dict[Kind, bytes] = {"spans": b"s", "ledger": b"t", "scored": b"r"}
_KINDS: dict[bytes, Kind] = {byte: kind for kind, byte in _BYTES.items()}

_TOKEN_BYTES = 8
"""An id and a log-probability, in a snapshot as in the log."""

_RESPONSE_BYTES = 256
"""What else a snapshot holds of a response, about."""

_LEAST_LOG_BYTES = 64 << 10
"""A log up to this size is never compacted."""


class Diverged(InfrastructureError):
    """The ledger's store is not where the coordinator left it: it lost its tail, or is a new one."""


@dataclass(frozen=True, slots=True)
class Position:
    """How much of the log a book has applied."""

    stream: str
    """Identity of the stream."""
    applied: int
    """Sequence of the last message applied."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of the log is applied to every job."""

    stream: str
    """Identity of the stream."""
    applied: int
    """Sequence of the last message applied."""
    mark: int = 0
    """Digest of that message: a stream that holds another one there is not the one that was read. 0: not known."""


class Store:
    """Books of all jobs in one Redis or Valkey."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    @classmethod
    def connect(cls, url: str) -> Store:
        """Return a store; connects when it is first used."""
        return cls(Redis.from_url(url, socket_timeout=10, socket_connect_timeout=2, health_check_interval=5))

    async def prepare(self) -> None:
        """Load the functions and check that the server keeps what it is given.

        Raises:
            InvalidField: the server may evict keys.
        """
        policy = (await self.redis.config_get("maxmemory-policy")).get("maxmemory-policy")
        if policy not in (None, "noeviction"):
            raise InvalidField(
                "maxmemory-policy",
                policy,
                "the server at RLHARVEST_REDIS_URL may evict live responses",
                "Start it with --maxmemory-policy noeviction.",
            )
        code = resources.files("rlharvest.ledger").joinpath("functions.lua").read_text(encoding="utf-8")
        await self.redis.function_load(code, replace=True)

    async def begin(self, job: str, epoch: int) -> tuple[Book, Position]:
        """Take a job over and return its book as the store has it.

        Raises:
            Fenced: a coordinator of a higher epoch has it.
        """
        stream, applied, generation = (
            value.decode() for value in await self._call("rlharvest_begin", [_head(job)], [epoch])
        )
        fields = await self.redis.hgetall(_snap(job, generation))
        book = snapshot.load(job, {_bytes(name).decode(): _bytes(data) for name, data in fields.items()})
        for record in map(_bytes, await self.redis.lrange(_log(job), 0, -1)):
            record_apply(book, _KINDS[record[:1]], record[1:])
        book.touched.clear()
        return book, Position(stream, int(applied))

    async def position(self, job: str) -> Position:
        """Return how much of the log the store has applied to a job."""
        stream, applied = await self.redis.hmget(_head(job), "stream", "applied")
        return Position(_bytes(stream or b"").decode(), int(applied or 0))

    async def rebase(self, book: Book, epoch: int, position: Position) -> None:
        """Note that the log is another stream from now on."""
        await self._call("rlharvest_rebase", [_head(book.job)], [epoch, position.stream, position.applied])

    async def commit(
        self, book: Book, epoch: int, before: Position, applied: int, records: Sequence[tuple[Kind, bytes]]
    ) -> Position:
        """Write what was applied to a book since `before`; return the new position.

        Raises:
            Fenced: a coordinator of a higher epoch took over.
            Diverged: the store is not at `before`.
        """
        states: list[str | int] = []
        for handle in sorted(book.touched):
            response = book.responses.get(handle)
            text = (
                f"{response.state.name.lower()} {response.attempt} {response.length} {response.worker}"
                if response is not None
                else ""
            )
            states += [handle, text]
        data = [_BYTES[kind] + message for kind, message in records]
        log_bytes = await self._call(
            "rlharvest_commit",
            [_head(book.job), _log(book.job), _state(book.job)],
            [epoch, before.stream, before.applied, applied, len(data), *data, *states],
        )
        book.touched.clear()
        position = Position(before.stream, applied)
        live = _TOKEN_BYTES * book.tokens + _RESPONSE_BYTES * len(book.responses)
        # Twice what the snapshot will hold, so that writing it again and again costs less than the log itself.
        if int(log_bytes) > max(_LEAST_LOG_BYTES, 2 * live):
            await self.compact(book, epoch, position)
        return position

    async def compact(self, book: Book, epoch: int, position: Position) -> None:
        """Write a snapshot of the book and start the log anew."""
        old = _bytes(await self.redis.hget(_head(book.job), "generation") or b"0").decode()
        # The epoch is in the name: a coordinator that was replaced while it compacted must not write into the new one's.
        new = f"{epoch}.{int(old.rpartition('.')[2]) + 1}"
        await self.redis.delete(_snap(book.job, new))
        await self.redis.hset(_snap(book.job, new), snapshot.JOB_FIELD, snapshot.dump_job(book))
        responses = list(book.responses.values())
        # A part at a time: a large book takes seconds, in which heartbeats are heard all the same.
        for at in range(0, len(responses), 256):
            part = responses[at : at + 256]
            await self.redis.hset(
                _snap(book.job, new), mapping={str(item.handle): snapshot.dump_response(item) for item in part}
            )
        await self._call(
            "rlharvest_compact",
            [_head(book.job), _log(book.job), _snap(book.job, old)],
            [epoch, position.stream, position.applied, new],
        )
        log.debug("ledger.compacted", job=book.job, responses=len(responses))

    async def cursor(self) -> Cursor:
        """Return up to where every message of the log is applied to every job that was open."""
        stream, applied, mark = await self.redis.hmget(_CURSOR, "stream", "applied", "mark")
        return Cursor(_bytes(stream or b"").decode(), int(applied or 0), int(mark or 0))

    async def set_cursor(self, epoch: int, cursor: Cursor) -> None:
        """Note up to where the log is applied; call it after the commits, so that it never runs ahead of them.

        Raises:
            Fenced: a coordinator of a higher epoch took over.
        """
        await self._call("rlharvest_cursor", [_CURSOR], [epoch, cursor.stream, cursor.applied, cursor.mark])

    async def synced(self) -> bool:
        """Wait until what was written is on the server's disk; False if that takes over two seconds."""
        answer = await self.redis.waitaof(1, 0, 2000)
        return int(answer[0]) >= 1

    async def forget(self, job: str) -> None:
        """Delete everything of a job that has ended."""
        generation = _bytes(await self.redis.hget(_head(job), "generation") or b"0").decode()
        keys = [_head(job), _log(job), _state(job), _snap(job, generation)]
        # Of a coordinator that died while it wrote the next one.
        keys += [
            _bytes(key).decode() async for key in self.redis.scan_iter(match=_snap(_escaped(job), "*"), count=1000)
        ]
        await self.redis.delete(*keys)

    async def close(self) -> None:
        await self.redis.aclose()

    async def _call(self, function: str, keys: list[str], arguments: Sequence[Any]) -> Any:
        try:
            return await self.redis.fcall(function, len(keys), *keys, *arguments)
        except ResponseError as error:
            word, _, rest = str(error).partition(" ")
            if word == "FENCED":
                raise Fenced(f"a coordinator of epoch {rest} took over") from error
            if word == "DIVERGED":
                raise Diverged(f"the ledger's store is at {rest}, not where this coordinator left it") from error
            if "Function not found" in str(error):
                raise Diverged("the ledger's store is a new server: its functions are missing") from error
            raise


_CURSOR = "rlharvest:cursor"


def _bytes(value: bytes | str) -> bytes:
    """The client's types allow text; this one is not set to decode."""
    return value if isinstance(value, bytes) else value.encode()


def _escaped(job: str) -> str:
    """For a pattern of keys; the ids of jobs hold nothing else that a pattern would read."""
    return job.replace("[", "\\[")


def _head(job: str) -> str:
    return f"rlharvest:{{{job}}}:head"


def _log(job: str) -> str:
    return f"rlharvest:{{{job}}}:log"


def _state(job: str) -> str:
    return f"rlharvest:{{{job}}}:state"


def _snap(job: str, generation: str) -> str:
    return f"rlharvest:{{{job}}}:snap:{generation}"

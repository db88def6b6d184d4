"""What from outside may hold a running job up: named states, each with what to do.

Nothing is lost while one lasts: whoever meets it tries again until it is over. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js.errors import APIError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from rlharvest.errors import InfrastructureError
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InternalError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from rlharvest_coordinator import sql

TRANSIENT = (InfrastructureError, *sql.FAULTS, TimeoutError, NatsError)
"""What may be over at the next try."""

REASONS = {
    "LedgerFull": "The ledger's stream in NATS is full",
    "LedgerStoreFull": "The ledger's store (Valkey) takes no more",
    "LedgerStoreUnavailable": "The ledger's store (Valkey) does not answer",
    "DatabaseFull": "The disk of the database is full",
    "DatabaseUnavailable": "The database does not answer",
    "CoordinatorDiskFull": "The coordinator's disk has no room for the dataset",
    "WeightsDiskFull": "The weight service has no room for the next version",
    "WeightsLost": "The weight service lost the newest version",
    "CheckpointDiskFull": "There is no room for a checkpoint",
    "TrainerDiskFull": "The trainer's own disk has no room for the next version",
}
"""Reason -> how its sentence begins."""

TRAINERS = frozenset({"WeightsDiskFull", "CheckpointDiskFull", "TrainerDiskFull"})
"""Those that a trainer may name."""

_STREAM_FULL = frozenset({10023, 10047, 10077})
"""JetStream's error codes: insufficient resources, insufficient storage, maximum bytes exceeded."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One of REASONS, and a sentence for people."""

    reason: str
    message: str


def obstacle(reason: str, details: str) -> Obstacle:
    """Return an obstacle whose sentence says what it is and then what to do."""
    return Obstacle(reason, f"{REASONS[reason]}. {details}")


def of_stream(error: Exception) -> Obstacle | None:
    """Return what a refused publication means, None if the stream is not full."""
    if isinstance(error, APIError) and error.err_code in _STREAM_FULL:
        return stream_full(str(error.description))
    return None


def stream_full(problem: str) -> Obstacle:
    """Return the obstacle of a stream that takes no more."""
    return obstacle(
        "LedgerFull",
        "Workers keep their tokens and wait, nothing is forgotten. Its disk needs room, or the coordinator is behind "
        f"with applying it. ({problem})",
    )


def of_store(error: Exception) -> Obstacle:
    """Return what a fault of the ledger's store means."""
    full = isinstance(error, OutOfMemoryError) or (
        isinstance(error, ResponseError) and str(error).startswith("MISCONF")
    )
    if full:
        return obstacle("LedgerStoreFull", f"Raise its maxmemory, or give its disk room; nothing is lost. ({error})")
    return obstacle("LedgerStoreUnavailable", f"Start it again; nothing is lost. ({error})")


def of_database(error: Exception) -> Obstacle:
    """Return what a fault of the database means."""
    fault = error.orig if isinstance(error, DBAPIError) else error
    if _database_full(error):
        return obstacle("DatabaseFull", f"Give it room; the job goes on by itself. ({fault})")
    return obstacle("DatabaseUnavailable", f"The job goes on when it is back. ({fault})")


def database_hinders(error: Exception) -> bool:
    """Whether a fault is the database's own, away or full, and not of what it was asked.

    One that starts or stops has an error of its own for it, one that is away leaves the error of the socket.
    """
    if isinstance(error, DBAPIError):
        asked = (IntegrityError, ProgrammingError, DataError, NotSupportedError, InternalError)
        return not isinstance(error, asked) or _database_full(error)
    # Those of sockets, names and certificates are of no file.
    return isinstance(error, PoolTimeout) or (isinstance(error, OSError) and error.filename is None)


def unavailable(error: Exception) -> str | None:
    """Return what a caller is told of a fault that may be over at the next try, None of any other."""
    if isinstance(error, NatsError):
        problem = "NATS does not answer"
    elif isinstance(error, RedisError):
        problem = REASONS[of_store(error).reason]
    elif database_hinders(error):
        problem = REASONS[of_database(error).reason]
    else:
        return None
    return f"{problem}. Nothing was lost: try again."


def _database_full(error: Exception) -> bool:
    """Whether SQLite (SQLITE_FULL) or PostgreSQL (class 53100, disk_full) says that its disk is full."""
    fault = getattr(error, "orig", None)
    return "database or disk is full" in str(fault) or getattr(fault, "sqlstate", None) == "53100"


def of_trainer(reason: str, message: str) -> Obstacle | None:
    """Return what a trainer says that it waits for, None if that is nothing."""
    return obstacle(reason, message) if reason in TRAINERS else None

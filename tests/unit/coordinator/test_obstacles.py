"""Faults of what is outside become named states, by what the system itself says."""

from __future__ import annotations

import errno
import socket
import sqlite3
import ssl

import pytest
from nats.errors import TimeoutError as NatsTimeout
from nats.js.errors import APIError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError
from rlharvest_coordinator import obstacles
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout


class PostgresFault(Exception):
    """As SQLAlchemy's asyncpg dialect raises it."""

    sqlstate = "53100"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (sqlite3.OperationalError("database or disk is full"), "DatabaseFull"),
        (PostgresFault("could not extend file"), "DatabaseFull"),
        (sqlite3.OperationalError("disk I/O error"), "DatabaseUnavailable"),
        (ConnectionRefusedError("no"), "DatabaseUnavailable"),
    ],
)
def test_faults_of_the_database(fault: Exception, reason: str) -> None:
    found = obstacles.of_database(OperationalError("INSERT", {}, fault))
    assert found.reason == reason
    assert str(fault) in found.message


@pytest.mark.parametrize(
    ("fault", "its_own"),
    [
        (OperationalError("SELECT", {}, sqlite3.OperationalError("database is locked")), True),
        (DBAPIError("SELECT", {}, Exception("the database system is starting up")), True),
        (ConnectionRefusedError("no"), True),
        (socket.gaierror("no such name"), True),
        (ssl.SSLCertVerificationError("certificate has expired"), True),
        (PoolTimeout("all connections wait"), True),
        (IntegrityError("INSERT", {}, PostgresFault("could not extend file")), True),
        (IntegrityError("INSERT", {}, Exception("duplicate key")), False),
        (ProgrammingError("SELECT", {}, Exception("no such column")), False),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), False),
    ],
)
def test_what_the_database_is_asked_wrongly_is_no_fault_of_its_own(fault: Exception, its_own: bool) -> None:
    """A database that starts, stops or cannot be reached has 503 for an answer, a statement that is wrong 500."""
    assert obstacles.database_hinders(fault) is its_own


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (PoolTimeout("all connections wait"), "The database does not answer"),
        (
            OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full")),
            "The disk of the database",
        ),
        (TimeoutError(), "The database does not answer"),
        (NatsTimeout(), "NATS"),
        (APIError(code=503, err_code=10077, description="maximum bytes exceeded"), "NATS"),
        (RedisConnectionError("refused"), "Valkey"),
        (KeyError("x"), None),
        (ProgrammingError("SELECT", {}, Exception("no such column")), None),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), None),
    ],
)
def test_a_caller_is_told_what_does_not_answer(fault: Exception, says: str | None) -> None:
    """What may be over at the next try is named; a fault of ours never passes for one."""
    told = obstacles.unavailable(fault)
    assert (told is None) if says is None else (told is not None and says in told and "try again" in told)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "LedgerStoreFull"),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left on device"), "LedgerStoreFull"),
        (RedisConnectionError("refused"), "LedgerStoreUnavailable"),
    ],
)
def test_faults_of_the_store(fault: Exception, reason: str) -> None:
    assert obstacles.of_store(fault).reason == reason


def test_faults_of_the_stream() -> None:
    full = obstacles.of_stream(APIError(code=503, err_code=10077, description="maximum bytes exceeded"))
    assert full is not None
    assert full.reason == "LedgerFull"
    assert obstacles.of_stream(APIError(code=503, err_code=10076, description="other")) is None
    assert obstacles.of_stream(TimeoutError()) is None


def test_a_trainer_names_its_own_states_only() -> None:
    """Its words come over the wire: it cannot make the job look as if another service failed."""
    assert obstacles.of_trainer("", "") is None
    assert obstacles.of_trainer("LedgerFull", "x") is None
    found = obstacles.of_trainer("WeightsDiskFull", "no space left")
    assert found == obstacles.Obstacle("WeightsDiskFull", f"{obstacles.REASONS['WeightsDiskFull']}. no space left")

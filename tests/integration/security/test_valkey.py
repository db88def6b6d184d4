"""What a real Valkey server lets each user do."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from rlharvest.keyring import Keyring
from rlharvest.ledger.store import Store
from rlharvest.settings import LedgerSettings
from rlharvest.testing.servers import ValkeyServer

JOB = "rljob_acl"


def settings(valkey: ValkeyServer, secrets: Path) -> LedgerSettings:
    return LedgerSettings(redis_url=f"redis://coordinator@127.0.0.1:{valkey.port}/0", secrets_dir=secrets)


async def test_the_coordinator_keeps_its_ledger(valkey: ValkeyServer, secrets: Path) -> None:
    """Everything that the store does is allowed: functions, snapshots, the cursor, waiting for the disk, forgetting."""
    store = Store.connect(settings(valkey, secrets).ledger_url)
    await store.prepare()
    await store.prepare()
    book, position = await store.begin(JOB, 1)
    await store.rebase(book, 1, position)
    await store.compact(book, 1, position)
    assert await store.redis.waitaof(1, 0, 2000)
    assert await store.redis.ping()
    await store.close()


@pytest.mark.parametrize(
    "command",
    [
        *("KEYS *", "FLUSHALL", "FLUSHDB", "SWAPDB 0 1", "SHUTDOWN NOSAVE", "SAVE", "BGREWRITEAOF", "DEBUG SLEEP 0"),
        *("CONFIG SET dir /tmp", "CONFIG REWRITE", "ACL LIST", "ACL SETUSER x", "CLIENT LIST", "CLIENT KILL ID 1"),
        *("REPLICAOF 127.0.0.1 1", "MIGRATE 127.0.0.1 1 k 0 1", "MODULE LIST", "MONITOR", "EVAL x 0", "SCRIPT FLUSH"),
        *("FUNCTION FLUSH", "FUNCTION DELETE rlharvest", "PUBLISH c x", "SET other 1", "GET other", "DEL session:1"),
    ],
)
async def test_what_can_harm_the_server_or_is_not_its_own_is_refused_to_it(
    valkey: ValkeyServer, secrets: Path, command: str
) -> None:
    async with Redis.from_url(settings(valkey, secrets).ledger_url) as redis:
        with pytest.raises((NoPermissionError, ResponseError), match=r"ermission|not allowed"):
            await redis.execute_command(*command.split())


@pytest.mark.parametrize(
    "command", ["GET rlharvest:cursor", "INFO", "CONFIG GET dir", "CLIENT LIST", "FCALL f 0", "KEYS *"]
)
async def test_who_does_not_log_in_may_only_ask_whether_it_is_there(valkey: ValkeyServer, command: str) -> None:
    async with Redis(port=valkey.port) as redis:
        assert await redis.ping()
        with pytest.raises(NoPermissionError):
            await redis.execute_command(*command.split())


async def test_a_wrong_password_is_refused(valkey: ValkeyServer) -> None:
    async with Redis.from_url(f"redis://coordinator:wrong@127.0.0.1:{valkey.port}/0") as redis:
        with pytest.raises(AuthenticationError):
            await redis.ping()


async def test_the_password_is_not_on_the_command_line(valkey: ValkeyServer, keyring: Keyring) -> None:
    password = (keyring.holder("coordinator") / "redis_password").read_text().strip()
    assert password not in " ".join(valkey.command())

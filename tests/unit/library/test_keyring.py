"""The directory of secrets: who holds what, what is made once, what follows."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from rlharvest.accounts import Credential
from rlharvest.credentials import weakness
from rlharvest.errors import InvalidField
from rlharvest.keyring import HOLDERS, TOKENS, Keyring, given_secrets, users_acl

HELD = {
    "coordinator": {
        *("api_token", "worker_token", "service_token", "nats_account_seed", "nats_credentials"),
        *("redis_password", "sql_password"),
    },
    "trainer": {"service_token", "nats_credentials"},
    "weights": {"service_token", "worker_token", "nats_credentials"},
    "reward": {"nats_credentials"},
    "rollout": {"worker_token"},
    "nats": {"accounts.conf"},
    "valkey": {"users.acl"},
    "postgres": {"sql_password"},
}


def files(keyring: Keyring) -> dict[str, str]:
    return {str(path.relative_to(keyring.path)): path.read_text() for path in keyring.path.rglob("*") if path.is_file()}


def test_each_holder_gets_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    """A rollout worker, which runs where machines are cheap, holds the workers' token alone; the reward service, which
    runs code of users, no token at all."""
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    found = {holder: {path.name for path in keyring.holder(holder).iterdir()} for holder in HOLDERS}
    assert found == HELD


def test_only_the_owner_reads_them(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    for path in keyring.path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for path in Keyring(tmp_path / "secrets", readable=True).path.rglob("*"):
        assert not path.stat().st_mode & 0o022, path


def test_no_secret_is_ever_made_twice(tmp_path: Path) -> None:
    one, two = Keyring(tmp_path / "one"), Keyring(tmp_path / "two")
    one.make()
    two.make()
    for name in HELD["coordinator"]:
        assert files(one)[f"coordinator/{name}"] != files(two)[f"coordinator/{name}"]
    assert all(weakness(one.token(name)) is None for name in TOKENS)


def test_what_is_there_stays(tmp_path: Path) -> None:
    """Also when it is made readable later, and when what follows from it is lost."""
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    before = files(keyring)
    (keyring.holder("rollout") / "worker_token").unlink()
    Keyring(tmp_path / "secrets", readable=True).make()
    after = files(keyring)
    assert set(after) == set(before)
    for name in [f"coordinator/{each}" for each in HELD["coordinator"] - {"nats_credentials"}]:
        assert after[name] == before[name]
    assert after["rollout/worker_token"] == before["coordinator/worker_token"]


def test_a_credential_that_was_made_before_is_of_the_same_account(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    account = keyring.account().public
    keyring.make()
    assert keyring.account().public == account
    assert account in files(keyring)["nats/accounts.conf"]
    assert Credential.parse(files(keyring)["reward/nats_credentials"]).name == "reward"


def test_rotation_keeps_the_token_before_and_ends_the_one_before_that(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    first = keyring.token("worker_token")
    keyring.rotate("worker_token")
    second = keyring.token("worker_token")
    for holder in ("coordinator", "weights", "rollout"):
        assert files(keyring)[f"{holder}/worker_token"].split() == [second, first]
    keyring.rotate("worker_token")
    assert first not in files(keyring)["rollout/worker_token"]
    with pytest.raises(InvalidField, match="Tokens: api_token"):
        keyring.rotate("sql_password")


def test_a_secret_may_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from a file\n")
    given = given_secrets({"RLHARVEST_API_TOKEN": "mine", "RLHARVEST_SQL_PASSWORD_FILE": str(tmp_path / "file")})
    assert given == {"api_token": "mine", "sql_password": "from a file"}
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    keyring.make(given)
    assert keyring.token("api_token") == "mine"
    assert files(keyring)["postgres/sql_password"] == "from a file\n"
    keyring.make()
    assert keyring.token("api_token") == "mine"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidField, match="file"):
        Keyring(tmp_path / "file" / "secrets").make()


def test_valkey_gets_no_password_in_plain_text() -> None:
    assert "hunter2" not in users_acl("hunter2")

"""Secrets of a service: from its variable, the file that a variable names, or the directory of its secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from rlharvest.keyring import Keyring
from rlharvest.settings import LedgerSettings, ServiceSettings, with_password


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_TOKEN", "SERVICE_TOKEN_FILE", "SECRETS_DIR", "REDIS_PASSWORD", "REDIS_PASSWORD_FILE"):
        monkeypatch.delenv(f"RLHARVEST_{name}", raising=False)


def test_a_variable_wins_over_a_file_and_a_file_over_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "service_token").write_text("of the directory\n")
    (tmp_path / "named").write_text("of the file\n")
    monkeypatch.setenv("RLHARVEST_SECRETS_DIR", str(tmp_path))
    assert _token() == "of the directory"
    monkeypatch.setenv("RLHARVEST_SERVICE_TOKEN_FILE", str(tmp_path / "named"))
    assert _token() == "of the file"
    monkeypatch.setenv("RLHARVEST_SERVICE_TOKEN", "of the variable")
    assert _token() == "of the variable"


def test_a_service_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.make()
    caller = ServiceSettings(secrets_dir=keyring.holder("trainer")).as_service
    before = caller.headers
    keyring.rotate("service_token")
    assert caller.headers != before
    assert caller.headers == {"authorization": f"Bearer {keyring.token('service_token')}"}


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHARVEST_SERVICE_TOKEN", "")
    assert ServiceSettings().service_token is None


def test_only_secrets_come_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "nats_url").write_text("nats://elsewhere:1")
    assert ServiceSettings(secrets_dir=tmp_path).nats_url == "nats://127.0.0.1:4222"


def test_secrets_are_shown_nowhere(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.make()
    settings = LedgerSettings(secrets_dir=keyring.holder("coordinator"))
    shown = repr(settings) + str(settings) + str(settings.model_dump())
    for name in ("service_token", "redis_password"):
        assert (keyring.holder("coordinator") / name).read_text().strip() not in shown


def test_a_password_is_put_into_the_url(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.make()
    settings = LedgerSettings(
        redis_url="redis://coordinator@127.0.0.1:6379/0", secrets_dir=keyring.holder("coordinator")
    )
    assert settings.ledger_url == keyring.redis_url(6379)


@pytest.mark.parametrize(
    ("url", "password", "made"),
    [
        ("redis://u@h:1/0", "a/b@c", "redis://u:a%2Fb%40c@h:1/0"),
        ("redis://u:own@h:1/0", "p", "redis://u:own@h:1/0"),
        ("redis://h:1/0", "p", "redis://h:1/0"),
        ("postgresql+asyncpg://u@h/db?ssl=require", "p", "postgresql+asyncpg://u:p@h/db?ssl=require"),
        ("redis://u@h:1/0", None, "redis://u@h:1/0"),
    ],
)
def test_urls_with_passwords(url: str, password: str | None, made: str) -> None:
    assert with_password(url, SecretStr(password) if password else None) == made


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="go together"):
        ServiceSettings(tls_cert=tmp_path / "cert.pem")


def _token() -> str:
    tokens = ServiceSettings().service_token
    assert tokens is not None
    return tokens.current

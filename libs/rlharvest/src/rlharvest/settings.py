"""Settings that every service shares, read from the environment.

A field `nats_url` is the variable RLHARVEST_NATS_URL. A secret may come from a file instead: the one that
RLHARVEST_API_TOKEN_FILE names, else `api_token` in the directory RLHARVEST_SECRETS_DIR (see keyring.py). Files of tokens are
read again when they change, the others at the start.
Empty and unknown variables are left alone (the environment is not ours); unknown keyword arguments are refused.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, InstanceOf, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rlharvest.accounts import Credential
from rlharvest.credentials import Caller, Tokens
from rlharvest.tls import Tls


def _tokens(value: object) -> object:
    """Take one token as text, or a file of them."""
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        return Tokens([value.strip()])
    return Tokens(file=value) if isinstance(value, Path) else value


Token = Annotated[InstanceOf[Tokens], NoDecode, BeforeValidator(_tokens)]
"""A bearer token, or several of which each is good, from a variable or a file."""


def _holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_holds(each, kind) for each in get_args(annotation))


class ServiceSettings(BaseSettings):
    """Where the infrastructure is, and how this process speaks about itself."""

    model_config = SettingsConfigDict(env_prefix="RLHARVEST_", env_ignore_empty=True, extra="forbid", frozen=True)

    nats_url: str = "nats://127.0.0.1:4222"
    """NATS with JetStream on."""

    coordinator_grpc: str = "127.0.0.1:7081"
    """gRPC addresses of the coordinators, comma-separated; the leader is found among them."""

    weights_url: str = "http://127.0.0.1:7083"
    """HTTP address of the weight service: blobs and manifests."""

    weights_grpc: str = "127.0.0.1:7084"
    """gRPC address of the weight service: publishing and retention."""

    service_token: Token | None = None
    """Bearer token of trainers and services among themselves: batches, and publishing weights."""

    nats_credentials: SecretStr | None = None
    """Credential of this service for NATS, in NATS's file format; unset: NATS asks for none."""

    secrets_dir: Path | None = None
    """Directory with a file for each secret of this service, named as the setting; `rlharvest secrets` makes such."""

    tls_ca: Path | None = None
    """PEM file of the authorities that this process believes; with it gRPC is encrypted. URLs say https, tls, rediss."""

    tls_cert: Path | None = None
    """PEM file with the certificate chain that the servers of this process show; unset: they speak plain text."""

    tls_key: Path | None = None
    """PEM file with its key."""

    data_dir: Path = Path(".rlharvest")
    """Where this process keeps its files."""

    health_host: str = "127.0.0.1"
    """Address that the health and metrics endpoint listens on."""

    health_port: int = 0
    """Port of /livez, /readyz and /metrics; 0: any free port, written to the log."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is written."""

    log_format: Literal["auto", "console", "json"] = "auto"
    """`auto`: console on a terminal, JSON lines elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _secrets_from_files(cls, values: dict[str, Any]) -> dict[str, Any]:
        directory = values.get("secrets_dir")
        for name, info in cls.model_fields.items():
            if name in values:
                continue
            path = os.environ.get(f"RLHARVEST_{name.upper()}_FILE")
            tokens = _holds(info.annotation, Tokens)
            if not path and directory and (tokens or _holds(info.annotation, SecretStr)):
                found = Path(directory) / name
                path = str(found) if found.is_file() else None
            if path:
                values[name] = Path(path) if tokens else Path(path).read_text(encoding="utf-8").strip()
        return values

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or none")
        return self

    @functools.cached_property
    def tls(self) -> Tls:
        """What this process encrypts with."""
        return Tls(self.tls_ca, self.tls_cert, self.tls_key)

    @functools.cached_property
    def nats_credential(self) -> Credential | None:
        """What this service shows to NATS. Raises BadCredential."""
        return Credential.parse(self.nats_credentials.get_secret_value()) if self.nats_credentials else None

    @property
    def as_service(self) -> Caller:
        """How this process calls other services."""
        return Caller(self.service_token, self.tls)


class LedgerSettings(ServiceSettings):
    """Settings of processes that reach the ledger's store."""

    redis_url: str = Field("redis://127.0.0.1:6379/0")
    """Valkey or Redis with AOF on and maxmemory-policy noeviction."""

    redis_password: SecretStr | None = None
    """Password of the user that redis_url names, e.g. redis://coordinator@127.0.0.1:6379/0."""

    @property
    def ledger_url(self) -> str:
        """The URL with the password, and with the authorities if it is encrypted."""
        url = with_password(self.redis_url, self.redis_password)
        if self.tls_ca is None or not url.startswith("rediss:"):
            return url
        return f"{url}{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(self.tls_ca))}"


def with_password(url: str, password: SecretStr | None) -> str:
    """Return a URL with a password put beside its user, unless it has one."""
    parts = urlsplit(url)
    if password is None or parts.password or not parts.username:
        return url
    host = parts.netloc.rpartition("@")[2]
    login = f"{parts.username}:{quote(password.get_secret_value(), safe='')}"
    return urlunsplit(parts._replace(netloc=f"{login}@{host}"))

"""Settings that every service shares, read from the environment.

A field `nats_url` is the variable RLHARVEST_NATS_URL. A secret may come from a file instead: RLHARVEST_API_TOKEN_FILE.
Unknown variables are left alone (the environment is not ours); unknown keyword arguments are refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Where the infrastructure is, and how this process speaks about itself."""

    model_config = SettingsConfigDict(env_prefix="RLHARVEST_", extra="forbid", frozen=True)

    nats_url: str = "nats://127.0.0.1:4222"
    """NATS with JetStream on."""

    coordinator_grpc: str = "127.0.0.1:7081"
    """gRPC addresses of the coordinators, comma-separated; the leader is found among them."""

    weights_url: str = "http://127.0.0.1:7083"
    """HTTP address of the weight service: blobs and manifests."""

    weights_grpc: str = "127.0.0.1:7084"
    """gRPC address of the weight service: publishing and retention."""

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
        for name in cls.model_fields:
            path = os.environ.get(f"RLHARVEST_{name.upper()}_FILE")
            if path and name not in values:
                values[name] = Path(path).read_text(encoding="utf-8").strip()
        return values


class LedgerSettings(ServiceSettings):
    """Settings of processes that reach the ledger's store."""

    redis_url: str = Field("redis://127.0.0.1:6379/0")
    """Valkey or Redis with AOF on and maxmemory-policy noeviction."""

"""Settings of the coordinator (environment variables RLHARVEST_…)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from rlharvest.settings import LedgerSettings


class CoordinatorSettings(LedgerSettings):
    """Where it listens, what it reaches, and the deadlines it keeps."""

    sql_url: str = ""
    """SQLAlchemy URL (sqlite+aiosqlite:///… or postgresql+asyncpg://…); empty: a SQLite file in data_dir."""

    api_host: str = "127.0.0.1"
    """Address of REST and the web UI. An address that others can route to needs api_token."""

    api_port: int = 8080
    """Port of REST and the web UI."""

    api_token: SecretStr | None = None
    """Bearer token that REST asks for; unset: none, which only a loopback address may do."""

    grpc_address: str = "127.0.0.1:7081"
    """host:port on which gRPC listens."""

    lease_s: float = Field(1.0, gt=0.1)
    """A leader that does not renew for this long is replaced by a standby."""

    heartbeat_s: float = Field(0.5, gt=0)
    """Workers send a heartbeat this often."""

    heartbeat_deadline_s: float = Field(3.0, gt=0)
    """A worker without one for this long is dead."""

    trainer_deadline_s: float = Field(10.0, gt=0)
    """A trainer that does not renew its claim for this long has lost it."""

    roots: list[Path] = Field(default_factory=lambda: [Path.cwd()])
    """Directories that model, dataset and reward paths of jobs must lie in, as a JSON list."""

    checkpoints_dir: Path | None = None
    """Where trainers save; unset: data_dir/checkpoints."""

    @property
    def database(self) -> str:
        """The SQLAlchemy URL."""
        return self.sql_url or f"sqlite+aiosqlite:///{self.data_dir.absolute() / 'coordinator.sqlite3'}"

"""Settings of the coordinator (environment variables RLHARVEST_…)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from rlharvest.settings import LedgerSettings, Token, with_password


class CoordinatorSettings(LedgerSettings):
    """Where it listens, what it reaches, and the deadlines it keeps."""

    sql_url: str = ""
    """SQLAlchemy URL (sqlite+aiosqlite:///… or postgresql+asyncpg://…); empty: a SQLite file in data_dir."""

    sql_password: SecretStr | None = None
    """Password of the user that sql_url names."""

    api_host: str = "127.0.0.1"
    """Address of REST and the web UI. An address that others can route to needs api_token."""

    api_port: int = 8080
    """Port of REST and the web UI."""

    api_token: Token | None = None
    """Bearer token that REST and gRPC Jobs ask for; unset: none, which only a loopback address may do."""

    worker_token: Token | None = None
    """Bearer token that workers join with. Unset, or service_token unset: gRPC asks for none, on loopback only."""

    nats_account_seed: SecretStr | None = None
    """Seed of the NATS account, with which credentials of workers are signed; unset: they get none."""

    worker_credential_s: float = Field(86400.0, ge=1)
    """A worker's credential is good for so long; workers renew it at half of it."""

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

    most_jobs: int = Field(1000, ge=1, le=100_000)
    """Jobs that may be unfinished at a time; one more is refused with 429."""

    most_streams: int = Field(256, ge=1, le=65536)
    """Event streams that may be open at a time; one more is refused with 503 and Retry-After."""

    most_completions: int = Field(256, ge=1, le=65536)
    """Responses that may be sampled for clients of the gateway at a time; a request for more is refused with 429."""

    most_workers: int = Field(4096, ge=1, le=65536)
    """Workers that may be here at a time; one more is told so and tries again."""

    checkpoints_dir: Path | None = None
    """Where trainers save; unset: data_dir/checkpoints."""

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints of all jobs."""
        return (self.checkpoints_dir or self.data_dir / "checkpoints").absolute()

    @property
    def database(self) -> str:
        """The SQLAlchemy URL."""
        if self.sql_url:
            return with_password(self.sql_url, self.sql_password)
        return f"sqlite+aiosqlite:///{self.data_dir.absolute() / 'coordinator.sqlite3'}"

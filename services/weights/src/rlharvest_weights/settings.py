"""Settings of the weight service (environment variables RLHARVEST_…)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from rlharvest.settings import ServiceSettings, Token


class WeightSettings(ServiceSettings):
    """Where it listens, what it keeps, and its limits."""

    http_host: str = "127.0.0.1"
    """Address that blobs, manifests, health and metrics are served on."""

    http_port: int = Field(default=7083, ge=0, le=65535)
    """Port of the same; 0: any free port, written to the log."""

    grpc_address: str = "127.0.0.1:7084"
    """host:port on which gRPC listens."""

    worker_token: Token | None = None
    """Bearer token with which workers read. Unset, or service_token unset: it asks for none, on loopback only."""

    max_blob_bytes: int = Field(default=64 << 30, ge=1)
    """Largest file that is accepted."""

    min_free_bytes: int = Field(default=256 << 20, ge=0)
    """Publications that would leave less space than this on the disk are refused; their trainer waits."""

    most_uploads: int = Field(default=64, ge=1, le=4096)
    """Uploads at a time; one more is refused with 503 and tries again."""

    upload_grace_s: float = Field(default=600.0, ge=0)
    """A blob that no version names is deleted when it was uploaded, or asked for with HEAD, longer ago than this."""

    sweep_s: float = Field(default=60.0, gt=0)
    """Such blobs are looked for this often."""

    upload_idle_s: float = Field(default=60.0, gt=0)
    """An upload that brings no byte for this long is given up."""

    drain_s: float = Field(default=0.5, ge=0)
    """At shutdown, downloads in progress have this long to end; who is cut off resumes from its verified parts."""

    @property
    def weights_dir(self) -> Path:
        """Directory of blobs and versions."""
        return self.data_dir.absolute() / "weights"

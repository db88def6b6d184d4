"""Settings of a rollout worker (environment variables RLHARVEST_…)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode
from rlharvest.credentials import Caller
from rlharvest.settings import ServiceSettings, Token

EngineName = Literal["vllm", "torch", "stub"]


class RolloutSettings(ServiceSettings):
    """What this worker is, and how it buffers."""

    worker_class: Literal["reserved", "preemptible"] = "preemptible"
    """`reserved` shares the trainer's device; `preemptible` may vanish at any instant."""

    worker_token: Token | None = None
    """Bearer token that it joins with and pulls versions with."""

    worker_type: str = Field("cpu", max_length=100)
    """What the machine is paid as, e.g. `cpu` or `h100-spot`."""

    engines: Annotated[tuple[EngineName, ...], NoDecode] = ()
    """Engines it offers, comma-separated; `auto` or empty: all that are installed."""

    slots: int = Field(32, ge=1, le=16384)
    """Responses it runs at a time."""

    threads: int = Field(0, ge=0)
    """Compute threads of the engine; 0: one for each processor that this process may use."""

    kv_memory_mb: int = Field(1024, ge=1)
    """Bound of the engine's memory for keys and values; vLLM on a GPU goes by gpu_memory instead."""

    tensor_parallel: int = Field(1, ge=1, le=64)
    """GPUs that vLLM splits a model over."""

    gpu_memory: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes for weights, keys and values."""

    pull_threads: int = Field(4, ge=1, le=64)
    """Parts of a version that are fetched at a time."""

    cache_dir: Path | None = None
    """Where pulled versions are kept; workers of one machine may share it. Unset: data_dir/versions."""

    cache_versions: int = Field(3, ge=1, le=64)
    """Versions of a job that stay in cache_dir."""

    flush_s: float = Field(0.1, gt=0, le=60)
    """Longest time that a generated token waits before it is published."""

    flush_tokens: int = Field(2048, ge=1)
    """So many unpublished tokens are published at once."""

    buffer_tokens: int = Field(1 << 20, ge=1)
    """Generation pauses when so many tokens wait for the ledger."""

    probe_s: float = Field(2.0, gt=0)
    """An acknowledgement that is missing for this long is asked for."""

    drain_s: float = Field(5.0, gt=0)
    """Longest time for handing over the last tokens at shutdown."""

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            names = [name.strip() for name in value.split(",") if name.strip()]
            return () if names == ["auto"] else tuple(names)
        return value

    @property
    def as_worker(self) -> Caller:
        """How it calls services before it has a credential of its own, and the weight service always."""
        return Caller(self.worker_token, self.tls)

    @property
    def offered_engines(self) -> tuple[EngineName, ...]:
        """The engines to register with, best first."""
        if self.engines:
            return self.engines
        if not importlib.util.find_spec("torch"):
            return ("stub",)
        return ("vllm", "torch", "stub") if importlib.util.find_spec("vllm") else ("torch", "stub")

    @property
    def leasable_engines(self) -> tuple[str, ...]:
        """What a lease may name: the engines, and `auto` where one of them computes a model."""
        real = any(engine != "stub" for engine in self.offered_engines)
        return (*self.offered_engines, "auto") if real else self.offered_engines

    @property
    def compute_threads(self) -> int:
        """Compute threads of the engine."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def versions_dir(self) -> Path:
        """Where pulled versions are kept."""
        return self.cache_dir or self.data_dir.absolute() / "versions"

"""Full disks, full memory, and files that are gone, under a running job: it says what it waits for, goes on when that
is over, and every token is as in the uninterrupted run.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rlharvest import bus
from rlharvest.bus import LEDGER, STREAMS
from rlharvest.errors import InfrastructureError
from rlharvest.testing.fixtures import disk_of
from rlharvest.testing.model import tiny_model
from rlharvest.testing.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 240.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for this module: whatever was full in one test has room in the next."""
    settings = {"RLHARVEST_MIN_FREE_BYTES": "0"}
    with System(tmp_path_factory.mktemp("system"), workers=2, settings=settings) as running:
        yield running


def begun(system: System, *, steps: int = 5, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Submit a job of some seconds and wait until its first step is done and saved."""
    spec = system.spec(limits={"max_steps": steps}, rollout={"stub": {"step_s": 0.02, "mean_length": 30}}, **changes)
    job = system.submit(spec)
    system.until(lambda: bool(system.job(job)["latest_checkpoint"]), timeout_s=WAIT_S, what="the first checkpoint")
    return job, spec


def waits_for(system: System, job: str, reason: str) -> str:
    """Wait until a job shows a reason; return its sentence."""
    system.until(
        lambda: system.job(job)["status_detail"]["reason"] == reason, timeout_s=WAIT_S, what=f"{job} to show {reason}"
    )
    return str(system.job(job)["status_detail"]["message"])


def resize(system: System, max_bytes: int) -> None:
    """Give the ledger's stream another size."""

    async def update() -> None:
        client = await bus.connect(system.nats.url, "test", credential=system.nats.credential)
        await client.jetstream().update_stream(STREAMS[LEDGER].evolve(max_bytes=max_bytes))
        await client.close()

    asyncio.run(update())


def test_a_full_stream_makes_everybody_wait_and_loses_no_token(system: System) -> None:
    """JetStream refuses every message (discard: new)."""
    job, spec = begun(system)
    resize(system, 1)
    try:
        assert "nothing is forgotten" in waits_for(system, job, "LedgerFull")
    finally:
        resize(system, STREAMS[LEDGER].max_bytes or 0)
    system.finish(job, spec)


def test_a_store_at_its_maxmemory_makes_the_keeper_wait(system: System) -> None:
    """Valkey refuses every write with OOM; nothing is evicted, nothing is applied by half."""
    job, spec = begun(system)
    with redis.Redis.from_url(system.valkey.url) as client:
        client.config_set("maxmemory", "1")
        try:
            assert "maxmemory" in waits_for(system, job, "LedgerStoreFull")
        finally:
            client.config_set("maxmemory", "0")
    system.finish(job, spec)


def test_a_full_disk_of_the_weight_service_makes_the_trainer_wait(system: System) -> None:
    job, spec = begun(system)
    system.weights.kill()
    system.weights.start(RLHARVEST_MIN_FREE_BYTES=str(1 << 60))
    assert "RLHARVEST_MIN_FREE_BYTES" in waits_for(system, job, "WeightsDiskFull")
    assert system.job(job)["status"] == "running"
    assert any(event["type"] == "trainer.waiting" for event in system.client.events(job))
    system.weights.stop()
    system.weights.start()
    system.finish(job, spec)


def test_a_full_disk_of_the_checkpoints_makes_the_trainer_wait(system: System) -> None:
    """The optimizer's file is larger than the model's, so the limit lets publications pass and no checkpoint."""
    model = tiny_model(system.directory / "large", hidden=128)
    job, spec = begun(system, model=str(model))
    assert system.trainer.process is not None
    size = (model / "model.safetensors").stat().st_size
    assert system.trainer.log.stat().st_size < size, "the log has the same limit"
    limit = (size + size // 2, resource.RLIM_INFINITY)
    before = resource.prlimit(system.trainer.process.pid, resource.RLIMIT_FSIZE, limit)
    assert "File too large" in waits_for(system, job, "CheckpointDiskFull")
    kept = list((system.directory / "data" / "checkpoints" / job).glob("step_*/state.json"))
    assert kept, "the checkpoints before stand"
    resource.prlimit(system.trainer.process.pid, resource.RLIMIT_FSIZE, before)
    system.finish(job, spec)


def test_a_weight_service_that_lost_its_files_is_given_the_step_in_hand_again(system: System) -> None:
    """Nobody has the version any more, also no worker: without it no token would ever come."""
    job, spec = begun(system, steps=6)
    for worker in system.workers:
        worker.kill()
    system.weights.kill()
    shutil.rmtree(system.directory / "data" / "weights")
    shutil.rmtree(system.directory / "cache")
    lost = max(_versions(system, job))
    system.weights.start()
    for worker in system.workers:
        worker.start()
    system.finish(job, spec)
    there = [int(version["version"]) for version in system.client.weights(job)]
    assert min(there) > lost, f"a number was used twice: {there}, lost was {lost}"
    assert any(event["type"] == "weights.lost" for event in system.client.events(job))


def _versions(system: System, job: str) -> list[int]:
    """Every version that the job ever reported."""
    return [event["data"]["version"] for event in system.client.events(job) if event["type"] == "step.done"]


def test_a_deleted_job_leaves_no_version_and_says_where_its_checkpoints_are(system: System) -> None:
    """Also where the weight service is away when it is deleted."""
    job, spec = begun(system, steps=2)
    system.finish(job, spec)
    manifests = system.directory / "data" / "weights" / "jobs" / job / "versions"
    assert list(manifests.iterdir())
    system.weights.kill()
    left = system.client.delete(job)["checkpoints"]
    assert left == str(system.directory / "data" / "checkpoints" / job)
    assert list(Path(left).glob("step_*"))
    system.weights.start()
    system.until(lambda: not list(manifests.iterdir()), timeout_s=WAIT_S, what="the versions to go")
    other, spec = begun(system, steps=2)
    system.finish(other, spec)
    directory = system.directory / "data" / "checkpoints" / other
    assert directory.exists()
    assert system.client.delete(other, checkpoints=True)["checkpoints"] is None
    assert not directory.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "small", mebibytes=8) as path:
        yield path


def test_a_full_disk_of_the_database_makes_the_job_wait_and_refuses_new_ones(small_disk: Path, tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{small_disk / 'coordinator.sqlite3'}"
    with System(tmp_path / "system", workers=1, sql_url=url) as system:
        system.environment["RLHARVEST_SQL_URL"] = url
        job, spec = begun(system)
        ballast = small_disk / "ballast"
        fill(ballast)
        assert "Give it room" in waits_for(system, job, "DatabaseFull")
        system.client.retry_s = 0.5
        with pytest.raises(InfrastructureError, match="The disk of the database is full"):
            system.submit(spec)
        ballast.unlink()
        system.finish(job, spec)


def fill(path: Path) -> None:
    """Take the last byte of a disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(descriptor, bytes(size))
            except OSError:
                continue
    finally:
        os.close(descriptor)

"""A full disk under a weight service that runs: it says so, keeps what it has, and goes on when there is room."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rlharvest.errors import DiskFull
from rlharvest.testing.fixtures import disk_of
from rlharvest.weights import catalog, puller
from rlharvest.weights.publisher import Publisher

from .conftest import WeightService

JOB = "rljob_full"
MEBIBYTE = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of(tmp_path / "small", mebibytes=4) as path:
        yield path


async def _holds(service: WeightService, tmp_path: Path) -> bool:
    """Whether the first version can still be pulled, whole."""
    manifest = await catalog.fetch_manifest(service.url, JOB, 0)
    return (await puller.pull(service.url, manifest, tmp_path / "pulled")).exists()


async def test_a_real_disk_that_is_full_refuses_a_publication_and_takes_it_later(
    small_disk: Path, tmp_path: Path, model_directory: Callable[..., Path]
) -> None:
    service = WeightService(small_disk / "service", min_free_bytes=MEBIBYTE)
    service.start()
    publisher = Publisher(service.url, service.grpc, total_s=20)
    try:
        first, second = (model_directory(f"m{seed}", seed=seed, size=MEBIBYTE) for seed in (1, 2))
        await publisher.publish(first, job=JOB, step=0, parent=None, key="1:0")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(MEBIBYTE))
        with pytest.raises(DiskFull, match="must stay free"):
            await publisher.publish(second, job=JOB, step=1, parent=0, key="1:1")
        assert not list((service.files / "incoming").iterdir()), "not a byte was sent"
        assert await _holds(service, tmp_path)
        ballast.unlink()
        assert (await publisher.publish(second, job=JOB, step=1, parent=0, key="1:1")).version == 1
    finally:
        await publisher.close()
        service.stop()


async def test_a_limit_of_the_system_in_the_middle_of_an_upload_is_a_full_disk(
    service: WeightService, tmp_path: Path, model_directory: Callable[..., Path]
) -> None:
    """What the service could not foresee: the write itself fails."""
    publisher = Publisher(service.url, service.grpc, total_s=20)
    first, second = (model_directory(f"m{seed}", seed=seed, size=MEBIBYTE) for seed in (1, 2))
    await publisher.publish(first, job=JOB, step=0, parent=None, key="1:0")
    assert service.process is not None
    before = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (MEBIBYTE // 2, resource.RLIM_INFINITY))
    with pytest.raises(DiskFull, match="File too large"):
        await publisher.publish(second, job=JOB, step=1, parent=0, key="1:1")
    assert await _holds(service, tmp_path)
    assert not list((service.files / "incoming").iterdir())
    assert json.loads(service.request("GET", f"/v1/jobs/{JOB}/versions")[2])["data"][-1]["version"] == 0
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, before)
    assert (await publisher.publish(second, job=JOB, step=1, parent=0, key="1:1")).version == 1
    await publisher.close()

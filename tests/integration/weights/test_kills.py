"""SIGKILL at the worst instants: a version exists whole or not at all, and everybody carries on."""

from __future__ import annotations

import asyncio
import filecmp
import random
from pathlib import Path

import pytest
from rlharvest.weights.catalog import fetch_manifest, list_versions
from rlharvest.weights.publisher import Publisher
from rlharvest.weights.puller import PullOptions, pull

JOB = "rljob_t"

# Runs the service; it kills itself when a file whose path contains argv[2] is about to be put in place, or just was.
_DIES = """
import os, pathlib, signal, sys
from rlharvest_weights.main import main
real = pathlib.Path.replace
point, when = sys.argv.pop(), sys.argv.pop()
def replace(self, target):
    here = point in str(target)
    if here and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    moved = real(self, target)
    if here:
        os.kill(os.getpid(), signal.SIGKILL)
    return moved
pathlib.Path.replace = replace
main()
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", ["/blobs/", "state.json", "/versions/1.json"])
async def test_publication_is_atomic(
    service, model_directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, when: str
) -> None:
    """The service dies between blob, number and manifest; the publisher just goes on when it is back."""
    publisher = Publisher(service.url, service.grpc, timeout_s=5, total_s=60)
    await publisher.publish(model_directory("first", seed=1), job=JOB, step=0, parent=None, key="1:0")
    service.stop()
    plain = service.command()
    with monkeypatch.context() as patch:
        patch.setattr(service, "command", lambda: [*plain[:-2], _DIES, "serve", when, point])
        await asyncio.to_thread(service.start)
    second = model_directory("second", seed=2)
    publishing = asyncio.create_task(publisher.publish(second, job=JOB, step=1, parent=0, key="1:1"))
    assert await asyncio.to_thread(service.process.wait, 20) == -9
    # What a look at this instant would find: version 1 is whole, or does not exist.
    await asyncio.to_thread(service.start)
    for entry in await list_versions(service.url, JOB):
        await pull(service.url, await fetch_manifest(service.url, JOB, entry.version), tmp_path / "look")
    published = await publishing
    assert published.version == 1
    assert [entry.version for entry in await list_versions(service.url, JOB)] == [0, 1]
    directory = await pull(service.url, await fetch_manifest(service.url, JOB, 1), tmp_path / "worker")
    assert filecmp.cmp(second / "model.safetensors", directory / "model.safetensors", shallow=False)
    assert not list(service.files.rglob("*.tmp"))
    await publisher.close()


async def test_a_pull_outlives_the_service(service, model_directory, tmp_path: Path) -> None:
    """SIGKILL of the service in the middle of a pull, then a start on the same files: the pull ends whole."""
    source = model_directory("m", seed=random.randrange(99), size=24_000_000)
    publisher = Publisher(service.url, service.grpc, part_bytes=1 << 18)
    await publisher.publish(source, job=JOB, step=0, parent=None, key="k")
    await publisher.close()
    manifest = await fetch_manifest(service.url, JOB, 0)
    killed = asyncio.Event()

    def kill(done: int, total: int) -> None:
        if not killed.is_set() and 0 < done < total:
            service.process.kill()
            killed.set()

    pulling = asyncio.create_task(
        pull(service.url, manifest, tmp_path / "worker", options=PullOptions(threads=2, total_s=60), progress=kill)
    )
    await asyncio.wait_for(killed.wait(), 10)
    await asyncio.to_thread(service.process.wait)
    assert not (tmp_path / "worker" / JOB / "0").exists()
    await asyncio.to_thread(service.start)
    directory = await pulling
    assert filecmp.cmp(source / "model.safetensors", directory / "model.safetensors", shallow=False)

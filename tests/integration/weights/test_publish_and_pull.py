"""Publisher, service and puller together: what the trainer publishes is what the worker gets."""

from __future__ import annotations

import asyncio
import filecmp
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import nats
import pytest
from rlharvest import rpc
from rlharvest.errors import Conflict, CorruptData, DataError, InvalidField, NotFound, Unavailable
from rlharvest.testing.servers import free_port
from rlharvest.v1 import fleet_pb2, weights_pb2, weights_pb2_grpc
from rlharvest.weights import publisher as publisher_module
from rlharvest.weights.catalog import fetch_manifest, list_versions
from rlharvest.weights.manifest import MANIFEST_BYTES
from rlharvest.weights.publisher import Publisher
from rlharvest.weights.puller import pull

JOB = "rljob_t"


@pytest.fixture
async def publisher(service) -> AsyncIterator[Publisher]:
    publisher = Publisher(service.url, service.grpc, total_s=20, part_bytes=10_000)
    yield publisher
    await publisher.close()


async def _pulled(service, version: int, cache: Path) -> Path:
    return await pull(service.url, await fetch_manifest(service.url, JOB, version), cache)


def _equal(one: Path, two: Path) -> bool:
    names = [path.name for path in one.iterdir()]
    return filecmp.cmpfiles(one, two, names, shallow=False) == (names, [], [])


async def test_what_is_published_is_what_is_pulled(service, publisher, model_directory, tmp_path: Path) -> None:
    first, second = model_directory("first", seed=1), model_directory("second", seed=2)
    progress: list[tuple[int, int]] = []
    one = await publisher.publish(
        first, job=JOB, step=0, parent=None, key="1:0", progress=lambda *counts: progress.append(counts)
    )
    await asyncio.sleep(0)
    assert (one.version, one.uploaded_bytes) == (0, one.manifest.bytes)
    assert progress[-1] == (one.manifest.bytes, one.manifest.bytes)
    two = await publisher.publish(second, job=JOB, step=1, parent=0, key="1:1")
    assert two.version == 1
    assert two.uploaded_bytes == (second / "model.safetensors").stat().st_size
    assert two.digest == two.manifest.digest != one.digest

    for version, source in [(0, first), (1, second)]:
        assert _equal(source, await _pulled(service, version, tmp_path / "worker"))
    listed = await list_versions(service.url, JOB)
    assert [(entry.version, entry.step, entry.parent, entry.digest) for entry in listed] == [
        (0, 0, None, one.digest),
        (1, 1, 0, two.digest),
    ]


async def test_publishing_again_gives_the_same_version_and_moves_nothing(service, publisher, model_directory) -> None:
    directory = model_directory("first", seed=1)
    await publisher.publish(directory, job=JOB, step=0, parent=None, key="1:0")
    again = await publisher.publish(directory, job=JOB, step=0, parent=None, key="1:0")
    assert (again.version, again.uploaded_bytes) == (0, 0)
    assert (await publisher.publish(directory, job=JOB, step=0, parent=0, key="2:0")).version == 1
    with pytest.raises(Conflict, match="other content"):
        await publisher.publish(model_directory("x", seed=3), job=JOB, step=0, parent=None, key="1:0")


async def test_retain_and_forget(service, publisher, model_directory, tmp_path: Path) -> None:
    client = rpc.Client(service.grpc)
    directories = [model_directory(f"d{seed}", seed=seed) for seed in range(3)]
    for step, directory in enumerate(directories):
        await publisher.publish(directory, job=JOB, step=step, parent=None, key=str(step))
    reply = await client.call(
        weights_pb2_grpc.WeightsStub,
        lambda stub: stub.Retain,
        weights_pb2.RetainRequest(job=JOB, versions=[0], keep_last=1),
    )
    assert list(reply.deleted) == [1]
    assert reply.freed_bytes == (directories[1] / "model.safetensors").stat().st_size
    assert _equal(directories[0], await _pulled(service, 0, tmp_path / "worker"))
    with pytest.raises(NotFound):
        await fetch_manifest(service.url, JOB, 1)
    listed = await client.call(
        weights_pb2_grpc.WeightsStub, lambda stub: stub.List, weights_pb2.ListVersionsRequest(job=JOB)
    )
    assert [(info.version, info.HasField("parent")) for info in listed.versions] == [(0, False), (2, False)]
    await client.call(weights_pb2_grpc.WeightsStub, lambda stub: stub.Forget, weights_pb2.ForgetRequest(job=JOB))
    assert await list_versions(service.url, JOB) == ()
    assert [path for path in (service.files / "blobs").rglob("*") if path.is_file()] == []
    with pytest.raises(Conflict, match="was deleted"):
        await publisher.publish(directories[0], job=JOB, step=9, parent=None, key="9")
    await client.close()


async def test_a_blob_collected_before_the_version_names_it_is_uploaded_again(
    service, publisher, model_directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_version = publisher._publish
    calls = 0

    async def collected(manifest, *rest):
        nonlocal calls
        calls += 1
        if calls == 1:
            digest = manifest.files[0].blake3
            (service.files / "blobs" / digest[:2] / digest).unlink()
        return await make_version(manifest, *rest)

    monkeypatch.setattr(publisher, "_publish", collected)
    published = await publisher.publish(model_directory("m", seed=1), job=JOB, step=0, parent=None, key="k")
    assert (published.version, calls) == (0, 2)


async def test_directories_that_cannot_be_published_are_refused(service, publisher, model_directory) -> None:
    directory = model_directory("m", seed=1)
    with pytest.raises(InvalidField, match="not a directory"):
        await publisher.publish(directory / "config.json", job=JOB, step=0, parent=None, key="k")
    with pytest.raises(DataError, match="parent"):
        await publisher.publish(directory, job=JOB, step=0, parent=7, key="k")
    (directory / "my model.txt").write_text("x")
    with pytest.raises(InvalidField, match=r"my model\.txt"):
        await publisher.publish(directory, job=JOB, step=0, parent=None, key="k")
    (directory / "my model.txt").unlink()
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CorruptData, match=r"model\.safetensors.*cut short"):
        await publisher.publish(directory, job=JOB, step=0, parent=None, key="k")
    assert await list_versions(service.url, JOB) == ()


async def test_no_service_is_unavailable_in_time(model_directory) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    publisher = Publisher(f"http://{nowhere}", nowhere, total_s=0.5)
    with pytest.raises(Unavailable, match="127"):
        await publisher.publish(model_directory("m", seed=1), job=JOB, step=0, parent=None, key="k")
    await publisher.close()
    with pytest.raises(Unavailable):
        await list_versions(f"http://{nowhere}", JOB, total_s=0.3)


async def test_versions_are_announced_and_nats_may_come_late(service, publisher, model_directory, nats_server) -> None:
    """Published while NATS is away: the publication does not wait; the newest version is announced when NATS comes."""
    nats_server.stop()
    service.stop()
    service.settings["nats_url"] = nats_server.url
    service.start()
    directory = model_directory("m", seed=1)
    for step in range(2):
        await publisher.publish(directory, job=JOB, step=step, parent=None, key=str(step))
    nats_server.start()
    client = await nats.connect(nats_server.url)
    heard: asyncio.Queue[fleet_pb2.VersionExists] = asyncio.Queue()

    async def hear(message) -> None:
        assert message.subject == f"rlharvest.v1.version.{JOB}.weights"
        heard.put_nowait(fleet_pb2.VersionExists.FromString(message.data))

    await client.subscribe("rlharvest.v1.version.*.weights", cb=hear)
    await client.flush()
    # The late announcement may have gone out before this test listened; the next one may not.
    published = await publisher.publish(directory, job=JOB, step=2, parent=1, key="2")
    async with asyncio.timeout(10):
        while (message := await heard.get()).version != 2:
            assert message.version == 1
    assert (message.job, message.step, message.digest) == (JOB, 2, published.digest)
    await client.close()


def test_a_second_service_on_the_same_files_or_port_says_what_to_do(service, tmp_path: Path) -> None:
    same_files = subprocess.run(
        [*service.command()[:-4], f"RLHARVEST_HTTP_PORT={free_port()}", *service.command()[-4:]],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert same_files.returncode == 1
    assert "RLHARVEST_DATA_DIR" in same_files.stderr
    same_port = subprocess.run(
        [*service.command()[:-4], f"RLHARVEST_DATA_DIR={tmp_path / 'other'}", *service.command()[-4:]],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert same_port.returncode == 1
    assert "RLHARVEST_HTTP_PORT" in same_port.stderr
    assert "Traceback" not in same_port.stderr


async def test_a_manifest_over_the_limit_is_refused(service, publisher, model_directory, monkeypatch) -> None:
    """By the publisher before it is sent, and by the service of whoever sends it all the same."""
    directory = model_directory("m", seed=1)
    monkeypatch.setattr(publisher_module, "MANIFEST_BYTES", 100)
    with pytest.raises(InvalidField, match=r"its manifest has .* bytes; the limit is 100"):
        await publisher.publish(directory, job=JOB, step=0, parent=None, key="k")
    client = rpc.Client(service.grpc)
    request = weights_pb2.BeginRequest(manifest_json=" " * (MANIFEST_BYTES + 1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(weights_pb2_grpc.WeightsStub, lambda stub: stub.Begin, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(MANIFEST_BYTES) in str(caught.value.details())
    await client.close()

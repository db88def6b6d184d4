"""The weight service asks who reads and who writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from rlharvest.credentials import Caller, Tokens
from rlharvest.errors import Unavailable
from rlharvest.weights import catalog, puller
from rlharvest.weights.publisher import Publisher

from .conftest import WeightService

SERVICE = Caller(Tokens(["service-Zk3_u8Qe0vLw1sTn"]))
WORKER = Caller(Tokens(["worker-Zk3_u8Qe0vLw1sTn"]))
NOBODY = Caller(Tokens(["guess"]))
JOB = "rljob_a"

Start = Callable[..., WeightService]
Model = Callable[..., Path]


@pytest.fixture
def locked(start_service: Start) -> WeightService:
    assert SERVICE.tokens is not None
    assert WORKER.tokens is not None
    return start_service(service_token=SERVICE.tokens.current, worker_token=WORKER.tokens.current)


async def test_services_publish_and_workers_pull(locked: WeightService, model_directory: Model, tmp_path: Path) -> None:
    publisher = Publisher(locked.url, locked.grpc, caller=SERVICE)
    published = await publisher.publish(model_directory("one", seed=1), job=JOB, step=0, parent=None, key="1:0")
    await publisher.close()
    manifest = await catalog.fetch_manifest(locked.url, JOB, published.version, caller=WORKER)
    pulled = await puller.pull(locked.url, manifest, tmp_path / "cache", options=puller.PullOptions(caller=WORKER))
    assert (pulled / "model.safetensors").stat().st_size > 300_000


def test_without_a_token_nothing_is_read_or_written(locked: WeightService) -> None:
    for headers in ({}, dict(NOBODY.headers), {"Authorization": "Basic abc"}):
        for method, path in (
            ("GET", f"/v1/jobs/{JOB}/versions"),
            ("GET", "/v1/blobs/" + "0" * 64),
            ("HEAD", "/v1/blobs/" + "0" * 64),
            ("PUT", "/v1/blobs/" + "0" * 64),
            ("GET", "/v1/none"),
        ):
            status, answered, _ = locked.request(method, path, body=b"x" if method == "PUT" else None, headers=headers)
            assert (status, answered["www-authenticate"]) == (401, "Bearer"), (method, path)
    for path in ("/livez", "/readyz", "/metrics"):
        assert locked.request("GET", path)[0] == 200


async def test_a_worker_reads_and_does_not_write(locked: WeightService, model_directory: Model) -> None:
    digest = "0" * 64
    assert locked.request("PUT", f"/v1/blobs/{digest}", body=b"x", headers=WORKER.headers)[0] == 403
    assert locked.request("GET", f"/v1/blobs/{digest}", headers=WORKER.headers)[0] == 404
    publisher = Publisher(locked.url, locked.grpc, caller=WORKER, total_s=30)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await publisher.publish(model_directory("one", seed=1), job=JOB, step=0, parent=None, key="1:0")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await publisher.close()


async def test_who_has_no_token_is_told_by_status(locked: WeightService) -> None:
    with pytest.raises(Unavailable, match="status 401"):
        await catalog.fetch_manifest(locked.url, JOB, 0, total_s=0.2, caller=NOBODY)

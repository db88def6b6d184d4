"""The gRPC service Weights: publishing and retention. The bytes go over HTTP (data_plane).

Errors of ours are raised as they are: the server says what each stands for (rlharvest.rpc_faults).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import structlog
from pydantic import ValidationError
from rlharvest.errors import DataError, InvalidField
from rlharvest.v1 import weights_pb2, weights_pb2_grpc
from rlharvest.weights.manifest import MANIFEST_BYTES, Manifest

from rlharvest_weights import metrics
from rlharvest_weights.versions import VersionStore

log = structlog.get_logger(__name__)

SERVICE = "rlharvest.v1.Weights"


class WeightsServicer(weights_pb2_grpc.WeightsServicer):
    """Implements rlharvest.v1.Weights over a VersionStore.

    Args:
        announce: called with each new version after it can be pulled.
    """

    def __init__(self, versions: VersionStore, announce: Callable[[Manifest], None]) -> None:
        self._versions = versions
        self._announce = announce

    async def Begin(
        self,
        request: weights_pb2.BeginRequest,
        context: grpc.aio.ServicerContext[weights_pb2.BeginRequest, weights_pb2.BeginReply],
    ) -> weights_pb2.BeginReply:
        """Say what has to be uploaded; RESOURCE_EXHAUSTED when there is no room for it."""
        missing = await asyncio.to_thread(self._versions.begin, _manifest(request.manifest_json))
        return weights_pb2.BeginReply(missing=missing)

    async def Publish(
        self,
        request: weights_pb2.PublishRequest,
        context: grpc.aio.ServicerContext[weights_pb2.PublishRequest, weights_pb2.PublishReply],
    ) -> weights_pb2.PublishReply:
        """Make a version; INVALID_ARGUMENT names the field that cannot be used."""
        manifest = _manifest(request.manifest_json)
        made, new = await asyncio.to_thread(
            self._versions.publish, request.job, request.key, manifest, least=request.least_version
        )
        if new:
            metrics.PUBLISHED.inc()
            log.info("version.published", job=made.job, version=made.version, step=made.step, bytes=made.bytes)
        # Again for a publisher that comes again: this process may have died before it told.
        self._announce(made)
        return weights_pb2.PublishReply(version=made.version, digest=made.digest)

    async def List(
        self,
        request: weights_pb2.ListVersionsRequest,
        context: grpc.aio.ServicerContext[weights_pb2.ListVersionsRequest, weights_pb2.ListVersionsReply],
    ) -> weights_pb2.ListVersionsReply:
        """Return the versions that can be pulled, oldest first."""
        manifests = self._versions.listed(request.job)
        return weights_pb2.ListVersionsReply(
            versions=[
                weights_pb2.VersionInfo(
                    version=manifest.version,
                    step=manifest.step,
                    parent=manifest.parent,
                    digest=manifest.digest,
                    bytes=manifest.bytes,
                    created_at=manifest.created_at,
                )
                for manifest in manifests
            ]
        )

    async def Retain(
        self,
        request: weights_pb2.RetainRequest,
        context: grpc.aio.ServicerContext[weights_pb2.RetainRequest, weights_pb2.RetainReply],
    ) -> weights_pb2.RetainReply:
        """Delete versions except those named and the newest `keep_last`."""
        deleted, freed = await asyncio.to_thread(
            self._versions.retain, request.job, list(request.versions), request.keep_last
        )
        metrics.FREED_BYTES.inc(freed)
        if deleted:
            log.info("versions.deleted", job=request.job, versions=deleted, freed_bytes=freed)
        return weights_pb2.RetainReply(deleted=deleted, freed_bytes=freed)

    async def Forget(
        self,
        request: weights_pb2.ForgetRequest,
        context: grpc.aio.ServicerContext[weights_pb2.ForgetRequest, weights_pb2.ForgetReply],
    ) -> weights_pb2.ForgetReply:
        """Delete everything of a job."""
        freed = await asyncio.to_thread(self._versions.forget, request.job)
        metrics.FREED_BYTES.inc(freed)
        log.info("job.forgotten", job=request.job, freed_bytes=freed)
        return weights_pb2.ForgetReply()


def _manifest(text: str) -> Manifest:
    if len(text) > MANIFEST_BYTES:
        raise InvalidField(
            "manifest_json", f"{len(text)} bytes", f"the limit is {MANIFEST_BYTES}", "Write fewer, larger shards"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"manifest_json: {error}") from error

"""The console script `rlharvest-weights`: put the parts together, serve, stop in order."""

from __future__ import annotations

import asyncio

import structlog
import typer
from aiohttp import web
from rlharvest import process, rpc
from rlharvest.access import Access
from rlharvest.credentials import check_exposure
from rlharvest.errors import InvalidField
from rlharvest.health import Health
from rlharvest.supervise import Supervisor
from rlharvest.v1 import weights_pb2_grpc

from rlharvest_weights import metrics
from rlharvest_weights.announcer import Announcer
from rlharvest_weights.blobs import BlobStore
from rlharvest_weights.control_plane import SERVICE, WeightsServicer
from rlharvest_weights.data_plane import DataPlane
from rlharvest_weights.settings import WeightSettings
from rlharvest_weights.versions import VersionStore, claim

log = structlog.get_logger(__name__)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)


@app.callback()
def _group() -> None:
    """Versions of weights: publish once, pull by ranges."""


@app.command()
def serve() -> None:
    """Serve blobs and versions until SIGTERM. Settings come from the environment (RLHARVEST_…)."""
    settings = process.read_settings(WeightSettings)
    process.run("weights", settings, lambda: run(settings))


async def run(settings: WeightSettings) -> None:
    """Serve until a signal.

    Raises:
        Conflict: another weight service uses the directory.
        InvalidField: an address cannot be listened on.
    """
    with claim(settings.weights_dir):
        blobs = BlobStore(
            settings.weights_dir,
            min_free_bytes=settings.min_free_bytes,
            grace_s=settings.upload_grace_s,
            most_uploads=settings.most_uploads,
        )
        versions = VersionStore(settings.weights_dir, blobs, max_blob_bytes=settings.max_blob_bytes)
        await _serve(settings, blobs, versions)


async def _serve(settings: WeightSettings, blobs: BlobStore, versions: VersionStore) -> None:
    supervisor = Supervisor("weights")
    health = Health()
    health.checks["serving"] = lambda: _serving(supervisor)
    health.checks["disk"] = lambda: _disk(blobs)
    access = _access(settings)
    announcer = Announcer(settings.nats_url, credential=settings.nats_credential, tls=settings.tls.client)
    plane = DataPlane(
        blobs,
        versions,
        health,
        max_blob_bytes=settings.max_blob_bytes,
        upload_idle_s=settings.upload_idle_s,
        access=access,
    )
    # aiohttp waits this long twice: for the handler, then for the connection.
    runner = web.AppRunner(plane.app, access_log=None, handle_signals=False, shutdown_timeout=settings.drain_s / 2)
    server = rpc.Server(access=access, tls=settings.tls.listener)
    server.add(SERVICE, weights_pb2_grpc.add_WeightsServicer_to_server, WeightsServicer(versions, announcer.announce))
    await runner.setup()
    supervisor.on_stop(runner.cleanup)
    site = web.TCPSite(runner, settings.http_host, settings.http_port, ssl_context=settings.tls.server)
    try:
        await _listen(site, server, settings)
    except BaseException:
        await supervisor.close()
        raise
    supervisor.on_stop(lambda: server.close(settings.drain_s / 2))
    supervisor.on_stop(lambda: _drain(server))
    supervisor.spawn("announcer", announcer.run())
    supervisor.spawn("sweeper", _sweep(versions, settings.sweep_s))
    log.info(
        "serving",
        http=site.name,
        http_port=runner.addresses[0][1],
        grpc_port=server.port,
        dir=str(settings.weights_dir),
    )
    await supervisor.run()
    log.info("stopped")


def _access(settings: WeightSettings) -> Access:
    """Return whom both servers take. Raises InvalidField: others can reach them, and a token is missing or weak."""
    service, worker = settings.service_token, settings.worker_token
    for address, host in (
        ("http_host", settings.http_host),
        ("grpc_address", settings.grpc_address.rpartition(":")[0]),
    ):
        check_exposure(address, host, "service_token", service)
        check_exposure(address, host, "worker_token", worker)
    return Access() if service is None or worker is None else Access({"service": service, "worker": worker})


async def _listen(site: web.TCPSite, server: rpc.Server, settings: WeightSettings) -> None:
    try:
        await site.start()
    except OSError as error:
        address = f"{settings.http_host}:{settings.http_port}"
        fix = "Stop who uses it, or choose another."
        raise InvalidField("RLHARVEST_HTTP_PORT", address, error.strerror or str(error), fix) from error
    await server.start(settings.grpc_address)


async def _drain(server: rpc.Server) -> None:
    log.info("draining")
    await server.serving(False)


async def _sweep(versions: VersionStore, every_s: float) -> None:
    while True:
        freed = await asyncio.to_thread(versions.collect)
        if freed:
            metrics.FREED_BYTES.inc(freed)
            log.info("blobs.deleted", freed_bytes=freed)
        await asyncio.sleep(every_s)


async def _serving(supervisor: Supervisor) -> str | None:
    return "shutting down" if supervisor.stopping.is_set() else None


async def _disk(blobs: BlobStore) -> str | None:
    free = await asyncio.to_thread(blobs.free_bytes)
    return None if free > 0 else f"{-free} bytes less are free than must stay free"


def main() -> None:
    """Entry point of the console script."""
    app()

"""Command line of a rollout worker: `rlharvest-rollout serve`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time

import structlog
import typer
from nats.aio.client import Client
from rlharvest import bus, process
from rlharvest.accounts import Candidate
from rlharvest.errors import Unavailable
from rlharvest.health import Health, HealthServer
from rlharvest.supervise import Supervisor

from rlharvest_rollout.engine_catalog import import_engine, make_engine
from rlharvest_rollout.fleet import Fleet
from rlharvest_rollout.settings import RolloutSettings
from rlharvest_rollout.versions import PulledVersions
from rlharvest_rollout.worker import Worker

log = structlog.get_logger(__name__)

app = typer.Typer(add_completion=False, no_args_is_help=True, help="A rollout worker of rlharvest.")


@app.callback()
def _commands() -> None:
    """Keep `serve` a command of its own."""


@app.command()
def serve() -> None:
    """Run one worker until SIGTERM or SIGINT. Settings come from RLHARVEST_… variables."""
    settings = process.read_settings(RolloutSettings)
    process.run("rollout", settings, lambda: run(settings))


async def run(settings: RolloutSettings) -> None:
    """Run a worker in this process until it is told to stop.

    Raises:
        Unavailable: NATS does not answer.
        EngineBroken: the engine died; what it had generated was handed over.
    """
    candidate = Candidate()
    name = candidate.name
    supervisor = Supervisor("rollout", grace_s=settings.drain_s + 5.0)
    fleet = Fleet(settings, candidate, f"rlharvest-{importlib.metadata.version('rlharvest')}")
    health = Health()
    health.checks["admission"] = fleet.admitted
    server = HealthServer(health)
    await server.start(settings.health_host, settings.health_port)
    seconds = await fleet.admit()
    nc = await bus.connect(settings.nats_url, f"rollout/{name}", credential=fleet.credential, tls=settings.tls.client)
    versions = PulledVersions(
        settings.versions_dir,
        threads=settings.pull_threads,
        keep=settings.cache_versions,
        caller=settings.as_worker,
    )
    worker = Worker(
        name,
        settings,
        supervisor=supervisor,
        nc=nc,
        fleet=fleet,
        versions=versions,
        make_engine=lambda engine: make_engine(engine, settings),
        import_engine=import_engine,
    )
    health.checks["worker"] = worker.ready
    log.info(
        "worker.starts",
        worker=name,
        engines=",".join(settings.offered_engines),
        slots=settings.slots,
        health=f"{settings.health_host}:{server.port}",
    )
    supervisor.on_stop(nc.close)
    supervisor.on_stop(fleet.close)
    supervisor.on_stop(server.close)
    supervisor.on_stop(worker.leave)
    await worker.start()
    if fleet.credential is not None:
        supervisor.spawn("credential", _renew(fleet, nc, seconds))
    await supervisor.run()


async def _renew(fleet: Fleet, nc: Client, seconds: float) -> None:
    """Have a credential that is good, for ever.

    Raises:
        Unavailable: NATS ended the connection for good, because the credential was over before a new one could be had.
    """
    due = time.monotonic() + seconds / 2
    while True:
        await asyncio.sleep(min(1.0, max(0.0, due - time.monotonic())))
        if nc.is_closed:
            raise Unavailable("NATS ended the connection: this worker's credential is over")
        if time.monotonic() >= due:
            due = time.monotonic() + await fleet.admit() / 2
            # A connection keeps the credential that it began with, and ends with it.
            await nc.force_reconnect()

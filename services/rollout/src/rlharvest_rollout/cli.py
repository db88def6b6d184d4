"""Command line of a rollout worker: `rlharvest-rollout serve`."""

from __future__ import annotations

import importlib.metadata

import structlog
import typer
from rlharvest import bus, process
from rlharvest.health import Health, HealthServer
from rlharvest.ids import new_id
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
    name = new_id("wkr")
    supervisor = Supervisor("rollout", grace_s=settings.drain_s + 5.0)
    nc = await bus.connect(settings.nats_url, f"rollout/{name}")
    fleet = Fleet(settings, name, f"rlharvest-{importlib.metadata.version('rlharvest')}")
    versions = PulledVersions(settings.versions_dir, threads=settings.pull_threads, keep=settings.cache_versions)
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
    health = Health()
    health.checks["worker"] = worker.ready
    server = HealthServer(health)
    await server.start(settings.health_host, settings.health_port)
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
    await supervisor.run()

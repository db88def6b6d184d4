"""Command line of the trainer: `rlharvest-trainer serve`."""

from __future__ import annotations

import os
from typing import Annotated

import structlog
import typer
from rlharvest import bus, process
from rlharvest.health import Health, HealthServer
from rlharvest.rpc import Client
from rlharvest.supervise import Supervisor

from rlharvest_trainer.settings import TrainerSettings

log = structlog.get_logger(__name__)
app = typer.Typer(help="The trainer of rlharvest.", no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    """The trainer of rlharvest."""


@app.command()
def serve(
    trainer: Annotated[str | None, typer.Option(help="Stable name of this trainer (RLHARVEST_TRAINER).")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for computing (RLHARVEST_THREADS).")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<n> (RLHARVEST_DEVICE).")] = None,
) -> None:
    """Claim jobs and train them until SIGTERM; settings are RLHARVEST_… variables."""
    settings = process.read_settings(TrainerSettings, trainer=trainer, threads=threads, device=device)
    # cuBLAS repeats its results only with a fixed workspace, which is read once, at its start.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    process.run("trainer", settings, lambda: _serve(settings))


async def _serve(settings: TrainerSettings) -> None:
    # torch and transformers take seconds to import: not for --help, nor for a wrong setting.
    from rlharvest_trainer.compute import Compute
    from rlharvest_trainer.coordinator import Coordinator
    from rlharvest_trainer.notices import BusNotices
    from rlharvest_trainer.run import Surroundings
    from rlharvest_trainer.service import Service
    from rlharvest_trainer.versions import WeightService

    supervisor = Supervisor("trainer")
    nats = await bus.connect(
        settings.nats_url,
        f"trainer/{settings.trainer}",
        credential=settings.nats_credential,
        tls=settings.tls.client,
    )
    client = Client(settings.coordinator_grpc, settings.as_service)
    weights = WeightService(settings.weights_url, settings.weights_grpc, caller=settings.as_service)
    compute = Compute(settings.threads)
    health = Health()

    async def connected() -> str | None:
        return None if nats.is_connected else f"NATS at {settings.nats_url} is not connected"

    health.checks["nats"] = connected
    server = HealthServer(health)
    await server.start(settings.health_host, settings.health_port)
    service = Service(
        Surroundings(
            settings=settings,
            coordinator=Coordinator(client),
            publications=weights,
            notices=BusNotices(nats, settings.trainer),
            compute=compute,
            supervisor=supervisor,
        )
    )

    async def close() -> None:
        compute.close()
        await server.close()
        await client.close()
        await weights.close()
        await nats.close()

    supervisor.on_stop(close)
    supervisor.on_stop(service.stop)
    supervisor.spawn("jobs", service.run())
    log.info(
        "trainer.ready",
        trainer=settings.trainer,
        threads=compute.threads,
        health=f"{settings.health_host}:{server.port}",
    )
    await supervisor.run()

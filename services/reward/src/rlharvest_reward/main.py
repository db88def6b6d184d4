"""`rlharvest-reward serve`: the process of the reward service."""

from __future__ import annotations

import socket

import structlog
import typer
from rlharvest import bus, process
from rlharvest.health import Health, HealthServer
from rlharvest.supervise import Supervisor

from rlharvest_reward import escape, limits, metrics, trial
from rlharvest_reward.scoring import Scorer
from rlharvest_reward.service import RewardService
from rlharvest_reward.settings import RewardSettings

log = structlog.get_logger(__name__)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Scores responses with the reward functions of jobs."
)


@app.callback()
def _root() -> None:
    """Keep `serve` a command of its own though it is the only one."""


async def serve(settings: RewardSettings) -> None:
    """Serve until a signal or the failure of a task.

    Raises:
        InvalidField: the sandbox is required and does not hold here.
        Unavailable: NATS does not answer.
    """
    await _try_sandbox(settings)
    supervisor = Supervisor("reward")
    nc = await bus.connect(
        settings.nats_url,
        f"reward/{socket.gethostname()}",
        credential=settings.nats_credential,
        tls=settings.tls.client,
    )
    supervisor.on_stop(nc.close)
    scorer = Scorer(settings)
    supervisor.on_stop(scorer.close)
    service = RewardService(nc, scorer, settings, supervisor)
    supervisor.on_stop(service.drain)
    health = Health()
    health.checks["queue"] = service.ready
    server = HealthServer(health)
    await server.start(settings.health_host, settings.health_port)
    supervisor.on_stop(server.close)
    log.info(
        "reward.serving",
        health=f"http://{settings.health_host}:{server.port}",
        roots=[str(root) for root in settings.roots],
        processes=settings.processes,
    )
    service.start()
    supervisor.on_stop(service.stop_taking)
    supervisor.spawn("reap", scorer.reap())
    await supervisor.run()


async def _try_sandbox(settings: RewardSettings) -> None:
    found = await trial.broken(settings.sandbox)
    for wall in escape.BREACHES:
        metrics.SANDBOX.labels(wall).set(wall not in found)
    if found:
        log.warning(
            "reward.not_sandboxed", reward_code_gets_through=found, setting="RLHARVEST_REWARD_SANDBOX=best_effort"
        )
    else:
        log.info("reward.sandboxed", walls=list(escape.BREACHES))


@app.command("serve")
def serve_command() -> None:
    """Run the service; settings come from RLHARVEST_… variables."""
    settings = process.read_settings(RewardSettings)
    limits.hide_environment()
    process.run("reward", settings, lambda: serve(settings))


def main() -> None:
    """Entry point of the console script."""
    app()

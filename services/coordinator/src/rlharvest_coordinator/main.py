"""`rlharvest-coordinator serve` runs a coordinator; `migrate` brings the database to the newest schema."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from rlharvest import bus, process, rpc
from rlharvest.clock import SystemClock
from rlharvest.errors import InvalidField
from rlharvest.health import Health
from rlharvest.ledger.store import Store
from rlharvest.supervise import Supervisor
from rlharvest.v1 import batches_pb2_grpc, fleet_pb2_grpc, jobs_pb2_grpc

from rlharvest_coordinator import sql
from rlharvest_coordinator.api.app import create_app
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.rpc_jobs import NAME as JOBS
from rlharvest_coordinator.api.rpc_jobs import JobsServicer
from rlharvest_coordinator.core import Core
from rlharvest_coordinator.metrics import LiveCollector
from rlharvest_coordinator.migrations import migrate
from rlharvest_coordinator.settings import CoordinatorSettings

log = structlog.get_logger(__name__)

WEB_GRACE_S = 3.0
"""How long requests in progress may take at shutdown."""


class WebServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process stops in the order that it chooses."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: CoordinatorSettings) -> None:
    """Run a coordinator until it is stopped.

    Raises:
        InvalidField: an address cannot be listened on.
        Unavailable: NATS does not answer.
    """
    supervisor = Supervisor("coordinator")
    listener = _listen(settings.api_host, settings.api_port)
    clock = SystemClock()
    nats = await bus.connect(settings.nats_url, "coordinator")
    store = Store.connect(settings.redis_url)
    engine = sql.connect(settings.database)
    sessions = sql.sessions(engine)
    core = Core(settings, nats, store, sessions, clock, supervisor)

    async def nats_connected() -> str | None:
        return None if nats.is_connected else f"not connected to {settings.nats_url}"

    async def redis_answers() -> str | None:
        await store.redis.ping()
        return None

    health = Health()
    health.checks |= {"nats": nats_connected, "redis": redis_answers}
    server = rpc.Server()
    server.add("rlharvest.v1.Fleet", fleet_pb2_grpc.add_FleetServicer_to_server, core.roster)
    server.add("rlharvest.v1.Batches", batches_pb2_grpc.add_BatchesServicer_to_server, core.batches)
    jobs = JobsServicer(Jobs(sessions, core, clock))
    server.add(JOBS, jobs_pb2_grpc.add_JobsServicer_to_server, jobs)
    await server.start(settings.grpc_address)

    LiveCollector(core).register()
    app = create_app(settings, sessions, core, health, stopping=supervisor.stopping)
    web = WebServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(WEB_GRACE_S) - 1,
        )
    )

    async def stop() -> None:
        await core.close()
        web.should_exit = True
        await asyncio.wait([serving], timeout=WEB_GRACE_S)
        await server.close()
        await store.close()
        await nats.close()
        await engine.dispose()

    serving = supervisor.spawn("web", web.serve(sockets=[listener]))
    supervisor.on_stop(stop)
    supervisor.spawn("lead", core.lead(), may_end=True)
    log.info("coordinator.serving", api=f"http://{settings.api_host}:{settings.api_port}", grpc=settings.grpc_address)
    await supervisor.run()


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens: the web server, given an address, would end the process by itself if it is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        fix = "Stop who uses it, or choose another."
        raise InvalidField("RLHARVEST_API_PORT", f"{host}:{port}", error.strerror or str(error), fix) from error


def main() -> None:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="rlharvest-coordinator", description=__doc__)
    parser.add_argument("command", choices=["serve", "migrate"])
    command = parser.parse_args().command
    settings = process.read_settings(CoordinatorSettings)
    process.run("coordinator", settings, lambda: serve(settings) if command == "serve" else migrate(settings.database))


if __name__ == "__main__":
    main()

"""What a coordinator is made of, from the first connection to the last."""

from __future__ import annotations

import asyncio
import socket

import structlog
from rlharvest import bus, rpc
from rlharvest.clock import SystemClock
from rlharvest.errors import InvalidField
from rlharvest.health import Health, HealthServer
from rlharvest.ledger.store import Store
from rlharvest.supervise import Supervisor
from rlharvest.v1 import batches_pb2_grpc, fleet_pb2_grpc, jobs_pb2_grpc

from rlharvest_coordinator import sql
from rlharvest_coordinator.admission import Admission, access_of, account_of
from rlharvest_coordinator.api.app import create_app
from rlharvest_coordinator.api.guard import check_exposure
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.rpc_jobs import NAME as JOBS
from rlharvest_coordinator.api.rpc_jobs import JobsServicer
from rlharvest_coordinator.api.server import WebServer
from rlharvest_coordinator.api.server import config as web_config
from rlharvest_coordinator.core import Core
from rlharvest_coordinator.metrics import LiveCollector
from rlharvest_coordinator.migrations import require_newest
from rlharvest_coordinator.obstacles import unavailable
from rlharvest_coordinator.settings import CoordinatorSettings

log = structlog.get_logger(__name__)

WEB_GRACE_S = 3.0
"""How long requests in progress may take at shutdown."""


async def serve(settings: CoordinatorSettings) -> None:
    """Run a coordinator until it is stopped.

    Raises:
        InvalidField: an address cannot be listened on, or others could reach it without a token.
        Unavailable: NATS does not answer.
    """
    supervisor = Supervisor("coordinator")
    account = account_of(settings)
    access = access_of(settings, account)
    check_exposure(settings)
    listener = _listen(settings.api_host, settings.api_port)
    clock = SystemClock()
    nats = await bus.connect(
        settings.nats_url, "coordinator", credential=settings.nats_credential, tls=settings.tls.client
    )
    store = Store.connect(settings.ledger_url)
    engine = sql.connect(settings.database)
    await require_newest(engine)
    sessions = sql.sessions(engine)
    core = Core(settings, nats, store, sessions, clock, supervisor)
    core.roster.admit = Admission(account, settings.worker_credential_s).admit

    async def nats_connected() -> str | None:
        return None if nats.is_connected else f"not connected to {settings.nats_url}"

    async def redis_answers() -> str | None:
        await store.redis.ping()
        return None

    health = Health()
    health.checks |= {"nats": nats_connected, "redis": redis_answers}
    server = rpc.Server(unavailable, access=access, tls=settings.tls.listener)
    server.add("rlharvest.v1.Fleet", fleet_pb2_grpc.add_FleetServicer_to_server, core.roster)
    server.add("rlharvest.v1.Batches", batches_pb2_grpc.add_BatchesServicer_to_server, core.batches)
    held = Jobs(sessions, core.view, clock, most=settings.most_jobs, checkpoints=settings.checkpoints)
    jobs = JobsServicer(held, settings.api_token)
    server.add(JOBS, jobs_pb2_grpc.add_JobsServicer_to_server, jobs)
    await server.start(settings.grpc_address)
    # The API's port asks for a token; who watches the process has this one.
    watched = HealthServer(health)
    await watched.start(settings.health_host, settings.health_port)

    LiveCollector(core).register()
    app = create_app(settings, sessions, core.view, health, gateway=core.gateway, stopping=supervisor.stopping)
    web = WebServer(
        web_config(
            app,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            timeout_graceful_shutdown=int(WEB_GRACE_S) - 1,
        )
    )

    async def stop() -> None:
        await core.close()
        web.should_exit = True
        await asyncio.wait([serving], timeout=WEB_GRACE_S)
        await server.close()
        await watched.close()
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

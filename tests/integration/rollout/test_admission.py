"""A worker in a system that asks who it is: admitted, on NATS with a credential of its own, which it renews."""

from __future__ import annotations

from pathlib import Path

from rlharvest.accounts import Candidate
from rlharvest.keyring import Keyring
from rlharvest.testing.coordinator import FakeCoordinator
from rlharvest.testing.servers import NatsServer

from .conftest import JOB, WeightServer, World


async def test_a_worker_generates_past_the_end_of_its_first_credential(
    tmp_path: Path, weight_server: WeightServer
) -> None:
    """Without renewal the server would end its connection for good; nothing of its response is lost or doubled."""
    keyring = Keyring(tmp_path / "secrets")
    keyring.make()
    nats = NatsServer(tmp_path / "nats", keyring)
    nats.start()
    coordinator = FakeCoordinator(nats.url, JOB, keyring=keyring, credential_s=20.0)
    await coordinator.start()
    world = World(tmp_path, nats, coordinator, weight_server)
    try:
        name, process = await world.join(secrets_dir=keyring.holder("rollout"), stub={"step_s": 0.05})
        assert name.startswith("wkr_")
        assert name != Candidate().name
        incarnation = coordinator.workers[name].incarnation
        await coordinator.assign(name, [coordinator.assignment(1, budget=100_000)])
        await coordinator.until(lambda: coordinator.admissions >= 3, "two renewals", timeout_s=120)
        have = len(coordinator.ledger[1].tokens.ids)
        await coordinator.until(lambda: len(coordinator.ledger[1].tokens.ids) > have + 20, "it goes on", timeout_s=60)
        assert coordinator.workers[name].incarnation == incarnation
        assert not coordinator.counts["gap"]
        process.terminate()
        assert await process.exit_code(60) == 0
    finally:
        for process in world.processes:
            process.stop()
        await coordinator.close()
        nats.stop()

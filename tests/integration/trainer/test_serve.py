"""The whole process: `rlharvest-trainer serve` with real NATS and the real weight service."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from rlharvest import bus
from rlharvest.testing.batches import TOKENIZER_DIGEST, ScriptedCoordinator, random_group
from rlharvest.testing.servers import Child, NatsServer, free_port
from rlharvest.v1 import batches_pb2, events_pb2
from rlharvest.weights.catalog import fetch_manifest, list_versions


class Program(Child):
    """A console script of ours on free ports."""

    def __init__(self, directory: Path, module: str, **settings: object) -> None:
        super().__init__(directory)
        self.name = module
        self.settings = {"data_dir": directory, **settings}

    def command(self) -> list[str]:
        pairs = [f"RLHARVEST_{name.upper()}={value}" for name, value in self.settings.items()]
        code = f"from {self.name}.main import main; main()"
        return ["env", *pairs, sys.executable, "-c", code, "serve"]

    def healthy(self) -> bool:
        try:
            return b"ok" in self.get("/livez")
        except OSError:
            return False

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
            return bytes(reply.read())


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_trainer_wakes_on_groups_publishes_versions_tells_events_and_leaves_in_order(
    tmp_path: Path, nats_server: NatsServer, scripted: Callable[..., ScriptedCoordinator]
) -> None:
    def batch(step: int) -> list[batches_pb2.BatchGroup]:
        groups = [random_group(1, group=2 * step + at, n=4, vocab=32) for at in range(2)]
        if step == 0:
            groups[1].samples[0].reward = math.nan
        return groups

    coordinator = scripted(steps=2, batch=batch)
    coordinator.visible = {1: 1}
    address = await coordinator.start()
    grpc_port = free_port()
    weights = Program(tmp_path / "w", "rlharvest_weights", grpc_address=f"127.0.0.1:{grpc_port}", min_free_bytes=0)
    weights.settings |= {"http_port": weights.port, "nats_url": nats_server.url}
    trainer = Program(
        tmp_path / "t",
        "rlharvest_trainer",
        nats_url=nats_server.url,
        coordinator_grpc=address,
        weights_url=f"http://127.0.0.1:{weights.port}",
        weights_grpc=f"127.0.0.1:{grpc_port}",
        trainer="one",
        threads=1,
        device="cpu",
        poll_s=3600,
    )
    trainer.settings["health_port"] = trainer.port
    client = await bus.connect(nats_server.url, "test")
    try:
        await bus.ensure_streams(client.jetstream())
        weights.start(timeout_s=100)
        trainer.start(timeout_s=150)
        # The poll is an hour: only a wake-up can bring the second group of batch 1.
        await coordinator.until(lambda it: (1, 1, 1) in it.asked, timeout_s=100)
        coordinator.visible = {}
        await client.jetstream().publish(bus.subject("groups", coordinator.job, "coordinator"), b"")
        await coordinator.until(lambda it: bool(it.outcomes), timeout_s=30)
        assert coordinator.outcomes == [(batches_pb2.OUTCOME_SUCCEEDED, "")]
        published = await list_versions(f"http://127.0.0.1:{weights.port}", coordinator.job)
        assert [(entry.version, entry.step, entry.parent) for entry in published] == [
            (0, 0, None),
            (1, 1, 0),
            (2, 2, 1),
        ]
        assert {entry.step: entry.digest for entry in published} == coordinator.digests()
        manifest = await fetch_manifest(f"http://127.0.0.1:{weights.port}", coordinator.job, 2)
        assert manifest.tokenizer_digest == TOKENIZER_DIGEST
        stored = await client.jetstream().get_last_msg(bus.EVENTS, bus.subject("events", coordinator.job, "one"))
        event = events_pb2.Event()
        event.ParseFromString(stored.data or b"")
        assert event.type == "trainer.group_skipped"
        assert "reward nan" in event.message
        metrics = trainer.get("/metrics").decode()
        assert "rlharvest_trainer_steps_total 2.0" in metrics
        assert "rlharvest_trainer_skipped_groups_total 1.0" in metrics
        assert trainer.process is not None
        trainer.process.terminate()
        assert await asyncio.to_thread(trainer.process.wait, 30) == 0
    finally:
        trainer.stop()
        weights.stop()
        await client.close()
        await coordinator.close()


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("RLHARVEST_DEVICE=abacus", "RLHARVEST_DEVICE = 'abacus'"),
        ("RLHARVEST_TRAINER=a b", "RLHARVEST_TRAINER = 'a b'"),
        ("RLHARVEST_THREADS=-1", "RLHARVEST_THREADS = '-1'"),
    ],
)
def test_a_wrong_setting_is_named_at_once(variable: str, said: str) -> None:
    code = "from rlharvest_trainer.main import main; main()"
    ended = subprocess.run(["env", variable, sys.executable, "-c", code, "serve"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert said in ended.stderr

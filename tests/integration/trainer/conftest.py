"""A tiny model, a job on it, and a trainer in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rlharvest.jobs.model import JobSpec, parse
from rlharvest.rpc import Client
from rlharvest.supervise import Supervisor
from rlharvest.testing.batches import ScriptedCoordinator, random_group
from rlharvest.v1 import batches_pb2
from rlharvest_trainer.compute import Compute
from rlharvest_trainer.coordinator import Coordinator
from rlharvest_trainer.run import Surroundings
from rlharvest_trainer.service import Service
from rlharvest_trainer.settings import TrainerSettings
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # for processes, which import it by name
import trainer_process

VOCAB = 32
JOB = "rljob_0test"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("model") / "m"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def make_spec(model_dir: Path) -> Callable[..., JobSpec]:
    """Return a maker of jobs; keyword arguments are blocks that override the defaults."""

    def make(*, steps: int = 4, staleness: int = 0, every: int = 2, **blocks: dict[str, Any]) -> JobSpec:
        values: dict[str, Any] = {
            "model": str(model_dir),
            "dataset": {"path": "d.jsonl"},
            "rewards": [{"builtin": "exact_match"}],
            "sampling": {"num_generations": 4, "max_completion_length": 8},
            "algorithm": {"prompts_per_step": 3, "learning_rate": 1e-2, "micro_batch_tokens": 64},
            "staleness": {"max_staleness": staleness},
            "checkpoint": {"every_steps": every, "keep": 2},
            "limits": {"max_steps": steps},
        }
        for name, block in blocks.items():
            values[name] = values.get(name, {}) | block
        return parse(values)

    return make


def batch(step: int) -> list[batches_pb2.BatchGroup]:
    """Return three random groups; the same for the same step."""
    return [random_group(7, group=3 * step + at, n=4, vocab=VOCAB) for at in range(3)]


@pytest.fixture
def scripted(tmp_path: Path, make_spec: Callable[..., JobSpec]) -> Callable[..., ScriptedCoordinator]:
    """Return a maker of coordinators with the job of `make_spec`."""

    def make(**given: Any) -> ScriptedCoordinator:
        own = {name: given.pop(name) for name in ("batch", "order", "renew_s") if name in given}
        return ScriptedCoordinator(JOB, make_spec(**given), tmp_path / "ckpt", own.pop("batch", batch), **own)

    return make


class Trainer:
    """A trainer in this process and what it said."""

    def __init__(self, service: Service, notices: Any, publications: Any) -> None:
        self.service = service
        self.notices = notices
        self.publications = publications


@pytest.fixture
def training(tmp_path: Path) -> Callable[[ScriptedCoordinator], Any]:
    """Return a context manager that runs coordinator and trainer; leaving it stops the trainer as SIGTERM does.

    Keyword arguments are settings of the trainer.
    """

    @asynccontextmanager
    async def run(coordinator: ScriptedCoordinator, **settings: Any) -> AsyncIterator[Trainer]:
        client = Client(await coordinator.start())
        compute = Compute(1)
        supervisor = Supervisor("trainer")
        publications = trainer_process.FilePublications(tmp_path / "versions.jsonl")
        notices = trainer_process.SilentNotices()
        service = Service(
            Surroundings(
                settings=TrainerSettings(
                    **{
                        "trainer": "t",
                        "threads": 1,
                        "device": "cpu",
                        "data_dir": tmp_path,
                        "poll_s": 0.02,
                        "claim_wait_s": 0.5,
                        **settings,
                    }
                ),
                coordinator=Coordinator(client, patience_s=1.0),
                publications=publications,
                notices=notices,
                compute=compute,
                supervisor=supervisor,
            )
        )
        supervisor.spawn("jobs", service.run())
        try:
            yield Trainer(service, notices, publications)
        finally:
            async with asyncio.timeout(20):
                await service.stop()
            await supervisor.close()
            compute.close()
            await client.close()
            await coordinator.close()

    return run

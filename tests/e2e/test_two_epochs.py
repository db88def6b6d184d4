"""A second pass over the data drafts from the first one: nothing but the time depends on it, and no crash loses it."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nats.aio.msg import Msg
from rlharvest.bus import parse_subject, subject
from rlharvest.speculation.history import prompt_key
from rlharvest.speculation.segment import unpack
from rlharvest.testing.audit import VOCAB, prompt_ids
from rlharvest.testing.model import EOS, questions, tiny_model
from rlharvest.testing.servers import free_port
from rlharvest.testing.system import System
from rlharvest.v1 import fleet_pb2
from safetensors.numpy import load_file, save_file

from benchmarks.listener import Listener

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS, SAMPLES, LENGTH = 2, 4, 80
EPOCH = PROMPTS * SAMPLES
"""Responses of one pass over the data."""


class Heard(Listener):
    """Hears what workers are told of the history of one job; stops the trainer as soon as a response is given out."""

    def __init__(self, system: System) -> None:
        super().__init__(system.nats, "heard", [subject("assign", "*", "*")])
        self._trainer = system.trainer
        self._begun: set[str] = set()
        self.sources: dict[str, dict[int, list[bytes]]] = {}
        """Job -> group -> segments."""

    async def _hear(self, message: Msg) -> None:
        _, job, _ = parse_subject(message.subject)
        if job not in self._begun:
            self._begun.add(job)
            self._trainer.signal(signal.SIGSTOP)
        for source in fleet_pb2.Assignments.FromString(message.data).draft_sources:
            assert not source.by_reference
            self.sources.setdefault(job, {})[source.group] = list(source.segments)

    def past(self, job: str, group: int) -> list[tuple[int, list[int]]]:
        """Return (epoch, ids) of each response that a group was given."""
        segments = [unpack(data) for data in self.sources[job][group]]
        return [(one.epoch, one.ids.tolist()) for segment in segments for one in segment.responses]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """One worker with the torch engine, whose metrics can be read."""
    found = System(tmp_path / "system", workers=1, slots=EPOCH)
    found.workers[0].environment |= {"RLHARVEST_ENGINES": "torch", "RLHARVEST_HEALTH_PORT": str(free_port())}
    with found as running:
        yield running


def repetitive_model(directory: Path) -> Path:
    """A model that repeats its last token more often than not, so that drafts are right as often."""
    path = tiny_model(directory, context=128) / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"] * np.float32(25)
    embeddings[VOCAB[EOS]] = 0
    save_file({**tensors, "model.embed_tokens.weight": embeddings}, path, metadata={"format": "pt"})
    return directory


def counted(system: System) -> dict[str, float]:
    """Return what the worker has counted since it was started."""
    url = f"http://127.0.0.1:{system.workers[0].environment['RLHARVEST_HEALTH_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=5) as reply:
        text = reply.read().decode()
    found = re.findall(r"^rlharvest_rollout_(\w+)_tokens_total (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def two_epochs(system: System, *, speculation: str, kill: bool) -> dict[str, Any]:
    """Run a job of two steps, each of which is an epoch; return what came of it."""
    spec = system.spec(
        model=str(system.directory / "repetitive"),
        dataset={"path": str(system.directory / "two.jsonl")},
        sampling={"num_generations": SAMPLES, "max_completion_length": LENGTH},
        algorithm={"prompts_per_step": PROMPTS},
        rollout={"engine": "torch", "stub": {}, "speculation": {"enabled": speculation}},
        limits={"max_steps": 2},
    )
    job = system.submit(spec)
    try:
        system.until(lambda: len(system.client.samples(job)) == EPOCH, timeout_s=240, what="the first epoch")
        if kill:
            for service in (system.coordinator, system.workers[0]):
                service.kill()
                service.start()
            system.ready()
    finally:
        system.trainer.signal(signal.SIGCONT)
    system.wait(job, "succeeded", timeout_s=240)
    return {
        "job": job,
        "samples": system.samples(job),
        "digests": {item["version"]: item["digest"] for item in system.client.weights(job)},
    }


def test_the_first_epoch_is_what_the_second_drafts_from_and_changes_no_bit(system: System) -> None:
    """Drafts `auto`, and the coordinator and the worker killed between the epochs, against no drafts and no kill.

    Responses, log-probabilities and the digests of all versions are equal. The new coordinator gives each group of the
    second epoch all responses of the first to its prompt; the new worker, whose engine has seen none, drafts from them.
    """
    repetitive_model(system.directory / "repetitive")
    questions(system.directory / "two.jsonl", PROMPTS)
    with Heard(system) as heard:
        plain = two_epochs(system, speculation="off", kill=False)
        drafted = two_epochs(system, speculation="auto", kill=True)
        system.until(lambda: counted(system)["accepted"] > 0, timeout_s=60, what="drafts that were right")
    counts = counted(system)
    assert counts["drafted"] >= counts["accepted"]
    assert counts["prefill_saved"] == (SAMPLES - 1) * counts["prefill"], "a prompt was prefilled twice"
    assert drafted["digests"] == plain["digests"]
    assert sorted(plain["digests"]) == [0, 1, 2]
    for key in ("token_ids", "logprobs", "finish"):
        ours, theirs = ({handle: one[key] for handle, one in run["samples"].items()} for run in (drafted, plain))
        assert ours == theirs
    assert plain["job"] not in heard.sources
    samples = drafted["samples"].values()
    assert set(heard.sources[drafted["job"]]) == set(range(PROMPTS, 2 * PROMPTS))
    for group in range(PROMPTS, 2 * PROMPTS):
        (prompt,) = {one["prompt"] for one in samples if one["group"] == group}
        first = [one for one in samples if one["prompt"] == prompt and one["group"] < PROMPTS]
        assert sorted(heard.past(drafted["job"], group)) == sorted((0, one["token_ids"]) for one in first)
        keys = {unpack(data).prompt for data in heard.sources[drafted["job"]][group]}
        assert keys == {prompt_key(prompt_ids(prompt))}

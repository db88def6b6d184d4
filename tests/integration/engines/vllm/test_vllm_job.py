"""A whole job whose worker chose vLLM by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rlharvest.testing.audit import VOCAB
from rlharvest.testing.model import EOS, tiny_model
from rlharvest.testing.system import System
from safetensors.numpy import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, PROMPTS, SAMPLES, LENGTH = 3, 4, 4, 1000
"""Responses so long that training on a batch and publishing takes a part of the next ones' time."""


def model_without_end(directory: Path) -> Path:
    """A model that vLLM's kernels take, and that seldom ends a response."""
    path = tiny_model(directory, hidden=64, context=LENGTH + 24) / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"] * np.float32(25)
    embeddings[VOCAB[EOS]] = 0
    save_file({**tensors, "model.embed_tokens.weight": embeddings}, path, metadata={"format": "pt"})
    return directory


def check_samples(job: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """No token is lost or doubled, each has a version, a log-probability and an owner, and each batch is trained once."""
    counters = job["counters"]
    assert counters["submitted"] == counters["trained"] + counters["dropped"], counters
    assert counters["outstanding"] == 0, counters
    trained = [sample for sample in samples if sample["state"] == "trained"]
    assert len(trained) == counters["trained"] == STEPS * PROMPTS * SAMPLES
    groups: dict[int, set[int]] = {}
    for sample in trained:
        groups.setdefault(sample["step"], set()).add(sample["group"])
        n = len(sample["token_ids"])
        assert n == len(sample["logprobs"]) == sum(run["n"] for run in sample["version_runs"])
        assert n == sum(piece["n"] for piece in sample["pieces"])
        ended = sample["token_ids"].index(VOCAB[EOS]) + 1 if VOCAB[EOS] in sample["token_ids"] else LENGTH
        assert n == ended
        versions = [run["version"] for run in sample["version_runs"]]
        assert versions == sorted(set(versions))
    assert {step: len(found) for step, found in groups.items()} == dict.fromkeys(range(STEPS), PROMPTS)
    assert sum(map(len, groups.values())) == len(set.union(*groups.values())), "a group is in two batches"


def test_a_job_on_auto_runs_on_vllm_whose_processes_end_with_a_killed_worker(tmp_path: Path) -> None:
    system = System(tmp_path / "system", workers=1, slots=PROMPTS * SAMPLES)
    worker = system.workers[0]
    worker.environment |= {"RLHARVEST_ENGINES": "auto", "RLHARVEST_KV_MEMORY_MB": "64"}
    with system:
        spec = system.spec(
            model=str(model_without_end(tmp_path / "system" / "repetitive")),
            sampling={"num_generations": SAMPLES, "max_completion_length": LENGTH},
            algorithm={"prompts_per_step": PROMPTS},
            staleness={"max_staleness": 2},
            rollout={"engine": "auto", "stub": {}, "speculation": {"enabled": "off"}},
            limits={"max_steps": STEPS},
        )
        job = system.submit(spec)
        system.wait(job, "succeeded", timeout_s=1500)
        (seat,) = system.client.workers()
        assert seat["numerics_key"].startswith("vllm/")
        samples = list(system.samples(job).values())
        check_samples(system.job(job), samples)
        assert any(len(sample["version_runs"]) > 1 for sample in samples), "no version was switched in flight"
        curves = system.client.metrics(job, names=["sampling/sampling_logp_difference/mean"])["series"]
        # The policy that a later step recomputes with is newer than the one that sampled.
        first = next(value for value in curves["sampling/sampling_logp_difference/mean"] if value is not None)
        assert first < 1e-4
        assert worker.process is not None
        engine = psutil.Process(worker.process.pid).children(recursive=True)
        assert len(engine) >= 2
        worker.kill()
        _, alive = psutil.wait_procs(engine, timeout=120)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

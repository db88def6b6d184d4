"""What must be true of a finished job on the stub engine, whatever was killed while it ran."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlharvest.noise import response_seed
from rlharvest.testing.model import ALPHABET, EOS, PAD
from rlharvest.testing.stub import StubOptions, parse_options, stub_response

VOCAB = {token: index for index, token in enumerate([PAD, EOS, *ALPHABET])}


def prompt_ids(text: str) -> list[int]:
    """Return the tokens of a prompt of `questions` under the tokenizer of `tiny_model`."""
    return [VOCAB[character] for character in text]


def row_of(ordinal: int, rows: int, seed: int) -> tuple[int, int]:
    """Return (row, data epoch) of a group, by the rule of the coordinator's data order, written down a second time."""
    data_epoch, place = divmod(ordinal, rows)
    words = np.random.Philox(key=[seed, data_epoch]).random_raw(rows)
    return int(np.argsort(words, kind="stable")[place]), data_epoch


def expected(spec: dict[str, Any], sample: dict[str, Any], rows: int) -> tuple[list[int], npt.NDArray[np.float32], str]:
    """Return ids, log-probabilities and finish of a response that nothing interrupted."""
    n = spec["sampling"]["num_generations"]
    row, data_epoch = row_of(sample["group"], rows, spec.get("seed", 0))
    seed = response_seed(spec.get("seed", 0), row, data_epoch, sample["handle"] - sample["group"] * n)
    options: StubOptions = parse_options(spec["rollout"]["stub"]).model_copy(
        update={"vocab": len(VOCAB), "eos_id": VOCAB[EOS]}
    )
    ids, logprobs, finish = stub_response(
        prompt_ids(sample["prompt"]), seed, spec["sampling"]["max_completion_length"], options
    )
    return ids.tolist(), logprobs, finish.name.lower()


def check_sample(spec: dict[str, Any], sample: dict[str, Any], rows: int) -> None:
    """No token of a response is lost, doubled or changed; each has a log-probability, a version and an owner."""
    ids, logprobs, finish = expected(spec, sample, rows)
    name = sample["id"]
    assert sample["token_ids"] == ids, f"{name}: other tokens than the uninterrupted run"
    assert np.array_equal(np.asarray(sample["logprobs"], np.float32), logprobs), f"{name}: other log-probabilities"
    assert sample["finish"] == finish, f"{name}: finished by {sample['finish']}, expected {finish}"
    versions = [run["version"] for run in sample["version_runs"]]
    assert sum(run["n"] for run in sample["version_runs"]) == len(ids), f"{name}: a token has no version"
    assert versions == sorted(versions), f"{name}: versions fall: {versions}"
    at = 0
    for piece in sample["pieces"]:
        assert piece["offset"] == at, f"{name}: pieces do not touch: {sample['pieces']}"
        at += piece["n"]
    assert at == len(ids), f"{name}: a token has no owner"
    attempts = [int(piece["attempt"]) for piece in sample["pieces"]]
    assert attempts == sorted(set(attempts)), f"{name}: an attempt was used twice: {attempts}"


def check_job(spec: dict[str, Any], job: dict[str, Any], samples: dict[int, dict[str, Any]], *, rows: int = 32) -> None:
    """The job ended with exactly the expected groups, each batch trained once, and every counter adds up."""
    n, size, steps = (
        spec["sampling"]["num_generations"],
        spec["algorithm"]["prompts_per_step"],
        spec["limits"]["max_steps"],
    )
    counters = job["counters"]
    assert counters["submitted"] == counters["trained"] + counters["dropped"] + counters["outstanding"], counters
    assert counters["trained"] == n * size * steps, counters
    assert counters["outstanding"] == 0, counters
    trained = [sample for sample in samples.values() if sample["state"] == "trained"]
    by_step: dict[int, set[int]] = {}
    for sample in trained:
        by_step.setdefault(sample["step"], set()).add(sample["group"])
    assert {step: len(groups) for step, groups in by_step.items()} == dict.fromkeys(range(steps), size), by_step
    groups = [group for found in by_step.values() for group in found]
    assert len(groups) == len(set(groups)), "a group is in two batches"
    assert len(trained) == n * size * steps
    for sample in trained:
        check_sample(spec, sample, rows)

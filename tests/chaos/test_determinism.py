"""What a job computes does not depend on who computed it, when, or how often somebody died meanwhile.

Every service is a real process; the stub engine's tokens depend on prompt, seed and position alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rlharvest.errors import RlharvestError
from rlharvest.testing.audit import VOCAB, check_job
from rlharvest.testing.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 10


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for this module; it starts with one worker and gets more on the way."""
    directory = tmp_path_factory.mktemp("system")
    settings = {"RLHARVEST_HEARTBEAT_S": "0.2", "RLHARVEST_HEARTBEAT_DEADLINE_S": "1.5"}
    with System(directory, workers=1, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def reference(system: System) -> dict[str, Any]:
    """What one worker that nothing disturbs makes of the job: digests by version, and curves."""
    assert len(system.workers) == 1
    return run(system, ten_steps(system))


def ten_steps(system: System, **changes: Any) -> dict[str, Any]:
    return system.spec(
        **{
            "sampling": {"max_completion_length": 30},
            "rollout": {"stub": {"step_s": 0.01, "mean_length": 20}},
            "limits": {"max_steps": STEPS},
            "weights": {"keep_versions": STEPS + 1},
            "checkpoint": {"every_steps": 5},
            **changes,
        }
    )


def run(system: System, spec: dict[str, Any], during: Callable[[str], None] = lambda _job: None) -> dict[str, Any]:
    """Run a job to its end, audit it, and return its digests by version and its curves."""
    job = system.submit(spec)
    during(job)
    found = system.wait(job, "succeeded", timeout_s=240)
    check_job(spec, found, system.samples(job))
    curves = system.client.metrics(job)
    return {
        "digests": {item["version"]: item["digest"] for item in system.client.weights(job)},
        "steps": curves["steps"],
        "series": curves["series"],
        "counters": found["counters"],
        "job": job,
    }


def with_workers(system: System, n: int) -> None:
    while len(system.workers) < n:
        system.workers.append(system.worker(len(system.workers)).start())
    for worker in system.workers:
        if not worker.running:
            worker.start()
    system.until(
        lambda: sum(worker["state"] not in ("dead", "gone") for worker in system.client.workers()) >= n,
        timeout_s=240,
        what=f"{n} workers",
    )


def test_four_workers_make_the_versions_of_one(system: System, reference: dict[str, Any]) -> None:
    """Staleness 0: ten optimizer steps on four workers give bit for bit the versions that one worker gives."""
    with_workers(system, 4)
    four = run(system, ten_steps(system))
    assert sorted(reference["digests"]) == list(range(STEPS + 1))
    assert len(set(reference["digests"].values())) == STEPS + 1, "a step changed nothing"
    assert four["digests"] == reference["digests"]
    assert four["series"]["loss"] == reference["series"]["loss"]


def test_four_workers_that_die_make_the_versions_of_one(system: System, reference: dict[str, Any]) -> None:
    """The same with SIGKILLs of workers in the middle of their responses."""
    with_workers(system, 4)

    def kill_some(job: str) -> None:
        for index, step in enumerate((1, 4, 7)):
            system.until(lambda step=step: at(system, job) >= step, timeout_s=240, what=f"step {step}")  # type: ignore[misc]  # mypy cannot infer a lambda's default
            system.until(
                lambda: any(sample["state"] == "streaming" for sample in system.client.live_samples(job)),
                timeout_s=240,
                what="responses in the middle of their generation",
            )
            for worker in (system.workers[index], system.workers[index + 1]):
                worker.kill()
                worker.start()

    killed = run(system, ten_steps(system), kill_some)
    assert killed["counters"]["reassigned"] > 0, "nobody died while it mattered"
    assert killed["digests"] == reference["digests"]


def test_training_in_order_of_arrival_gives_the_same_losses_but_for_rounding(
    system: System, reference: dict[str, Any]
) -> None:
    """algorithm.deterministic: false accumulates micro-batches as groups arrive; sums differ in their last bits."""
    spec = ten_steps(system)
    spec["algorithm"]["deterministic"] = False
    streamed = run(system, spec)
    assert streamed["steps"] == reference["steps"]
    pairs = list(zip(streamed["series"]["loss"], reference["series"]["loss"], strict=True))
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None or theirs is not None]
    assert len(known) == STEPS
    assert max(abs(ours - theirs) for ours, theirs in known) < 1e-4, known


def at(system: System, job: str) -> int:
    return int(system.job(job)["progress"]["step"])


class Watch(threading.Thread):
    """Compares the groups that count with the gate, as often as it can."""

    def __init__(self, system: System, job: str, spec: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.system, self.job = system, job
        self.n = spec["sampling"]["num_generations"]
        self.size = spec["algorithm"]["prompts_per_step"]
        self.bound = spec["staleness"]["max_staleness"]
        self.over: list[tuple[int, int]] = []
        self.most = 0
        self.looks = 0
        self.step = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                counters = self.system.job(self.job)["counters"]
                # Read after the counters: by then the step is at least the one that the gate was asked with.
                # A trainer that replays steps does not take back what they let in.
                self.step = step = max(self.step, at(self.system, self.job))
            except RlharvestError:
                continue
            counted = (counters.get("submitted", 0) - counters.get("dropped", 0)) // self.n
            self.looks += 1
            self.most = max(self.most, counted - step * self.size)
            if counted > (step + self.bound + 1) * self.size:
                self.over.append((step, counted))
            self.stopped.wait(0.02)


@contextmanager
def watched(system: System, job: str, spec: dict[str, Any]) -> Iterator[Watch]:
    watch = Watch(system, job, spec)
    watch.start()
    try:
        yield watch
    finally:
        watch.stopped.set()
        watch.join()


def test_work_in_flight_never_exceeds_the_gate(system: System) -> None:
    """max_staleness 1: never more groups than (steps done + 2) batches, also after a pause and a restart."""
    with_workers(system, 2)
    spec = ten_steps(system, staleness={"max_staleness": 1}, limits={"max_steps": 8})
    job = system.submit(spec)
    with watched(system, job, spec) as watch:
        system.until(lambda: at(system, job) >= 2, timeout_s=240, what="two steps")
        system.client.pause(job)
        system.wait(job, "paused", timeout_s=240)
        system.client.resume(job)
        system.until(lambda: at(system, job) >= 4, timeout_s=240, what="four steps")
        system.coordinator.kill()
        system.coordinator.start()
        system.ready()
        found = system.wait(job, "succeeded", timeout_s=240)
    assert watch.over == []
    assert watch.looks > 20
    assert watch.most == 2 * watch.size, "rollout never ran ahead: the gate was not put to the test"
    samples = system.samples(job)
    check_job(spec, found, samples)
    for sample in samples.values():
        versions = [item["version"] for item in sample["version_runs"]]
        assert sample["step"] - min(versions) <= 1, f"{sample['id']} of batch {sample['step']} is too old: {versions}"


REWARD = '''
"""Rewards for some of the prompts."""


def score(prompts, completions, ground_truth, **columns):
    if int(ground_truth[0]) % 8 == 1:
        raise ValueError("this answer is not for sale")
    return [float(len(completions[0]) % 5)]
'''


def test_staleness_zero_does_not_lock_when_groups_are_dropped(system: System) -> None:
    """Groups whose reward fails are dropped, said so, and replaced; every batch is full and every counter adds up."""
    path = system.directory / "rewards.py"
    path.write_text(REWARD, encoding="utf-8")
    spec = ten_steps(system, rewards=[{"path": str(path), "name": "score", "style": "trl"}], limits={"max_steps": 4})
    job = system.submit(spec)
    found = system.wait(job, "succeeded", timeout_s=240)
    check_job(spec, found, system.samples(job))
    told = [event for event in system.client.events(job) if event["type"] == "group.reward_error"]
    n = spec["sampling"]["num_generations"]
    assert told, "no reward failed: the test tests nothing"
    assert found["counters"]["dropped"] == n * len(told)
    assert found["counters"]["reward_errors"] == len(told)
    assert all("not for sale" in event["message"] for event in told)


@contextmanager
def restarting(system: System) -> Iterator[list[int]]:
    """Start every worker that ends again, as a supervisor would; yields their exit statuses."""
    statuses: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            for worker in system.workers:
                if not worker.running and worker.process is not None:
                    statuses.append(worker.process.returncode)
                    worker.start()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield statuses
    finally:
        done.set()
        thread.join()


def test_a_poison_prompt_is_dropped_and_the_job_ends(system: System) -> None:
    """A prompt that kills whoever generates it is tried 5 times, the last ones alone; the innocent ones are all trained."""
    with_workers(system, 2)
    path = system.directory / "poison.jsonl"
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    rows[5]["question"] = "x+5="
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    spec = ten_steps(
        system,
        dataset={"path": str(path), "shuffle": False},
        rollout={"stub": {"step_s": 0.01, "mean_length": 20, "poison_token": VOCAB["x"]}},
        limits={"max_steps": 2},
    )
    with restarting(system) as statuses:
        job = system.submit(spec)
        started = time.monotonic()
        found = system.wait(job, "succeeded", timeout_s=240)
    samples = system.samples(job)
    assert statuses.count(77) >= 5, f"{statuses} after {time.monotonic() - started:.0f} s"
    told = [event for event in system.client.events(job) if event["type"] == "group.poison"]
    assert [event["data"]["deaths"] for event in told] == [5]
    assert found["counters"]["dropped"] == 4
    groups = {sample["group"] for sample in samples.values() if sample["state"] == "trained"}
    assert groups == {0, 1, 2, 3, 4, 6, 7, 8}

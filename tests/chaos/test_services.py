"""Every other service dies at the points where it hurts, one after another in one job: it ends as if nothing had happened.

Between what a service wrote down and what it said of it lies the state that the next process has to find its way out of.
The traps are set by rlharvest.testing.faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rlharvest.testing.faults import FAULTS, wait_sprung, with_faults
from rlharvest.testing.system import Service, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_STORE = "rlharvest_coordinator.store"

COORDINATOR = (
    # A transition is in the log, and what it assigns is not sent.
    "kill before rlharvest_coordinator.courier:Courier._request",
    # In the recovery from that: the lease is taken, then the book is loaded, and nothing is read yet.
    "kill after rlharvest_coordinator.leader:Leadership.acquire",
    "kill after rlharvest_coordinator.keeper:Keeper._begin",
    # The store has tokens that nobody was told of.
    "kill after rlharvest.ledger.store:Store.commit@3",
    # A group is in SQL, and the ledger was not told to let go of it.
    "kill after rlharvest_coordinator.harvest:Harvest._accept",
    # A group is in a batch, and the trainer was not woken.
    f"kill after {_STORE}.groups:commit",
    # A checkpoint is in SQL, and its groups are not trained.
    f"kill after {_STORE}.checkpoints:record",
)

TRAINER = (
    # In a step: gradients are summed, and not applied.
    "kill after rlharvest_trainer.step:Learner.accumulate",
    # The next step is published, and not reported.
    "kill after rlharvest_trainer.run:Run._upload@2",
    # In a save: every tensor is written, and what makes it a checkpoint is not.
    "kill before rlharvest_trainer.checkpoints:_write_durably",
)

WEIGHTS = (
    # In an upload: some files are there, the version is not.
    "kill after rlharvest_weights.blobs:Upload.commit",
    # The version is there, and nobody was told.
    "kill after rlharvest_weights.versions:VersionStore.publish",
)

REWARD = (
    "kill before rlharvest_reward.scoring:Scorer.score",
    # The reward is in the log, and the question is not acknowledged.
    "kill after rlharvest_reward.service:RewardService._publish@2",
)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all; questions of a dead reward service come again soon."""
    settings = {"RLHARVEST_ACK_WAIT_S": "1", "RLHARVEST_TRAINER_DEADLINE_S": "3"}
    system = System(tmp_path_factory.mktemp("system"), workers=2, settings=settings)
    for service in (system.coordinator, system.trainer, system.weights, system.reward):
        with_faults(service)
    with system:
        yield system


def small(system: System, **changes: Any) -> dict[str, Any]:
    return system.spec(
        **{
            "rollout": {"stub": {"step_s": 0.01, "mean_length": 20}},
            "sampling": {"num_generations": 2, "max_completion_length": 40},
            "limits": {"max_steps": 2},
            **changes,
        }
    )


def dies_again_and_again(system: System, service: Service, traps: tuple[str, ...], spec: dict[str, Any]) -> str:
    """Run a job in which a service dies at each trap in turn; return the job."""
    service.stop()
    service.start(**{FAULTS: traps[0]})
    if service is system.coordinator:
        system.ready()
    job = system.submit(spec)
    for trap, following in zip(traps, [*traps[1:], ""], strict=True):
        wait_sprung(system, service, trap)
        service.start(**{FAULTS: following})
    if service is system.coordinator:
        system.ready()
    return job


def test_coordinator_dies_between_what_it_wrote_and_what_it_said(system: System) -> None:
    """Log, store, SQL and workers agree again each time, also when it dies in its own recovery."""
    spec = small(system)
    job = dies_again_and_again(system, system.coordinator, COORDINATOR, spec)
    found = system.finish(job, spec)
    assert found["counters"].get("reassigned", 0) == 0, "generated tokens were thrown away"


def test_trainer_dies_in_a_step_and_in_a_save(system: System) -> None:
    """Each batch is trained once in the end: the steps of all published versions are those of one line."""
    spec = small(system)
    job = dies_again_and_again(system, system.trainer, TRAINER, spec)
    system.finish(job, spec)
    assert system.client.metrics(job)["steps"] == [0, 1, 2]
    digests: dict[int, set[str]] = {}
    for version in system.client.weights(job):
        digests.setdefault(version["step"], set()).add(version["digest"])
    assert {step: len(found) for step, found in digests.items()} == {0: 1, 1: 1, 2: 1}, "a batch counts twice"


def test_weight_service_dies_in_an_upload_and_in_a_publication(system: System) -> None:
    """The trainer waits and repeats; a version is there once, whole."""
    # Weights that no other job here has: files that the service knows are not uploaded.
    rewards = [{"builtin": "regex", "params": {"pattern": "^[0-9a-m]"}}]
    spec = small(system, rewards=rewards, algorithm={"learning_rate": 3e-3})
    job = dies_again_and_again(system, system.weights, WEIGHTS, spec)
    system.finish(job, spec)
    assert [version["step"] for version in system.client.weights(job)] == [0, 1, 2]


def test_reward_service_dies_with_a_question_in_hand(system: System) -> None:
    """The queue gives the question to the next process; a reward that came twice counts once."""
    spec = small(system)
    job = dies_again_and_again(system, system.reward, REWARD, spec)
    found = system.finish(job, spec)
    assert found["counters"].get("reward_errors", 0) == 0

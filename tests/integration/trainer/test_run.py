"""A job's life in the trainer, over real gRPC."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlharvest.errors import DataError, DiskFull
from rlharvest.testing.batches import ScriptedCoordinator, random_group
from rlharvest.testing.fixtures import disk_of
from rlharvest.v1 import batches_pb2
from rlharvest_trainer import checkpoints
from transformers import AutoModelForCausalLM

Scripted = Callable[..., ScriptedCoordinator]
Training = Callable[[ScriptedCoordinator], Any]
DONE = (batches_pb2.OUTCOME_SUCCEEDED, "")


def finished(coordinator: ScriptedCoordinator) -> bool:
    return bool(coordinator.outcomes)


async def test_a_job_publishes_every_step_saves_and_succeeds(
    scripted: Scripted, training: Training, tmp_path: Path
) -> None:
    coordinator = scripted(steps=4, every=3)
    async with training(coordinator) as trainer:
        await coordinator.until(finished)
    assert coordinator.outcomes == [DONE]
    assert [coordinator.steps[step][0].version for step in range(5)] == [0, 1, 2, 3, 4]
    assert [line["parent"] for line in trainer.publications.lines()] == [None, 0, 1, 2, 3]
    assert len(set(coordinator.digests().values())) == 5
    assert [(saved.step, saved.version) for saved in coordinator.checkpoints] == [(3, 3), (4, 4)]
    last = coordinator.checkpoints[-1]
    assert last.digest == coordinator.digests()[4]
    AutoModelForCausalLM.from_pretrained(last.path)
    metrics = coordinator.steps[4][0].metrics
    assert {"reward", "loss", "grad_norm", "num_tokens", "perf/step_s", "perf/rollout_wait_s", "perf/compute_s",
            "perf/publish_s", "perf/save_s"} <= set(metrics)  # fmt: skip
    assert all(math.isfinite(value) for value in metrics.values())
    assert coordinator.renewals or metrics["perf/step_s"] < 1
    assert not list((tmp_path / "trainer").rglob("*.safetensors")), "the staging directory is emptied"


async def test_deterministic_runs_give_equal_digests_whatever_the_order_of_arrival(
    scripted: Scripted, training: Training, tmp_path: Path
) -> None:
    found = []
    for turn, order in enumerate((None, lambda step, n: [(at + step + 1) % n for at in range(n)][::-1])):
        coordinator = scripted(order=order)
        coordinator.checkpoint_dir = tmp_path / f"ckpt{turn}"
        coordinator.visible = {1: 1, 2: 2}
        async with training(coordinator):
            await coordinator.until(lambda it: len(it.asked) > 6)
            coordinator.visible = {}
            await coordinator.until(finished)
        found.append(coordinator.digests())
    assert found[0] == found[1]


async def test_streaming_trains_on_groups_as_they_come_with_the_same_loss(
    scripted: Scripted, training: Training, tmp_path: Path
) -> None:
    losses = []
    for turn, staleness in enumerate((0, 1)):
        coordinator = scripted(staleness=staleness, order=lambda _step, n: range(n)[::-1])
        coordinator.checkpoint_dir = tmp_path / f"ckpt{turn}"
        coordinator.visible = {0: 1}
        async with training(coordinator):
            await coordinator.until(lambda it: (1, 0, 1) in it.asked)
            coordinator.visible = {}
            await coordinator.until(finished)
        losses.append([coordinator.steps[step][0].metrics["loss"] for step in range(1, 5)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_pause_saves_and_the_next_claim_goes_on_from_there(
    scripted: Scripted, training: Training, tmp_path: Path, staleness: int
) -> None:
    coordinator = scripted(steps=3, every=100, staleness=staleness)
    coordinator.visible = {2: 1}
    async with training(coordinator):
        await coordinator.until(lambda it: 2 in it.steps)
        coordinator.directive = batches_pb2.DIRECTIVE_PAUSE
        await coordinator.until(finished)
        assert coordinator.outcomes == [(batches_pb2.OUTCOME_PAUSED, "")]
        assert [saved.step for saved in coordinator.checkpoints] == [2]
        coordinator.directive, coordinator.visible = batches_pb2.DIRECTIVE_CONTINUE, {}
        coordinator.open = True
        await coordinator.until(lambda it: len(it.outcomes) == 2)
    assert coordinator.outcomes[1] == DONE
    assert {step for fence, step, _ in coordinator.asked if fence == 2} == {2}
    assert coordinator.steps[2][1].version == 2, "the newest version is this very step: not published again"
    assert coordinator.steps[2][1].metrics["reward"] == coordinator.steps[2][0].metrics["reward"]


async def test_a_cancel_ends_without_saving(scripted: Scripted, training: Training) -> None:
    coordinator = scripted(every=100)
    coordinator.visible = {1: 1}
    async with training(coordinator):
        await coordinator.until(lambda it: 1 in it.steps)
        coordinator.directive = batches_pb2.DIRECTIVE_CANCEL
        await coordinator.until(finished)
    assert coordinator.outcomes == [(batches_pb2.OUTCOME_CANCELLED, "")]
    assert not coordinator.checkpoints


async def test_a_fenced_trainer_says_nothing_more_and_claims_again(scripted: Scripted, training: Training) -> None:
    coordinator = scripted(every=100)
    coordinator.visible = {1: 1}
    async with training(coordinator):
        await coordinator.until(lambda it: 1 in it.steps)
        coordinator.fence += 1
        coordinator.open, coordinator.visible = True, {}
        await coordinator.until(finished)
    assert coordinator.outcomes == [DONE]
    assert coordinator.fence == 3
    assert not coordinator.checkpoints or {saved.fence for saved in coordinator.checkpoints} == {3}


async def test_stopping_saves_releases_and_the_next_one_resumes(
    scripted: Scripted, training: Training, tmp_path: Path
) -> None:
    first = scripted(every=100)
    first.visible = {2: 1}
    async with training(first):
        await first.until(lambda it: 2 in it.steps)
    assert first.outcomes == [(batches_pb2.OUTCOME_RELEASED, "")]
    assert [saved.step for saved in first.checkpoints] == [2]
    second = scripted(every=100)
    second.fence = first.fence
    async with training(second):
        await second.until(finished)
    assert second.outcomes == [DONE]
    assert {step for _, step, _ in second.asked} == {2, 3}
    whole = scripted(every=100)
    whole.checkpoint_dir = tmp_path / "other"
    async with training(whole):
        await whole.until(finished)
    assert second.digests()[4] == whole.digests()[4]


async def test_a_group_that_is_not_finite_is_left_out_and_reported(scripted: Scripted, training: Training) -> None:
    def batch(step: int) -> list[batches_pb2.BatchGroup]:
        groups = [random_group(1, group=3 * step + at, n=4, vocab=32) for at in range(3)]
        if step == 1:
            groups[1].samples[2].reward = math.nan
        if step == 2:
            for group in groups:
                group.samples[0].reward = math.inf
        return groups

    coordinator = scripted(batch=batch, steps=4)
    async with training(coordinator) as trainer:
        await coordinator.until(finished)
    assert coordinator.outcomes == [DONE]
    skipped = [data for _, kind, data in trainer.notices.events if kind == "trainer.group_skipped"]
    assert skipped == [{"step": 1, "group": 4}] + [{"step": 2, "group": at} for at in (6, 7, 8)]
    assert [data["step"] for _, kind, data in trainer.notices.events if kind == "trainer.step_skipped"] == [3]
    digests = coordinator.digests()
    assert digests[2] == digests[3], "a step without a group changes nothing"
    assert digests[3] != digests[4]
    assert coordinator.steps[4][0].metrics["skipped_steps"] == 1.0


async def test_a_reply_of_an_older_coordinator_is_refused(scripted: Scripted, training: Training) -> None:
    coordinator = scripted(steps=2)
    coordinator.epoch = 5
    coordinator.visible = {1: 0}
    async with training(coordinator):
        await coordinator.until(lambda it: any(step == 1 for _, step, _ in it.asked))
        coordinator.epoch, coordinator.visible = 4, {}
        await asyncio.sleep(0.5)
        assert 2 not in coordinator.steps
        coordinator.epoch = 6
        await coordinator.until(finished)
    assert coordinator.outcomes == [DONE]


async def test_the_claim_is_renewed_while_it_computes(
    scripted: Scripted, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from rlharvest_trainer.step import Learner

    apply = Learner.apply

    def slow(learner: Learner, rate: float) -> object:
        time.sleep(0.6)
        return apply(learner, rate)

    monkeypatch.setattr(Learner, "apply", slow)
    coordinator = scripted(steps=1)
    async with training(coordinator):
        await coordinator.until(finished)
    assert sum(renewal.phase == "computing" for renewal in coordinator.renewals) >= 5


async def test_a_model_that_cannot_be_trained_fails_the_job_with_field_value_and_fix(
    scripted: Scripted, training: Training, make_spec: Callable[..., Any]
) -> None:
    coordinator = scripted()
    coordinator.spec = coordinator.spec.model_copy(update={"model": "/nowhere/at/all"})
    async with training(coordinator):
        await coordinator.until(finished)
    ((outcome, error),) = coordinator.outcomes
    assert outcome == batches_pb2.OUTCOME_FAILED
    assert error.startswith("model = '/nowhere/at/all': there is no such directory")


async def test_a_full_disk_under_a_checkpoint_is_waited_for_by_name(
    scripted: Scripted, training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = FullDisk(monkeypatch)
    coordinator = scripted(steps=4, every=2)
    async with training(coordinator) as trainer:
        await coordinator.until(lambda it: it.renewals and it.renewals[-1].obstacle == "CheckpointDiskFull")
        assert "No space left" in coordinator.renewals[-1].obstacle_message
        assert [path.name for path in (tmp_path / "ckpt").glob("step_*")] == ["step_2"]
        assert not coordinator.outcomes
        full.step = 0
        await coordinator.until(finished)
        assert coordinator.outcomes == [DONE]
        assert [kind for _, kind, _ in trainer.notices.events] == ["trainer.waiting", "trainer.goes_on"]
    assert [saved.step for saved in coordinator.checkpoints] == [2, 4]


async def test_a_job_that_waits_for_room_can_be_paused_and_keeps_the_checkpoint_before(
    scripted: Scripted, training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FullDisk(monkeypatch)
    coordinator = scripted(steps=4, every=2)
    async with training(coordinator):
        await coordinator.until(lambda it: it.renewals and it.renewals[-1].obstacle == "CheckpointDiskFull")
        coordinator.directive = batches_pb2.DIRECTIVE_PAUSE
        await coordinator.until(finished)
    assert coordinator.outcomes == [(batches_pb2.OUTCOME_PAUSED, "")]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [".fence", "step_2"]


class FullDisk:
    """A disk without room for the checkpoint of step `step`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = 4
        save_file = checkpoints.save_file

        def save(tensors: Any, path: Path) -> None:
            if f".writing_{self.step}_" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            save_file(tensors, path)

        monkeypatch.setattr(checkpoints, "save_file", save)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_full_disk_of_the_weight_service_is_waited_for_by_name(
    scripted: Scripted, training: Training, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    coordinator = scripted(steps=3, staleness=staleness)
    async with training(coordinator) as trainer:
        publish = trainer.publications.publish
        room = asyncio.Event()

        async def refused(directory: Path, *, step: int, **given: Any) -> Any:
            if step == 1 and not room.is_set():
                raise DiskFull("no space left on the weight service's disk")
            return await publish(directory, step=step, **given)

        monkeypatch.setattr(trainer.publications, "publish", refused)
        await coordinator.until(lambda it: it.renewals and it.renewals[-1].obstacle == "WeightsDiskFull")
        room.set()
        await coordinator.until(finished)
    assert coordinator.outcomes == [DONE]
    assert [coordinator.steps[step][0].version for step in range(4)] == [0, 1, 2, 3]


async def test_a_full_disk_of_its_own_is_waited_for_by_name(
    scripted: Scripted, training: Training, tmp_path: Path
) -> None:
    """A version is written to the trainer's disk before it is uploaded: a real one, which is too small for a while."""
    coordinator = scripted(steps=2)
    with disk_of(tmp_path / "small", mebibytes=4) as small:
        ballast = small / "ballast"
        ballast.write_bytes(bytes(3 << 20))
        async with training(coordinator, data_dir=small, min_free_bytes=1 << 20) as trainer:
            await coordinator.until(lambda it: it.renewals and it.renewals[-1].obstacle == "TrainerDiskFull")
            assert "must stay free" in coordinator.renewals[-1].obstacle_message
            assert not coordinator.steps, "not even the initial weights are published"
            ballast.unlink()
            await coordinator.until(finished)
            assert [kind for _, kind, _ in trainer.notices.events] == ["trainer.waiting", "trainer.goes_on"]
    assert coordinator.outcomes == [DONE]
    assert sorted(coordinator.steps) == [0, 1, 2]


async def test_a_version_that_the_weight_service_lost_is_published_again_above_all_numbers(
    scripted: Scripted, training: Training, tmp_path: Path
) -> None:
    coordinator = scripted(steps=3, every=3)
    coordinator.visible = {1: 1}
    async with training(coordinator):
        await coordinator.until(lambda it: 1 in it.steps)
        digest = coordinator.digests()[1]
        (tmp_path / "versions.jsonl").unlink()  # with everything that it knew
        coordinator.lost_version = 1
        await coordinator.until(lambda it: len(it.steps[1]) == 2)
        again = coordinator.steps[1][-1]
        coordinator.lost_version = None
        coordinator.visible = {}
        await coordinator.until(finished)
    assert (again.version, again.digest) == (2, digest)
    assert [coordinator.steps[step][-1].version for step in range(4)] == [0, 2, 3, 4]
    assert coordinator.outcomes == [DONE]


async def test_a_claim_numbers_its_versions_above_those_that_the_coordinator_knows(
    scripted: Scripted, training: Training
) -> None:
    """The weight service lost its files while no trainer had the job."""
    coordinator = scripted(steps=1)
    coordinator.next_version = 7
    async with training(coordinator):
        await coordinator.until(finished)
    assert [coordinator.steps[step][0].version for step in range(2)] == [7, 8]


async def test_a_publication_that_fails_while_the_next_batch_is_awaited_fails_the_job(
    scripted: Scripted, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = scripted(staleness=1, every=100)
    coordinator.visible = {1: 0}
    async with training(coordinator) as trainer:
        publish = trainer.publications.publish

        async def refused(directory: Path, *, step: int, **given: Any) -> Any:
            if step == 1:
                await coordinator.until(lambda it: (1, 1, 0) in it.asked)
                raise DataError("the weight service refuses it")
            return await publish(directory, step=step, **given)

        monkeypatch.setattr(trainer.publications, "publish", refused)
        await coordinator.until(finished)
    assert coordinator.outcomes == [(batches_pb2.OUTCOME_FAILED, "the weight service refuses it")]


async def test_a_step_that_changes_no_weight_though_it_has_a_gradient_is_told(
    scripted: Scripted, training: Training
) -> None:
    """Whatever swallows the update, it looks like staleness for weeks if nobody compares what is published."""
    coordinator = scripted(steps=2, algorithm={"learning_rate": 1e-30})
    async with training(coordinator) as trainer:
        await coordinator.until(finished)
        events = [(kind, data["step"]) for _, kind, data in trainer.notices.events]
    assert events == [("trainer.unchanged", 1), ("trainer.unchanged", 2)]
    assert coordinator.outcomes == [DONE]

"""Workers of a whole job: those that come late serve what is newest, and the end of a job leaves nobody behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rlharvest.testing.fixtures import disk_of
from rlharvest.testing.system import Service, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 200.0


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for this module, with two workers."""
    with System(tmp_path_factory.mktemp("system"), workers=2) as running:
        yield running


def idle(system: System, worker: Service) -> bool:
    """Whether a worker is here and has nothing to do."""
    seat = system.seat(worker)
    return seat["state"] not in ("absent", "dead", "gone") and not seat["held"] and seat["job"] is None


def test_a_job_that_ends_lets_every_worker_go_and_ends_nobody(system: System) -> None:
    """Neither side waits for a version that will never come: the next job finds the same processes, at once."""
    before = [service.process for service in (system.coordinator, system.trainer, *system.workers)]
    for _ in range(2):
        spec = system.spec(limits={"max_steps": 3})
        job = system.submit(spec)
        found = system.finish(job, spec)
        assert found["progress"]["step"] == 3
        system.until(lambda: all(idle(system, worker) for worker in system.workers), timeout_s=60, what="idle workers")
        assert not system.client.live_samples(job)
    after = [service.process for service in (system.coordinator, system.trainer, *system.workers)]
    assert after == before
    assert all(service.running for service in (system.coordinator, system.trainer, system.weights, *system.workers))


def test_a_worker_that_comes_late_serves_the_newest_version_only(system: System) -> None:
    """One that never was here, and one that was and has an old version on its disk. With max_staleness 0 a token of any
    other version than the step's could not be trained.
    """
    spec = system.spec(limits={"max_steps": 10_000}, rollout={"stub": {"step_s": 0.02, "mean_length": 30}})
    job = system.submit(spec)
    system.until(lambda: system.job(job)["progress"]["step"] >= 1, timeout_s=WAIT_S, what="the first step")
    known = system.workers[0]
    known.stop()
    step = system.job(job)["progress"]["step"]
    system.until(lambda: system.job(job)["progress"]["step"] >= step + 3, timeout_s=WAIT_S, what="three more steps")
    late = system.worker(7)
    joined: dict[str, int] = {}
    try:
        for worker in (late, known):
            version = system.job(job)["progress"]["weight_version"]
            worker.start()
            system.wait_joined(worker)
            joined[system.seat(worker)["id"]] = version
        for worker in (late, known):
            system.until(lambda worker=worker: _generated(system, worker), timeout_s=WAIT_S, what="tokens of it")
        step = system.job(job)["progress"]["step"]
        system.until(lambda: system.job(job)["progress"]["step"] >= step + 2, timeout_s=WAIT_S, what="their steps")
        system.client.cancel(job)
        found = system.wait(job, "cancelled", timeout_s=WAIT_S)
    finally:
        late.stop()
    seen = set()
    for sample in system.samples(job).values():
        if sample["step"] is None or sample["state"] not in ("committed", "trained"):
            continue
        assert {run["version"] for run in sample["version_runs"]} == {sample["oldest_version"]}
        assert sample["staleness"] == 0, sample["id"]
        for worker in joined.keys() & {piece["worker"] for piece in sample["pieces"]}:
            seen.add(worker)
            assert sample["oldest_version"] >= joined[worker]
    assert seen == joined.keys()
    assert found["counters"].get("stale_groups", 0) == 0


def _generated(system: System, worker: Service) -> bool:
    return bool(system.seat(worker)["generated_tokens"])


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with disk_of(tmp_path_factory.mktemp("disk") / "small", mebibytes=2) as path:
        yield path


def test_a_coordinator_without_room_for_the_dataset_says_so_and_takes_the_job_up_later(
    system: System, small: Any
) -> None:
    """CoordinatorDiskFull: the job is queued, not failed; nothing of it is half there."""
    data = str(system.directory / "data")
    system.coordinator.stop()
    where = {"RLHARVEST_DATA_DIR": str(small), "RLHARVEST_CHECKPOINTS_DIR": f"{data}/checkpoints"}
    system.coordinator.start(RLHARVEST_SQL_URL=f"sqlite+aiosqlite:///{data}/coordinator.sqlite3", **where)
    system.ready()
    ballast = small / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    spec = system.spec(seed=5, dataset={"system_prompt": "another dataset"}, limits={"max_steps": 1})
    job = system.submit(spec)
    system.until(
        lambda: system.job(job)["status_detail"]["reason"] == "CoordinatorDiskFull",
        timeout_s=WAIT_S,
        what="the job to say what it waits for",
    )
    found = system.job(job)
    assert "RLHARVEST_DATA_DIR" in found["status_detail"]["message"]
    assert found["status"] in ("queued", "validating")
    ballast.unlink()
    system.wait(job, "succeeded", timeout_s=WAIT_S)
    system.coordinator.stop()
    system.coordinator.start()
    system.ready()

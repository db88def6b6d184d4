"""Kill anything, one at a time, in a running job: it ends as if nothing had happened.

Every service is a real process; NATS and Valkey are real servers. The stub engine's tokens do not depend on versions or
workers, so each response is compared with the uninterrupted run, token by token.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlharvest.testing.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all kills of this module; each test puts back what it took."""
    with System(tmp_path_factory.mktemp("system"), workers=2) as running:
        yield running


def spec_of(system: System, **changes: Any) -> dict[str, Any]:
    return system.spec(
        **{
            "rollout": {"stub": {"step_s": 0.02, "mean_length": 60}},
            "sampling": {"max_completion_length": 100},
            "limits": {"max_steps": 2},
            **changes,
        }
    )


def test_a_job_that_nothing_disturbs_is_the_uninterrupted_run(system: System) -> None:
    """The reference itself: no kill, no reassignment, every response as the pure function of the stub has it."""
    spec = spec_of(system)
    found = system.finish(system.submit(spec), spec)
    assert found["counters"].get("reassigned", 0) == 0


def test_worker_killed_mid_span_loses_and_doubles_no_token(system: System) -> None:
    """SIGKILL of a worker while it generates: its responses go on elsewhere from their last published token."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.workers[0].kill()
    system.workers[0].start()
    found = system.finish(job, spec)
    assert found["counters"]["reassigned"] > 0
    assert found["counters"]["salvaged_tokens"] > 0


def test_worker_killed_after_its_last_token_before_the_ack(system: System) -> None:
    """The finish is in the stream, the worker dies before anyone confirms it: the response is finished, not repeated."""
    spec = spec_of(system, rollout={"stub": {"step_s": 0.01, "length": 40}})
    job = system.submit(spec)
    system.wait_streaming(job)
    system.coordinator.signal(signal.SIGSTOP)
    time.sleep(1.5)  # all running responses end and are published while nobody reads
    for worker in system.workers:
        worker.kill()
    system.coordinator.signal(signal.SIGCONT)
    for worker in system.workers:
        worker.start()
    system.finish(job, spec)


def test_coordinator_killed_while_workers_generate(system: System) -> None:
    """SIGKILL of the coordinator: workers go on, the next one finds everything, no attempt is taken from anyone."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.coordinator.kill()
    system.coordinator.start()
    system.ready()
    found = system.finish(job, spec)
    assert found["counters"].get("reassigned", 0) == 0, "generated tokens were thrown away"


def test_trainer_killed_in_a_step(system: System) -> None:
    """SIGKILL of the trainer between a batch and its checkpoint: the batch is trained once in the end."""
    spec = spec_of(system, limits={"max_steps": 3}, checkpoint={"every_steps": 2})
    job = system.submit(spec)
    system.until(lambda: system.job(job)["progress"]["step"] >= 1, timeout_s=240, what="the first step")
    system.trainer.kill()
    system.trainer.start()
    found = system.finish(job, spec)
    steps = system.client.metrics(job)["steps"]
    assert steps == [0, 1, 2, 3]
    assert found["progress"]["step"] == 3


def test_nats_killed_in_a_job(system: System) -> None:
    """SIGKILL of NATS and a restart on its files: publishers send again, readers go on, nothing is applied twice."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.nats.kill()
    time.sleep(1.0)
    system.nats.start()
    system.finish(job, spec)


def test_nats_comes_back_empty(system: System) -> None:
    """A NATS that lost its files: the ledger starts the new stream at 0 and asks workers for what nobody confirmed."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.nats.kill()
    _remove(system.nats.directory / "jetstream")
    system.nats.start()
    system.finish(job, spec)


def test_nats_loses_its_tail(system: System) -> None:
    """A NATS whose disk lost the end of the stream: numbers come twice, the ledger sees it and starts a new stream."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job, tokens=2)
    system.nats.kill()
    saved = system.nats.directory.with_name("nats-saved")
    shutil.copytree(system.nats.directory, saved)
    system.nats.start()
    system.wait_streaming(job, tokens=15)
    system.nats.kill()
    _remove(system.nats.directory / "jetstream")
    shutil.copytree(saved / "jetstream", system.nats.directory / "jetstream", dirs_exist_ok=True)
    shutil.rmtree(saved)
    system.nats.start()
    system.finish(job, spec)


def test_valkey_killed_in_a_job(system: System) -> None:
    """SIGKILL of Valkey: what its append-only file lost is read from the stream again."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.valkey.kill()
    time.sleep(0.5)
    system.valkey.start()
    system.finish(job, spec)


def test_valkey_loses_its_tail(system: System) -> None:
    """A Valkey that comes back as it was some time ago is found out by its position and brought up to date."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job, tokens=2)
    system.valkey.kill()
    saved = {path: path.read_bytes() for path in (system.valkey.directory / "appendonlydir").iterdir()}
    system.valkey.start()
    system.wait_streaming(job, tokens=15)
    system.valkey.kill()
    for path in (system.valkey.directory / "appendonlydir").iterdir():
        path.unlink()
    for path, data in saved.items():
        path.write_bytes(data)
    system.valkey.start()
    system.finish(job, spec)


def test_worker_that_hangs_is_replaced_and_its_late_tokens_are_fenced(system: System) -> None:
    """SIGSTOP of a worker: its responses move; when it wakes up, what it sends of them changes nothing."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.workers[0].signal(signal.SIGSTOP)
    system.until(
        lambda: any(event["type"] == "worker.dead" for event in system.client.events(job)),
        timeout_s=240,
        what="the hanging worker to be declared dead",
    )
    system.workers[0].signal(signal.SIGCONT)
    system.finish(job, spec)


def test_worker_told_to_stop_hands_everything_over(system: System) -> None:
    """SIGTERM of a worker: it publishes its tail, leaves with status 0, and nothing of it is generated twice."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    assert system.workers[0].stop() == 0
    found = system.finish(job, spec)
    system.workers[0].start()
    assert found["counters"]["reassigned"] > 0
    assert found["counters"].get("fenced_tokens", 0) == 0


def test_paused_job_goes_on_where_it_stopped(system: System) -> None:
    """Pause in the middle of generation, resume: tokens are kept, the batch is the same."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.client.pause(job)
    system.wait(job, "paused", timeout_s=240)
    system.client.resume(job)
    system.finish(job, spec)


def test_a_user_who_resumes_while_it_pauses_has_their_way(system: System) -> None:
    """The trainer was told to pause and the job runs again: it lets go, takes the job anew, and the batch is the same."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.wait_streaming(job)
    system.client.pause(job)
    time.sleep(1.2)  # long enough for the trainer to hear of it
    if system.job(job)["status"] == "pausing":
        system.client.resume(job)
    else:
        system.wait(job, "paused", timeout_s=240)
        system.client.resume(job)
    system.finish(job, spec)


def test_a_job_without_a_trainer_can_be_cancelled(system: System) -> None:
    """Nobody is left to let go of it: it is cancelled, what it had is counted as dropped, and the next job runs."""
    job = system.submit(spec_of(system))
    system.wait_streaming(job)
    system.trainer.kill()
    system.client.cancel(job)
    system.wait(job, "cancelled", timeout_s=240)
    system.until(
        lambda: system.job(job)["counters"].get("outstanding") == 0, timeout_s=10, what="every response to be counted"
    )
    counters = system.job(job)["counters"]
    assert counters["submitted"] == counters["trained"] + counters["dropped"], counters
    system.trainer.start()
    spec = spec_of(system)
    system.finish(system.submit(spec), spec)


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()

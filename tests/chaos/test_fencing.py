"""Two coordinators: the one that was stopped and replaced changes nothing when it wakes, and goes."""

from __future__ import annotations

import re
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlharvest.ledger.response import epoch_of
from rlharvest.testing.audit import check_job
from rlharvest.testing.system import Service, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with System(tmp_path / "system", workers=2) as running:
        yield running


def leader(system: System) -> tuple[int, str]:
    """Epoch and holder on record."""
    with sqlite3.connect(system.directory / "data" / "coordinator.sqlite3", timeout=10) as connection:
        epoch, holder = connection.execute("select epoch, holder from leader").fetchone()
    connection.close()
    return int(epoch), str(holder)


def tokens(system: System, job: str) -> int:
    return int(system.job(job)["counters"].get("generated_tokens", 0))


def speak_to_the_standby(system: System) -> None:
    """Everything that the test asks from now on goes to the standby."""
    system.client.close()
    system.client = system.api(system.standby_ports[0])
    system.until(lambda: not system.client.ready(), timeout_s=240, what="the standby to lead")


def end_of(service: Service, *, timeout_s: float = 30.0) -> int:
    assert service.process is not None
    return service.process.wait(timeout_s)


def spec_of(system: System, **changes: Any) -> dict[str, Any]:
    return system.spec(
        rollout={"stub": {"step_s": 0.04, "mean_length": 60}},
        sampling={"max_completion_length": 100},
        limits={"max_steps": 2},
        **changes,
    )


def test_a_stopped_coordinator_that_wakes_after_its_successor_took_over_changes_nothing(system: System) -> None:
    """It notices by itself, ends by itself, and the job ends as if it had never woken."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.until(lambda: tokens(system, job) > 40, timeout_s=240, what="responses to be generated")
    before, _ = leader(system)

    system.coordinator.signal(signal.SIGSTOP)
    system.standby.start()
    speak_to_the_standby(system)
    epoch, holder = leader(system)
    assert epoch > before
    generated = tokens(system, job)
    system.until(lambda: tokens(system, job) > generated + 40, timeout_s=240, what="the job to go on")

    system.coordinator.signal(signal.SIGCONT)
    assert end_of(system.coordinator) == 1
    assert re.search(r"coordinator\.stopped .*(took over|is over)", system.coordinator.log.read_text())
    assert leader(system) == (epoch, holder), "the old coordinator wrote over its successor"

    found = system.wait(job, "succeeded", timeout_s=240)
    samples = system.samples(job)
    check_job(spec, found, samples)
    assert found["counters"].get("reassigned", 0) == 0, "generated tokens were thrown away"
    assert leader(system) == (epoch, holder)
    given = {epoch_of(int(piece["attempt"])) for sample in samples.values() for piece in sample["pieces"]}
    assert given == {before, epoch}, "attempts come from the leaders of the time, no others"


def test_a_standby_waits_while_the_leader_lives_and_takes_over_at_once_when_it_stops_in_order(system: System) -> None:
    """SIGTERM of the leader: its lease is released, the job goes on without a lost token."""
    spec = spec_of(system)
    job = system.submit(spec)
    system.standby.start()
    system.until(lambda: tokens(system, job) > 40, timeout_s=240, what="responses to be generated")
    time.sleep(2.0)
    first, _ = leader(system)
    assert first == 1, "the standby took over from a leader that lives"
    assert system.coordinator.stop() == 0
    speak_to_the_standby(system)
    assert leader(system)[0] == 2
    found = system.wait(job, "succeeded", timeout_s=240)
    check_job(spec, found, system.samples(job))
    assert found["counters"].get("reassigned", 0) == 0, "generated tokens were thrown away"

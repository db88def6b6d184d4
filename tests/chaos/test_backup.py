"""A backup of a running system, restored into an empty one, with NATS and Valkey empty: the job goes on and ends as if
nothing had been. Every service is a real process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlharvest.testing.audit import check_job
from rlharvest.testing.postgres import PostgresServer
from rlharvest.testing.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 16


def coordinator(system: System, *arguments: object) -> str:
    """Run a command of the coordinator with a system's settings; return what it says."""
    done = subprocess.run(
        [Path(sys.executable).parent / "rlharvest-coordinator", *map(str, arguments)],
        env={**os.environ, **system.coordinator.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_job_goes_on_from_a_backup_that_was_made_while_it_ran(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """From SQLite to PostgreSQL: what is in the file does not depend on the database."""
    backup = tmp_path / "backup.tar"
    with System(tmp_path / "first") as first:
        spec = first.spec(
            limits={"max_steps": STEPS},
            checkpoint={"every_steps": 2},
            staleness={"max_staleness": 1},
            rollout={"stub": {"step_s": 0.05, "mean_length": 30}},
        )
        job = first.submit(spec)
        first.until(lambda: first.job(job)["progress"]["step"] >= 3, timeout_s=240, what="step 3")
        coordinator(first, "backup", backup, "--weights", first.directory / "data" / "weights")
        assert first.job(job)["status"] == "running", "the backup came too late"
        # What comes after the backup is lost with the machine; the numbers it used must not come again.
        at = first.job(job)["progress"]["step"]
        first.until(lambda: first.job(job)["progress"]["step"] > at, timeout_s=240, what="another step")
        for service in first.services:
            service.kill()
    second = System(
        tmp_path / "second",
        sql_url=postgres_server.database(),
        settings={"RLHARVEST_ROOTS": json.dumps([str(first.directory)])},
    )
    coordinator(second, "restore", backup, "--weights", second.directory / "data" / "weights")
    with second:
        assert second.job(job)["status"] in ("queued", "running")
        ended = second.wait(job, "succeeded", timeout_s=240)
        samples = second.samples(job)
        check_job(spec, ended, samples)
        # What had not reached SQL was started anew under its old ordinal: no prompt was left out.
        trained = {sample["group"] for sample in samples.values() if sample["state"] == "trained"}
        assert trained == set(range(STEPS * spec["algorithm"]["prompts_per_step"]))
        (event,) = [event for event in second.client.events(job) if event["type"] == "job.restored"]
        assert event["data"]["step"] in range(2, STEPS, 2)
        assert ended["latest_checkpoint"].startswith(str(second.directory))

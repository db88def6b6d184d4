"""What must not have changed: the rows of a job that is over, its versions, and that every process is the same."""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.testing.system import System

TABLES = ("events", "steps", "versions", "checkpoints", "groups", "samples")
UNKNOWN = "rljob_01k0000000000000000000none"
"""A job that never was."""


@dataclass(frozen=True, slots=True)
class Still:
    """A picture of what bad input may not touch."""

    rows: dict[str, str]
    """Digest of every row of jobs that are over, by table."""
    versions: tuple[str, ...]
    """Files of the weight service for those jobs."""
    processes: dict[str, int]
    """Process id of every service."""


def look(system: System, over: str) -> Still:
    """Take the picture; `over` is a job that has ended."""
    with sqlite3.connect(f"file:{database(system)}?mode=ro", uri=True) as records:
        rows = {table: _digest(records, f"SELECT * FROM {table} WHERE job = ?", over) for table in TABLES}
        rows["jobs"] = _digest(records, "SELECT * FROM jobs WHERE id = ?", over)
    return Still(
        rows=rows,
        versions=tuple(sorted(str(file) for file in _weights(system).glob(f"jobs/{over}/versions/*"))),
        processes={
            service.name: service.process.pid
            for service in system.services
            if service.process is not None and service.running
        },
    )


def database(system: System) -> Path:
    """Return the file of the coordinator's records."""
    (path,) = (system.directory / "data").rglob("*.sqlite3")
    return path


def differences(before: Still, after: Still) -> list[str]:
    """Return what changed, in words."""
    found = [f"rows of {table} changed" for table, rows in before.rows.items() if after.rows[table] != rows]
    if before.versions != after.versions:
        found.append(f"versions: {before.versions} became {after.versions}")
    found += [
        f"{name} died" if name not in after.processes else f"{name} was started again"
        for name, pid in before.processes.items()
        if after.processes.get(name) != pid
    ]
    return found


def problems(system: System) -> list[str]:
    """Return what the services say of faults that nobody foresaw."""
    return [
        f"{service.name}: {line[:4000]}"
        for service in system.services
        if service.log.exists()
        for line in service.log.read_text(errors="replace").splitlines()
        if any(sign in line for sign in SIGNS)
    ]


SIGNS = ("Traceback (most recent", "rpc.failed", "request.failed", ".crashed", "task.died", "never retrieved")


def slow_job(system: System, *, steps: int = 2, step_s: float = 0.03) -> dict[str, Any]:
    """Return a job that takes long enough to be disturbed."""
    return system.spec(rollout={"stub": {"step_s": step_s, "mean_length": 30}}, limits={"max_steps": steps})


def _digest(records: sqlite3.Connection, query: str, job: str) -> str:
    rows = sorted(map(repr, records.execute(query, (job,)).fetchall()))
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _weights(system: System) -> Path:
    return system.directory / "data" / "weights"

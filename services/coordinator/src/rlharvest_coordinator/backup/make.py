"""Making a backup of a system that may run, and bringing one back into an empty one."""

from __future__ import annotations

import importlib.metadata
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rlharvest.errors import Conflict, NotFound
from rlharvest.jobs.state import TERMINAL
from sqlalchemy import select

from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.backup import archive, checkpoints, rows, turn
from rlharvest_coordinator.backup.archive import Index
from rlharvest_coordinator.tables import Job

Say = Callable[[str], None]
"""Takes one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a system keeps what a backup holds."""

    sql_url: str
    checkpoints: Path
    weights: Path
    """Directory of the weight service, which holds `jobs`."""


async def backup(places: Places, output: BinaryIO, *, scratch: Path | None, now: float, say: Say) -> Index:
    """Write a backup of a system; it may go on meanwhile.

    Args:
        scratch: directory for a copy of the database while it is written; None: the system's.
        now: seconds since 1970.

    Raises:
        InvalidField: the database is at another revision than this version's.
        NotFound: a job that is under way has no numbers at the weight service.
    """
    writer = archive.Writer(output)
    for job in checkpoints.jobs(places.checkpoints):
        with ExitStack() as stack:
            newest = checkpoints.newest(places.checkpoints, job, stack)
            if newest is None:
                continue
            for name, (file, size) in sorted(newest.files.items()):
                writer.add(f"checkpoints/{job}/step_{newest.step}/{name}", file, size)
            total = sum(size for _, size in newest.files.values())
            say(f"checkpoint of step {newest.step} of {job}, {_megabytes(total)}")
    with tempfile.TemporaryDirectory(dir=scratch, prefix="rlharvest-backup-") as directory:
        copy = Path(directory) / archive.DATABASE
        counts = await rows.dump(places.sql_url, copy)
        with copy.open("rb") as file:
            writer.add(archive.DATABASE, file, copy.stat().st_size)
        say(f"database, {_shown(counts)}, {_megabytes(copy.stat().st_size)}")
        under_way = await _under_way(copy)
    for job, published in under_way.items():
        state = places.weights / "jobs" / job / "state.json"
        try:
            data = state.read_bytes()
        except FileNotFoundError as error:
            if not published:
                continue
            raise NotFound(
                f"job {job} has published weights, and {state} does not exist. Is --weights the weight service's "
                "directory (RLHARVEST_DATA_DIR/weights)?"
            ) from error
        writer.add(f"numbers/{job}/state.json", io.BytesIO(data), len(data))
    version = importlib.metadata.version("rlharvest")
    index = Index(rlharvest=version, made_at=now, members=writer.members)
    writer.finish(index)
    return index


async def restore(source: BinaryIO, places: Places, *, now: float, say: Say) -> Index:
    """Bring a backup back into a system that is empty and does not run. The database is written last, in one
    transaction; when anything fails before, what was put in place is taken away again.

    Args:
        now: seconds since 1970.

    Raises:
        Conflict: the system is not empty.
        CorruptData: the backup is not whole.
    """
    versions = places.weights / "jobs"
    for directory in (places.checkpoints, versions):
        directory.mkdir(parents=True, exist_ok=True)
        if found := sorted(path.name for path in directory.iterdir() if not path.name.startswith(".")):
            raise Conflict(f"{directory} is not empty: it has {found[0]!r}. Restore into a new one, or move it away")
    await migrations.migrate(places.sql_url)
    await rows.require_empty(places.sql_url)
    placed: list[Path] = []
    # Beside the checkpoints, so that they come to their place by a rename.
    with tempfile.TemporaryDirectory(dir=places.checkpoints, prefix=".restoring-") as name:
        unpacked = Path(name)
        index = archive.unpack(source, unpacked)
        say(f"the backup is whole; version {index.rlharvest} made it {_minutes(now - index.made_at)} ago")
        database = unpacked / archive.DATABASE
        await migrations.migrate(rows.sqlite_url(database))  # a backup of an older version
        saved = unpacked / "checkpoints"
        steps = {job: checkpoints.steps(saved / job) for job in checkpoints.jobs(saved)}
        going_on = await _turn_over(database, places, steps, index, now)
        try:
            for job in steps:
                placed.append(places.checkpoints / job)
                (saved / job).rename(placed[-1])
            for state in sorted((unpacked / "numbers").glob("*/state.json")):
                placed.append(versions / state.parent.name)
                placed[-1].mkdir()
                shutil.copyfile(state, placed[-1] / state.name)
            os.sync()
            counts = await rows.load(database, places.sql_url)
        except BaseException:
            for path in placed:
                shutil.rmtree(path, ignore_errors=True)
            raise
    say(f"database, {_shown(counts)}")
    for job, found_steps in sorted(steps.items()):
        say(f"checkpoint of step {max(found_steps)} of {job}")
    say(f"{len(going_on)} jobs go on when the system is started" + (": " + ", ".join(going_on) if going_on else ""))
    return index


async def _turn_over(
    database: Path, places: Places, steps: Mapping[str, set[int]], index: Index, now: float
) -> list[str]:
    engine = sql.connect(rows.sqlite_url(database))
    try:
        return await turn.over(
            sql.sessions(engine),
            checkpoints_dir=places.checkpoints.absolute(),
            restored=steps,
            made_at=index.made_at,
            now=now,
        )
    finally:
        await engine.dispose()


async def _under_way(database: Path) -> dict[str, bool]:
    """Return the jobs that are not over, and whether each has published weights."""
    engine = sql.connect(rows.sqlite_url(database))
    try:
        async with sql.sessions(engine)() as session:
            over = [status.value for status in TERMINAL]
            query = select(Job.id, Job.version).where(Job.status.not_in(over)).order_by(Job.id)
            return {job: version is not None for job, version in await session.execute(query)}
    finally:
        await engine.dispose()


def _shown(counts: rows.Counts) -> str:
    names = ("jobs", "samples", "events")
    return ", ".join(f"{counts[name]} {name}" for name in names)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _minutes(seconds: float) -> str:
    return f"{max(0.0, seconds) / 60:.0f} minutes"

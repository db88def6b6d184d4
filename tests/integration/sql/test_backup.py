"""Backup and restore with real databases and files, no services; tests/chaos/test_backup.py has a job go on from one."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rlharvest.errors import Conflict, CorruptData, NotFound
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import Move
from rlharvest.weights.manifest import describe
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.backup import archive, checkpoints, make, rows, turn
from rlharvest_coordinator.backup.make import Places
from rlharvest_coordinator.leader import RELEASED
from rlharvest_coordinator.store import checkpoints as checkpoint_rows
from rlharvest_coordinator.store import events, groups, jobs
from rlharvest_coordinator.store.events import NewEvent
from rlharvest_coordinator.tables import Base, Event, Group, Leader, Sample
from sqlalchemy import select

TRAINED = ["trained", "trained", "trained", "committed", "dropped"]
"""State of group n, in batch n."""


@pytest.fixture(params=["sqlite", "postgresql"])
def target_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database to restore into, whatever the first one is."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'restored.sqlite3'}"
    url: str = request.getfixturevalue("postgres_server").database()
    return url


def _checkpoint(root: Path, job: str, step: int) -> Path:
    path = root / job / f"step_{step}"
    (path / "trainer").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes([step]) * 70_000)
    (path / "trainer" / "optimizer.safetensors").write_bytes(b"moments" * step)
    names = ("model.safetensors", "trainer/optimizer.safetensors")
    files = {name: describe(path / name).model_dump(mode="json") for name in names}
    (path / "state.json").write_text(json.dumps({"step": step, "files": files}))
    return path


class Origin:
    """A system with one job that ran for three steps and saved after the second and the third."""

    def __init__(self, directory: Path, url: str) -> None:
        self.places = Places(sql_url=url, checkpoints=directory / "checkpoints", weights=directory / "weights")
        self.job = ""

    async def fill(self, spec: JobSpec) -> Origin:
        await migrations.migrate(self.places.sql_url)
        engine = sql.connect(self.places.sql_url)
        sessions = sql.sessions(engine)
        row, _ = await jobs.create(sessions, spec, key=None, now=1.0)
        self.job = row.id
        await jobs.move(sessions, row.id, Move.VALIDATED, now=1.0)
        await jobs.claim(sessions, trainer="t", now=1.0)
        await jobs.update(sessions, row.id, lambda job: setattr(job, "version", 3))
        async with sessions.begin() as session:
            session.add(Leader(id=1, epoch=7, holder="somebody", beat=3))
            for n, state in enumerate(TRAINED):
                session.add(
                    Group(job=row.id, ordinal=n, state=state, step=n, position=0, prompt=0, data_epoch=0, tokens=2,
                          staleness=0, at=1.0)
                )  # fmt: skip
                session.add(
                    Sample(job=row.id, handle=n, response_id=f"resp_{n}", group=n, finish="eos", ids=bytes(range(8)),
                           logprobs=bytes(range(255, 247, -1)), runs=[[2, n]], pieces=[[0, 2, str(7 << 32), "w"]],
                           prompt_text="p", text="ü\N{GRINNING FACE}", reward=0.1, components=[["r", None, 1.0]], at=1.0)
                )  # fmt: skip
        await events.append(sessions, [self.event(0), self.event(1)])
        for step in (2, 3):
            path = _checkpoint(self.places.checkpoints, row.id, step)
            await checkpoint_rows.record(
                sessions, row.id, step, version=step, path=str(path), digest="d", metrics={}, now=1.0
            )
        state = self.places.weights / "jobs" / row.id / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text('{"last": 3}')
        await engine.dispose()
        return self

    def event(self, n: int) -> NewEvent:
        return NewEvent(id=f"evt_{n}", job=self.job, level="info", type="t", message="m", at=1.0, source=self.job)

    async def backup(self) -> bytes:
        output = io.BytesIO()
        await make.backup(self.places, output, scratch=None, now=100.0, say=lambda _: None)
        return output.getvalue()


@pytest.fixture
async def origin(tmp_path: Path, database_url: str, spec: JobSpec) -> Origin:
    return await Origin(tmp_path / "origin", database_url).fill(spec)


def _files(directory: Path, beginning: str) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name.startswith(beginning))


async def _everything(url: str) -> dict[str, list[Any]]:
    engine = sql.connect(url)
    async with engine.connect() as connection:
        found = {
            table.name: [tuple(row) for row in await connection.execute(select(table).order_by(*table.primary_key))]
            for table in Base.metadata.sorted_tables
        }
    await engine.dispose()
    return found


async def test_every_row_is_the_same_in_the_other_database(origin: Origin, target_url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite3"
    counts = await rows.dump(origin.places.sql_url, copy)
    assert [path.name for path in _files(tmp_path, "copy.")] == [copy.name], "a journal is left beside the file"
    assert {name: counts[name] for name in ("jobs", "groups", "samples", "events")} == {
        "jobs": 1,
        "groups": 5,
        "samples": 5,
        "events": 2,
    }
    await migrations.migrate(target_url)
    assert await rows.load(copy, target_url) == counts
    assert await _everything(target_url) == await _everything(origin.places.sql_url)
    engine = sql.connect(target_url)
    assert await events.append(sql.sessions(engine), [origin.event(2)]) == 1, "new events get new numbers"
    async with engine.connect() as connection:
        assert len(set(await connection.scalars(select(Event.number)))) == 3
    await engine.dispose()


async def test_what_is_restored_fits_together_and_no_number_comes_again(
    origin: Origin, target_url: str, tmp_path: Path
) -> None:
    # Step 3 was saved, and is gone by the time of the backup: its batches are not covered any more.
    shutil.rmtree(origin.places.checkpoints / origin.job / "step_3")
    backup = await origin.backup()
    places = Places(sql_url=target_url, checkpoints=tmp_path / "c", weights=tmp_path / "w")
    await make.restore(io.BytesIO(backup), places, now=160.0, say=lambda _: None)

    engine = sql.connect(target_url)
    sessions = sql.sessions(engine)
    job = await jobs.get(sessions, origin.job)
    assert (job.status, job.trainer, job.version, job.fence) == ("running", None, None, 1 + turn.LEAP)
    found = [state async for _, state, _, _ in groups.all_of(sessions, origin.job)]
    assert found == ["trained", "trained", "committed", "committed", "dropped"]
    latest = await checkpoint_rows.latest(sessions, origin.job)
    assert latest is not None
    assert (latest.step, Path(latest.path)) == (2, tmp_path / "c" / origin.job / "step_2")
    assert (Path(latest.path) / "model.safetensors").read_bytes() == b"\2" * 70_000
    assert (tmp_path / "w" / "jobs" / origin.job / "state.json").read_text() == '{"last": 3}'
    async with sessions() as session:
        leader = (await session.scalars(select(Leader))).one()
        assert (leader.epoch, leader.holder) == (7 + turn.LEAP, RELEASED)
    (event,) = [row for row in (await events.newest(sessions, origin.job, limit=9)).rows if row.type == "job.restored"]
    assert event.data == {"step": 2, "made_at": 100.0}
    await engine.dispose()


async def test_a_system_that_is_not_empty_is_refused_and_left_as_it_is(
    origin: Origin, target_url: str, tmp_path: Path
) -> None:
    backup = await origin.backup()
    places = Places(sql_url=target_url, checkpoints=tmp_path / "c", weights=tmp_path / "w")
    await make.restore(io.BytesIO(backup), places, now=160.0, say=lambda _: None)
    before = await _everything(target_url)
    with pytest.raises(Conflict, match="is not empty"):
        await make.restore(io.BytesIO(backup), places, now=160.0, say=lambda _: None)
    elsewhere = Places(sql_url=target_url, checkpoints=tmp_path / "c2", weights=tmp_path / "w2")
    with pytest.raises(Conflict, match="has rows"):
        await make.restore(io.BytesIO(backup), elsewhere, now=160.0, say=lambda _: None)
    assert await _everything(target_url) == before
    assert list(elsewhere.checkpoints.iterdir()) == []


async def test_weights_that_are_elsewhere_are_asked_for(origin: Origin) -> None:
    shutil.rmtree(origin.places.weights)
    with pytest.raises(NotFound, match="--weights"):
        await origin.backup()


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _without_index(data: bytes) -> bytes:
    return _rewritten(data, lambda name: name != archive.INDEX)


def _without_a_checkpoint(data: bytes) -> bytes:
    return _rewritten(data, lambda name: not name.startswith("checkpoints/"))


def _changed(data: bytes) -> bytes:
    at = data.index(b"\3" * 1000)
    return data[:at] + b"\4" + data[at + 1 :]


def _with_a_path_that_leads_out(data: bytes) -> bytes:
    return data.replace(b"checkpoints/rljob_", b"checkpoints/../../", 1)


def _something_else(data: bytes) -> bytes:
    return b"PK\3\4" + data[:100]


def _rewritten(data: bytes, keep: Callable[[str], bool]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as source, tarfile.open(fileobj=output, mode="w") as target:
        for member in source:
            if keep(member.name):
                target.addfile(member, source.extractfile(member))
    return output.getvalue()


@pytest.mark.parametrize(
    "damage", [_cut, _without_index, _without_a_checkpoint, _changed, _with_a_path_that_leads_out, _something_else]
)
async def test_a_damaged_backup_is_refused_and_nothing_of_it_stays(
    tmp_path: Path, spec: JobSpec, damage: Callable[[bytes], bytes]
) -> None:
    origin = await Origin(tmp_path / "origin", rows.sqlite_url(tmp_path / "origin.sqlite3")).fill(spec)
    backup = damage(await origin.backup())
    target = rows.sqlite_url(tmp_path / "new.sqlite3")
    places = Places(sql_url=target, checkpoints=tmp_path / "new" / "c", weights=tmp_path / "new" / "w")
    with pytest.raises(CorruptData):
        await make.restore(io.BytesIO(backup), places, now=160.0, say=lambda _: None)
    assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == []
    assert not any((await _everything(target)).values())
    await make.restore(io.BytesIO(await origin.backup()), places, now=160.0, say=lambda _: None)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_whole_all_the_same(tmp_path: Path) -> None:
    path = _checkpoint(tmp_path, "job", 2)
    _checkpoint(tmp_path, "job", 3)
    (tmp_path / "job" / "step_3" / "model.safetensors").write_bytes(b"not what state.json says")
    (tmp_path / "job" / "step_4").mkdir()  # of a deletion that was cut short
    with ExitStack() as stack:
        found = checkpoints.newest(tmp_path, "job", stack)
        assert found is not None
        assert found.step == 2
        shutil.rmtree(path)
        file, size = found.files["model.safetensors"]
        assert file.read() == b"\2" * size
    with ExitStack() as stack:
        assert checkpoints.newest(tmp_path, "job", stack) is None
    assert list(checkpoints.jobs(tmp_path / "nowhere")) == []

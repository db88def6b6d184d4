"""Which server and which job a command means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.cli.connection import local_server, pick
from rlharvest.errors import InvalidField, NotFound
from rlharvest.ids import new_id
from rlharvest.keyring import Keyring
from rlharvest.local.datadir import DataDirectory

JOBS = [{"id": "rljob_01b2"}, {"id": "rljob_01b1"}, {"id": "rljob_01a2"}]


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("last", "rljob_01b2"),
        ("rljob_01a2", "rljob_01a2"),
        ("rljob_01a", "rljob_01a2"),
        ("01a", "rljob_01a2"),
        ("b1", "rljob_01b1"),
        ("…a2", "rljob_01a2"),
    ],
)
def test_a_job_is_meant_by_its_id_a_unique_part_of_it_or_last(name: str, job: str) -> None:
    assert pick(JOBS, name) == job


def test_several_or_none_are_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidField, match="2 jobs are meant: rljob_01b2, rljob_01b1"):
        pick(JOBS, "01b")
    with pytest.raises(NotFound, match="rlharvest jobs"):
        pick(JOBS, "zz")
    with pytest.raises(NotFound, match="no job yet"):
        pick([], "last")


@given(st.lists(st.floats(0, 2e9), min_size=1, max_size=20))
def test_every_job_is_found_by_its_whole_id(times: list[float]) -> None:
    jobs = [{"id": new_id("rljob", now=time)} for time in times]
    assert all(pick(jobs, job["id"]) == job["id"] for job in jobs)


def test_a_running_up_of_this_directory_is_found_and_a_dead_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHARVEST_DATA_DIR", raising=False)
    assert local_server(tmp_path) == (None, None)
    data = DataDirectory(tmp_path / ".rlharvest")
    data.create()
    data.write("up.json", {"pid": os.getpid(), "url": "http://127.0.0.1:1234"})
    assert local_server(tmp_path) == ("http://127.0.0.1:1234", None)
    keyring = Keyring(tmp_path / ".rlharvest" / "secrets")
    keyring.make()
    assert local_server(tmp_path) == ("http://127.0.0.1:1234", keyring.token("api_token"))
    data.write("up.json", {"pid": 2**22 + 1, "url": "http://127.0.0.1:1234"})
    assert local_server(tmp_path) == (None, None)

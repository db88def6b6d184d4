"""Identifiers sort by time, never repeat, and fit everywhere they are used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.bus import subject
from rlharvest.ids import new_id, parse_response_id, response_id

TIMES = st.floats(0, 4_102_444_800.0)


@given(TIMES, TIMES)
def test_identifiers_sort_by_the_time_of_their_making(one: float, two: float) -> None:
    """To the millisecond; within one the order is random."""
    first, second = new_id("evt", now=one), new_id("evt", now=two)
    if int(one * 1000) != int(two * 1000):
        assert (first < second) == (one < two)


def test_identifiers_of_one_instant_differ() -> None:
    assert len({new_id("rljob", now=1.0) for _ in range(1000)}) == 1000


@given(TIMES)
def test_an_identifier_is_a_subject_token_and_lower_case(now: float) -> None:
    job = new_id("rljob", now=now)
    assert job == job.lower()
    assert len(job) == len("rljob_") + 26
    assert subject("spans", job, new_id("wkr", now=now)).split(".")[3] == job


@given(st.integers(0, 2**32 - 1))
def test_a_response_id_names_its_job_and_handle(handle: int) -> None:
    job = new_id("rljob")
    assert parse_response_id(response_id(job, handle)) == (job, handle)


@pytest.mark.parametrize(
    "text", ["", "resp", "resp_", "resp_1", "resp__1", "resp_a_", "resp_a_-1", "job_a_1", "resp_a_1x"]
)
def test_what_is_no_response_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a response id"):
        parse_response_id(text)

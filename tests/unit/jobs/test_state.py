"""The life of a job: nothing leaves the table, and what is over stays over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import Conflict
from rlharvest.jobs.state import TERMINAL, Move, Status, advance

MOVES = st.lists(st.sampled_from(list(Move)), max_size=30)


@given(st.sampled_from(list(Status)), MOVES)
def test_a_terminal_status_never_changes(status: Status, moves: list[Move]) -> None:
    """Whatever happens to a job afterwards."""
    for move in moves:
        before = status
        try:
            status = advance(status, move)
        except Conflict:
            assert status is before
        if before in TERMINAL:
            assert status is before


@given(MOVES)
def test_a_refusal_names_the_status_the_move_and_what_is_possible(moves: list[Move]) -> None:
    status = Status.VALIDATING
    for move in moves:
        try:
            status = advance(status, move)
        except Conflict as error:
            text = str(error)
            assert status.value in text
            assert move.value in text
            possible = text.rpartition("possible: ")[2]
            assert possible
            for name in possible.split(", "):
                if name != "none":
                    advance(status, Move(name))


def reachable(start: Status) -> set[Status]:
    found, todo = {start}, [start]
    while todo:
        status = todo.pop()
        for move in Move:
            try:
                after = advance(status, move)
            except Conflict:
                continue
            if after not in found:
                found.add(after)
                todo.append(after)
    return found


def test_every_status_can_be_reached_and_every_job_can_end() -> None:
    assert reachable(Status.VALIDATING) == set(Status)
    for status in Status:
        assert reachable(status) & TERMINAL, f"a job that is {status} can never end"


@pytest.mark.parametrize("status", [status for status in Status if status not in TERMINAL])
def test_a_user_can_cancel_whatever_is_not_over(status: Status) -> None:
    assert advance(status, Move.CANCEL) in (Status.CANCELLING, Status.CANCELLED)


def test_cancelling_twice_is_the_same_as_once() -> None:
    assert advance(Status.CANCELLING, Move.CANCEL) is Status.CANCELLING
    assert advance(Status.CANCELLED, Move.CANCEL) is Status.CANCELLED


def test_a_job_that_pauses_can_be_resumed_before_and_after_it_has_paused() -> None:
    pausing = advance(Status.RUNNING, Move.PAUSE)
    assert advance(pausing, Move.RESUME) is Status.RUNNING
    assert advance(advance(pausing, Move.PAUSED), Move.RESUME) is Status.QUEUED


def test_a_job_whose_last_step_is_done_succeeds_even_if_it_was_asked_to_pause_or_cancel() -> None:
    assert advance(Status.PAUSING, Move.SUCCEED) is Status.SUCCEEDED
    assert advance(Status.CANCELLING, Move.SUCCEED) is Status.SUCCEEDED

"""Which version a worker is offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rlharvest_coordinator.leases import Leases
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.run import Run


@pytest.mark.parametrize(
    ("serving", "offered", "older"),
    [(8, 9, True), (7, 9, False), (None, 9, False), (5, 8, False), (8, 10, False)],
)
def test_a_worker_is_not_taken_back_to_an_earlier_step(serving: int | None, offered: int, older: bool) -> None:
    """A trainer that resumed from step 5 publishes it as version 9: who serves step 8 stays until step 9 is done."""
    run: Any = SimpleNamespace(scope=SimpleNamespace(versions={5: 5, 7: 5, 8: 8, 9: 5, 10: 9}))
    leases = Leases.__new__(Leases)
    assert leases._older(cast(Run, run), serving, offered) is older


@pytest.mark.parametrize(
    ("job", "coming", "taken_up", "awaits"),
    [("a", {"a"}, False, True), ("a", {"a"}, True, False), ("a", set(), False, False), (None, {"a"}, False, False)],
)
def test_a_worker_keeps_a_job_that_a_new_coordinator_has_not_taken_up_yet(
    job: str | None, coming: set[str], taken_up: bool, awaits: bool
) -> None:
    """To release it would throw away what it has generated while nobody led."""
    leases = Leases.__new__(Leases)
    leases.coming = coming
    leases.runs = {"a": cast(Run, SimpleNamespace())} if taken_up else {}
    assert leases._awaits(cast(Seat, SimpleNamespace(job=job, heartbeat=object()))) is awaits


def test_a_worker_that_was_not_heard_yet_is_offered_nothing() -> None:
    """It may serve a job: another one would take its buffer from it."""
    leases = Leases.__new__(Leases)
    leases.coming, leases.runs = set(), {}
    assert leases._awaits(cast(Seat, SimpleNamespace(job=None, heartbeat=None)))

"""Which version a worker is offered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rlharvest_coordinator.leases import Leases
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

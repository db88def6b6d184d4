"""Which batch a group will be in, and so how old its tokens may be: counted without what was dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.jobs.model import parse
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import Group
from rlharvest.policies.staleness import Gate
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.dispatcher import Dispatcher
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.history import History
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import groups

SIZE = 2


def harvest(
    *, alive: list[int], running: list[int], bound: int = 0, order: str = "admission", step: int = 0
) -> Harvest:
    """What a job has brought in, without anyone to reach."""
    spec = parse(
        {
            "model": "m",
            "dataset": {"path": "d.jsonl"},
            "rewards": [{"builtin": "exact_match"}],
            "algorithm": {"prompts_per_step": SIZE},
            "staleness": {"max_staleness": bound, "order": order},
            "sampling": {"num_generations": 2},
        }
    )
    book = Book("rljob_test")
    for ordinal in running:
        book.groups[ordinal] = Group(ordinal, 2 * ordinal, 2, 8, 0, 0)
    scope: Any = SimpleNamespace(
        id="rljob_test",
        spec=spec,
        book=book,
        row=SimpleNamespace(step=step),
        gate=Gate(SIZE, bound, spec.limits.max_steps),
    )
    found = Harvest(cast(Scope, scope), Courier(cast(Scope, scope), History(cast(Scope, scope))))
    for ordinal in sorted(alive):
        found.tally.record(ordinal, groups.ACCEPTED)
    return found


ORDINALS = st.sets(st.integers(0, 30), max_size=20)


@given(ORDINALS, ORDINALS)
def test_a_rank_counts_every_group_before_that_is_not_dropped(alive: set[int], running: set[int]) -> None:
    """Those in SQL and those in the ledger; a dropped one is in neither, so what follows it moves up."""
    running -= alive
    found = harvest(alive=list(alive), running=list(running)).ranks()
    assert found == {ordinal: sum(other < ordinal for other in alive | running) for ordinal in running}


def test_a_group_that_is_in_sql_and_not_yet_out_of_the_ledger_counts_once() -> None:
    found = harvest(alive=[0, 1], running=[1, 2])
    assert found.ranks() == {2: 2}


def test_a_book_that_came_back_without_its_tail_changes_no_rank() -> None:
    """The ledger has groups again that are in SQL: they wait for nothing but to be forgotten."""
    found = harvest(alive=[0, 1], running=[2])
    assert (found.settled, found.running()) == (set(), {2})
    book = Book("rljob_test")
    for ordinal in (1, 2, 3):
        book.groups[ordinal] = Group(ordinal, 2 * ordinal, 2, 8, 0, 0)
    cast(Any, found.scope).book = book
    assert (found.settled, found.running()) == ({1}, {2, 3})
    assert found.ranks() == {2: 2, 3: 3}
    del book.groups[1]
    assert found.settled == set()


@given(ORDINALS, st.integers(0, 3))
def test_the_oldest_step_is_the_bound_below_the_batch(running: set[int], bound: int) -> None:
    """In order of admission the rank says the batch, and the batch how old a version may sample the group."""
    book_of = harvest(alive=[], running=list(running), bound=bound)
    dispatcher = Dispatcher(book_of.scope, book_of.courier, book_of)
    wanted = {ordinal: max(0, rank // SIZE - bound) for rank, ordinal in enumerate(sorted(running))}
    assert dispatcher._oldest_steps() == wanted


def test_in_order_of_completion_only_the_present_step_bounds_the_age() -> None:
    book_of = harvest(alive=[], running=[0, 1, 2, 3], bound=1, order="completion", step=5)
    dispatcher = Dispatcher(book_of.scope, book_of.courier, book_of)
    assert dispatcher._oldest_steps() == dict.fromkeys(range(4), 4)


def test_totals_add_up_at_every_point() -> None:
    """submitted = trained + dropped + outstanding; a group in SQL that the ledger still has counts once."""
    found = harvest(alive=[0, 1], running=[1, 3, 4])
    found.tally.record(2, groups.DROPPED)
    found.tally.move(0, groups.ACCEPTED, groups.COMMITTED)
    found.tally.move(0, groups.COMMITTED, groups.TRAINED, 7)
    totals = found.totals()
    names = ("submitted", "trained", "dropped", "outstanding")
    assert [totals[name] for name in names] == [10, 2, 2, 6]
    assert totals["trained_tokens"] == 7

"""Completions of the gateway come first, and leave training its half of every worker."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.policies.dispatch import Candidate, Waiting, assign, share

WORKERS = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=5).map(
    lambda rows: [
        Candidate(
            worker=f"w{at}", slots=slots, held=min(held, slots), served=min(served, held, slots), step=0, version=0
        )
        for at, (slots, held, served) in enumerate(rows)
    ]
)


@given(WORKERS, st.integers(0, 30), st.integers(0, 30))
def test_what_is_served_comes_first_and_never_takes_more_than_its_share(
    workers: list[Candidate], served: int, trained: int
) -> None:
    waiting = [Waiting(handle=handle, served=True) for handle in range(served)]
    waiting += [Waiting(handle=handle) for handle in range(served, served + trained)]
    pairs = assign(waiting, workers)
    taken = Counter(worker for _, worker in pairs)
    taken_served = Counter(worker for handle, worker in pairs if handle < served)
    free_of_trained = free_of_served = 0
    for worker in workers:
        assert worker.held + taken[worker.worker] <= worker.slots
        before = worker.served
        assert before + taken_served[worker.worker] <= max(before, share(worker.slots))
        free = worker.slots - worker.held - taken[worker.worker]
        free_of_trained += free
        free_of_served += min(free, max(0, share(worker.slots) - before - taken_served[worker.worker]))
    if len(pairs) - sum(taken_served.values()) < trained:
        assert free_of_trained == 0, "a response of training waits beside a free slot"
    if sum(taken_served.values()) < served and not any(handle >= served for handle, _ in pairs):
        assert free_of_served == 0, "a served response waits beside a slot that it may have"
    alone = assign([one for one in waiting if one.served], workers)
    assert [pair for pair in pairs if pair[0] < served] == alone, "training came before what is served"


def test_the_share_is_half_and_at_least_one() -> None:
    assert [share(slots) for slots in (1, 2, 3, 8, 9)] == [1, 1, 1, 4, 4]

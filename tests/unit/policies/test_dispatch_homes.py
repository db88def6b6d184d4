"""A response goes where its prompt is, as far as an even load allows."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.policies.dispatch import Candidate, Waiting, assign, share, slack

NAMES = [f"w{at}" for at in range(5)]
PROMPTS = st.integers(0, 3)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        worker=st.sampled_from(NAMES),
        slots=st.integers(1, 24),
        held=st.integers(0, 12),
        served=st.integers(0, 2),
        step=st.integers(0, 1),
        version=st.integers(0, 1),
        quarantined=st.booleans(),
    ),
    unique_by=lambda item: item.worker,
)
WAITING = st.lists(
    st.builds(
        Waiting,
        handle=st.integers(0, 60),
        min_step=st.integers(0, 1),
        min_version=st.integers(0, 1),
        suspected=st.sampled_from([False, False, False, True]),
        served=st.booleans(),
        prompt=st.one_of(st.none(), PROMPTS),
    ),
    unique_by=lambda item: item.handle,
    max_size=40,
)
HOMES = st.dictionaries(PROMPTS, st.frozensets(st.sampled_from([*NAMES, "gone"])))


def by_looking_at_all(
    waiting: list[Waiting], workers: list[Candidate], homes: Mapping[int, frozenset[str]]
) -> list[tuple[int, str]]:
    """The rule, one response after another."""
    held, served = {one.worker: one.held for one in workers}, {one.worker: one.served for one in workers}
    alone, there, pairs = set[str](), {prompt: set(names) for prompt, names in homes.items()}, []
    for response in waiting:
        able = {
            one.worker: (held[one.worker] / one.slots, one.worker)
            for one in workers
            if not one.quarantined
            and one.worker not in alone
            and held[one.worker] < one.slots
            and one.step >= response.min_step
            and one.version >= response.min_version
            and not (response.suspected and held[one.worker])
            and not (response.served and served[one.worker] >= share(one.slots))
        }
        if not able:
            continue
        least, name = min(able.values())
        known = there.setdefault(response.prompt, set()) if response.prompt is not None else set[str]()
        slots = {one.worker: one.slots for one in workers}
        if near := [able[home] for home in known & able.keys() if able[home][0] <= least + slack(slots[home])]:
            name = min(near)[1]
        known.add(name)
        held[name] += 1
        served[name] += response.served
        if response.suspected:
            alone.add(name)
        pairs.append((response.handle, name))
    return pairs


@given(WAITING, CANDIDATES, HOMES)
def test_a_home_that_is_hardly_ahead_gets_it_else_the_least_loaded(
    waiting: list[Waiting], workers: list[Candidate], homes: dict[int, frozenset[str]]
) -> None:
    assert assign(waiting, workers, homes) == by_looking_at_all(waiting, workers, homes)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=6), st.integers(0, 40), st.integers(1, 8))
def test_homes_unbalance_the_load_by_no_more_than_the_slack(slots: list[int], groups: int, n: int) -> None:
    """From an empty fleet, whatever the groups: nobody is more than slack and one response ahead of a worker with room."""
    workers = [Candidate(worker=f"w{at}", slots=each, held=0, step=0, version=0) for at, each in enumerate(slots)]
    pairs = assign([Waiting(handle=handle, prompt=handle // n) for handle in range(groups * n)], workers)
    loads = {one.worker: sum(name == one.worker for _, name in pairs) / one.slots for one in workers}
    for one in workers:
        assert loads[one.worker] <= min(loads.values()) + slack(one.slots) + 1 / one.slots + 1e-9
    assert len(pairs) == min(groups * n, sum(slots))


def test_siblings_start_together_and_one_that_lost_its_worker_joins_them() -> None:
    """Four groups of four on four workers with 32 slots: one prefill each, and none for a late sibling."""
    workers = [Candidate(worker=f"w{at}", slots=32, held=0, step=0, version=0) for at in range(4)]
    pairs = assign([Waiting(handle=handle, prompt=handle // 4) for handle in range(16)], workers)
    assert len({(handle // 4, name) for handle, name in pairs}) == 4
    busy = [Candidate(worker=f"w{at}", slots=32, held=2 * at, step=0, version=0) for at in range(8)]
    assert assign([Waiting(handle=3, prompt=0)], busy, {0: {"w4", "w6"}}) == [(3, "w4")]
    assert assign([Waiting(handle=3, prompt=0)], busy, {0: {"w5", "w6"}}) == [(3, "w0")], "too far ahead"

"""Groups are whole, worker counts are the best there are, and stragglers go where they may."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.policies import pipe
from rlharvest.policies.pipe import Action, Running, Target

# --- ranks and turns ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e5), max_size=60), st.integers(1, 8))
def test_every_prompt_is_in_one_group_and_longer_ones_are_in_later_groups(lengths: list[float], groups: int) -> None:
    ranked = pipe.rank(lengths, groups)
    assert len(ranked) == groups
    assert sorted(itertools.chain(*ranked)) == list(range(len(lengths)))
    sizes = [len(group) for group in ranked]
    assert max(sizes) - min(sizes) <= 1
    in_order = [lengths[at] for group in ranked for at in group]
    assert in_order == sorted(lengths)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 9))
def test_every_worker_has_one_group_and_every_group_its_workers(counts: list[int], step: int) -> None:
    workers = [f"w{at}" for at in range(sum(counts))]
    placed = pipe.place(counts, workers, step)
    assert list(placed) == workers
    assert Counter(placed.values()) == dict(enumerate(counts))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 9))
def test_two_steps_even_out(groups: int, each: int, step: int) -> None:
    """Where all groups have as many workers, the ranks of a worker's two groups add up to the same for all."""
    workers = [f"w{at}" for at in range(groups * each)]
    now, then = (pipe.place([each] * groups, workers, number) for number in (step, step + 1))
    assert {now[worker] + then[worker] for worker in workers} == {groups - 1}


def test_in_two_steps_alternating_takes_the_mean_where_keeping_takes_the_longest() -> None:
    """Of equal prompts in both steps: makespan near the mean of group times, not twice the longest."""
    times = [1.0, 2.0, 4.0, 9.0]
    workers = ["a", "b", "c", "d"]
    alternate = max(sum(times[pipe.place([1] * 4, workers, step)[worker]] for step in (0, 1)) for worker in workers)
    assert alternate == 10.0
    assert 2 * max(times) == 18.0


# --- two tiers ------------------------------------------------------------------------------------------------------------

TABLES = st.integers(1, 4).flatmap(
    lambda groups: st.lists(
        st.lists(st.floats(0.5, 100), min_size=8, max_size=8).map(lambda row: sorted(row, reverse=True)),
        min_size=groups,
        max_size=groups,
    )
)


def end_of(table: list[list[float]], counts: tuple[int, ...]) -> float:
    """The least T for which every group is within its time, by bisection."""
    first, last = table[0][0], len(table) - 1
    low, high = 0.0, 1e6
    for _ in range(200):
        end = (low + high) / 2
        allowed = [
            min(first, end) + max(0.0, end - first) * (group / last if last else 1.0) for group in range(len(table))
        ]
        times = [row[count - 1] for row, count in zip(table, counts, strict=True)]
        if all(time <= limit for time, limit in zip(times, allowed, strict=True)):
            high = end
        else:
            low = end
    return high


@settings(max_examples=60, deadline=None)
@given(TABLES, st.integers(0, 4))
def test_no_division_of_the_workers_ends_earlier(table: list[list[float]], more: int) -> None:
    groups, workers = len(table), len(table) + more
    counts = tuple(pipe.tiers(groups, workers, lambda group, n: table[group][n - 1]))
    assert sum(counts) == workers
    assert min(counts) >= 1
    every = [one for one in itertools.product(range(1, more + 2), repeat=groups) if sum(one) <= workers]
    assert end_of(table, counts) <= min(end_of(table, one) for one in every) * (1 + 1e-6)


def test_longer_groups_get_more_workers_and_completion_grows_evenly() -> None:
    """Times that grow exponentially with one worker each grow about linearly with those that they get."""
    work = [1.0, 3.0, 9.0, 27.0]
    counts = pipe.tiers(4, 16, lambda group, n: work[group] / n)
    assert counts == sorted(counts)
    assert counts[-1] > 2 * counts[0]
    ends = [one / n for one, n in zip(work, counts, strict=True)]
    assert ends[-1] < 4


def test_too_few_workers_are_refused_and_no_groups_need_none() -> None:
    with pytest.raises(ValueError, match="2 workers cannot have 3 groups"):
        pipe.tiers(3, 2, lambda group, n: 1.0)
    assert pipe.tiers(0, 3, lambda group, n: 1.0) == []


# --- stragglers -----------------------------------------------------------------------------------------------------------

RUNNING = st.builds(
    Running,
    handle=st.integers(0, 99),
    group=st.integers(0, 3),
    worker=st.sampled_from(["a", "b"]),
    generated=st.integers(0, 1000),
    threshold=st.floats(1, 1000),
    expected=st.floats(1, 2000),
    context=st.integers(1, 3000),
    oldest_step=st.integers(0, 6),
)


@settings(deadline=None)
@given(st.lists(RUNNING, max_size=12, unique_by=lambda one: one.handle), st.integers(0, 200))
def test_only_the_last_tenth_is_late_and_only_what_is_longer_than_predicted(running: list[Running], size: int) -> None:
    late = pipe.stragglers(running, size)
    if len(running) > size / 10:
        assert late == []
    else:
        assert {one.handle for one in late} == {one.handle for one in running if one.generated > one.threshold}
        left = [one.expected - one.generated for one in late]
        assert left == sorted(left, reverse=True)


@settings(deadline=None)
@given(
    st.lists(RUNNING, max_size=12, unique_by=lambda one: one.handle),
    st.lists(
        st.builds(
            Target, worker=st.sampled_from(["a", "b", "c", "d"]), free=st.integers(0, 3), step_s=st.floats(0.001, 0.2)
        ),
        max_size=4,
        unique_by=lambda target: target.worker,
    ),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_stragglers_go_where_they_may(
    late: list[Running], targets: list[Target], batch: int, max_staleness: int, may_defer: int
) -> None:
    step_s = {"a": 0.1, "b": 0.05}
    actions = pipe.settle(
        late, targets, step_s=step_s, prefill_s=1e-3, batch=batch, max_staleness=max_staleness, may_defer=may_defer
    )
    by_handle = {one.handle: one for one in late}
    by_name = {target.worker: target for target in targets}
    assert len({action.handle for action in actions}) == len(actions), "a response is told two things"
    taken: Counter[str] = Counter()
    groups = set()
    for action in actions:
        one = by_handle[action.handle]
        assert action.reason
        if action.kind == "migrate":
            assert action.target is not None
            assert action.target != one.worker
            taken[action.target] += 1
            saved = max(1.0, one.expected - one.generated) * (step_s[one.worker] - by_name[action.target].step_s)
            assert saved > 1e-3 * one.context, "it costs more than it saves"
        else:
            groups.add(one.group)
            assert batch + 1 - one.oldest_step <= max_staleness, "deferred beyond the staleness bound"
    assert len(groups) <= may_defer
    assert all(n <= by_name[worker].free for worker, n in taken.items())


def test_what_no_worker_makes_sooner_is_deferred_with_its_siblings() -> None:
    def running(handle: int, group: int) -> Running:
        return Running(
            handle=handle,
            group=group,
            worker="a",
            generated=900,
            threshold=500.0,
            expected=2000.0,
            context=1000,
            oldest_step=4,
        )

    actions = pipe.settle(
        [running(1, 7), running(2, 7), running(3, 8)],
        [Target(worker="b", free=0, step_s=0.01)],
        step_s={"a": 0.1},
        prefill_s=1e-4,
        batch=4,
        max_staleness=1,
        may_defer=1,
    )
    assert [(action.handle, action.kind) for action in actions] == [(1, "defer"), (2, "defer")]
    assert isinstance(actions[0], Action)

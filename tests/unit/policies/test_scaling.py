"""The advice is the best of what was allowed, and who is let go leaves nothing behind."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlharvest.policies.release import Leased, Progress, cut, release
from rlharvest.policies.scaling import Kind, Model, Outlook, advise

LENGTHS = st.lists(st.floats(1, 5000), min_size=1, max_size=40)
KINDS = st.lists(
    st.tuples(
        st.floats(0.1, 20), st.integers(1, 16), st.integers(0, 1), st.integers(1, 4), st.sampled_from([0.0, 60.0])
    ),
    min_size=1,
    max_size=2,
).map(
    lambda rows: [
        Kind(
            name=f"k{at}",
            usd_per_hour=price,
            slots=slots,
            least=least,
            most=max(least, most),
            boot_s=boot,
            life_s=3600.0,
        )
        for at, (price, slots, least, most, boot) in enumerate(rows)
    ]
)
OUTLOOKS = st.builds(
    Outlook,
    lengths=LENGTHS,
    prompt_tokens=st.just(100.0),
    train_s=st.sampled_from([0.0, 5.0, 60.0]),
    overlaps=st.booleans(),
    fixed_usd_per_hour=st.sampled_from([0.0, 10.0]),
)


def step_s(kind: str, batch: float, context: float) -> float:
    """A decode step: flat at first, then rising, the second kind twice as slow."""
    return (0.02 + 0.001 * batch + 1e-7 * batch * context) * (2.0 if kind == "k1" else 1.0)


def now_of(kinds: list[Kind], data: st.DataObject) -> tuple[int, ...]:
    return tuple(data.draw(st.integers(kind.least, kind.most)) for kind in kinds)


@settings(max_examples=60, deadline=None)
@given(KINDS, OUTLOOKS, st.floats(0, 1), st.data())
def test_nothing_that_was_allowed_is_better(
    kinds: list[Kind], outlook: Outlook, weight: float, data: st.DataObject
) -> None:
    now = now_of(kinds, data)
    assume(any(now))
    advice = advise(kinds, outlook, step_s, now=now, weight=weight, margin=0.0)
    model = Model(kinds, outlook, step_s)
    present = model.candidate(now)
    for counts in itertools.product(*(range(kind.least, kind.most + 1) for kind in kinds)):
        one = model.candidate(counts)
        if any(counts):
            score = weight * one.step_s / present.step_s + (1 - weight) * one.usd / present.usd
            assert advice.best.score <= score * (1 + 1e-9)
    assert all(kind.least <= n <= kind.most for kind, n in zip(kinds, advice.best.counts, strict=True))
    assert tuple(n + d for n, d in zip(now, advice.change, strict=True)) == advice.best.counts
    assert advice.reason


@settings(max_examples=60, deadline=None)
@given(KINDS, OUTLOOKS, st.floats(0, 1), st.floats(0, 1), st.data())
def test_who_counts_time_more_never_gets_a_longer_step(
    kinds: list[Kind], outlook: Outlook, one: float, other: float, data: st.DataObject
) -> None:
    now = now_of(kinds, data)
    assume(any(now))
    less, more = sorted((one, other))
    assume(more - less > 1e-6)
    slow = advise(kinds, outlook, step_s, now=now, weight=less, margin=0.0).best
    fast = advise(kinds, outlook, step_s, now=now, weight=more, margin=0.0).best
    assert fast.step_s <= slow.step_s * (1 + 1e-6)
    assert slow.usd <= fast.usd * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(KINDS, OUTLOOKS, st.floats(0, 1), st.data())
def test_small_gains_change_nothing(kinds: list[Kind], outlook: Outlook, weight: float, data: st.DataObject) -> None:
    """Advice that is followed is not changed again."""
    now = now_of(kinds, data)
    first = advise(kinds, outlook, step_s, now=now, weight=weight)
    again = advise(kinds, outlook, step_s, now=first.best.counts, weight=weight)
    if any(again.change):
        assert again.best.score < again.now.score * (1 - 0.03)
    else:
        assert "as good as any" in again.reason


@settings(deadline=None)
@given(KINDS, OUTLOOKS, st.data())
def test_more_workers_never_roll_out_slower_where_all_are_alike(
    kinds: list[Kind], outlook: Outlook, data: st.DataObject
) -> None:
    model = Model(kinds[:1], outlook, step_s)
    times = [model.candidate([n]).rollout_s for n in (1, 2, 4, 8)]
    # A slice stands for its lengths by a few points: equal up to that.
    assert all(b <= a * 1.1 for a, b in itertools.pairwise(times))
    least = max(outlook.lengths) * step_s("k0", 1, 0)
    assert times[-1] >= least * 0.99


def test_money_alone_takes_few_and_time_alone_takes_many() -> None:
    chance = random.Random(3)
    outlook = Outlook(
        lengths=[chance.lognormvariate(7, 0.9) for _ in range(1024)], prompt_tokens=200.0, fixed_usd_per_hour=5.0
    )
    kinds = [Kind(name="spot", usd_per_hour=2.0, slots=64, most=40)]
    counts = [
        advise(kinds, outlook, step_s, now=(4,), weight=weight, margin=0.0).best.counts[0] for weight in (0.0, 0.5, 1.0)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]


def test_training_bounds_what_is_worth_having() -> None:
    """Workers beyond what training can follow are not asked for, however much time counts."""
    outlook = Outlook(lengths=[1000.0] * 256, prompt_tokens=100.0, train_s=100.0)
    kinds = [Kind(name="spot", usd_per_hour=2.0, slots=32, most=30)]
    advice = advise(kinds, outlook, step_s, now=(1,), weight=1.0)
    assert advice.best.rollout_s <= 100.0
    assert advice.best.counts[0] < 30
    assert "training is what the step waits for" in advice.reason


def test_with_nobody_there_somebody_is_asked_for_whatever_money_says() -> None:
    outlook = Outlook(lengths=[100.0] * 8, prompt_tokens=10.0)
    kinds = [Kind(name="spot", usd_per_hour=2.0, slots=4, most=3)]
    advice = advise(kinds, outlook, step_s, now=(0,), weight=0.0)
    assert advice.best.counts[0] >= 1
    assert "nothing rolls out now" in advice.reason


def test_what_cannot_be_answered_is_refused() -> None:
    outlook = Outlook(lengths=[1.0], prompt_tokens=1.0)
    with pytest.raises(ValueError, match="weight is 2"):
        advise([Kind(name="a", usd_per_hour=1.0, slots=1, most=1)], outlook, step_s, now=(1,), weight=2)
    with pytest.raises(ValueError, match="most"):
        advise([Kind(name="a", usd_per_hour=1.0, slots=1)], outlook, step_s, now=(0,))


def test_many_candidates_are_searched_and_not_tried_one_by_one() -> None:
    """1,000 workers of three types and 100,000 responses: near the best of a coarse grid, in a fraction of a second."""
    chance = random.Random(4)
    outlook = Outlook(
        lengths=[chance.lognormvariate(7, 0.9) for _ in range(100_000)], prompt_tokens=200.0, fixed_usd_per_hour=50.0
    )
    kinds = [Kind(name=f"k{at}", usd_per_hour=2.0 - at / 2, slots=64, most=333) for at in range(3)]
    began = time.process_time()
    advice = advise(kinds, outlook, step_s, now=(10, 10, 10), weight=0.5)
    spent = time.process_time() - began
    model = Model(kinds, outlook, step_s)
    present = model.candidate((10, 10, 10))

    def score(counts: tuple[int, ...]) -> float:
        one = model.candidate(counts)
        return 0.5 * one.step_s / present.step_s + 0.5 * one.usd / present.usd

    best = min(score(counts) for counts in itertools.product((0, 20, 80, 333), repeat=3) if any(counts))
    assert advice.best.score <= best * 1.02
    assert spent < 10


# --- letting go -----------------------------------------------------------------------------------------------------------

LEASED = st.lists(
    st.builds(
        Leased,
        worker=st.integers(0, 30).map(str),
        kind=st.sampled_from("ab"),
        tokens_per_s=st.floats(0, 1000),
        usd_per_hour=st.floats(0, 10),
        tokens=st.integers(0, 10_000),
        paid_s=st.floats(0, 3600),
    ),
    unique_by=lambda one: one.worker,
    max_size=10,
)


@settings(deadline=None)
@given(LEASED, st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)))
def test_exactly_the_surplus_goes(workers: list[Leased], surplus: dict[str, int]) -> None:
    chosen = release(workers, surplus)
    assert len(set(chosen)) == len(chosen)
    kinds = {one.worker: one.kind for one in workers}
    have = Counter(kinds.values())
    assert Counter(kinds[name] for name in chosen) == {
        kind: min(n, have[kind]) for kind, n in surplus.items() if min(n, have[kind])
    }


def test_the_dearest_goes_first_then_who_is_paid_ahead_least_then_who_holds_least() -> None:
    def leased(name: str, usd: float, paid: float, tokens: int) -> Leased:
        return Leased(worker=name, kind="a", tokens_per_s=100.0, usd_per_hour=usd, paid_s=paid, tokens=tokens)

    workers = [leased("d", 1, 60, 9), leased("c", 1, 60, 5), leased("b", 1, 0, 9), leased("a", 2, 90, 99)]
    assert release(workers, {"a": 4}) == ["a", "b", "c", "d"]


@st.composite
def progress(draw: st.DrawFn) -> list[Progress]:
    handles = itertools.count()
    workers = []
    for at in range(draw(st.integers(0, 8))):
        assigned = draw(st.integers(0, 10))
        left = draw(st.integers(0, assigned))
        workers.append(
            Progress(
                worker=f"w{at}",
                assigned=assigned,
                unfinished=tuple(itertools.islice(handles, left)),
                free=draw(st.integers(0, 6)),
                may_end=draw(st.booleans()),
            )
        )
    return workers


@settings(deadline=None)
@given(progress(), st.sampled_from([0.0, 0.5, 0.7, 1.0]))
def test_a_cut_leaves_nothing_behind(workers: list[Progress], tau: float) -> None:
    cuts = cut(workers, tau=tau)
    by_name = {one.worker: one for one in workers}
    gone = {one.worker for one in cuts}
    assert len(gone) == len(cuts)
    assert not workers or len(gone) < len(workers), "nobody stays"
    taken: Counter[str] = Counter()
    for one in cuts:
        worker = by_name[one.worker]
        assert worker.may_end
        assert len(worker.unfinished) <= (1 - tau) * worker.assigned + 1e-9
        assert [handle for handle, _ in one.moves] == list(worker.unfinished), "not all of it is given away"
        taken.update(target for _, target in one.moves)
    assert not gone & set(taken), "one that takes is cut"
    assert all(n <= by_name[target].free for target, n in taken.items())


@settings(deadline=None)
@given(progress())
def test_who_is_done_and_has_room_elsewhere_is_cut(workers: list[Progress]) -> None:
    """Cutting once more changes nothing: whoever could go went, or takes over from those who went."""
    cuts = cut(workers)
    gone = {one.worker for one in cuts}
    taken = Counter(target for one in cuts for _, target in one.moves)
    for one in workers:
        if one.worker in gone or taken[one.worker] or not one.may_end or not one.assigned:
            continue
        if one.assigned - len(one.unfinished) < 0.7 * one.assigned:
            continue
        others = [other for other in workers if other.worker != one.worker and other.worker not in gone]
        room = sum(other.free - taken[other.worker] for other in others)
        assert not others or room < len(one.unfinished)


def test_who_takes_is_not_cut_after_it() -> None:
    """`b` is as good as done, but it takes what `a` had: it stays, though `c` has room for all of it."""
    workers = [
        Progress(worker="a", assigned=10, unfinished=(1,), free=0),
        Progress(worker="b", assigned=10, unfinished=(2, 3), free=9),
        Progress(worker="c", assigned=10, unfinished=(4, 5, 6, 7), free=6),
    ]
    assert [(one.worker, one.moves) for one in cut(workers)] == [("a", ((1, "b"),))]

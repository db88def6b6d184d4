"""Bills are exact and whole, figures follow from them, and a budget is never exceeded."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rlharvest.money import budget, figures
from rlharvest.money.amount import HOUR_MS, Money, milliseconds, show
from rlharvest.money.lease import Bill, Lease, bill
from rlharvest.money.meter import Meter
from rlharvest.money.price import INCREMENT_MS, Billing, WorkerType

BILLINGS = st.builds(
    Billing,
    increment=st.sampled_from(sorted(INCREMENT_MS)),
    minimum_s=st.sampled_from([0, 1, 60, 600]),
    boot=st.booleans(),
    free_if_interrupted_within_s=st.sampled_from([0, 5, 3600]),
)
PRICES = st.decimals(min_value=0, max_value=200, places=6)
TYPES = st.builds(
    WorkerType, name=st.just("w"), usd_per_hour=PRICES, market=st.sampled_from(["reserved", "spot"]), billing=BILLINGS
)
MS = st.integers(0, 20_000_000)


@st.composite
def leases(draw: Callable[..., Any]) -> Lease:
    start, ready, end = sorted(draw(st.tuples(MS, MS, MS)))
    busy = draw(st.integers(0, end - ready))
    never = draw(st.booleans())
    return Lease(
        start_ms=start,
        ready_ms=None if never else ready,
        end_ms=end,
        busy_ms=0 if never else busy,
        interrupted=draw(st.booleans()),
    )


# --- amounts --------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(PRICES, MS)
def test_a_price_over_time_is_exact(price: Decimal, ms: int) -> None:
    kind = WorkerType(name="w", usd_per_hour=price)
    assert kind.price(ms).dollars == Fraction(price) * ms / HOUR_MS


@pytest.mark.parametrize("text", ["0.0000000000001", "nan", "many"])
def test_an_amount_is_not_rounded_when_it_comes_in(text: str) -> None:
    with pytest.raises(ValueError, match=r"dollar|Fraction|convert"):
        Money.usd(text)


def test_amounts_are_shown_in_cents_and_small_ones_with_four_places() -> None:
    assert str(Money.usd("1234.567")) == "$1,234.57"
    assert str(Money.usd("0.0123")) == "$0.0123"
    assert str(Money()) == "$0.00"
    assert show(Fraction(-3, 2)) == "-$1.50"
    assert Money.usd("1.5").micros == 1_500_000
    assert milliseconds(1.2345) == 1234


def test_a_price_finer_than_a_micro_dollar_is_refused() -> None:
    with pytest.raises(ValidationError):
        WorkerType(name="w", usd_per_hour=Decimal("1.0000001"))


# --- billing rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "used_ms", "billed_ms"),
    [
        (Billing(), 1_001, 2_000),
        (Billing(increment="millisecond"), 1_001, 1_001),
        (Billing(increment="minute"), 60_001, 120_000),
        (Billing(increment="hour"), 1, 3_600_000),
        (Billing(minimum_s=60), 1, 60_000),
        (Billing(increment="minute", minimum_s=61), 1, 120_000),
        (Billing(), 0, 0),
    ],
)
def test_a_begun_increment_is_billed_whole_and_at_least_the_minimum(
    rule: Billing, used_ms: int, billed_ms: int
) -> None:
    assert rule.billed_ms(used_ms=used_ms) == billed_ms


def test_boot_time_is_billed_unless_the_rule_says_otherwise() -> None:
    assert Billing().billed_ms(used_ms=10_000, boot_ms=4_000) == 10_000
    assert Billing(boot=False).billed_ms(used_ms=10_000, boot_ms=4_000) == 6_000


def test_an_early_interruption_may_be_free_and_a_release_never_is() -> None:
    rule = Billing(free_if_interrupted_within_s=3600)
    assert rule.billed_ms(used_ms=3_599_999, interrupted=True) == 0
    assert rule.billed_ms(used_ms=3_600_000, interrupted=True) == 3_600_000
    assert rule.billed_ms(used_ms=1_000) == 1_000


@settings(deadline=None)
@given(BILLINGS, MS, MS, MS)
def test_a_bill_covers_the_time_and_never_falls(rule: Billing, boot: int, more: int, later: int) -> None:
    now = rule.billed_ms(used_ms=boot + more, boot_ms=boot)
    assert now >= (boot + more if rule.boot else more)
    assert rule.billed_ms(used_ms=boot + more + later, boot_ms=boot) >= now


@settings(deadline=None)
@given(TYPES, leases())
def test_the_parts_of_a_bill_add_up(kind: WorkerType, lease: Lease) -> None:
    found = bill(lease, kind, now_ms=0)
    assert found.total == kind.price(found.billed_ms)
    assert all(part >= Money() for part in (found.busy, found.boot, found.idle, found.unused))


def test_times_out_of_order_are_refused() -> None:
    kind = WorkerType(name="w", usd_per_hour=Decimal(1))
    for lease in (
        Lease(start_ms=5, end_ms=4),
        Lease(start_ms=5, ready_ms=3, end_ms=9),
        Lease(start_ms=0, ready_ms=5, end_ms=9, busy_ms=5),
    ):
        with pytest.raises(ValueError, match="not in order"):
            bill(lease, kind, now_ms=0)


# --- the meter ------------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "ready", "busy", "rest", "close", "lose"]),
        st.integers(0, 2),
        st.integers(0, 4_000_000),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TYPES, min_size=2, max_size=2), STEPS)
def test_the_meter_is_the_sum_of_the_bills_of_all_leases(
    kinds: list[WorkerType], steps: list[tuple[str, int, int]]
) -> None:
    types = [kind.model_copy(update={"name": f"t{at}"}) for at, kind in enumerate(kinds)]
    meter = Meter(types)
    naive: dict[str, dict[str, Any]] = {}
    done: list[tuple[WorkerType, Lease]] = []
    now = 0
    for action, number, wait in steps:
        now += wait
        worker = f"w{number}"
        state = naive.get(worker)
        if action == "open":
            if state is not None:
                with pytest.raises(ValueError, match="leased already"):
                    meter.open(worker, "t0", at_ms=now)
                continue
            meter.open(worker, f"t{number % 2}", at_ms=now)
            naive[worker] = {"kind": types[number % 2], "start": now, "ready": None, "busy": 0, "since": None}
            continue
        if state is None:
            with pytest.raises(ValueError, match="no lease"):
                meter.ready(worker, at_ms=now)
            continue
        if action != "ready" and state["since"] is not None:
            state["busy"] += now - state["since"]
            state["since"] = None
        if action in ("ready", "busy", "rest") and state["ready"] is None:
            state["ready"] = now
        if action == "busy":
            state["since"] = now
        if action == "ready":
            meter.ready(worker, at_ms=now)
        elif action in ("busy", "rest"):
            meter.busy(worker, at_ms=now, holds_work=action == "busy")
        else:
            meter.close(worker, at_ms=now, interrupted=action == "lose")
            lost = action == "lose"
            done.append((state["kind"], _lease(state, now, interrupted=lost)))
            del naive[worker]
    whole = sum((bill(lease, kind, now_ms=now) for kind, lease in done), Bill())
    whole += sum((bill(_lease(state, now), state["kind"], now_ms=now) for state in naive.values()), Bill())
    statement = meter.statement(now_ms=now)
    assert statement.whole == whole
    assert statement.total == statement.of("reserved") + statement.of("spot")
    assert meter.committed(now_ms=now) >= statement.total


def _lease(state: dict[str, Any], now: int, *, interrupted: bool = False) -> Lease:
    busy = state["busy"] + (0 if state["since"] is None else now - state["since"])
    return Lease(start_ms=state["start"], ready_ms=state["ready"], end_ms=now, busy_ms=busy, interrupted=interrupted)


def test_time_does_not_run_back_and_types_are_known() -> None:
    meter = Meter([WorkerType(name="a", usd_per_hour=Decimal(1))])
    with pytest.raises(ValueError, match="known: a"):
        meter.open("w", "b", at_ms=0)
    meter.open("w", "a", at_ms=10)
    meter.busy("w", at_ms=20, holds_work=True)
    with pytest.raises(ValueError, match="before 20 ms"):
        meter.close("w", at_ms=19)


# --- figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instances", "speedup", "gain"), [(1, "1.37", 1.288), (6, "2.247", 1.627), (3, "1.47", 1.235), (6, "2.22", 1.608)]
)
def test_the_cost_identity_of_rlboost_holds_exactly(instances: int, speedup: str, gain: float) -> None:
    """speedup / (1 + n 5.32 / 83.79), from the bills of a two-hour run of real leases."""
    meter = Meter(
        [
            WorkerType(name="8xH100", usd_per_hour=Decimal("83.79")),
            WorkerType(name="2xH100", usd_per_hour=Decimal("5.32"), market="spot"),
        ]
    )
    meter.open("trainer", "8xH100", at_ms=0)
    for number in range(instances):
        meter.open(f"w{number}", "2xH100", at_ms=0)
    statement = meter.statement(now_ms=2 * HOUR_MS)
    found = figures.efficiency(speedup=Fraction(speedup), reserved=statement.of("reserved"), spot=statement.of("spot"))
    assert found == Fraction(speedup) / (1 + instances * Fraction("5.32") / Fraction("83.79"))
    assert float(found) == pytest.approx(gain, abs=6e-4)
    # The same, by way of what was saved: a dollar buys `gain` times the tokens.
    rate = Fraction(1000)
    tokens = int(rate * Fraction(speedup) * 7200)
    alone = figures.reserved_alone(
        reserved_per_hour=meter.types["8xH100"].price(HOUR_MS), tokens=tokens, tokens_per_s=rate
    )
    assert alone is not None
    assert abs(alone / statement.total - found) < Fraction(1, 10**9)
    assert (
        figures.saved(statement.total, reserved_per_hour=Money.usd("83.79"), tokens=tokens, tokens_per_s=rate)
        == alone - statement.total
    )


def test_what_is_not_known_is_none() -> None:
    assert figures.per_step(Money.usd(1), 0) is None
    assert figures.per_million(Money.usd(1), 0) is None
    assert figures.forecast(Money(), [], steps_left=3) is None
    assert figures.reserved_alone(reserved_per_hour=Money.usd(1), tokens=5, tokens_per_s=Fraction(0)) is None
    assert figures.per_step(Money.usd(3), 2) == Fraction(3, 2)
    assert figures.per_million(Money.usd(3), 2_000_000) == Fraction(3, 2)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**15).map(Money), min_size=1, max_size=30), st.integers(0, 100))
def test_a_forecast_is_what_was_spent_and_the_newest_steps_again(steps: list[Money], left: int) -> None:
    total = sum(steps, Money())
    found = figures.forecast(total, steps, steps_left=left, window=5)
    assert found is not None
    newest = steps[-5:]
    assert found.expected == total.dollars + sum((step.dollars for step in newest), Fraction()) / len(newest) * left
    assert found.low <= float(found.expected) * (1 + 1e-12)
    assert found.high >= float(found.expected) * (1 - 1e-12)
    assert found.low >= float(total.dollars)


def test_a_forecast_of_steady_steps_has_no_band() -> None:
    found = figures.forecast(Money.usd(4), [Money.usd(2), Money.usd(2)], steps_left=3)
    assert found is not None
    assert (found.expected, found.low, found.high) == (Fraction(10), 10.0, 10.0)


# --- the budget -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(TYPES.filter(lambda kind: kind.usd_per_hour > 1), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans(), st.integers(1, 1_000_000)), max_size=60),
    st.integers(0, 300),
    st.integers(1, 900_000),
)
def test_a_budget_is_never_exceeded(
    kinds: list[WorkerType], steps: list[tuple[int, int, bool, int]], dollars: int, stop_ms: int
) -> None:
    """Whatever the billing rules, if checks are in time, leases are asked for, and a paused run ends its leases in time."""
    types = [kind.model_copy(update={"name": f"t{at}"}) for at, kind in enumerate(kinds)]
    meter = Meter(types)
    limit = Money.usd(dollars)
    interval = 1_000_000
    now = 0
    for number, kind, ready, wait in steps:
        if budget.check(meter, limit, now_ms=now, next_check_ms=interval, stop_ms=stop_ms).pause:
            break
        worker = f"w{number}-{kind % len(types)}"
        wanted = types[kind % len(types)]
        if worker in meter.leases:
            meter.ready(worker, at_ms=now) if ready else meter.close(worker, at_ms=now)
        elif budget.affords(meter, [wanted], limit, now_ms=now, next_check_ms=interval, stop_ms=stop_ms):
            meter.open(worker, wanted.name, at_ms=now)
        now += wait
    # The check that says pause is the one after the last wait; then everything stops as late as it may.
    for worker in list(meter.leases):
        meter.close(worker, at_ms=now + stop_ms)
    assert meter.statement(now_ms=now + stop_ms).total <= limit


def test_a_begun_hour_is_foreseen() -> None:
    """Ten minutes before the hour is over a check that sees half an hour ahead counts the next hour whole."""
    meter = Meter([WorkerType(name="h", usd_per_hour=Decimal(10), billing=Billing(increment="hour"))])
    meter.open("w", "h", at_ms=0)
    early = budget.check(meter, Money.usd(15), now_ms=1_000_000, next_check_ms=60_000, stop_ms=60_000)
    assert not early.pause
    late = budget.check(meter, Money.usd(15), now_ms=3_500_000, next_check_ms=60_000, stop_ms=60_000)
    assert late.pause
    assert late.reason == "$10.00 of $15.00 are spent, and $20.00 would be before a later check could stop it"
    assert early.reason.startswith("$10.00 of $15.00 are spent; $10.00 by")
    assert not budget.affords(meter, [meter.types["h"]], Money.usd(15), now_ms=1_000_000, next_check_ms=0, stop_ms=0)

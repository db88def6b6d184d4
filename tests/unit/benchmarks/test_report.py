"""A benchmark's report: no bar is met by accident, and the exit status says so."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.report import MEASUREMENTS, Report

finite = st.floats(-1e9, 1e9)


def line(report: Report) -> dict[str, object]:
    return dict(json.loads(report.line()))


def test_report_without_bars_is_not_ok() -> None:
    report = Report("empty")
    report.median("seconds", "s", [1.0] * MEASUREMENTS)
    assert report.status == 1
    assert line(report)["ok"] is False


def test_bar_of_a_figure_that_is_not_there_is_missed() -> None:
    report = Report("x")
    report.bar("seconds", 10, "bar")
    assert report.status == 1
    assert line(report)["bars"] == {"seconds": {"value": None, "limit": 10.0, "ok": False}}
    assert "not measured" in report.table()
    assert "MISSED" in report.table()


@given(st.lists(finite, max_size=MEASUREMENTS - 1))
def test_too_few_measurements_meet_no_bar(values: list[float]) -> None:
    report = Report("x")
    report.median("seconds", "s", values)
    report.bar("seconds", 1e12, "bar")
    assert report.status == 1


@given(st.lists(finite, min_size=MEASUREMENTS - 1), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_figure_that_is_not_finite_meets_no_bar(values: list[float], bad: float) -> None:
    report = Report("x")
    report.median("seconds", "s", [*values, bad])
    report.bar("seconds", 1e12, "bar")
    assert report.status == 1
    assert line(report)["ok"] is False


def test_a_limit_that_is_not_finite_is_never_met() -> None:
    """The bar depends on a figure that was not measured."""
    report = Report("x")
    report.median("seconds", "s", [1.0] * MEASUREMENTS)
    for limit in (math.nan, math.inf):
        report.bar("seconds", limit, "bar")
        assert report.status == 1


@pytest.mark.parametrize(("worst", "status"), [(2.0, 0), (2.001, 1)])
def test_median_at_the_bar_meets_it_and_above_misses_it(worst: float, status: int) -> None:
    report = Report("x")
    report.median("seconds", "s", [0.0, 0.0, worst, worst, worst])
    report.bar("seconds", 2.0, "bar")
    assert report.status == status


def test_one_missed_bar_fails_the_report() -> None:
    report = Report("x")
    report.count("lost", "tokens", 0)
    report.count("dead", "workers", 1)
    report.bar("lost", 0, "none")
    assert report.status == 0
    report.bar("dead", 0, "none")
    assert report.status == 1


def test_last_line_printed_is_the_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("x")
    report.median("seconds", "s", [1, 2, 3, 4, 5])
    report.bar("seconds", 3, "bar")
    assert report.finish() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "bench": "x",
        "figures": {"seconds": 3.0},
        "bars": {"seconds": {"value": 3.0, "limit": 3.0, "ok": True}},
        "ok": True,
    }


@given(finite, finite)
def test_a_least_bar_is_met_from_its_limit_up(value: float, limit: float) -> None:
    report = Report("x")
    report.count("tokens", "tokens", value)
    report.least("tokens", limit, "enough")
    assert report.ok == (value >= limit)
    report.least("absent", limit, "enough")
    assert not report.ok
    assert "≥" in report.table()

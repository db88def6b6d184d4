"""The live screen is a pure function of one snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rlharvest.cli.watch import Snapshot, screen

Render = Callable[..., str]


@pytest.fixture
def render(make_job: Callable[..., dict[str, Any]], make_worker: Callable[..., dict[str, Any]]) -> Render:
    def one(width: int = 100, **changes: Any) -> str:
        series = {"reward": [0.1, 0.4, None, 0.9], "loss": [0.5, 0.25], "completions/mean_length": [10.0, 12.0]}
        snapshot = Snapshot(make_job(**changes), [1, 2, 3, 4], series, [make_worker()], 1110.0)
        console = Console(width=width, highlight=False)
        with console.capture() as capture:
            console.print(screen(snapshot, width=width))
        return capture.get()

    return one


def test_it_shows_reason_progress_curves_workers_and_what_was_salvaged(render: Render) -> None:
    text = render()
    assert "running" in text
    assert "0 ready workers." in text
    assert "step 3/10" in text
    assert "about 233 s to go" in text
    assert "salvaged 55" in text
    assert "regenerated 7" in text
    assert "0.9 ┤" in text
    assert "0.25" in text
    assert "workers (2 lost so far)" in text
    assert "…0000000009" in text


def test_an_error_is_shown_and_an_ended_job_has_no_workers(render: Render) -> None:
    text = render(status="failed", error="the disk is full", finished_at=1050.0)
    assert "the disk is full" in text
    assert "workers (" not in text
    assert "40 s" in text


def test_it_fits_a_narrow_terminal(render: Render) -> None:
    assert all(len(line) <= 80 for line in render(width=80).splitlines())

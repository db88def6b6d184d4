"""The simulated fleet of benchmarks.prefix samples everything, whatever is killed, and counts every prompt once a start."""

from __future__ import annotations

import pytest

from benchmarks import prefix
from benchmarks.prefix import Sample, Worker, run


@pytest.mark.parametrize("life", [0.0, 60.0])
def test_homes_save_prefill_and_lose_nothing(life: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "GROUPS", 12)
    monkeypatch.setattr(prefix, "LENGTH", 20)
    ours, again, none = (run(3, at_a_time=6, life=life, homes=homes) for homes in (True, True, False))
    assert ours == again, "the seed does not decide everything"
    assert ours.computed < none.computed
    if not life:
        assert ours.computed + ours.saved == none.computed + none.saved, "a response was started twice"


def test_a_worker_keeps_the_prompts_that_it_used_last() -> None:
    worker = Worker("w0")
    assert worker.take(Sample(0, 5), 10) == 10
    assert worker.take(Sample(1, 5), 10) == 0, "a sibling computed it again"
    for group in range(1, prefix.KEPT + 1):
        worker.take(Sample(group * prefix.SAMPLES, 5), 10)
    assert worker.take(Sample(2, 5), 10) == 10

"""What groups are given to draft from: earlier responses to their own prompt, within bounds, sent or named."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlharvest.jobs.model import parse
from rlharvest.spans import ids_bytes
from rlharvest.speculation.history import prompt_key
from rlharvest.speculation.segment import unpack
from rlharvest_coordinator import history as history_module
from rlharvest_coordinator.history import History, segments_of
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store.history import Past

EPOCHS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9)), max_size=12
)


def past(epoch: int, ids: list[int], *, prompt: int = 0, reward: float = 1.0) -> Past:
    return Past(prompt, epoch, ids_bytes(ids), epoch + 10, reward)


@given(EPOCHS, st.integers(0, 200))
def test_segments_hold_whole_responses_one_epoch_each_the_newest_first_within_the_bound(
    rows: list[tuple[int, list[int]]], most: int
) -> None:
    key = prompt_key([1])
    ordered = sorted(rows, key=lambda row: -row[0])
    segments = [unpack(data) for data in segments_of(key, [past(*row) for row in ordered], most_bytes=most)]
    epochs = [{one.epoch for one in segment.responses} for segment in segments]
    assert all(len(found) == 1 for found in epochs)
    assert [max(found) for found in epochs] == sorted({max(found) for found in epochs}, reverse=True)
    kept = [(one.epoch, one.ids.tolist()) for segment in segments for one in segment.responses]
    assert 4 * sum(len(ids) for _, ids in kept) <= most
    assert all(segment.prompt == key for segment in segments)
    if 4 * sum(len(ids) for _, ids in rows) <= most:
        assert kept == ordered


class Sql:
    """Answers as SQL does, and counts."""

    def __init__(self, rows: list[Past]) -> None:
        self.rows = rows
        self.asked: list[tuple[set[int], int, int]] = []

    async def past(self, _: Any, __: str, prompts: set[int], *, first_epoch: int, below_epoch: int) -> list[Past]:
        self.asked.append((prompts, first_epoch, below_epoch))
        found = [one for one in self.rows if one.prompt in prompts and first_epoch <= one.epoch < below_epoch]
        return sorted(found, key=lambda one: (-one.epoch, -one.reward))


def build(monkeypatch: pytest.MonkeyPatch, rows: list[Past], groups: dict[int, tuple[int, int]], **wanted: Any) -> Any:
    """Return (history, live groups, SQL) with groups {ordinal: (prompt, epoch)}."""
    sql = Sql(rows)
    monkeypatch.setattr(history_module.history, "past", sql.past)
    live = {
        ordinal: SimpleNamespace(ordinal=ordinal, prompt=prompt, data_epoch=epoch)
        for ordinal, (prompt, epoch) in groups.items()
    }
    spec = parse(
        {
            "model": "m",
            "dataset": {"path": "d.jsonl"},
            "rewards": [{"builtin": "exact_match"}],
            "rollout": {"speculation": wanted},
        }
    )
    dataset = SimpleNamespace(prompt_ids=lambda row: np.array([row, row], np.uint32))
    scope = SimpleNamespace(
        id="rljob_x",
        spec=spec,
        sessions=None,
        book=SimpleNamespace(groups=live, next_group=max(groups, default=-1) + 1),
        prepared=SimpleNamespace(dataset=dataset),
    )
    return History(cast(Scope, scope)), live, sql


async def test_a_group_gets_its_own_prompt_s_responses_of_the_epochs_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [past(epoch, [epoch, prompt], prompt=prompt) for epoch in range(4) for prompt in (1, 2)]
    history, _, sql = build(monkeypatch, rows, {5: (1, 2), 6: (2, 3), 7: (1, 0)}, history_epochs=2)
    await history.follow()
    await history.follow()
    assert sql.asked == [({1, 2}, 0, 3)]
    found = {group: [one for data in history.segments(group) for one in unpack(data).responses] for group in (5, 6, 7)}
    assert [(one.epoch, one.ids.tolist()) for one in found[5]] == [(1, [1, 1]), (0, [0, 1])]
    assert [(one.epoch, one.ids.tolist()) for one in found[6]] == [(2, [2, 2]), (1, [1, 2])]
    assert found[7] == []
    assert unpack(history.segments(5)[0]).prompt == prompt_key([1, 1])


async def test_what_left_the_ledger_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is said that it left, or a recovery took the book away."""
    history, live, _ = build(monkeypatch, [past(0, [1], prompt=1)], {5: (1, 1), 6: (1, 1)})
    await history.follow()
    assert history.segments(5)
    assert history.segments(6)
    history.left(5)
    assert history.segments(5) == []
    live.clear()
    history.recovered()
    await history.follow()
    assert history.segments(6) == []
    assert history._held == 0


@pytest.mark.parametrize("wanted", [{"enabled": "off"}, {"history_epochs": 0}])
async def test_nothing_is_read_for_a_job_that_wants_none(
    wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    history, _, sql = build(monkeypatch, [past(0, [1], prompt=1)], {5: (1, 1)}, **wanted)
    await history.follow()
    assert sql.asked == []
    assert history.sources([5]) == []


async def test_large_history_is_named_and_small_travels_along(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {1: 10, 2: 20_000, 3: 15_000, 4: 15_000, 5: 15_000}
    rows = [past(0, list(range(n)), prompt=prompt) for prompt, n in tokens.items()]
    history, _, _ = build(monkeypatch, rows, {prompt: (prompt, 1) for prompt in tokens} | {6: (6, 1)})
    await history.follow()
    sources = {source.group: source for source in history.sources([1, 1, 2, 3, 4, 5, 6])}
    assert {group: source.by_reference for group, source in sources.items()} == {
        1: False,
        2: True,
        3: False,
        4: False,
        5: True,
    }
    assert sum(len(data) for source in sources.values() for data in source.segments) <= history_module.MESSAGE_BYTES
    assert list(sources[3].segments) == history.segments(3)


async def test_memory_is_bounded_and_those_beyond_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "CACHE_BYTES", 300)
    rows = [past(0, list(range(50)), prompt=1)]
    history, _, _ = build(monkeypatch, rows, {5: (1, 1), 6: (1, 1)})
    await history.follow()
    assert history.segments(5)
    assert history.segments(6) == []
    assert history._held <= 300


ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sets(st.integers(0, 30), max_size=4), st.sampled_from(["", "", "recovered", "fails"])
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=ROUNDS)
async def test_each_group_is_looked_up_once_and_those_that_are_live_are_known(
    rounds: list[tuple[int, set[int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes, leaves, is recovered, and however often SQL is away; no round looks at groups that it knows."""
    history, live, sql = build(monkeypatch, [past(0, [1], prompt=prompt) for prompt in range(100)], {})
    book = history._scope.book
    asked: list[int] = []

    async def look_up(_: Any, __: str, prompts: set[int], **bounds: int) -> list[Past]:
        if trouble == "fails":
            raise ConnectionError
        asked.extend(prompts)
        return await sql.past(_, __, prompts, **bounds)

    monkeypatch.setattr(history_module.history, "past", look_up)
    for admitted, leaving, trouble in [*rounds, (0, set(), "")]:
        for ordinal in range(book.next_group, book.next_group + admitted):
            live[ordinal] = SimpleNamespace(ordinal=ordinal, prompt=ordinal, data_epoch=1)
        book.next_group += admitted
        for ordinal in leaving & live.keys():
            del live[ordinal]
            history.left(ordinal)
        if trouble == "recovered":
            history.recovered()
        with contextlib.suppress(ConnectionError):
            await history.follow()
    assert history._segments.keys() == live.keys()
    assert len(asked) == len(set(asked))
    assert history._held == sum(len(data) for ordinal in live for data in history.segments(ordinal))

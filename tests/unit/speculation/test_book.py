"""The book stays within its memory, and the oldest epoch goes first."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.speculation.book import SLACK, DraftBook
from rlharvest.speculation.history import DraftSource, PastResponse
from rlharvest.speculation.options import Speculation


def source(*responses: tuple[int, list[int]]) -> DraftSource:
    """Return history of (epoch, ids)."""
    return DraftSource(
        responses=tuple(
            PastResponse(ids=np.array(ids, np.uint32), epoch=epoch, version=0, reward=0.0) for epoch, ids in responses
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(1, 5), min_size=1, max_size=60), st.booleans()), max_size=30
    ),
    st.integers(2000, 30_000),
)
def test_memory_is_bounded_and_counted_exactly(steps: list[tuple[int, list[int], bool]], limit: int) -> None:
    book = DraftBook(Speculation(), limit_bytes=limit)
    indexes = {}
    for prompt, ids, looked_up in steps:
        key, index = book.open([prompt] * 4)
        serial = index.open(epoch=book.epoch)
        index.extend(serial, ids)
        if looked_up:
            index.draft([prompt] * 4, 3)
        index.close(serial)
        book.settle(key)
        indexes[key] = index
        assert book.memory <= limit
    alive = [book.open([prompt] * 4)[1] for prompt in range(6)]
    assert book.memory == sum(index.memory for index in alive)


def test_the_oldest_epoch_goes_first_and_then_the_prompt_that_was_used_least_recently() -> None:
    book = DraftBook(Speculation(), limit_bytes=20_000)
    for prompt, epoch in ((1, 3), (2, 1), (3, 3), (4, 2)):
        key, _ = book.open([prompt] * 4, source((epoch, list(range(100, 180)))))
        book.settle(key)
    each = book.memory // 4
    book.open([1] * 4)
    # Room for it is made by three of the four, with the slack.
    new = range(1000, 1000 + 80 * (20_000 - each - 20_000 // SLACK) // each)
    key, _ = book.open([5] * 4, source((4, list(new))))
    book.settle(key)
    assert [prompt for prompt in (1, 2, 3, 4, 5) if len(book.open([prompt] * 4)[1])] == [1, 5]
    assert book.epoch == 5


def test_a_source_that_siblings_share_is_entered_once() -> None:
    book = DraftBook(Speculation(), limit_bytes=1 << 20)
    shared = source((0, [1, 2, 3]))
    _, index = book.open([9] * 4, shared)
    index.remove(0)
    assert len(book.open([9] * 4, shared)[1]) == 0
    assert len(book.open([9] * 4, source((0, [1, 2, 3])))[1]) == 1

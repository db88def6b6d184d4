"""The index drafts what followed the longest match, in the best response, and knows what it holds."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rlharvest.speculation.index import CANDIDATES, KEY_BYTES, PLACE_BYTES, TEXT_BYTES, TOKEN_BYTES, PromptIndex

TOKENS = st.integers(0, 3)
TEXTS = st.lists(TOKENS, max_size=25)
MOST, LEAST = 5, 2


def best_draft(texts: list[tuple[float, list[int]]], context: list[int], limit: int) -> list[int]:
    """The rule itself, by trying everything: texts are (reward, tokens), the newest last."""
    context = context[-MOST:]
    found = [
        (n, reward, order, at)
        for order, (reward, tokens) in enumerate(texts)
        for at in range(len(tokens))
        for n in range(LEAST, min(len(context), at) + 1)
        if tokens[at - n : at] == context[-n:]
    ]
    if not found or limit < 1:
        return []
    _, _, order, at = max(found)
    return texts[order][1][at : at + limit]


@settings(max_examples=300)
@given(TEXTS, st.lists(st.tuples(st.integers(0, 2), TEXTS), max_size=3), TEXTS, st.integers(0, 6))
def test_a_draft_follows_the_longest_match_in_the_best_and_newest_response(
    prompt: list[int], responses: list[tuple[int, list[int]]], tail: list[int], limit: int
) -> None:
    index = PromptIndex(prompt, match_max=MOST, match_min=LEAST)
    texts = []
    for reward, ids in responses:
        before = len(index)
        if ids and ids not in [tokens for _, tokens in texts]:
            texts.append((reward, ids))
            index.add(ids, epoch=0, reward=float(reward))
            assert len(index) == before + 1
    whole = [(float(reward), prompt[-MOST:] + ids) for reward, ids in texts]
    context = prompt + tail
    assert index.draft(context[-MOST:], limit) == best_draft(whole, context, limit)


def test_a_response_starts_with_what_followed_the_prompt() -> None:
    index = PromptIndex([5, 6, 7, 8])
    index.add([1, 2, 3], epoch=0, reward=0.0)
    assert index.draft([5, 6, 7, 8], 8) == [1, 2, 3]
    assert index.draft([6, 7, 8, 1], 1) == [2]


def test_an_unknown_reward_counts_as_the_mean() -> None:
    index = PromptIndex([1, 2, 3])
    index.add([10], epoch=0, reward=0.0)
    index.add([11], epoch=0, reward=1.0)
    index.add([12], epoch=0)
    assert index.draft([1, 2, 3], 1) == [11]
    index.add([11, 5], epoch=0, reward=0.0)
    index.remove(1)
    assert index.draft([1, 2, 3], 1) == [12]


def test_the_newer_epoch_wins_among_equal_rewards() -> None:
    index = PromptIndex([1, 2, 3])
    index.add([10], epoch=4, reward=1.0)
    index.add([11], epoch=3, reward=1.0)
    assert index.draft([1, 2, 3], 1) == [10]


def test_equal_responses_are_held_once_and_learn_their_reward() -> None:
    index = PromptIndex([1, 2, 3])
    serial = index.open(epoch=1)
    index.extend(serial, [10, 20])
    index.close(serial)
    index.add([11, 21], epoch=1, reward=0.5)
    assert index.draft([1, 2, 3], 2) == [11, 21]
    index.add([10, 20], epoch=1, reward=0.9)
    assert len(index) == 2
    assert index.draft([1, 2, 3], 2) == [10, 20]
    again = index.open(epoch=2)
    index.extend(again, [10, 20])
    index.close(again)
    assert len(index) == 2
    assert sorted(index.epochs().values()) == [1, 2]


def test_a_response_that_runs_is_drafted_from_by_its_siblings_and_by_itself() -> None:
    index = PromptIndex([1, 2, 3])
    first = index.open(epoch=0)
    index.extend(first, [4, 5, 6, 7])
    assert index.draft([2, 3, 4], 9) == [5, 6, 7]
    index.extend(first, [4, 5, 6])
    assert index.draft([7, 4, 5, 6], 9) == [7, 4, 5, 6]


def test_one_token_over_and_over_keeps_the_best_places_only() -> None:
    index = PromptIndex([7])
    index.add([7] * 5000, epoch=0, reward=0.0)
    assert index.draft([7] * 7, 4) == [7] * len(index.draft([7] * 7, 4)) != []
    assert index.memory < 5000 * TOKEN_BYTES + TEXT_BYTES + KEY_BYTES + (CANDIDATES + 8) * PLACE_BYTES


@pytest.mark.parametrize(("most", "least"), [(2, 3), (3, 0)])
def test_bounds_of_a_match_that_make_no_sense_are_refused(most: int, least: int) -> None:
    with pytest.raises(ValueError, match="match_min"):
        PromptIndex([1], match_max=most, match_min=least)


class IndexMachine(RuleBasedStateMachine):
    """Texts come, grow, end and go in any order; an index of the same texts made at once says the same."""

    @initialize(prompt=TEXTS)
    def begin(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.index = PromptIndex(prompt, match_max=MOST, match_min=LEAST)
        self.running: list[int] = []

    @rule(epoch=st.integers(0, 2))
    def open(self, epoch: int) -> None:
        self.running.append(self.index.open(epoch=epoch))

    @rule(data=st.data(), tokens=TEXTS)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        if self.running:
            self.index.extend(data.draw(st.sampled_from(self.running)), tokens)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.running:
            serial = data.draw(st.sampled_from(self.running))
            self.running.remove(serial)
            self.index.close(serial)

    @rule(ids=TEXTS, epoch=st.integers(0, 2), reward=st.sampled_from([None, 0.0, 0.5, -1.0]))
    def add(self, ids: list[int], epoch: int, reward: float | None) -> None:
        self.index.add(ids, epoch=epoch, reward=reward)

    @rule(context=TEXTS, limit=st.integers(0, 9))
    def draft(self, context: list[int], limit: int) -> None:
        draft = self.index.draft(context, limit)
        assert len(draft) <= max(limit, 0)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        serials = sorted(self.index.epochs())
        if serials:
            self.index.remove(data.draw(st.sampled_from(serials)))

    @invariant()
    def the_account_is_that_of_what_is_held(self) -> None:
        if not hasattr(self, "index"):
            return
        texts, places = self.index._texts.values(), self.index._places.values()
        assert self.index.memory == (
            len(texts) * TEXT_BYTES
            + sum(len(text.tokens) for text in texts) * TOKEN_BYTES
            + len(places) * KEY_BYTES
            + sum(map(len, places)) * PLACE_BYTES
        )

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for serial in list(self.index.epochs()):
                self.index.remove(serial)
            assert self.index.memory == 0
            assert self.index.draft([0] * MOST, 3) == []


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_the_account_is_what_python_takes() -> None:
    """Within a third, for texts without a common stretch, the worst case."""
    texts = [[1000 + 7919 * n % 50_000 + at * 13 % 977 for at in range(1500)] for n in range(8)]
    tracemalloc.start()
    try:
        index = PromptIndex([1, 2, 3])
        for text in texts:
            index.add([int(str(token)) for token in text], epoch=0, reward=0.5)
        index.draft([1, 2, 3], 1)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.67 < index.memory / taken < 1.5

"""What a client sees does not depend on how the tokens came."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from rlharvest_coordinator.gateway.text import Detokeniser, Stops

PARTS = st.lists(st.integers(1, 4), min_size=1, max_size=40)


def of_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose ids are bytes; one of 256 or above is a special token, which has no text."""
    return bytes(id for id in ids if id < 256).decode("utf-8", "replace")


def of_words(ids: Sequence[int]) -> str:
    """A tokenizer that leaves out the space at the beginning of a text."""
    return "".join(f" {id}" for id in ids).removeprefix(" ")


def cut(ids: Sequence[int], parts: Sequence[int]) -> list[Sequence[int]]:
    """Cut ids into parts of these lengths, the rest in one."""
    found, at = [], 0
    for n in parts:
        found.append(ids[at : at + n])
        at += n
    return [*found, ids[at:]]


@given(st.text(max_size=30), PARTS)
def test_characters_come_whole_and_in_order(text: str, parts: list[int]) -> None:
    ids = list(text.encode("utf-8", "ignore"))
    whole = of_bytes(ids)
    text_of = Detokeniser(of_bytes)
    seen = ""
    for part in cut(ids, parts):
        seen += text_of.add(part)
        assert whole.startswith(seen), "part of a character was shown"
    assert seen + text_of.end() == whole


@given(st.lists(st.integers(0, 300), max_size=30), PARTS)
def test_whatever_the_bytes_the_parts_do_not_matter(ids: list[int], parts: list[int]) -> None:
    """Bytes that make no character come out as U+FFFD, in the end at the latest."""
    whole, cut_up = Detokeniser(of_bytes), Detokeniser(of_bytes)
    at_once = whole.add(ids) + whole.end()
    assert "".join(map(cut_up.add, cut(ids, parts))) + cut_up.end() == at_once


@given(st.lists(st.integers(0, 99), max_size=30))
def test_what_a_tokenizer_leaves_out_at_the_beginning_is_there_in_the_middle(ids: list[int]) -> None:
    text_of = Detokeniser(of_words)
    assert "".join(text_of.add([id]) for id in ids) + text_of.end() == of_words(ids)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("abc", max_size=40), STOPS, PARTS)
def test_text_ends_before_the_first_stop_string_however_it_comes(text: str, stop: list[str], parts: list[int]) -> None:
    stops = Stops(stop)
    seen = ""
    for part in cut(text, parts):
        seen += stops.add(str(part))
        assert not any(string in seen for string in stop)
    ends = sorted((text.find(string) + len(string), text.find(string)) for string in stop if string in text)
    assert stops.found == bool(ends)
    assert seen + stops.end() == (text[: ends[0][1]] if ends else text)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stops = Stops(["END"])
    assert [stops.add(part) for part in ("a", "E", "N", "x", "EN", "D and more")] == ["a", "", "", "ENx", "", ""]
    assert (stops.found, stops.end()) == (True, "")

"""Subjects: built and taken apart by one rule, whatever is in them."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.bus import NO_JOB, STREAMS, Kind, parse_subject, subject
from rlharvest.errors import InvalidField

TOKENS = st.text("abcXYZ019_-", min_size=1, max_size=100)
KINDS = st.sampled_from(get_args(Kind))


@given(KINDS, TOKENS, TOKENS)
def test_a_subject_is_parsed_into_what_it_was_built_from(kind: Kind, job: str, who: str) -> None:
    assert parse_subject(subject(kind, job, who)) == (kind, job, who)


@given(KINDS, st.text(max_size=120), st.booleans())
def test_no_text_escapes_from_its_token(kind: Kind, text: str, as_job: bool) -> None:
    """A name with dots, spaces or wildcards would go to somebody else's subject: it is refused by name."""
    try:
        built = subject(kind, text if as_job else "job", "who" if as_job else text)
    except InvalidField as error:
        refused = (error.field, error.value)
    else:
        assert built.count(".") == 4
        assert parse_subject(built)[1 if as_job else 2] == text
        return
    assert refused == ("subject.job" if as_job else "subject.who", text)


@pytest.mark.parametrize("text", ["", "a.b", "rlharvest.v1.spans.j", "rlharvest.v2.spans.j.w", "rlharvest.v1.a.b.c.d"])
def test_foreign_subjects_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a subject of rlharvest"):
        parse_subject(text)


def test_each_kind_that_must_not_be_lost_is_in_exactly_one_stream() -> None:
    kept = [parse_subject(text)[0] for config in STREAMS.values() for text in config.subjects or []]
    assert sorted(kept) == ["events", "groups", "ledger", "score", "scored", "spans"]
    assert set(kept) <= set(get_args(Kind))


def test_what_has_no_job_says_so() -> None:
    assert subject("beat", who="wkr_1") == f"rlharvest.v1.beat.{NO_JOB}.wkr_1"

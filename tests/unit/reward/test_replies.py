"""Answers of a child process: one that is right passes, everything else is refused, however it is made."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import CorruptData
from rlharvest_reward import replies
from rlharvest_reward.fault import KINDS

CALL = "00112233aabbccdd"
FAULT = {"kind": "none", "message": "m", "function": "f"}

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(value=st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
def test_a_number_or_none_passes(value: float | None) -> None:
    assert replies.read({"call": CALL, "value": value}, CALL).value == value


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_fault_of_a_known_kind_passes(kind: str) -> None:
    fault = replies.read({"call": CALL, "fault": {**FAULT, "kind": kind}}, CALL).fault
    assert fault is not None
    assert fault.kind == kind


@pytest.mark.parametrize(
    "change",
    [
        *({"call": "0" * 16}, {"call": None}, {"call": 7}),
        *({"value": "1.0"}, {"value": True}, {"value": [1.0]}, {"value": {}}, {"value": math.nan}, {"value": math.inf}),
        *({"value": 10**400}, {"handle": 7}, {"job": "rljob_other"}, {"walls": ["x"] * 9}, {"walls": [1]}),
        *({"fault": {**FAULT, "kind": "other"}}, {"fault": {**FAULT, "message": "x" * 5000}}, {"fault": "none"}),
        *({"fault": {**FAULT, "function": "x" * 500}}, {"fault": {**FAULT, "more": 1}}, {"fault": {}}),
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptData):
        replies.read({"call": CALL, "value": 1.0, **change}, CALL)


@given(st.dictionaries(st.sampled_from(["call", "value", "fault", "walls", "x"]), json, max_size=5))
def test_no_message_gives_anything_but_a_reply_or_a_refusal(message: dict[str, Any]) -> None:
    try:
        reply = replies.read(message, CALL)
    except CorruptData:
        return
    assert reply.call == CALL
    assert reply.value is None or math.isfinite(reply.value)

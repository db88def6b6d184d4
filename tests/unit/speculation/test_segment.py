"""History survives the wire; what was changed on the way is refused as a whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import CorruptData
from rlharvest.speculation.history import KEY_BYTES, PastResponse, prompt_key
from rlharvest.speculation.segment import DIGEST_BYTES, Segment, _digest, pack, unpack
from rlharvest.v1 import history_pb2

U32 = st.integers(0, 2**32 - 1)
RESPONSES = st.builds(
    PastResponse,
    ids=st.lists(U32, min_size=1, max_size=8).map(lambda ids: np.array(ids, np.uint32)),
    epoch=U32,
    version=U32,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
SEGMENTS = st.builds(
    Segment,
    prompt=st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    responses=st.lists(RESPONSES, max_size=4).map(tuple),
)


@given(SEGMENTS)
def test_pack_and_unpack_are_inverse_and_equal_segments_have_equal_bytes(segment: Segment) -> None:
    again = unpack(pack(segment))
    assert again.prompt == segment.prompt
    for mine, theirs in zip(segment.responses, again.responses, strict=True):
        assert np.array_equal(mine.ids, theirs.ids)
        assert (mine.epoch, mine.version, mine.reward) == (theirs.epoch, theirs.version, theirs.reward)
    assert pack(again) == pack(segment)


@given(SEGMENTS, st.data())
def test_a_changed_or_missing_byte_is_refused(segment: Segment, data: st.DataObject) -> None:
    whole = pack(segment)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for changed in (bytes(flipped), whole[:at], whole + b"\0"):
        with pytest.raises(CorruptData):
            unpack(changed)


@given(st.binary(max_size=200))
def test_any_bytes_with_a_digest_are_a_segment_or_corrupt_data(body: bytes) -> None:
    try:
        unpack(_digest(body) + body)
    except CorruptData:
        pass


@pytest.mark.parametrize(
    "change",
    [{"n": [1, 1]}, {"n": [0]}, {"epoch": []}, {"reward": [math.inf]}, {"prompt": b"short"}, {"ids": b"\0" * 8}],
)
def test_columns_that_do_not_fit_together_are_refused(change: dict[str, object]) -> None:
    values = {"prompt": bytes(KEY_BYTES), "n": [1], "epoch": [0], "version": [0], "reward": [0.0], "ids": b"\0" * 4}
    body = history_pb2.HistorySegment(**{**values, **change}).SerializeToString()  # type: ignore[arg-type]  # on purpose
    with pytest.raises(CorruptData):
        unpack(_digest(body) + body)


@pytest.mark.parametrize("wrong", ["prompt", "ids", "reward"])
def test_what_breaks_an_invariant_is_not_packed(wrong: str) -> None:
    one = np.array([1], np.uint32)
    response = PastResponse(
        ids=one[:0] if wrong == "ids" else one, epoch=0, version=0, reward=math.inf if wrong == "reward" else 0.0
    )
    with pytest.raises(ValueError):
        pack(Segment(prompt=b"x" if wrong == "prompt" else bytes(KEY_BYTES), responses=(response,)))


def test_a_prompt_is_known_by_its_tokens() -> None:
    assert prompt_key([1, 2, 3]) == prompt_key(np.array([1, 2, 3], np.uint32))
    assert len({prompt_key([1, 2, 3]), prompt_key([1, 2]), prompt_key([])}) == 3
    assert len(pack(Segment(prompt=prompt_key([1]), responses=()))) == DIGEST_BYTES + KEY_BYTES + 2

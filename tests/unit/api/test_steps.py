"""Curves are thinned evenly, JSON is strict."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rlharvest_coordinator.api.strict import StrictJSON
from rlharvest_coordinator.store.steps import thin
from rlharvest_coordinator.store.values import finite, storable

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.integers(0, 3000), st.none() | st.integers(1, 500))
def test_thinning_keeps_order_ends_and_the_bound(n: int, most: int | None) -> None:
    kept = thin(n, most)
    assert kept == sorted(set(kept))
    assert len(kept) == min(n, most) if most is not None else len(kept) == n
    if n and most != 1:
        assert (kept[0], kept[-1]) == (0, n - 1)


def _refuse(name: str) -> Any:
    raise AssertionError(name)


@given(JSON)
def test_json_has_no_nan_and_no_broken_text(value: Any) -> None:
    body = bytes(StrictJSON(value).body)
    json.loads(body.decode("utf-8"), parse_constant=_refuse)
    assert finite(finite(value)) == finite(value)


@given(st.text())
def test_stored_text_has_no_nul_and_is_utf8(text: str) -> None:
    stored = storable(text)
    assert "\0" not in stored
    stored.encode("utf-8")
    assert len(stored) == len(text)

"""Spans survive the wire, and what does not fit together is refused as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import CorruptData
from rlharvest.spans import Finish, Flush, Run, Span, Tokens, merge_runs, pack, skip_runs, unpack
from rlharvest.v1 import spans_pb2

RUNS = st.lists(st.builds(Run, n=st.integers(1, 4), version=st.integers(0, 2**32 - 1)), max_size=3)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    runs = tuple(draw(RUNS))
    n = sum(run.n for run in runs)
    finish = draw(st.sampled_from(list(Finish) if n else [Finish.EOS, Finish.STOP, Finish.LENGTH]))
    return Span(
        handle=draw(st.integers(0, 2**32 - 1)),
        attempt=draw(st.integers(0, 2**64 - 1)),
        offset=draw(st.integers(0, 2**31)),
        ids=np.array(draw(st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n)), np.uint32),
        logprobs=np.array(draw(st.lists(st.floats(-(2.0**100), 0, width=32), min_size=n, max_size=n)), np.float32),
        runs=runs,
        finish=finish,
    )


@given(st.lists(spans(), max_size=5), st.booleans(), st.integers(0, 2**64 - 1))
def test_pack_and_unpack_are_inverse(rows: list[Span], final: bool, number: int) -> None:
    flush = Flush(worker="w", incarnation=3, number=number, spans=tuple(rows), final=final, numerics_key="k")
    again = unpack(pack(flush))
    assert (again.worker, again.incarnation, again.number, again.final) == ("w", 3, number, final)
    for mine, theirs in zip(rows, again.spans, strict=True):
        assert (mine.handle, mine.attempt, mine.offset, mine.runs, mine.finish) == (
            theirs.handle,
            theirs.attempt,
            theirs.offset,
            theirs.runs,
            theirs.finish,
        )
        assert np.array_equal(mine.ids, theirs.ids)
        assert np.array_equal(mine.logprobs, theirs.logprobs)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_flush_or_corrupt_data(data: bytes) -> None:
    try:
        unpack(data)
    except CorruptData:
        pass


def good() -> spans_pb2.TokenSpans:
    return spans_pb2.TokenSpans(
        worker="w",
        handle=[1],
        attempt=[1],
        offset=[0],
        n=[2],
        finish=[spans_pb2.FINISH_NONE],
        ids=b"\0" * 8,
        logprobs=b"\0" * 8,
        run_n=[2],
        run_version=[0],
    )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("attempt", [], "attempt"),
        ("ids", b"\0" * 4, "ids"),
        ("ids", b"\0" * 7, "token ids"),
        ("logprobs", np.array([np.nan, 0], "<f4").tobytes(), "logprobs"),
        ("logprobs", np.array([0.1, 0], "<f4").tobytes(), "logprobs"),
        ("run_n", [1], "runs"),
        ("run_n", [3], "runs"),
        ("run_n", [2, 1], "run_version"),
        ("finish", [9], "finish"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(field: str, value: object, named: str) -> None:
    """A lost log-probability is never padded, a wrong one never trained."""
    message = good()
    message.ClearField(field)  # type: ignore[arg-type]  # the names are checked by the test itself
    if isinstance(value, bytes):
        setattr(message, field, value)
    else:
        getattr(message, field).extend(value)
    with pytest.raises(CorruptData, match=named):
        unpack(message.SerializeToString())


@given(RUNS, st.integers(0, 12))
def test_skipping_runs_skips_tokens(runs: list[Run], n: int) -> None:
    flat = [run.version for run in runs for _ in range(run.n)]
    assert [run.version for run in skip_runs(runs, n) for _ in range(run.n)] == flat[n:]
    assert [run.version for run in merge_runs(runs) for _ in range(run.n)] == flat


def test_tokens_refuse_a_gap() -> None:
    tokens = Tokens()
    span = Span(
        handle=0, attempt=1, offset=1, ids=np.zeros(1, np.uint32), logprobs=np.zeros(1, np.float32), runs=(Run(1, 0),)
    )
    with pytest.raises(CorruptData, match="does not continue"):
        tokens.extend(span)

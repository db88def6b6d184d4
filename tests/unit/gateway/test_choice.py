"""A choice and its answer are the same, however the tokens came from the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.spans import Finish, Run
from rlharvest_coordinator.gateway.choice import Choice, Piece
from rlharvest_coordinator.gateway.shapes import ChatShape, CompletionShape
from rlharvest_coordinator.serving import Delta

IDS = st.lists(st.integers(97, 101), min_size=1, max_size=30)
PARTS = st.lists(st.integers(0, 4), max_size=20)
STOPS = st.lists(st.text("abc", min_size=1, max_size=3), max_size=2)


def letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def deltas(ids: list[int], parts: list[int], finish: Finish) -> list[Delta]:
    """Cut a response into what the ledger gives at a time; the finish comes with the last tokens."""
    cuts, at = [], 0
    for n in parts:
        cuts.append(ids[at : at + n])
        at += n
    cuts.append(ids[at:])
    runs = (Run(len(ids), 3),)
    return [
        Delta(
            place=0,
            ids=part,
            logprobs=[-float(id) for id in part],
            finish=finish if place == len(cuts) - 1 else Finish.NONE,
            runs=runs,
        )
        for place, part in enumerate(cuts)
    ]


@given(IDS, PARTS, STOPS, st.sampled_from([Finish.EOS, Finish.LENGTH, Finish.STOP]))
def test_text_tokens_and_reason_do_not_depend_on_the_parts(
    ids: list[int], parts: list[int], stop: list[str], finish: Finish
) -> None:
    choice, text = Choice(0, letters, stop), letters(ids)
    pieces = [piece for delta in deltas(ids, parts, finish) if (piece := choice.add(delta)) is not None]
    ends = sorted((text.find(string) + len(string), text.find(string)) for string in stop if string in text)
    tokens, shown = (ends[0][0], text[: ends[0][1]]) if ends else (len(ids), text)
    assert "".join(piece.text for piece in pieces) == shown
    assert [id for piece in pieces for id in piece.ids] == ids[:tokens]
    assert [logprob for piece in pieces for logprob in piece.logprobs] == [-float(id) for id in ids[:tokens]]
    assert choice.tokens == tokens
    wanted = "length" if finish is Finish.LENGTH and not ends else "stop"
    assert [piece.reason for piece in pieces if piece.reason] == [wanted]
    assert pieces[-1].runs == (Run(tokens, 3),)


def piece(index: int, text: str, reason: Any = None) -> Piece:
    ids = list(map(ord, text))
    runs = (Run(len(ids), 3),) if reason else ()
    return Piece(index=index, text=text, ids=ids, logprobs=[-1.0] * len(ids), reason=reason, runs=runs)


ARGUMENTS: dict[str, Any] = {
    "id": "x",
    "created": 1,
    "model": "m",
    "prompts": [[1, 2], [3]],
    "n": 1,
    "logprobs": True,
    "piece_text": chr,
}


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
def test_what_is_not_openais_is_there_only_if_asked_for(kind: Any) -> None:
    pieces = [piece(0, "ab", "stop"), piece(1, "c", "length")]
    choices = [Choice(0, letters, [], tokens=2), Choice(1, letters, [], tokens=1)]
    plain = kind(**ARGUMENTS, ids=False).whole(pieces, choices)
    assert "token_ids" not in str(plain)
    assert plain["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    full = kind(**ARGUMENTS, ids=True).whole(pieces, choices)
    assert [choice["token_ids"] for choice in full["choices"]] == [[97, 98], [99]]
    assert full["choices"][0]["version_runs"] == [{"n": 2, "version": 3}]


def test_offsets_of_tokens_go_on_through_a_stream() -> None:
    shape = CompletionShape(**ARGUMENTS, ids=True)
    chunks = [shape.chunk(part) for part in (piece(0, "ab"), piece(1, "x"), piece(0, "c", "stop"))]
    offsets = [(chunk["choices"][0]["index"], chunk["choices"][0]["logprobs"]["text_offset"]) for chunk in chunks]
    assert offsets == [(0, [0, 1]), (1, [0]), (0, [2])]
    prompts = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert prompts == [[1, 2], [3], None], "the prompt's ids come with the first chunk of a choice"


def test_a_token_that_is_part_of_a_character_has_no_bytes() -> None:
    shape = ChatShape(**{**ARGUMENTS, "piece_text": lambda id: "\ufffd" if id == 97 else chr(id)}, ids=False)
    content = shape.chunk(piece(0, "ab"))["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["bytes"]) for token in content] == [("\ufffd", None), ("b", [98])]

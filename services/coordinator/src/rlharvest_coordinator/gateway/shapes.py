"""Answers of the gateway in OpenAI's form: whole, or as the chunks of a stream. Pure.

What is not OpenAI's is there with `return_token_ids` only: `prompt_token_ids` (of a choice; in chat of the answer),
`token_ids` and `token_logprobs` of a choice, and `version_runs` where it ends: how many of its tokens each version sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from rlharvest_coordinator.gateway.choice import Choice, Piece

Json = dict[str, Any]
PieceText = Callable[[int], str]
"""A token id to its text."""


class Shape(ABC):
    """How the answer to one request looks.

    Args:
        prompts: token ids, each with `n` choices in order.
        logprobs: whether log-probabilities are given in OpenAI's form.
        ids: whether token ids are given.
    """

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        prompts: Sequence[Sequence[int]],
        n: int,
        logprobs: bool,
        ids: bool,
        piece_text: PieceText,
    ) -> None:
        self._head: Json = {"id": f"{self.prefix}-{id}", "created": created, "model": model}
        self._prompts = prompts
        self._n = n
        self._logprobs = logprobs
        self._ids = ids
        self._piece_text = piece_text
        self._begun: set[int] = set()
        """Choices of which a chunk was made."""

    def chunk(self, piece: Piece) -> Json:
        """Return the chunk of a stream that carries a piece."""
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        choice = {"index": piece.index, **self._part(piece, first=first), "finish_reason": piece.reason}
        choice |= self._extras(piece, first=first)
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        """Return the last chunk of a stream that shows what was used."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage(choices)}

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Json:
        """Return the answer, of all pieces that came."""
        shown = []
        for choice in choices:
            joined = _joined(choice.index, [piece for piece in pieces if piece.index == choice.index])
            content = {"index": choice.index, **self._message(joined), "finish_reason": joined.reason}
            shown.append(content | self._extras(joined, first=True))
        return {**self._head, "object": self.kind, "choices": shown, "usage": self._usage(choices)}

    @abstractmethod
    def _part(self, piece: Piece, *, first: bool) -> Json:
        """Return what a chunk's choice holds of a piece."""

    @abstractmethod
    def _message(self, piece: Piece) -> Json:
        """Return what a whole answer's choice holds."""

    def _extras(self, piece: Piece, *, first: bool) -> Json:
        if not self._ids:
            return {}
        found: Json = {"token_ids": piece.ids, "token_logprobs": piece.logprobs}
        if first:
            found["prompt_token_ids"] = self._prompts[piece.index // self._n]
        if piece.reason is not None:
            found["version_runs"] = [{"n": run.n, "version": run.version} for run in piece.runs]
        return found

    def _usage(self, choices: Sequence[Choice]) -> Json:
        prompt, completion = sum(map(len, self._prompts)), sum(choice.tokens for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class CompletionShape(Shape):
    """Of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._offsets: dict[int, int] = {}
        """Characters of the tokens of each choice so far."""

    def _part(self, piece: Piece, *, first: bool) -> Json:
        return self._message(piece)

    def _message(self, piece: Piece) -> Json:
        return {"text": piece.text, "logprobs": self._table(piece) if self._logprobs else None}

    def _table(self, piece: Piece) -> Json:
        tokens = list(map(self._piece_text, piece.ids))
        offsets, at = [], self._offsets.get(piece.index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[piece.index] = at
        return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": None, "text_offset": offsets}


class ChatShape(Shape):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def chunk(self, piece: Piece) -> Json:
        return _prompt_on_top(super().chunk(piece))

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Json:
        return _prompt_on_top(super().whole(pieces, choices))

    def _part(self, piece: Piece, *, first: bool) -> Json:
        delta: Json = {"role": "assistant"} if first else {}
        if piece.text or first:
            delta["content"] = piece.text
        return {"delta": delta, "logprobs": self._table(piece)}

    def _message(self, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": self._table(piece)}

    def _table(self, piece: Piece) -> Json | None:
        if not self._logprobs:
            return None
        content = []
        for id, logprob in zip(piece.ids, piece.logprobs, strict=True):
            token = self._piece_text(id)
            # Part of a character has no text, and its bytes cannot be told from the text.
            whole = "\ufffd" not in token
            held = {"token": token, "logprob": logprob, "bytes": list(token.encode()) if whole else None}
            content.append({**held, "top_logprobs": []})
        return {"content": content, "refusal": None}


def _joined(index: int, pieces: Sequence[Piece]) -> Piece:
    """Return the pieces of one choice as one."""
    return Piece(
        index=index,
        text="".join(piece.text for piece in pieces),
        ids=[id for piece in pieces for id in piece.ids],
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        reason=pieces[-1].reason if pieces else None,
        runs=pieces[-1].runs if pieces else (),
    )


def _prompt_on_top(answer: Json) -> Json:
    """All choices of a chat have one prompt: it is shown once."""
    for choice in answer["choices"]:
        if (ids := choice.pop("prompt_token_ids", None)) is not None:
            answer["prompt_token_ids"] = ids
    return answer

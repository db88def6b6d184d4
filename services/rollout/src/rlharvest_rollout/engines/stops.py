"""Stop strings: whether the text of a response holds one.

No state: a stop string that a token completes lies in the text of the last few tokens, since each token but a special
one has at least one byte. So a response that continues elsewhere ends at the very token it would have ended at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rlharvest.errors import InvalidField
from tokenizers import Tokenizer

MARGIN = 8
"""Tokens before the window: decoders treat the first token of a text apart, and a character may span four tokens."""


class StopText:
    """Decodes what the search for stop strings needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = (id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._special = frozenset(special)

    def whole(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def tail(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """Return the end of the text, long enough to hold any stop string that the last token completed."""
        wanted = max(len(string.encode()) for string in stop) + MARGIN
        start = len(ids)
        while wanted and start:
            start -= 1
            wanted -= ids[start] not in self._special
        return self.whole(ids[start:])


class StopTexts:
    """The decoder of each version; versions of a job share their tokenizer, which takes as long to read as a small model."""

    def __init__(self) -> None:
        self._digest = ""
        self._newest: StopText | None = None

    def read(self, path: Path) -> StopText | None:
        """Return the decoder of a tokenizer.json; None: there is none.

        Raises:
            InvalidField: the file is no tokenizer.
        """
        if not path.exists():
            return None
        data = path.read_bytes()
        digest = hashlib.blake2b(data).hexdigest()
        if self._newest is None or self._digest != digest:
            try:
                tokenizer = Tokenizer.from_str(data.decode())
            except Exception as error:  # the library raises nothing narrower
                raise InvalidField(
                    "model", str(path), f"not a tokenizer ({error})", "Save the tokenizer again."
                ) from error
            self._digest, self._newest = digest, StopText(tokenizer)
        return self._newest

"""From token ids to the text that a client may see, as they come. Pure.

Invariants (property-tested): however the tokens are cut into parts, the text is the same; no character is given in pieces;
of a stop string nothing is given, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Ids to text; bytes that make no character yet come out as U+FFFD."""

_UNFINISHED = "\ufffd"


class Detokeniser:
    """The text of one response, a part at a time.

    A token is decoded behind those before it, back to the last place where text came out: what some tokenizers write at the
    start of a text (or leave out there) so never shows in the middle.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        """From the last but one place where text came out."""
        self._said = 0
        """How many of those have been given as text."""

    def add(self, ids: Sequence[int]) -> str:
        """Take tokens; return the text that is certain now."""
        return "".join(map(self._next, ids))

    def end(self) -> str:
        """Return what is left: bytes that make no character, as U+FFFD."""
        return self._decode(self._ids)[len(self._before()) :]

    def _next(self, token: int) -> str:
        self._ids.append(token)
        text, before = self._decode(self._ids), self._before()
        if len(text) <= len(before) or text.endswith(_UNFINISHED):
            return ""
        self._ids, self._said = self._ids[self._said :], len(self._ids) - self._said
        return text[len(before) :]

    def _before(self) -> str:
        return self._decode(self._ids[: self._said])


class Stops:
    """Lets text through up to the first stop string.

    The first is the one that is complete first, and of several that are complete at the same place the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Take text; return what cannot be part of a stop string."""
        if self.found:
            return ""
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            given, self._held = self._held[: min(ends)[1]], ""
            return given
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        at = len(self._held) - keep
        given, self._held = self._held[:at], self._held[at:]
        return given

    def end(self) -> str:
        """Nothing more comes: return what was held back."""
        given, self._held = self._held, ""
        return given


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

"""The responses to one prompt, searched by their last few tokens.

A draft is what followed where the last tokens of a response occurred before: in the longest match of at most `match_max`
tokens; among equally long ones in the response with the highest reward, and then in the newest one. It ends where that
response ends. An unknown reward counts as the mean of the known ones.

Occurrences are found by their last `match_min` tokens, best first, and compared backwards from there. A text is entered
only when something is looked up, so history that nobody asks for costs its tokens alone.

Invariants: what a draft names lies, in one text, behind a match of at least `match_min` tokens; equal responses are held
once; `memory` depends only on what is held and entered, and is 0 for an empty index.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rlharvest.speculation.options import MATCH_MAX, MATCH_MIN

CANDIDATES = 32
"""Most occurrences of the same `match_min` tokens that are kept, the best ones."""

TOKEN_BYTES = 40
"""Of a token in a list: a reference and an integer."""
KEY_BYTES = 190
"""Of an entry of the dictionary: a tuple of references, a list, the slot."""
PLACE_BYTES = 48
"""Of an occurrence: a reference and an integer of four digits."""
TEXT_BYTES = 600
"""Of a text, besides its tokens."""

_AT_BITS = 32
_SERIAL_BITS = 32
_EPOCH_BITS = 32


@dataclass(slots=True)
class _Text:
    tokens: list[int]
    """The end of the prompt, then the response."""
    entered: int
    """Tokens whose occurrences are in the dictionary."""
    rank: int
    """Reward, epoch and serial number, in this order of importance, moved up by _AT_BITS."""
    epoch: int
    digest: bytes | None = None
    """Of a finished response."""
    reward: float | None = None


class PromptIndex:
    """Texts of one prompt. A serial number names a text; numbers are not used again."""

    def __init__(self, prompt: Sequence[int], *, match_max: int = MATCH_MAX, match_min: int = MATCH_MIN) -> None:
        """Start empty.

        Args:
            prompt: its last `match_max` tokens are the context in which responses start.
        """
        if not 1 <= match_min <= match_max:
            raise ValueError(f"match_min {match_min} is not within 1 .. match_max {match_max}")
        self._before = [int(token) for token in prompt[-match_max:]]
        self._most, self._least = match_max, match_min
        self._texts: dict[int, _Text] = {}
        self._behind: set[int] = set()
        """Texts with tokens that are not entered."""
        self._digests: dict[bytes, int] = {}
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Rank and place of each occurrence, ascending."""
        self._reward_sum, self._rewards = 0.0, 0
        self._next = 0
        self._tokens = self._held_places = 0

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def memory(self) -> int:
        """Memory taken, by the constants above."""
        return (
            self._tokens * TOKEN_BYTES
            + len(self._texts) * TEXT_BYTES
            + len(self._places) * KEY_BYTES
            + self._held_places * PLACE_BYTES
        )

    def open(self, *, epoch: int) -> int:
        """Begin a response that is generated now; return its serial number."""
        return self._hold([], epoch=epoch, reward=None)

    def extend(self, serial: int, tokens: Sequence[int]) -> None:
        """Append tokens to a response, if it is still held."""
        text = self._texts.get(serial)
        if text is not None and tokens:
            text.tokens.extend(tokens)
            self._tokens += len(tokens)
            self._behind.add(serial)

    def close(self, serial: int) -> None:
        """A response is finished: from now on it is history, and takes the place of one that it equals."""
        text = self._texts.get(serial)
        if text is None:
            return
        ids = text.tokens[len(self._before) :]
        digest = _digest(ids)
        if digest in self._digests or not ids:
            self.remove(serial)
            self.add(ids, epoch=text.epoch)
        else:
            text.digest = digest
            self._digests[digest] = serial

    def add(self, ids: Sequence[int], *, epoch: int, reward: float | None = None) -> int | None:
        """Take a finished response in; return its serial number, None if nothing was added.

        One that is held already takes the newer epoch and the known reward.
        """
        if not ids:
            return None
        digest = _digest(ids)
        serial = self._digests.get(digest)
        if serial is not None:
            held = self._texts[serial]
            if epoch < held.epoch or (epoch == held.epoch and (reward is None or held.reward is not None)):
                return None
            reward = held.reward if reward is None else reward
            self.remove(serial)
        serial = self._hold(ids, epoch=epoch, reward=reward)
        self._texts[serial].digest = digest
        self._digests[digest] = serial
        return serial

    def remove(self, serial: int) -> None:
        """Forget a text, if it is held."""
        text = self._texts.pop(serial, None)
        if text is None:
            return
        self._tokens -= len(text.tokens)
        self._behind.discard(serial)
        if text.digest is not None:
            del self._digests[text.digest]
        for at in range(self._least, text.entered):
            key = tuple(text.tokens[at - self._least : at])
            places = self._places.get(key)
            if places is None:
                continue
            place = text.rank | at
            found = bisect_left(places, place)
            if found < len(places) and places[found] == place:
                del places[found]
                self._held_places -= 1
                if not places:
                    del self._places[key]

    def epochs(self) -> dict[int, int]:
        """Return the epoch of each text by its serial number."""
        return {serial: text.epoch for serial, text in self._texts.items()}

    def draft(self, context: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow; none without a match.

        Args:
            context: the last tokens, of prompt and response together; `match_max` of them are enough.
        """
        if self._behind:
            self._enter()
        least, most = self._least, min(self._most, len(context))
        if most < least or limit < 1:
            return []
        places = self._places.get(tuple(context[-least:]))
        if places is None:
            return []
        best: list[int] = []
        best_at, longest = 0, 0
        for place in reversed(places):
            tokens = self._texts[(place >> _AT_BITS) & _SERIAL_MASK].tokens
            at = place & _AT_MASK
            n, bound = least, min(most, at)
            while n < bound and tokens[at - n - 1] == context[-n - 1]:
                n += 1
            if n > longest:
                best, best_at, longest = tokens, at, n
                if n == most:
                    break
        return best[best_at : best_at + limit]

    def _hold(self, ids: Sequence[int], *, epoch: int, reward: float | None) -> int:
        serial = self._next
        self._next += 1
        if reward is not None:
            self._reward_sum += reward
            self._rewards += 1
        rank = _order(self._reward_sum / max(self._rewards, 1) if reward is None else reward)
        rank = (((rank << _EPOCH_BITS) | epoch) << _SERIAL_BITS | serial) << _AT_BITS
        tokens = [*self._before, *ids]
        self._texts[serial] = _Text(tokens, entered=self._least, rank=rank, epoch=epoch, reward=reward)
        self._tokens += len(tokens)
        if len(tokens) > self._least:
            self._behind.add(serial)
        return serial

    def _enter(self) -> None:
        places, least = self._places, self._least
        for serial in self._behind:
            text = self._texts[serial]
            start, rank = text.entered, text.rank
            part = text.tokens[start - least : -1]
            keys = zip(*(part[shift:] for shift in range(least)), strict=False)
            for at, key in enumerate(keys, start):
                found = places.get(key)
                if found is None:
                    places[key] = [rank | at]
                else:
                    insort(found, rank | at)
                    if len(found) > CANDIDATES:
                        del found[0]
                        self._held_places -= 1
                self._held_places += 1
            text.entered = max(least, len(text.tokens))
        self._behind.clear()


_AT_MASK = (1 << _AT_BITS) - 1
_SERIAL_MASK = (1 << _SERIAL_BITS) - 1


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=16).digest()


def _order(value: float) -> int:
    """Return an integer of 32 bits that orders as the value does, rounded to float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", max(-_LARGEST, min(value, _LARGEST))))
    return int(bits ^ 0xFFFFFFFF) if bits >> 31 else int(bits | 0x80000000)


_LARGEST = 3.4e38

"""What a worker remembers of many prompts, within a bound of memory.

Invariants: after `settle` the memory counted is at most the bound, and exactly the sum over the indexes; what goes first is
of the oldest epoch, and within one epoch of the prompt that was used least recently.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

from rlharvest.spans import Ids
from rlharvest.speculation.history import DraftSource, prompt_key
from rlharvest.speculation.index import PromptIndex
from rlharvest.speculation.options import Speculation

SLACK = 8
"""One part in so many of the bound is freed beyond need, so that not every response makes room anew."""


class DraftBook:
    """Indexes by prompt."""

    def __init__(self, options: Speculation, *, limit_bytes: int) -> None:
        self._options = options
        self._limit = limit_bytes
        self._indexes: OrderedDict[bytes, PromptIndex] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        self._held = 0
        self._sources: dict[bytes, weakref.ref[DraftSource]] = {}
        """What was entered last for each prompt, while a request has it."""
        self.epoch = 0
        """Of what is generated now: the one after the newest that came as history."""

    def __len__(self) -> int:
        return len(self._indexes)

    @property
    def memory(self) -> int:
        """Memory of all indexes, as they were when they were settled last."""
        return self._held

    def open(self, prompt: Sequence[int] | Ids, source: DraftSource | None = None) -> tuple[bytes, PromptIndex]:
        """Return key and index of a prompt, with the history that came with it."""
        key = prompt_key(prompt)
        index = self._indexes.get(key)
        if index is None:
            options = self._options
            index = PromptIndex(
                [int(token) for token in prompt[-options.match_max :]],
                match_max=options.match_max,
                match_min=options.match_min,
            )
            self._indexes[key] = index
        self._indexes.move_to_end(key)
        entered = self._sources.get(key)
        if source is not None and (entered is None or entered() is not source):
            self._sources[key] = weakref.ref(source)
            for response in source.responses:
                index.add(response.ids.tolist(), epoch=response.epoch, reward=response.reward)
                self.epoch = max(self.epoch, response.epoch + 1)
        return key, index

    def settle(self, key: bytes) -> None:
        """Count what changed of a prompt, and make room if there is too much."""
        index = self._indexes.get(key)
        if index is None:
            return
        size = index.memory
        self._held += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if self._held > self._limit:
            self._make_room()

    def _make_room(self) -> None:
        texts = [
            (epoch, used, serial, key)
            for used, (key, index) in enumerate(self._indexes.items())
            for serial, epoch in index.epochs().items()
        ]
        wanted = self._limit - self._limit // SLACK
        for _, _, serial, key in sorted(texts):
            if self._held <= wanted:
                return
            index = self._indexes[key]
            index.remove(serial)
            size = index.memory
            self._held += size - self._sizes.get(key, 0)
            self._sizes[key] = size
            if not index:
                del self._indexes[key], self._sizes[key]
                self._sources.pop(key, None)

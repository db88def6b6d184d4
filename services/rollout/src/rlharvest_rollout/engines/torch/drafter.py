"""Drafts for the sequences that run: where they come from, how long they are, whether there are any.

Belongs to the engine's thread. Knows no tensors and nothing of what is sampled: it proposes, and is told what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several

from rlharvest.speculation.book import DraftBook
from rlharvest.speculation.options import Speculation
from rlharvest.speculation.switch import Switch
from rlharvest.speculation.window import next_window

from rlharvest_rollout.engines.torch.scheduler import Own, Sequence

SHORT = 4
"""Longest draft of the arm of the switch that drafts a little."""

SPREAD = 2
"""A draft is at most so many times as long as the mean of a step's: attention is computed for as many rows of each
sequence as the longest one has."""

SETTLE_STEPS = 256
"""So often the memory of what is still growing is counted."""


class Drafter:
    """Drafts of one job."""

    def __init__(self, options: Speculation, *, memory_bytes: int, clock: Callable[[], float]) -> None:
        """Start without history.

        Args:
            memory_bytes: bound of what is remembered.
            clock: seconds that steps took, by which drafts are judged.
        """
        self._options = options
        self._clock = clock
        self._book = DraftBook(options, limit_bytes=memory_bytes)
        self._caps = sorted({0, min(SHORT, options.window_max), options.window_max})
        self._switch = Switch(self._caps)
        self._steps = 0
        self._started, self._timed = 0.0, False
        self._proposed = 0
        self.drafts = self.drafted = self.accepted = 0

    @property
    def memory(self) -> int:
        """Bytes of what is remembered."""
        return self._book.memory

    def propose(self, sequences: Several[Sequence]) -> list[list[int]] | None:
        """Return a draft for each sequence, maybe an empty one; None: none for any."""
        if self._options.enabled == "off":
            return None
        cap, self._proposed = self._options.window_max, 0
        if self._options.enabled == "auto":
            cap, self._timed = self._switch.choose(len(sequences)), self._switch.measuring(len(sequences))
            self._started = self._clock() if self._timed else 0.0
        if not cap:
            return None
        drafts = [self._draft(sequence, cap) for sequence in sequences]
        self._proposed = sum(map(len, drafts))
        if not self._proposed:
            return None
        longest = -(-SPREAD * self._proposed // len(drafts))
        if len(drafts) > 1 and max(map(len, drafts)) > longest:
            drafts = [draft[:longest] for draft in drafts]
        self._steps += 1
        if self._steps % SETTLE_STEPS == 0:
            for key in {sequence.own.prompt for sequence in sequences if sequence.own is not None}:
                self._book.settle(key)
        return drafts

    def verified(self, sequence: Sequence, *, drafted: int, accepted: int) -> None:
        """Take in what became of a draft; after the tokens were appended to the sequence."""
        if drafted:
            self.drafts += 1
            self.drafted += drafted
            self.accepted += accepted
            sequence.window = next_window(
                sequence.window, drafted=drafted, accepted=accepted, most=self._options.window_max
            )

    def stepped(self, batch: int, tokens: int) -> None:
        """The step that `propose` was called for is done, with so many tokens."""
        if self._options.enabled == "auto":
            seconds = self._clock() - self._started if self._timed else 0.0
            self._switch.observe(batch, seconds=seconds, tokens=tokens, drafted=self._proposed > 0)

    def ended(self, sequence: Sequence) -> None:
        """A response is finished: its siblings, and the next epoch, may draft from it."""
        if self._options.enabled == "off":
            return
        own = self._own(sequence)
        own.index.extend(own.serial, sequence.ids[own.known :])
        own.index.close(own.serial)
        self._book.settle(own.prompt)
        sequence.own = None

    def dropped(self, sequence: Sequence) -> None:
        """A response is given up."""
        if sequence.own is not None:
            sequence.own.index.remove(sequence.own.serial)
            self._book.settle(sequence.own.prompt)
            sequence.own = None

    def _draft(self, sequence: Sequence, cap: int) -> list[int]:
        own = self._own(sequence)
        own.index.extend(own.serial, sequence.ids[own.known :])
        own.known = len(sequence.ids)
        # The token after the last draft that is accepted is sampled as well.
        limit = min(sequence.window, cap, sequence.request.budget - own.known - 1)
        return own.index.draft(sequence.tail(self._options.match_max), limit)

    def _own(self, sequence: Sequence) -> Own:
        if sequence.own is None:
            key, index = self._book.open(sequence.prompt, sequence.request.drafts)
            sequence.own = Own(key, index, index.open(epoch=self._book.epoch), 0)
        return sequence.own

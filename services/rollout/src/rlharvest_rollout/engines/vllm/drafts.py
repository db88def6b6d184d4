"""Drafts from history inside vLLM's worker: what vLLM calls a custom proposer.

vLLM makes a `HistoryProposer` by name and asks it after each step what may follow; the scheduler has the next step verify
it. What is drafted, how far and whether at all is decided by the same `Drafter` as in the torch engine. Of a step only
what the model and the sampler compute is timed, so waiting costs no arm of the switch anything. Knows no tensors.

Invariants: a response is known from its first sampled token to the step after its last; a step that prefilled anything,
or that ran other responses than the drafts were made for, is not judged; until `attach` nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from rlharvest.engine import Request, Sampling
from rlharvest.speculation.history import DraftSource
from rlharvest.speculation.options import Speculation
from rlharvest.speculation.segment import DIGEST_BYTES, unpack

from rlharvest_rollout.engines.torch.drafter import Drafter
from rlharvest_rollout.engines.torch.scheduler import Sequence

PROMPT_TOKENS, HISTORY = "rlharvest_prompt", "rlharvest_history"
"""Keys of a request's extra arguments: tokens of the prompt alone, without what was generated before; history segments."""


class BusyClock:
    """Seconds that were spent on something, by a clock that is read only while it is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self._total if self._since is None else self._total + self._clock() - self._since

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time inside."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._total, self._since = self(), None


class HistoryProposer:
    """vLLM's custom proposer, of one worker process."""

    def __init__(self, vllm_config: Any) -> None:
        """As vLLM calls it; its configuration says nothing that matters here."""
        self._runner: Any = None
        self._drafter: Drafter | None = None
        self._sequences: dict[str, Sequence] = {}
        self._sources: WeakValueDictionary[bytes, DraftSource] = WeakValueDictionary()
        """By the digests of their segments, while a response has them: siblings share one."""
        self._verified: dict[str, int] = {}
        """Tokens that the step now running verifies, by request."""
        self._drafted_for: list[str] = []
        self._judged = False
        self.always: list[int] | None = None
        """Draft this, whatever was sampled; for the self-test."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model."""

    def attach(self, runner: Any, options: Speculation, *, memory_bytes: int, clock: Callable[[], float]) -> None:
        """Begin to draft for a vLLM model runner, without history.

        Args:
            runner: its steps are watched from now on.
            memory_bytes: bound of what is remembered.
            clock: seconds, of what the steps take.
        """
        busy = BusyClock(clock)
        self._runner, self._drafter = runner, Drafter(options, memory_bytes=memory_bytes, clock=busy)
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin(scheduled)
            with busy.busy():
                return execute(scheduled, *args, **kwargs)

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            with busy.busy():
                return sample(*args, **kwargs)

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens

    def propose(self, sampled: Several[Several[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return a draft for each request of the batch, maybe an empty one.

        Args:
            sampled: the tokens that the step sampled for each; none while its prompt is prefilled in parts.
        """
        if self.always is not None:
            return [list(self.always) if tokens else [] for tokens in sampled]
        drafter = self._drafter
        nothing: list[list[int]] = [[] for _ in sampled]
        if drafter is None:
            return nothing
        names = [name for name, tokens in zip(self._runner.input_batch.req_ids, sampled, strict=True) if tokens]
        sequences = [self._sequences.get(name) or self._open(name) for name in names]
        for name, sequence, tokens in zip(names, sequences, filter(None, sampled), strict=True):
            sequence.ids.extend(tokens)
            drafter.verified(sequence, drafted=self._verified.get(name, 0), accepted=len(tokens) - 1)
        if self._judged and names == self._drafted_for:
            drafter.stepped(len(names), sum(map(len, sampled)))
        self._drafted_for = names
        drafts = drafter.propose(sequences) if sequences else None
        if drafts is None:
            return nothing
        rest = iter(drafts)
        return [next(rest) if tokens else [] for tokens in sampled]

    def _begin(self, scheduled: Any) -> None:
        """A step begins: let go of what has ended, and note what it computes."""
        drafter = self._drafter
        assert drafter is not None
        for name in scheduled.finished_req_ids:
            if (sequence := self._sequences.pop(name, None)) is not None:
                drafter.ended(sequence)
        self._verified = {name: len(ids) for name, ids in scheduled.scheduled_spec_decode_tokens.items()}
        decoded = len(scheduled.num_scheduled_tokens) + sum(self._verified.values())
        self._judged = not scheduled.scheduled_new_reqs and scheduled.total_num_scheduled_tokens == decoded

    def _open(self, name: str) -> Sequence:
        state = self._runner.requests[name]
        extra = state.sampling_params.extra_args or {}
        ids = list(state.prompt_token_ids)
        cut = extra.get(PROMPT_TOKENS, len(ids))
        request = Request(
            handle=0,
            attempt=0,
            group=0,
            seed=0,
            prompt=np.array(ids[:cut], dtype=np.uint32),
            prefix=np.array(ids[cut:], dtype=np.uint32),
            budget=len(ids) - cut + state.sampling_params.max_tokens,
            sampling=Sampling(),
            drafts=self._source(extra.get(HISTORY, ())),
        )
        sequence = self._sequences[name] = Sequence.of(request)
        return sequence

    def _source(self, segments: Several[bytes]) -> DraftSource | None:
        if not segments:
            return None
        digests = b"".join(segment[:DIGEST_BYTES] for segment in segments)
        source = self._sources.get(digests)
        if source is None:
            # They were made by this worker's own process: they verify.
            source = DraftSource(responses=tuple(one for segment in segments for one in unpack(segment).responses))
            self._sources[digests] = source
        return source

"""One step after the other: let sequences in, prefill them, decode one token of each running one, or verify its draft.

Belongs to one thread and blocks it; knows no event loop. A step prefills at most `PREFILL_ROWS` tokens before it
decodes, so that a long prompt delays the others by little. The prompt of a group is prefilled once and copied to each
sample.

Drafts change nothing but the time: each position is sampled from its own distribution with its own uniform, and a drafted
token counts for nothing but that the position behind it was computed along. The first sample that differs from the draft
ends what can be used of a step, since the rows behind it saw another token; so does the end of the response.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from rlharvest.engine import EngineConfig, EngineStats, Request, Sampling
from rlharvest.errors import Conflict
from rlharvest.spans import Finish
from rlharvest.terminal import terminal
from torch import Tensor

from rlharvest_rollout.engines.outbox import Outbox, Token
from rlharvest_rollout.engines.stops import StopText
from rlharvest_rollout.engines.torch.drafter import Drafter
from rlharvest_rollout.engines.torch.kv_cache import KvCache
from rlharvest_rollout.engines.torch.model import Model
from rlharvest_rollout.engines.torch.sampler import sample
from rlharvest_rollout.engines.torch.scheduler import Move, Scheduler, Sequence

PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A version, read and checked, ready to serve."""

    version: int
    model: Model
    stop_text: StopText | None
    """None: the directory has no tokenizer."""


class Runner:
    """The sequences of one job on one model."""

    def __init__(
        self,
        config: EngineConfig,
        outbox: Outbox,
        *,
        slots: int,
        kv_memory_bytes: int,
        draft_memory_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._outbox = outbox
        self._slots = slots
        self._kv_memory_bytes = kv_memory_bytes
        self._scheduler = Scheduler(slots)
        self._drafter = Drafter(config.speculation, memory_bytes=draft_memory_bytes, clock=clock)
        self._loaded: Loaded | None = None
        self._cache: KvCache | None = None
        self._filled = 0
        """Tokens of the entering sequence that the stage holds."""
        self._generated = self._prefilled = self._saved = 0

    @property
    def loaded(self) -> Loaded | None:
        """What serves now."""
        return self._loaded

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return self._loaded is not None and self._scheduler.busy

    @property
    def draft_memory(self) -> int:
        """Bytes of what drafts are made of."""
        return self._drafter.memory

    def stats(self) -> EngineStats:
        """Return the counters; any thread may ask."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running) + (scheduler.entering is not None),
            waiting=len(scheduler.waiting),
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            prefill_saved_tokens=self._saved,
            drafts=self._drafter.drafts,
            drafted_tokens=self._drafter.drafted,
            accepted_tokens=self._drafter.accepted,
        )

    def install(self, loaded: Loaded) -> None:
        """Serve another version from the next token on.

        Raises:
            InvalidField: its keys and values do not fit into the memory; the old version goes on.
        """
        cache, shape = self._cache, loaded.model.shape
        old = self._loaded.model.shape if self._loaded is not None else None
        same = old is not None and (old.layers, old.kv_heads, old.head_dim) == (
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
        )
        if cache is None or not same:
            cache = KvCache(
                shape,
                loaded.model.numerics,
                slots=self._slots,
                context=self._config.context,
                memory_bytes=self._kv_memory_bytes,
            )
        if not same or self._config.kv == "recompute":
            self._scheduler.requeue()
        cache.prompts.clear()
        self._scheduler.slots = cache.slots
        self._cache, self._loaded = cache, loaded

    def submit(self, requests: Several[Request]) -> None:
        """Queue requests; one that has ended already gets its finish at once."""
        for request in requests:
            sequence = Sequence.of(request)
            self.abort({other.key for other in self._scheduler if other.key[0] == request.handle})
            finish = self._finish(sequence, whole=True)
            if finish is Finish.NONE:
                self._close_holes(self._scheduler.submit(sequence))
            else:
                self._emit([_token(sequence, 0.0, finish, new=False)])

    def abort(self, keys: set[tuple[int, int]]) -> None:
        """Forget these (handle, attempt) pairs."""
        if keys:
            for sequence in self._scheduler:
                if sequence.key in keys:
                    self._drafter.dropped(sequence)
            self._close_holes(self._scheduler.abort(keys))

    @torch.inference_mode()
    def step(self) -> None:
        """Generate at least one token of every sequence that runs, after letting in those that may.

        Raises:
            NotFinite: the weights give no distribution.
        """
        self._enter()
        running = list(self._scheduler.running)
        if not running:
            return
        model, cache = self._serving()
        positions = [sequence.length - 1 for sequence in running]
        drafts = self._drafter.propose(running)
        before = self._generated
        if drafts is None:
            logits = model.decode(cache, [sequence.ids[-1] for sequence in running], positions)
        else:
            windows = [[sequence.ids[-1], *draft] for sequence, draft in zip(running, drafts, strict=True)]
            logits = model.verify(cache, windows, positions)
        self._sample(running, logits, drafts)
        self._drafter.stepped(len(running), self._generated - before)

    def _enter(self) -> None:
        """Prefill waiting sequences, as many tokens as one step may, and sample their first tokens."""
        scheduler, (_, cache) = self._scheduler, self._serving()
        fresh: list[tuple[Sequence, Tensor]] = []
        rows = PREFILL_ROWS
        while rows > 0:
            sequence = scheduler.entering
            if sequence is None:
                self._filled = 0
                sequence = scheduler.admit()
            if sequence is None:
                break
            before = self._filled
            logits = self._prefill(sequence, rows)
            # Those that find their prompt prefilled are not free either.
            rows -= max(1, self._filled - before)
            if self._filled == sequence.length:
                assert logits is not None
                cache.copy(cache.stage, scheduler.join(), sequence.length)
                fresh.append((sequence, logits))
        if fresh:
            self._sample([sequence for sequence, _ in fresh], torch.stack([logits for _, logits in fresh]))

    def _prefill(self, sequence: Sequence, rows: int) -> Tensor | None:
        """Put more tokens of the entering sequence into the stage; return the logits after the last, if known."""
        model, cache = self._serving()
        prompt = len(sequence.prompt)
        tokens = np.array(sequence.prompt, dtype=np.uint32).tobytes()
        kept = cache.prompts.get(tokens) if self._filled == 0 else None
        if kept is not None:
            cache.stage_prompt(kept)
            self._filled = prompt
            self._saved += prompt
            return kept.logits
        start = self._filled
        end = min(start + rows, prompt if start < prompt else sequence.length)
        logits = model.prefill(
            cache,
            cache.stage,
            [sequence.token(position) for position in range(start, end)],
            start,
            want_logits=end in (prompt, sequence.length),
        )
        self._filled = end
        self._prefilled += end - start
        if end == prompt and logits is not None:
            cache.keep_prompt(tokens, prompt, logits)
        return logits

    def _sample(
        self, sequences: Several[Sequence], logits: Tensor, drafts: Several[Several[int]] | None = None
    ) -> None:
        """Append what is sampled to each sequence, send it off, and take out those that ended.

        Args:
            logits: (1 + drafted tokens of all sequences, at least vocab), sequence after sequence.
            drafts: of each sequence; None: there are none.
        """
        rows = [1] * len(sequences) if drafts is None else [1 + len(draft) for draft in drafts]
        ids, logprobs = self._draw(sequences, rows, logits)
        tokens: list[Token] = []
        ended: set[tuple[int, int]] = set()
        row = 0
        for index, (sequence, n) in enumerate(zip(sequences, rows, strict=True)):
            draft = drafts[index] if drafts is not None else ()
            accepted = 0
            for place in range(row, row + n):
                sequence.ids.append(ids[place])
                finish = self._finish(sequence)
                tokens.append(_token(sequence, logprobs[place], finish))
                if finish is not Finish.NONE:
                    ended.add(sequence.key)
                if accepted == len(draft) or draft[accepted] != ids[place]:
                    break
                accepted += 1
                if finish is not Finish.NONE:
                    break
            self._drafter.verified(sequence, drafted=len(draft), accepted=accepted)
            row += n
        self._generated += len(tokens)
        if ended:
            for sequence in sequences:
                if sequence.key in ended:
                    self._drafter.ended(sequence)
            self._close_holes(self._scheduler.finish(lambda sequence: sequence.key in ended))
        self._emit(tokens)

    def _draw(self, sequences: Several[Sequence], rows: Several[int], logits: Tensor) -> tuple[list[int], list[float]]:
        """Return a token and its log-probability for each row of logits; `rows` of them belong to each sequence."""
        model, _ = self._serving()
        vocab = model.shape.vocab
        noise = [sequence.noise(n) for sequence, n in zip(sequences, rows, strict=True)]
        alike: dict[Sampling, list[int]] = {}
        for index, sequence in enumerate(sequences):
            alike.setdefault(sequence.request.sampling, []).append(index)
        if len(alike) == 1:
            uniforms = [uniform for part in noise for uniform in part]
            return sample(logits, sequences[0].request.sampling, uniforms, vocab=vocab)
        first = [end - n for end, n in zip(accumulate(rows), rows, strict=True)]
        ids, logprobs = [0] * len(logits), [0.0] * len(logits)
        for sampling, members in alike.items():
            places = [place for index in members for place in range(first[index], first[index] + rows[index])]
            uniforms = [uniform for index in members for uniform in noise[index]]
            drawn = sample(logits[places], sampling, uniforms, vocab=vocab)
            for place, token, logprob in zip(places, *drawn, strict=True):
                ids[place], logprobs[place] = token, logprob
        return ids, logprobs

    def _finish(self, sequence: Sequence, *, whole: bool = False) -> Finish:
        sampling = sequence.request.sampling
        text = None
        if sampling.stop and self._loaded is not None and self._loaded.stop_text is not None:
            stop_text = self._loaded.stop_text
            text = stop_text.whole(sequence.ids) if whole else stop_text.tail(sequence.ids, sampling.stop)
        return terminal(
            sequence.ids, eos_ids=sampling.eos_ids, budget=sequence.request.budget, stop=sampling.stop, text=text
        )

    def _emit(self, tokens: list[Token]) -> None:
        assert self._loaded is not None
        self._outbox.put(tokens, self._loaded.version)

    def _close_holes(self, moves: list[Move]) -> None:
        if moves:
            _, cache = self._serving()
            for move in moves:
                cache.copy(move.source, move.target, move.length)

    def _serving(self) -> tuple[Model, KvCache]:
        if self._loaded is None or self._cache is None:
            raise Conflict("the engine has loaded no version yet")
        return self._loaded.model, self._cache


def _token(sequence: Sequence, logprob: float, finish: Finish, *, new: bool = True) -> Token:
    """Return the newest token of a sequence, or its finish alone."""
    handle, attempt = sequence.key
    offset, token = (len(sequence.ids) - 1, sequence.ids[-1]) if new else (len(sequence.ids), None)
    return Token(handle=handle, attempt=attempt, offset=offset, id=token, logprob=logprob, finish=finish)

"""A deterministic engine without a model: what tests and the simulator's real-service runs generate with.

Invariants: token i and its log-probability depend only on (prompt ids, seed, i), never on worker, version, batch or
time, so `stub_tokens` computes what an uninterrupted run yields; loading a version only notes its number (the
directory may hold anything, since it goes the way of real weights); each token carries the version that was loaded
when it was made.

The faults that StubOptions can switch on are those a real engine has: silence, a crash, a death of the whole process.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlharvest.engine import EngineBroken, EngineConfig, EngineStats, Request, Sampling
from rlharvest.errors import DataError, InvalidField
from rlharvest.noise import uniforms
from rlharvest.spans import Finish, Ids, Logprobs, Run, Span, ids_bytes, merge_runs
from rlharvest.terminal import terminal

POISON_EXIT_CODE = 77
"""Exit status of a process that a poison prompt killed."""

_TICK_S = 0.002
_LONGEST_TICK_S = 0.05


class StubOptions(BaseModel):
    """The job's `rollout.stub` block."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    vocab: int | None = Field(None, ge=2)
    """Ids are drawn below this; unset: the job's vocabulary, else 256."""

    eos_id: int | None = Field(None, ge=0)
    """Id that ends a response and occurs nowhere else; unset: the lowest of the job's end-of-sequence ids."""

    tokens_per_s: float | None = Field(None, gt=0)
    """Speed of each response; unset: by step_s."""

    step_s: float = Field(0.005, gt=0)
    """Seconds between two tokens of a response."""

    length: int | None = Field(None, ge=1)
    """Every response has this many tokens, the end-of-sequence id included; unset: by mean_length."""

    mean_length: float | None = Field(None, ge=1)
    """Lengths are uniform in 1 .. 2 * mean_length - 1, by the seed; unset: responses run to their budget."""

    first_token_delay_s: float = Field(0.0, ge=0)
    """From submission to the first token: the prefill."""

    load_s: float = Field(0.0, ge=0)
    """How long a load takes; nothing is generated meanwhile."""

    bad_versions: tuple[int, ...] = ()
    """Versions whose load fails as a directory without a usable model does."""

    hang_handles: tuple[int, ...] = ()
    """Responses that are taken but get no token, or none after the first `hang_after`."""

    hang_attempts: int = Field(0, ge=0)
    """`hang_handles` hang in their first so many attempts only; 0: always."""

    hang_after: int = Field(0, ge=0)
    """New tokens of an attempt before it hangs."""

    crash_token: int | None = None
    """A prompt with this id in it makes the engine raise EngineBroken."""

    poison_token: int | None = None
    """A prompt with this id in it ends the whole process, as a device fault does."""

    poison_after: int = Field(0, ge=0)
    """New tokens of a poison prompt before that."""

    @model_validator(mode="after")
    def _eos_in_vocab(self) -> StubOptions:
        if self.vocab is not None and self.eos_id is not None and self.eos_id >= self.vocab:
            raise ValueError(f"eos_id {self.eos_id} is not below vocab {self.vocab}")
        return self

    def for_job(self, sampling: Sampling) -> StubOptions:
        """Return the options with vocabulary and end-of-sequence id taken from the job where they are unset."""
        vocab = self.vocab or sampling.vocab or 256
        eos = self.eos_id if self.eos_id is not None else min(sampling.eos_ids, default=None)
        return self.model_copy(update={"vocab": vocab, "eos_id": eos})

    @property
    def interval_s(self) -> float:
        """Seconds between two tokens of a response."""
        return 1.0 / self.tokens_per_s if self.tokens_per_s else self.step_s


def parse_options(values: dict[str, object]) -> StubOptions:
    """Return the options of a job's `rollout.stub` block.

    Raises:
        InvalidField: names the key, the value and what is known.
    """
    try:
        return StubOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in ("rollout", "stub", *first["loc"]))
        known = ", ".join(StubOptions.model_fields)
        raise InvalidField(name, first.get("input"), first["msg"], f"Known keys: {known}.") from error


def _key(prompt: Ids | Sequence[int], seed: int, purpose: bytes) -> int:
    hasher = blake2b(ids_bytes(prompt), digest_size=8, person=purpose)
    hasher.update(struct.pack("<Q", seed & (2**64 - 1)))
    return int.from_bytes(hasher.digest(), "little")


def stub_length(prompt: Ids | Sequence[int], seed: int, options: StubOptions) -> int | None:
    """Return the length at which the end-of-sequence id comes, or None if only the budget ends the response."""
    if options.length is not None:
        return options.length
    if options.mean_length is None:
        return None
    return 1 + int(uniforms(_key(prompt, seed, b"length"), 0, 1)[0] * (2 * options.mean_length - 1))


def stub_tokens(
    prompt: Ids | Sequence[int], seed: int, start: int, n: int, options: StubOptions
) -> tuple[Ids, Logprobs]:
    """Return ids and log-probabilities of positions start .. start + n - 1, each of shape (n,).

    The response ends where the end-of-sequence id comes or its budget is used up; positions beyond are defined all
    the same. `options` has its vocabulary set, as `StubOptions.for_job` returns it.
    """
    vocab = options.vocab or 256
    eos = options.eos_id
    drawn = uniforms(_key(prompt, seed, b"ids"), start, n)
    ids = np.floor(drawn * (vocab if eos is None else vocab - 1)).astype(np.uint32)
    if eos is not None:
        ids[ids >= eos] += 1
        length = stub_length(prompt, seed, options)
        if length is not None and start <= length - 1 < start + n:
            ids[length - 1 - start] = eos
    logprobs = -4.0 * uniforms(_key(prompt, seed, b"logprobs"), start, n)
    return ids, logprobs.astype(np.float32)


def stub_response(
    prompt: Ids | Sequence[int], seed: int, budget: int, options: StubOptions, *, eos_ids: frozenset[int] | None = None
) -> tuple[Ids, Logprobs, Finish]:
    """Return a whole response, as a worker that nothing interrupts generates it."""
    ends = frozenset(() if options.eos_id is None else (options.eos_id,)) if eos_ids is None else eos_ids
    ids, logprobs = stub_tokens(prompt, seed, 0, budget, options)
    stops = np.flatnonzero(np.isin(ids, list(ends)))
    length = int(stops[0]) + 1 if len(stops) else budget
    finish = terminal(ids[:length].tolist(), eos_ids=ends, budget=budget)
    return ids[:length], logprobs[:length], finish


@dataclass(slots=True)
class _Running:
    request: Request
    options: StubOptions
    length: int
    """Tokens so far, prefix included."""
    due_at: float
    """No token before this instant."""
    pending: list[tuple[Ids, Logprobs, int]] = field(default_factory=list)
    """(ids, log-probabilities, version) that `spans` has not returned yet."""
    offset: int = 0
    """Position of the first pending token."""
    finish: Finish = Finish.NONE
    credit: float = 0.0
    """Tokens that the passed time allows, fraction included."""


class StubEngine:
    """Implements rlharvest.engine.Engine."""

    batch_invariant = True
    numerics_key = "stub"

    def __init__(self) -> None:
        self._config: EngineConfig | None = None
        self._options = StubOptions()
        self._version: int | None = None
        self._running: dict[int, _Running] = {}
        self._waiting: list[Request] = []
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._paused = False
        self._loading = 0
        self._broken: EngineBroken | None = None
        self._generated = 0
        self._prefilled = 0

    @property
    def version(self) -> int | None:
        return self._version

    async def start(self, config: EngineConfig) -> None:
        options = parse_options(config.options)
        await self.close()
        self._config, self._options = config, options
        self._version, self._broken, self._paused = None, None, False
        self._task = asyncio.create_task(self._generate(), name="stub-engine")
        self._task.add_done_callback(self._generation_ended)

    async def load(self, directory: Path, version: int) -> None:
        if version == self._version:
            return
        self._loading += 1
        try:
            await asyncio.sleep(self._options.load_s)
            if version in self._options.bad_versions:
                raise DataError(f"{directory}: version {version} holds no model that the stub engine can run")
            self._version = version
        finally:
            self._loading -= 1

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            held = self._running.get(request.handle)
            attempts = [held.request.attempt] if held else []
            attempts += [waiting.attempt for waiting in self._waiting if waiting.handle == request.handle]
            if any(attempt >= request.attempt for attempt in attempts):
                continue
            self.abort([(request.handle, attempt) for attempt in attempts])
            if self._options.crash_token is not None and self._options.crash_token in request.prompt:
                self._break(EngineBroken(f"the stub engine crashes on prompts that hold {self._options.crash_token}"))
            self._waiting.append(request)

    def abort(self, handles: Sequence[tuple[int, int]]) -> None:
        gone = set(handles)
        self._waiting = [request for request in self._waiting if (request.handle, request.attempt) not in gone]
        for handle, attempt in gone:
            if (held := self._running.get(handle)) is not None and held.request.attempt == attempt:
                del self._running[handle]

    async def spans(self) -> list[Span]:
        await self._ready.wait()
        if self._broken is not None:
            raise self._broken
        self._ready.clear()
        spans = []
        for handle, held in list(self._running.items()):
            if held.pending or held.finish is not Finish.NONE:
                spans.append(_span(held))
            if held.finish is not Finish.NONE:
                del self._running[handle]
        return spans

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
        )

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._running.clear()
        self._waiting.clear()
        self._ready.clear()

    def _break(self, error: EngineBroken) -> None:
        self._broken = error
        self._ready.set()

    def _generation_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(EngineBroken(f"the stub engine's generation failed: {error!r}"))

    async def _generate(self) -> None:
        loop = asyncio.get_running_loop()
        tick = min(max(self._options.interval_s, _TICK_S), _LONGEST_TICK_S)
        before = loop.time()
        while self._broken is None:
            await asyncio.sleep(tick)
            now = loop.time()
            elapsed, before = now - before, now
            if self._paused or self._loading or self._version is None:
                continue
            self._admit(now)
            for held in self._running.values():
                if held.finish is Finish.NONE and now >= held.due_at and not self._hangs(held):
                    held.credit += elapsed / held.options.interval_s
                    self._advance(held, self._version)

    def _admit(self, now: float) -> None:
        slots = self._config.slots if self._config is not None else 0
        while self._waiting and len(self._running) < slots:
            request = self._waiting.pop(0)
            options = self._options.for_job(request.sampling)
            length = len(request.prefix)
            held = _Running(request, options, length, now + options.first_token_delay_s, offset=length)
            held.finish = terminal(request.prefix.tolist(), eos_ids=request.sampling.eos_ids, budget=request.budget)
            self._running[request.handle] = held
            self._prefilled += len(request.prompt) + length
            if held.finish is not Finish.NONE:
                self._ready.set()

    def _hanging(self, request: Request) -> bool:
        """Whether this attempt hangs sooner or later."""
        number = request.attempt & 0xFFFFFFFF
        limit = self._options.hang_attempts
        return request.handle in self._options.hang_handles and (limit == 0 or number <= limit)

    def _hangs(self, held: _Running) -> bool:
        made = held.length - len(held.request.prefix)
        return self._hanging(held.request) and made >= self._options.hang_after

    def _advance(self, held: _Running, version: int) -> None:
        request, options = held.request, held.options
        n = min(int(held.credit), request.budget - held.length)
        if n <= 0:
            return
        held.credit -= n
        made = held.length - len(request.prefix)
        poisoned = options.poison_token is not None and options.poison_token in request.prompt
        if poisoned and made >= options.poison_after:
            os._exit(POISON_EXIT_CODE)
        if poisoned:
            n = min(n, options.poison_after - made)
        if self._hanging(request):
            n = min(n, options.hang_after - made)
        ids, logprobs = stub_tokens(request.prompt, request.seed, held.length, n, options)
        stops = np.flatnonzero(np.isin(ids, list(request.sampling.eos_ids)))
        if len(stops):
            n = int(stops[0]) + 1
            ids, logprobs = ids[:n], logprobs[:n]
        held.pending.append((ids, logprobs, version))
        held.length += n
        if len(stops):
            self._finish(held, Finish.EOS)
        elif held.length >= request.budget:
            self._finish(held, Finish.LENGTH)
        self._generated += n
        self._ready.set()

    def _finish(self, held: _Running, finish: Finish) -> None:
        held.finish = finish


def _span(held: _Running) -> Span:
    """Return everything pending of a response as one span, and count it as handed out."""
    pending, held.pending = held.pending, []
    offset, held.offset = held.offset, held.length
    empty: list[Ids] = [np.empty(0, np.uint32)]
    return Span(
        handle=held.request.handle,
        attempt=held.request.attempt,
        offset=offset,
        ids=np.concatenate([ids for ids, _, _ in pending] or empty),
        logprobs=np.concatenate([logprobs for _, logprobs, _ in pending] or [np.empty(0, np.float32)]),
        runs=merge_runs([Run(len(ids), version) for ids, _, version in pending]),
        finish=held.finish,
    )

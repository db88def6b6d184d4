"""One job on this worker: its engine, its buffer, its versions. The I/O around buffer, admission and lease.

Invariants: a version is served only after it was loaded whole; what the engine yields goes into the buffer before
anything else happens with it; a full buffer pauses the engine, and nothing but room in it resumes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import structlog
from nats.aio.client import Client
from rlharvest.engine import Engine, EngineBroken, Request, Sampling
from rlharvest.errors import CorruptData, InvalidField, RlharvestError, Unavailable
from rlharvest.speculation.history import DraftSource
from rlharvest.supervise import Supervisor, cancel
from rlharvest.v1 import fleet_pb2, spans_pb2

from rlharvest_rollout import metrics
from rlharvest_rollout.admission import Admission, Verdict, request_of, sampling_of
from rlharvest_rollout.buffer import AckOutcome, Buffer
from rlharvest_rollout.counts import EngineCounts
from rlharvest_rollout.drafts import source_of, sources_of
from rlharvest_rollout.fleet import Fleet
from rlharvest_rollout.lease import Pull, Pulls, Target
from rlharvest_rollout.publisher import Publisher
from rlharvest_rollout.settings import RolloutSettings
from rlharvest_rollout.versions import Versions

log = structlog.get_logger(__name__)

Report = Callable[[str, str, str, dict[str, Any]], Awaitable[None]]
"""Publishes an event: (level, type, message, data)."""

_LAST_STEP_S = 0.05
"""How long the engine's step that was running at a pause may take to hand its tokens over."""


class Session:
    """Serves one job until it is released."""

    def __init__(
        self,
        target: Target,
        engine: Engine,
        *,
        worker: str,
        incarnation: int,
        settings: RolloutSettings,
        supervisor: Supervisor,
        nc: Client,
        fleet: Fleet,
        versions: Versions,
        flush_numbers: Iterator[int],
        report: Report,
        changed: Callable[[], None],
    ) -> None:
        self.target = target
        self.engine = engine
        self.buffer = Buffer(settings.buffer_tokens)
        self.note = ""
        """What it does besides generating, for people."""
        self.generated = 0
        """Tokens taken from the engine in this incarnation."""
        self.counts = EngineCounts()
        self._worker = worker
        self._settings = settings
        self._supervisor = supervisor
        self._nc = nc
        self._fleet = fleet
        self._versions = versions
        self._flush_numbers = flush_numbers
        self._report = report
        self._changed = changed
        self._pulls = Pulls(target.version)
        self._wake = asyncio.Event()
        self._paused = False
        self._stopped = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._fetches: set[asyncio.Task[Any]] = set()
        self._renew(incarnation)

    def _renew(self, incarnation: int) -> None:
        self._admission = Admission(self.target.config.slots)
        self.publisher = Publisher(
            self._nc,
            self.buffer,
            job=self.target.job,
            worker=self._worker,
            incarnation=incarnation,
            numbers=self._flush_numbers,
            flush_s=self._settings.flush_s,
            flush_tokens=self._settings.flush_tokens,
        )

    async def start(self) -> None:
        """Start the engine, and everything that turns.

        Raises:
            DataError: the job has settings that the engine refuses.
        """
        await self.engine.start(self.target.config)
        self.publisher.numerics_key = self.engine.numerics_key
        self._tasks = [
            self._supervisor.spawn("collect", self._collect()),
            self._supervisor.spawn("versions", self._follow()),
            self._supervisor.spawn("probe", self._probe()),
        ]
        self._publishing = self._supervisor.spawn("publish", self.publisher.run())

    # --- what the coordinator says ---

    def follow(self, target: Target) -> None:
        """A lease names a target version, maybe a newer one."""
        self.target = target
        self._pulls.want(target.version)
        self._wake.set()

    def assign(self, message: fleet_pb2.Assignments) -> Verdict:
        """Start responses; the same assignment twice starts one."""
        verdict = self._admission.judge(
            message,
            held={held.handle: held.attempt for held in self.buffer.held()},
            running=self.buffer.running,
            version=None if self._stopped else self.engine.version,
        )
        sampling = sampling_of(message.sampling)
        sources, fetched = sources_of(message)
        requests: list[Request] = []
        later: dict[int, list[Request]] = {}
        """By group, those that wait for its history."""
        refused = list(verdict.refused)
        reason = verdict.reason
        for one in verdict.take:
            if one.prefix_by_reference:
                self.buffer.open(one.handle, one.attempt, one.prefix_length)
                self._fetch("prefix", self._start_by_reference(one, sampling, sources.get(one.group)))
                continue
            try:
                request = request_of(one, sampling, prompt=one.prompt, prefix=one.prefix, drafts=sources.get(one.group))
            except CorruptData as error:
                refused.append(one.handle)
                reason = str(error)
            else:
                self.buffer.open(one.handle, one.attempt, len(request.prefix))
                (later.setdefault(one.group, []) if one.group in fetched else requests).append(request)
        try:
            self.engine.submit(requests)
        except InvalidField as error:  # nothing of the call was taken
            for request in requests:
                self.buffer.forget(request.handle, request.attempt)
                refused.append(request.handle)
            reason = str(error)
        for group, waiting in later.items():
            self._fetch("history", self._start_with_history(group, waiting))
        metrics.REFUSALS.labels("assignment").inc(len(refused))
        return Verdict(verdict.take, tuple(refused), reason)

    def abort(self, message: fleet_pb2.Abort) -> None:
        """Give responses up; with `flush` their tokens are published first."""
        pairs = [
            pair
            for pair in zip(message.handle, message.attempt, strict=False)
            if self.buffer.attempt(pair[0]) == pair[1]
        ]
        self.engine.abort(pairs)
        metrics.ABORTS.labels("flushed" if message.flush else "ordered").inc(len(pairs))
        for handle, attempt in pairs:
            if message.flush:
                self.buffer.close(handle, attempt)
            else:
                self.buffer.forget(handle, attempt)
        self.publisher.notify()
        self._pace()

    def acknowledge(self, ack: spans_pb2.LedgerAck) -> None:
        """The ledger says how far it is."""
        stop: list[tuple[int, int]] = []
        for handle, attempt, length, status in zip(ack.handle, ack.attempt, ack.length, ack.status, strict=False):
            outcome = self.buffer.acknowledge(handle, attempt, length, status)
            if outcome in (AckOutcome.FENCED, AckOutcome.LOST):
                log.info("response.given_up", handle=handle, attempt=attempt, why=outcome.value)
                metrics.ABORTS.labels(outcome.value).inc()
                stop.append((handle, attempt))
            elif outcome is AckOutcome.RESEND:
                metrics.RESENDS.labels("gap").inc()
        self.engine.abort(stop)
        metrics.BUFFERED.set(self.buffer.tokens)
        self.publisher.notify()
        self._pace()

    def resend(self) -> None:
        """The log lost its tail: publish again what no acknowledgement covers."""
        tokens = self.buffer.resend()
        log.warning("buffer.resend", tokens=tokens)
        metrics.RESENDS.labels("ordered").inc()
        self.publisher.notify()

    async def rejoined(self, incarnation: int) -> None:
        """Nothing that was held counts any more; engine and version stay."""
        held = self.buffer.held()
        self.engine.abort([(one.handle, one.attempt) for one in held])
        metrics.ABORTS.labels("rejoined").inc(len(held))
        self.buffer.clear()
        self.generated = 0
        await cancel([*self._fetches, self._publishing])
        key = self.publisher.numerics_key
        self._renew(incarnation)
        self.publisher.numerics_key = key
        self._publishing = self._supervisor.spawn("publish", self.publisher.run())
        self._pace()

    # --- the end ---

    async def hand_over(self, limit_s: float, *, final: bool) -> bool:
        """Stop generating and publish what there is; return whether all of it became durable in time.

        With `final` the last message says that nothing of this incarnation follows.
        """
        self._stopped = True
        self.engine.pause()
        await cancel(list(self._fetches))
        if self.buffer.running:
            await asyncio.sleep(_LAST_STEP_S)
        try:
            async with asyncio.timeout(limit_s):
                await (self.publisher.finish() if final else self.publisher.flush())
        except TimeoutError:
            log.warning("handover.late", limit_s=limit_s, tokens=self.buffer.unsent_tokens)
            return False
        return True

    async def close(self) -> None:
        """Stop everything and free the device."""
        await cancel([*self._tasks, *self._fetches, self._publishing])
        await self.engine.close()

    # --- what turns ---

    async def _collect(self) -> None:
        while True:
            for span in await self.engine.spans():
                taken = self.buffer.add(span)
                self.generated += taken
                metrics.TOKENS.inc(taken)
                metrics.UNWANTED_TOKENS.inc(len(span.ids) - taken)
            metrics.BUFFERED.set(self.buffer.tokens)
            self.publisher.notify()
            self._pace()

    def _pace(self) -> None:
        full = self.buffer.full or self._stopped
        if full == self._paused:
            return
        self._paused = full
        metrics.PAUSED.set(full)
        if full:
            self.engine.pause()
        else:
            self.engine.resume()
        if not self._stopped:
            log.info("generation.paused" if full else "generation.resumed", buffered=self.buffer.tokens)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._settings.probe_s)
            await self.publisher.probe()

    def _fetch(self, name: str, start: Coroutine[Any, Any, None]) -> None:
        """Start responses in the background."""
        fetch = self._supervisor.spawn(name, start, may_end=True)
        self._fetches.add(fetch)
        fetch.add_done_callback(self._fetches.discard)

    async def _start_by_reference(
        self, assignment: fleet_pb2.Assignment, sampling: Sampling, drafts: DraftSource | None
    ) -> None:
        handle, attempt = assignment.handle, assignment.attempt
        try:
            reply = await self._fleet.get_prefix(self.target.job, handle, attempt)
            request = request_of(assignment, sampling, prompt=reply.prompt, prefix=reply.prefix, drafts=drafts)
        except (grpc.aio.AioRpcError, Unavailable, CorruptData) as error:
            # It is absent from the next heartbeats, so the coordinator assigns it anew.
            log.warning("prefix.failed", handle=handle, attempt=attempt, error=str(error))
            metrics.ABORTS.labels("prefix").inc()
            self.buffer.forget(handle, attempt)
            return
        self._start_late(request)

    async def _start_with_history(self, group: int, requests: Sequence[Request]) -> None:
        drafts = None
        try:
            drafts = source_of((await self._fleet.get_drafts(self.target.job, group)).segments)
        except (grpc.aio.AioRpcError, Unavailable) as error:
            log.warning("history.failed", group=group, error=str(error))
        for request in requests:
            self._start_late(replace(request, drafts=drafts))

    def _start_late(self, request: Request) -> None:
        """Start a response whose assignment was taken some time ago, if it is still wanted."""
        handle, attempt = request.handle, request.attempt
        if self.buffer.attempt(handle) != attempt:
            return
        self.buffer.open(handle, attempt, len(request.prefix))
        try:
            self.engine.submit([request])
        except InvalidField as error:
            log.warning("response.refused", handle=handle, error=str(error))
            self.buffer.forget(handle, attempt)

    async def _follow(self) -> None:
        pull: asyncio.Task[None] | None = None
        try:
            while True:
                pause: float | None = None
                if pull is not None and pull.done():
                    pause = await self._concluded(pull)
                    pull = None
                if pause is None and self._pulls.decide() is not Pull.WAIT:
                    if pull is not None:
                        await cancel([pull])
                    version = self._pulls.start()
                    pull = asyncio.create_task(self._bring(version), name=f"pull {version}")
                    pull.add_done_callback(lambda _: self._wake.set())
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pass  # time for another try
                self._wake.clear()
        finally:
            if pull is not None:
                await cancel([pull])

    async def _bring(self, version: int) -> None:
        serving = self.engine.version

        def progress(done: int, total: int) -> None:
            self.note = f"downloading version {version}, {100 * done // max(total, 1)} %"

        self.note = f"downloading version {version}"
        self._changed()
        started = time.monotonic()
        directory = await self._versions.bring(self.target, version, progress)
        pulled = time.monotonic()
        self._pulls.loading = True
        self.note = f"loading version {version}"
        await self.engine.load(directory, version)
        loaded = time.monotonic()
        metrics.PULL_SECONDS.observe(loaded - started)
        self.publisher.numerics_key = self.engine.numerics_key
        before = {} if serving is None else {"before": serving}
        log.info(
            "version.loaded",
            version=version,
            **before,
            pull_s=round(pulled - started, 2),
            load_s=round(loaded - pulled, 2),
        )

    async def _concluded(self, pull: asyncio.Task[None]) -> float | None:
        """Take a pull's end in; return the seconds to wait before another try, None if there is nothing to wait for."""
        version = self._pulls.pulling
        try:
            pull.result()
        except EngineBroken:
            raise
        except (RlharvestError, OSError) as error:
            pause = self._pulls.failed()
            serving = self.engine.version
            still = "nothing is served" if serving is None else f"version {serving} is served on"
            self.note = f"version {version} failed, {still}: {error}"
            metrics.PULL_FAILURES.inc()
            log.warning("version.failed", version=version, serving=serving, error=str(error), retry_s=pause)
            if self._pulls.failures == 1:
                data = {"version": version, "serving": serving, "error": str(error)}
                await self._report("error", "weights.failed", f"Version {version} could not be loaded: {error}", data)
            self._changed()
            return pause
        self._pulls.succeeded()
        self.note = ""
        metrics.VERSION.set(-1 if self.engine.version is None else self.engine.version)
        self._changed()
        return None

"""One claimed job, from its model to its outcome.

    load → publish step s → [gather batch s → apply → publish s + 1 → report → save]* → finish

Invariants: `step` is the number of optimizer steps that the parameters in memory have had; batch `step` is what
NextBatch says and nothing else, so a run that died replays exactly the batches that its checkpoint doesn't cover;
versions are published in the order of their steps; a checkpoint is reported after it is durable, a step after it is
published; nothing is said after a newer claim took the job.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from rlharvest.errors import CorruptData, DataError, DiskFull, Fenced, InfrastructureError, NotFound, Unavailable
from rlharvest.jobs.model import JobSpec, parse
from rlharvest.supervise import Supervisor
from rlharvest.v1 import batches_pb2

from rlharvest_trainer import metrics, versions
from rlharvest_trainer.batches import BadGroup, Group, decode_group
from rlharvest_trainer.checkpoints import Checkpoints, State
from rlharvest_trainer.claim import Claim
from rlharvest_trainer.compute import Compute, choose_device
from rlharvest_trainer.coordinator import Coordinator
from rlharvest_trainer.notices import Notices
from rlharvest_trainer.orders import Order, Stopped
from rlharvest_trainer.preparation import Prepared, prepare, state_tensors
from rlharvest_trainer.schedule import learning_rate
from rlharvest_trainer.settings import TrainerSettings
from rlharvest_trainer.step import StepResult
from rlharvest_trainer.versions import Publications, Version

log = structlog.get_logger(__name__)

RELEASE_PATIENCE_S = 5.0
"""How long a trainer that shuts down waits for a publication, and again for the coordinator."""
_PUBLISH_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all runs of a trainer share."""

    settings: TrainerSettings
    coordinator: Coordinator
    publications: Publications
    notices: Notices
    compute: Compute
    supervisor: Supervisor


@dataclass(slots=True)
class _Clocked:
    """What the step in hand took: seconds by what they went to, and tokens."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    computed: float = 0.0
    tokens: int = 0
    """Prompt and response tokens of its batch."""


class Run:
    """Trains one claimed job. Use once."""

    def __init__(self, claimed: batches_pb2.Claimed, around: Surroundings) -> None:
        self.job = claimed.job
        self.fence = claimed.fence
        self._claimed = claimed
        self._claim = Claim(claimed, around.coordinator, around.notices)
        self.orders = self._claim.orders
        self._around = around
        self._staging = around.settings.data_dir / "trainer" / around.settings.trainer / claimed.job
        self._prepared: Prepared | None = None
        self._version: Version | None = None
        """Of the parameters in memory; None while they are not published."""
        self._parent: int | None = None
        self._tokens = 0
        self._skipped = 0
        self._metrics: dict[str, float] = {}
        self._saved_step: int | None = None
        self._save_s = 0.0
        self._publication: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps that the parameters in memory have had."""
        return self._claim.step

    async def run(self) -> None:
        """Train until the last step, an order, or a fault; tell the coordinator which. Raises nothing of the job's
        own."""
        renewals = self._around.supervisor.spawn(f"renew {self.job}", self._claim.renew(), may_end=True)
        try:
            try:
                await self._train()
                await self._claim.finish(batches_pb2.OUTCOME_SUCCEEDED)
            except Stopped:
                await self._obey()
        except (Fenced, NotFound) as lost:
            self.orders.give(Order.FENCED)
            metrics.FENCED.inc()
            log.warning("claim.lost", job=self.job, fence=self.fence, why=str(lost))
        except (DataError, InfrastructureError) as error:
            await self._claim.fail(str(error))
        except Exception as error:
            log.exception("run.failed", job=self.job, step=self.step)
            await self._claim.fail(f"the trainer failed at step {self.step}: {error!r}")
        finally:
            # Whatever still computes ends at the next micro-batch.
            self.orders.give(Order.RELEASE)
            renewals.cancel()
            await self._drop_publication(0.0)
            await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)
            self._claim.show("idle")

    async def _train(self) -> None:
        spec = parse(json.loads(self._claimed.job_json))
        saved = Checkpoints(Path(self._claimed.checkpoint_dir), keep=spec.checkpoint.keep)
        await self._load(spec, saved)
        overlap = spec.staleness.max_staleness > 0
        last = spec.limits.max_steps
        async with self._around.notices.wakeups(self.job) as woken:
            while self.step < last:
                clocked = _Clocked()
                await self._gather(spec, woken, clocked)
                await self._publication_done()
                result = await self._apply(spec, clocked)
                self._publication = asyncio.create_task(self._publish(spec, result, clocked))
                due = self.step % spec.checkpoint.every_steps == 0 or self.step == last
                if due or not overlap:
                    await self._publication_done()
                if due:
                    await self._report_checkpoint(*await self._save(spec, saved))

    async def _load(self, spec: JobSpec, saved: Checkpoints) -> None:
        self._claim.show("loading")
        settings = self._around.settings
        self._prepared = prepared = await self.orders.obeying(
            self._around.compute(
                prepare,
                self.job,
                spec,
                saved,
                attention=settings.attention,
                device=choose_device(settings.device),
            )
        )
        state = prepared.resumed
        if state is not None:
            self._claim.step, self._tokens, self._skipped = state.step, state.tokens, state.skipped
            self._metrics = state.metrics
            self._parent = state.parent if state.version is None else state.version
            self._saved_step = state.step
            await self._claim.event("info", "trainer.resumed", f"resumed from step {state.step}", {"step": state.step})
        metrics.STEP.set(self.step)
        newest = await self.orders.obeying(self._newest())
        if state is not None and newest is not None and newest.digest == state.digest:
            self._version = newest
        else:
            self._version = await self.orders.obeying(self._upload(spec))
        await self.orders.obeying(self._claim.report_step(self.step, self._version, self._metrics))
        if state is not None and prepared.path is not None:
            await self._report_checkpoint(prepared.path, state.digest)
        log.info("run.ready", job=self.job, step=self.step, version=self._version.number, resumed=state is not None)

    async def _gather(self, spec: JobSpec, woken: asyncio.Event, clocked: _Clocked) -> None:
        """Bring the gradients of the whole batch into the learner."""
        held: list[Group] = []
        after = 0
        while True:
            self._claim.show("waiting")
            since = time.monotonic()
            woken.clear()
            reply = await self.orders.obeying(self._claim.next_batch(after=after))
            complete = reply.complete or 0 < reply.size <= after + len(reply.groups)
            if not reply.groups and not complete:
                await self.orders.obeying(_wait(woken, self._around.settings.poll_s))
            clocked.waited += time.monotonic() - since
            groups = await self._accept(spec, reply, after)
            after += len(reply.groups)
            clocked.tokens += sum(sample.length for group in groups for sample in group.samples)
            if spec.deterministic:
                held += groups
                groups = held if complete else []
            if groups:
                self._claim.show("computing")
                since = time.monotonic()
                await self.orders.obeying(
                    self._around.compute(self._ready.learner.accumulate, groups, stop=self.orders.given)
                )
                clocked.computed += time.monotonic() - since
            if complete:
                return

    async def _accept(self, spec: JobSpec, reply: batches_pb2.NextBatchReply, after: int) -> list[Group]:
        """Return the groups of a reply that can be trained on; report the others."""
        places = [group.position for group in reply.groups]
        if reply.step != self.step or places != list(range(after, after + len(places))):
            raise CorruptData(
                f"NextBatch({self.step}, after {after}) brought batch {reply.step}, positions {places[:8]}"
            )
        groups = []
        for message in reply.groups:
            try:
                group = await self._around.compute(
                    decode_group,
                    message,
                    vocab=self._ready.vocab,
                    scale_rewards=spec.algorithm.scale_rewards == "group",
                    mask_truncated=spec.algorithm.mask_truncated_completions,
                )
            except BadGroup as bad:
                metrics.SKIPPED_GROUPS.inc()
                await self._claim.event(
                    "error",
                    "trainer.group_skipped",
                    f"left out of step {self.step}: {bad}",
                    {"step": self.step, "group": bad.group},
                )
                continue
            groups.append(group)
        return groups

    async def _apply(self, spec: JobSpec, clocked: _Clocked) -> StepResult:
        """Make the step. Never cut short: afterwards `step` and the parameters agree."""
        algorithm = spec.algorithm
        self._claim.show("computing")
        since = time.monotonic()
        result = await self._around.compute(
            self._ready.learner.apply,
            learning_rate(
                self.step,
                peak=algorithm.learning_rate,
                shape=algorithm.lr_schedule,
                warmup_steps=algorithm.warmup_steps,
                max_steps=spec.limits.max_steps,
            ),
        )
        clocked.computed += time.monotonic() - since
        self._claim.step += 1
        self._tokens += clocked.tokens
        metrics.TOKENS.inc(clocked.tokens)
        self._parent = self._version.number if self._version else self._parent
        self._version = None
        metrics.STEP.set(self.step)
        metrics.STEPS.inc()
        if not result.applied:
            self._skipped += 1
            metrics.SKIPPED_STEPS.inc()
            await self._claim.event(
                "warn",
                "trainer.step_skipped",
                f"step {self.step} changed nothing: {result.problem}",
                {"step": self.step, "groups": list(result.suspects)},
            )
        return result

    async def _publish(self, spec: JobSpec, result: StepResult, clocked: _Clocked) -> None:
        """Publish and report the step that was just made."""
        step = self.step
        since = time.monotonic()
        version = await self._upload(spec)
        now = time.monotonic()
        seconds = {
            "step_s": now - clocked.started,
            "rollout_wait_s": clocked.waited,
            "compute_s": clocked.computed,
            "publish_s": now - since,
            "save_s": self._save_s,
        }
        self._save_s = 0.0
        for phase, spent in seconds.items():
            metrics.SECONDS.labels(phase.removesuffix("_s")).inc(spent)
        self._metrics = {
            **result.metrics,
            **{f"perf/{name}": value for name, value in seconds.items()},
            "perf/tokens_per_s": clocked.tokens / max(clocked.computed, 1e-9),
            "num_tokens": float(self._tokens),
            "skipped_steps": float(self._skipped),
        }
        self._version = version
        _show_step(step, spec.limits.max_steps, self.job, self._metrics, result)
        await self._claim.report_step(step, version, self._metrics)

    async def _upload(self, spec: JobSpec) -> Version:
        """Write the parameters as they are now and make a version of them."""
        self._claim.show("publishing")
        step, parent, directory = self.step, self._parent, self._staging / f"step_{self.step}"
        await self._around.compute(
            versions.write,
            self._ready.learner.model,
            directory,
            tokenizer=self._ready.tokenizer,
            shard_bytes=spec.weights.shard_bytes,
        )
        while True:
            try:
                version = await self._around.publications.publish(
                    directory, job=self.job, key=f"{self.fence}:{step}", step=step, parent=parent
                )
                break
            except Unavailable as problem:
                log.warning("publish.waiting", job=self.job, step=step, why=str(problem))
                await asyncio.sleep(_PUBLISH_RETRY_S)
        metrics.PUBLICATIONS.inc()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        return version

    async def _save(self, spec: JobSpec, saved: Checkpoints) -> tuple[Path, str]:
        """Make a durable checkpoint of the parameters in memory; return its path and digest. Never cut short."""
        self._claim.show("saving")
        since = time.monotonic()
        state = State(
            job=self.job,
            job_digest=spec.digest(),
            fence=self.fence,
            step=self.step,
            version=self._version.number if self._version else None,
            parent=self._parent,
            seed=spec.seed,
            tokens=self._tokens,
            skipped=self._skipped,
            metrics=self._metrics,
        )
        path, state = await self._around.compute(_save, saved, state, self._ready, spec.weights.shard_bytes)
        self._saved_step = self.step
        self._save_s += time.monotonic() - since
        metrics.CHECKPOINTS.inc()
        log.info("checkpoint.saved", job=self.job, step=self.step, path=str(path), seconds=round(self._save_s, 3))
        return path, state.digest

    async def _report_checkpoint(self, path: Path, digest: str) -> None:
        assert self._version is not None, "only published weights are reported"
        report = self._claim.report_checkpoint(self._version.number, path, digest, self._metrics)
        await self.orders.obeying(report)

    async def _obey(self) -> None:
        """End as ordered. A pause and a release keep every step that was made."""
        order = self.orders.current
        log.info("run.ordered", job=self.job, order=order.name if order else "", step=self.step)
        if order is Order.FENCED:
            raise Fenced
        if order is Order.CANCEL:
            await self._claim.finish(batches_pb2.OUTCOME_CANCELLED)
            return
        await self._drop_publication(RELEASE_PATIENCE_S)
        if self._prepared is not None and self._saved_step != self.step:
            await self._save_last()
        outcome = batches_pb2.OUTCOME_PAUSED if order is Order.PAUSE else batches_pb2.OUTCOME_RELEASED
        await self._claim.finish(outcome, patience_s=RELEASE_PATIENCE_S)

    async def _save_last(self) -> None:
        spec = parse(json.loads(self._claimed.job_json))
        saved = Checkpoints(Path(self._claimed.checkpoint_dir), keep=spec.checkpoint.keep)
        try:
            path, digest = await self._save(spec, saved)
            if self._version is not None:
                async with asyncio.timeout(RELEASE_PATIENCE_S):
                    await self._claim.report_checkpoint(self._version.number, path, digest, self._metrics)
        except TimeoutError:
            log.warning("checkpoint.unheard", job=self.job, step=self.step)  # the next run reports it
        except DiskFull as full:
            # The checkpoint before stands and its batches replay: nothing is lost but time.
            await self._claim.event("error", "trainer.save_failed", str(full), {"step": self.step})

    async def _newest(self) -> Version | None:
        while True:
            try:
                return await self._around.publications.newest(self.job)
            except Unavailable as problem:
                log.warning("versions.waiting", job=self.job, why=str(problem))
                await asyncio.sleep(_PUBLISH_RETRY_S)

    async def _publication_done(self) -> None:
        """Wait for the publication in flight, if there is one."""
        if self._publication is not None:
            await self.orders.obeying(_joined(self._publication))
            self._publication = None

    async def _drop_publication(self, patience_s: float) -> None:
        """Give the publication in flight a little time, then cancel it."""
        if self._publication is None:
            return
        await asyncio.wait([self._publication], timeout=patience_s)
        self._publication.cancel()
        (ended,) = await asyncio.gather(self._publication, return_exceptions=True)
        if isinstance(ended, Exception):
            log.warning("publish.dropped", job=self.job, step=self.step, error=repr(ended))
        self._publication = None

    @property
    def _ready(self) -> Prepared:
        assert self._prepared is not None, "loaded before anything else"
        return self._prepared


async def _wait(woken: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await woken.wait()
    except TimeoutError:
        pass  # the poll


async def _joined(task: asyncio.Task[None]) -> None:
    """Wait for a task without cancelling it when this wait is cancelled."""
    await asyncio.shield(task)


def _save(saved: Checkpoints, state: State, ready: Prepared, shard_bytes: int) -> tuple[Path, State]:
    return saved.save(
        state,
        ready.learner.model,
        state_tensors(ready.learner),
        tokenizer=ready.tokenizer,
        shard_bytes=shard_bytes,
    )


def _show_step(step: int, last: int, job: str, values: Mapping[str, float], result: StepResult) -> None:
    for gauge, name in (
        (metrics.REWARD, "reward"),
        (metrics.LOSS, "loss"),
        (metrics.GRAD_NORM, "grad_norm"),
        (metrics.KL, "kl"),
        (metrics.STALENESS, "staleness/mean"),
    ):
        if name in values:
            gauge.set(values[name])
    shown = {
        name: round(values[key], 5)
        for name, key in (
            ("reward", "reward"),
            ("loss", "loss"),
            ("grad_norm", "grad_norm"),
            ("length", "completions/mean_length"),
            ("wait_s", "perf/rollout_wait_s"),
            ("compute_s", "perf/compute_s"),
            ("tok_per_s", "perf/tokens_per_s"),
        )
        if key in values
    }
    log.info(f"step {step}/{last}", job=job, **shown, **({} if result.applied else {"skipped": result.problem}))

"""One claimed job, from its model to its outcome.

    load → publish step s → [gather batch s → apply → publish s + 1 → report → save]* → finish

Invariants: `step` is the number of optimizer steps that the parameters in memory have had; batch `step` is what
NextBatch says and nothing else, so a run that died replays exactly the batches that its checkpoint doesn't cover;
versions are published in the order of their steps; a publication that goes on by itself ends the run when it fails
(publication.InFlight); a checkpoint is reported after it is durable, a step after it is published; nothing is said
after a newer claim took the job.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
from rlharvest.errors import DataError, DiskFull, Fenced, InfrastructureError, NotFound
from rlharvest.jobs.model import JobSpec, parse
from rlharvest.supervise import Supervisor
from rlharvest.v1 import batches_pb2

from rlharvest_trainer import metrics
from rlharvest_trainer.checkpoints import Checkpoints, State
from rlharvest_trainer.claim import Claim
from rlharvest_trainer.compute import Compute, choose_device
from rlharvest_trainer.coordinator import Coordinator
from rlharvest_trainer.intake import Intake
from rlharvest_trainer.notices import Notices
from rlharvest_trainer.orders import Order, Stopped
from rlharvest_trainer.preparation import Prepared, prepare, state_tensors
from rlharvest_trainer.publication import InFlight, Uploads
from rlharvest_trainer.report import StepClock, moved, show_step, step_metrics
from rlharvest_trainer.room import Room
from rlharvest_trainer.schedule import learning_rate
from rlharvest_trainer.settings import TrainerSettings
from rlharvest_trainer.step import StepResult
from rlharvest_trainer.versions import Publications, Version

log = structlog.get_logger(__name__)

RELEASE_PATIENCE_S = 5.0
"""How long a trainer that shuts down waits for a publication, and again for the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all runs of a trainer share."""

    settings: TrainerSettings
    coordinator: Coordinator
    publications: Publications
    notices: Notices
    compute: Compute
    supervisor: Supervisor


class Run:
    """Trains one claimed job. Use once."""

    def __init__(self, claimed: batches_pb2.Claimed, around: Surroundings) -> None:
        self.job = claimed.job
        self.fence = claimed.fence
        self._claimed = claimed
        self._claim = Claim(claimed, around.coordinator, around.notices)
        self.orders = self._claim.orders
        self._around = around
        self._room = Room(self._claim)
        self._uploads = Uploads(
            around.publications,
            around.compute,
            self._claim,
            self._room,
            tokenizer_digest=claimed.tokenizer_digest,
            staging=around.settings.data_dir / "trainer" / around.settings.trainer / claimed.job,
            reserve=around.settings.min_free_bytes,
        )
        self._in_flight = InFlight(self.orders)
        self._prepared: Prepared | None = None
        self._version: Version | None = None
        """Of the parameters in memory; None while they are not published."""
        self._parent: int | None = None
        self._digest = ""
        """Of the last version."""
        self._tokens = 0
        self._skipped = 0
        self._metrics: dict[str, float] = {}
        self._saved_step: int | None = None
        self._save_s = 0.0

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
            await self._in_flight.abandon(0.0)
            await self._uploads.clear()
            self._claim.show("idle")

    async def _train(self) -> None:
        spec = parse(json.loads(self._claimed.job_json))
        saved = self._checkpoints(spec)
        await self._load(spec, saved)
        overlap = spec.staleness.max_staleness > 0
        last = spec.limits.max_steps
        async with self._around.notices.wakeups(self.job) as woken:
            intake = Intake(
                self._claim,
                self._around.compute,
                spec,
                self._ready,
                woken=woken,
                poll_s=self._around.settings.poll_s,
                idle=lambda: self._replace_lost(spec),
            )
            while self.step < last:
                clock = StepClock()
                await intake.gather(clock)
                await self._in_flight.landed()
                result = await self._apply(spec, clock)
                self._in_flight.launch(self._publish(spec, result, clock))
                due = self.step % spec.checkpoint.every_steps == 0 or self.step == last
                if due or not overlap:
                    await self._in_flight.landed()
                if due:
                    path, digest = await self._room.wait("CheckpointDiskFull", lambda: self._save(spec, saved))
                    await self._report_checkpoint(path, digest)

    async def _load(self, spec: JobSpec, saved: Checkpoints) -> None:
        self._claim.show("loading")
        await self._room.wait("CheckpointDiskFull", lambda: self._around.compute(saved.claim, self.fence))
        settings = self._around.settings
        self._prepared = prepared = await self.orders.obeying(
            self._around.compute(
                prepare,
                self.job,
                spec,
                saved,
                attention=settings.attention,
                device=choose_device(settings.device),
                roots=settings.roots,
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
        newest = await self.orders.obeying(self._uploads.newest())
        if state is not None and newest is not None and newest.digest == state.digest:
            self._version = newest
        else:
            self._version = await self.orders.obeying(self._upload(spec))
        self._digest = self._version.digest
        await self.orders.obeying(self._claim.report_step(self.step, self._version, self._metrics))
        if state is not None and prepared.path is not None:
            await self._report_checkpoint(prepared.path, state.digest)
        log.info("run.ready", job=self.job, step=self.step, version=self._version.number, resumed=state is not None)

    async def _apply(self, spec: JobSpec, clock: StepClock) -> StepResult:
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
        clock.computed += time.monotonic() - since
        self._claim.step += 1
        self._tokens += clock.tokens
        metrics.TOKENS.inc(clock.tokens)
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

    async def _publish(self, spec: JobSpec, result: StepResult, clock: StepClock) -> None:
        """Publish and report the step that was just made."""
        step = self.step
        since = time.monotonic()
        version = await self._upload(spec)
        self._metrics = step_metrics(
            result,
            clock,
            published_s=time.monotonic() - since,
            saved_s=self._save_s,
            tokens=self._tokens,
            skipped=self._skipped,
        )
        self._save_s = 0.0
        unchanged, self._digest = version.digest == self._digest, version.digest
        self._version = version
        if unchanged and moved(self._metrics):
            await self._claim.event(
                "warn",
                "trainer.unchanged",
                f"step {step} left every weight as it was, though its gradient was not 0: is algorithm.learning_rate too "
                f"small for {spec.algorithm.dtype}?",
                {"step": step, "grad_norm": self._metrics["grad_norm"]},
            )
        show_step(self.job, step, spec.limits.max_steps, version.number, self._metrics, result)
        await self._claim.report_step(step, version, self._metrics)

    async def _upload(self, spec: JobSpec) -> Version:
        """Make a version of the parameters as they are now."""
        self._claim.show("publishing")
        return await self._uploads.upload(
            self._ready, step=self.step, parent=self._parent, shard_bytes=spec.weights.shard_bytes
        )

    async def _replace_lost(self, spec: JobSpec) -> None:
        """Publish the step in hand again, under a new number, if the weight service lost its version."""
        lost = self._claim.lost_version
        if lost is None or self._version is None or self._version.number != lost:
            return
        log.warning("version.lost", job=self.job, version=lost, step=self.step)
        version = await self.orders.obeying(self._upload(spec))
        self._version = version
        await self.orders.obeying(self._claim.report_step(self.step, version, self._metrics))
        self._claim.show("waiting")

    def _checkpoints(self, spec: JobSpec) -> Checkpoints:
        return Checkpoints(
            Path(self._claimed.checkpoint_dir),
            keep=spec.checkpoint.keep,
            reserve=self._around.settings.min_free_bytes,
        )

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
        log.info("checkpoint.saved", job=self.job, step=self.step, save_s=round(self._save_s, 2), path=str(path))
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
        await self._in_flight.abandon(RELEASE_PATIENCE_S)
        if self._prepared is not None and self._saved_step != self.step:
            await self._save_last()
        outcome = batches_pb2.OUTCOME_PAUSED if order is Order.PAUSE else batches_pb2.OUTCOME_RELEASED
        await self._claim.finish(outcome, patience_s=RELEASE_PATIENCE_S)

    async def _save_last(self) -> None:
        spec = parse(json.loads(self._claimed.job_json))
        saved = self._checkpoints(spec)
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

    @property
    def _ready(self) -> Prepared:
        assert self._prepared is not None, "loaded before anything else"
        return self._prepared


def _save(saved: Checkpoints, state: State, ready: Prepared, shard_bytes: int) -> tuple[Path, State]:
    return saved.save(
        state,
        ready.learner.model,
        state_tensors(ready.learner),
        tokenizer=ready.tokenizer,
        shard_bytes=shard_bytes,
    )

"""What the trainer asks: the gRPC service Batches.

Invariants: a claim has a fence that rises with every claim of the job, and a call with a lower one changes nothing; batch t
is what SQL says it is, for ever; what the trainer reports is in SQL before it is answered.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from rlharvest.bus import names_one
from rlharvest.clock import Clock
from rlharvest.errors import Conflict, InvalidField, NotFound
from rlharvest.jobs.state import TERMINAL, Move, Status
from rlharvest.rpc import NOT_LEADER
from rlharvest.rpc_faults import shortened
from rlharvest.spans import Finish
from rlharvest.v1 import batches_pb2, batches_pb2_grpc

from rlharvest_coordinator.obstacles import of_trainer
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import checkpoints, groups, jobs, steps
from rlharvest_coordinator.tables import Group, Job, Sample

log = structlog.get_logger(__name__)

REPLY_BYTES = 16 << 20
"""A reply is cut after the group with which it grows past this size."""

RENEW_S = 1.0

MAX_WAIT_S = 30.0
"""A call that waits is answered after so long, with or without news."""

_MAX_VERSION = 2**31 - 1
_MAX_TEXT = 500
_MAX_METRICS = 1000
_MAX_ERROR = 10_000

Context = grpc.aio.ServicerContext[Any, Any]


class Batches(batches_pb2_grpc.BatchesServicer):
    """Serves trainers from the runs of this coordinator."""

    def __init__(
        self,
        runs: dict[str, Run],
        sessions: Sessions,
        clock: Clock,
        *,
        epoch: Callable[[], int],
        checkpoints_dir: Path,
        deadline_s: float,
        on_version: Callable[[Run, int], Any],
    ) -> None:
        self.runs = runs
        self.sessions = sessions
        self.clock = clock
        self.epoch = epoch
        self.checkpoints_dir = checkpoints_dir
        self.deadline_s = deadline_s
        self.on_version = on_version
        self.queued = asyncio.Event()
        """Set whenever a job may be there to claim."""

    async def Claim(self, request: batches_pb2.ClaimRequest, context: Context) -> batches_pb2.ClaimReply:
        if not names_one(request.trainer):
            fix = "Use letters, digits, '_' and '-', at most 100."
            raise InvalidField("trainer", request.trainer, "not a trainer's name", fix)
        wait_s = _wait(request.wait_s)
        epoch = await self._lead(context)
        end = self.clock.monotonic() + wait_s
        while True:
            self.queued.clear()
            row = await jobs.claim(self.sessions, trainer=request.trainer, now=self.clock.time(), epoch=epoch)
            if row is not None and row.id in self.runs:
                return await self._claimed(row, request)
            left = end - self.clock.monotonic()
            if left <= 0:
                return batches_pb2.ClaimReply()
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self.queued.wait()
            except TimeoutError:
                pass

    async def _claimed(self, row: Job, request: batches_pb2.ClaimRequest) -> batches_pb2.ClaimReply:
        run = self.runs[row.id]
        run.scope.row = row
        run.trainer_heard = self.clock.monotonic()
        run.scope.event("info", "job.claimed", f"Trainer {request.trainer} has the job.", {"trainer": request.trainer})
        run.scope.woken.set()
        directory = self.checkpoints_dir / row.id
        # The trainer reads what validation checked, wherever the job's own path is relative to.
        spec = {**row.spec, "model": str(run.scope.prepared.model_dir)}
        if run.scope.prepared.tokenizer_dir is not None:
            spec["tokenizer"] = str(run.scope.prepared.tokenizer_dir)
        return batches_pb2.ClaimReply(
            claimed=batches_pb2.Claimed(
                job=row.id,
                fence=row.fence,
                job_json=json.dumps(spec),
                checkpoint_dir=str(directory),
                renew_s=RENEW_S,
                deadline_s=self.deadline_s,
                tokenizer_digest=run.scope.prepared.tokenizer.digest,
                next_version=max(run.scope.versions, default=-1) + 1,
            )
        )

    async def Renew(self, request: batches_pb2.RenewRequest, context: Context) -> batches_pb2.RenewReply:
        run = await self._fenced(request.job, request.fence, context)
        run.trainers_obstacle = of_trainer(request.obstacle, request.obstacle_message[:_MAX_TEXT])
        return batches_pb2.RenewReply(directive=_directive(run), lost_version=run.lost_version)

    async def NextBatch(self, request: batches_pb2.NextBatchRequest, context: Context) -> batches_pb2.NextBatchReply:
        wait_s = _wait(request.wait_s)
        run = await self._fenced(request.job, request.fence, context)
        size = run.scope.spec.algorithm.prompts_per_step
        _at_most("step", request.step, run.scope.spec.limits.max_steps)
        _at_most("after", request.after, size)
        end = self.clock.monotonic() + wait_s
        while True:
            batched = run.harvest.open_batch.batched
            rows = await groups.batch(self.sessions, run.id, request.step, after=request.after, limit=size)
            left = end - self.clock.monotonic()
            if rows or left <= 0 or run.closed:
                break
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await batched.wait()
            except TimeoutError:
                pass
            run.trainer_heard = self.clock.monotonic()
        reply = batches_pb2.NextBatchReply(step=request.step, epoch=self.epoch(), size=size)
        for group, samples in rows:
            reply.groups.append(_group(run, group, samples))
            if reply.ByteSize() > REPLY_BYTES:
                break
        reply.complete = request.after + len(reply.groups) >= size
        return reply

    async def ReportStep(self, request: batches_pb2.ReportStepRequest, context: Context) -> batches_pb2.ReportStepReply:
        run = await self._fenced(request.job, request.fence, context)
        _at_most("step", request.step, run.scope.spec.limits.max_steps)
        _at_most("version", request.version, _MAX_VERSION)
        _check_report(request)
        now, epoch = self.clock.time(), self.epoch()
        await groups.record_version(
            self.sessions, run.id, request.version, step=request.step, digest=request.digest, now=now, epoch=epoch
        )
        await steps.record(
            self.sessions,
            run.id,
            request.step,
            version=request.version,
            digest=request.digest,
            fence=request.fence,
            metrics=dict(request.metrics),
            now=now,
            epoch=epoch,
        )
        run.scope.versions[request.version] = request.step
        await run.refresh()
        run.lost_version = None
        shown = f"Version {request.version} is published" + (f" after step {request.step}." if request.step else ".")
        reward = request.metrics.get("reward")
        if request.step and reward is not None:
            shown += f" Mean reward {reward:.3f}."
        run.scope.event("info", "step.done", shown, {"step": request.step, "version": request.version})
        self.on_version(run, request.version)
        run.scope.woken.set()
        return batches_pb2.ReportStepReply(directive=_directive(run))

    async def ReportCheckpoint(
        self, request: batches_pb2.ReportCheckpointRequest, context: Context
    ) -> batches_pb2.ReportCheckpointReply:
        run = await self._fenced(request.job, request.fence, context)
        if request.step > run.scope.row.step:
            await run.refresh()
        # What it covers is trained for good, so it cannot cover steps that were never done.
        _at_most("step", request.step, run.scope.row.step)
        _at_most("version", request.version, _MAX_VERSION)
        _check_report(request)
        directory = self.checkpoints_dir / run.id
        if "\0" in request.path or ".." in Path(request.path).parts or not Path(request.path).is_relative_to(directory):
            raise InvalidField("path", request.path, "not below the job's checkpoints", f"Save below {directory}.")
        await checkpoints.record(
            self.sessions,
            run.id,
            request.step,
            version=request.version,
            path=request.path,
            digest=request.digest,
            metrics=dict(request.metrics),
            now=self.clock.time(),
            epoch=self.epoch(),
        )
        await run.harvest.trained(request.step)
        run.scope.event(
            "info", "checkpoint.saved", f"Step {request.step} is saved.", {"step": request.step, "path": request.path}
        )
        return batches_pb2.ReportCheckpointReply()

    async def Finish(self, request: batches_pb2.FinishRequest, context: Context) -> batches_pb2.FinishReply:
        run = await self._fenced(request.job, request.fence, context)
        await run.refresh()
        if run.scope.status not in TERMINAL:
            move = _MOVES.get(request.outcome)
            if move is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"outcome = {request.outcome}: not an outcome")
            assert move is not None
            # A user may have changed their mind since the trainer was told: then the job goes on, with any trainer.
            told = {Move.CANCELLED: Status.CANCELLING, Move.PAUSED: Status.PAUSING}
            if told.get(move, run.scope.status) is not run.scope.status:
                move = Move.RELEASE
            try:
                if move is Move.FAIL:
                    await run.fail(request.error[:_MAX_ERROR] or "the trainer gave no reason")
                else:
                    run.scope.row = await jobs.move(
                        self.sessions, run.id, move, now=self.clock.time(), epoch=self.epoch()
                    )
            except Conflict as error:
                await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        run.trainer_heard = None
        run.trainers_obstacle = None
        self.queued.set()
        run.scope.woken.set()
        return batches_pb2.FinishReply()

    async def expire(self) -> None:
        """Free the claims of trainers that are lost: another one, or the same restarted, takes the job."""
        now = self.clock.monotonic()
        for run in list(self.runs.values()):
            if run.closed or run.scope.status in TERMINAL:
                continue
            if run.scope.row.trainer is None:
                if run.scope.status in (Status.PAUSING, Status.CANCELLING):
                    await self._let_go(run)  # there is no trainer to wait for
                continue
            if run.trainer_heard is None:
                run.trainer_heard = now
            silent = now - run.trainer_heard
            if silent < self.deadline_s:
                continue
            lost = run.scope.row.trainer
            if run.scope.status in (Status.PAUSING, Status.CANCELLING):
                await self._let_go(run)
            else:
                run.scope.row = await jobs.update(
                    self.sessions, run.id, lambda row: setattr(row, "trainer", None), epoch=self.epoch()
                )
            run.trainer_heard = None
            run.trainers_obstacle = None
            run.scope.event("warn", "trainer.lost", f"Trainer {lost} was silent for {silent:.0f} s.", {"trainer": lost})
            self.queued.set()

    async def _let_go(self, run: Run) -> None:
        """A job pauses or is cancelled and has no trainer: it is so at once."""
        move = Move.PAUSED if run.scope.status is Status.PAUSING else Move.CANCELLED
        try:
            run.scope.row = await jobs.move(self.sessions, run.id, move, now=self.clock.time(), epoch=self.epoch())
        except (Conflict, NotFound):
            run.scope.woken.set()  # a user was faster; the next round sees what it is now
            return
        run.scope.woken.set()

    async def _fenced(self, job: str, fence: int, context: Context) -> Run:
        await self._lead(context)
        run = self.runs.get(job)
        if run is None:
            try:
                row = await jobs.get(self.sessions, job)
            except NotFound:
                await _abort(context, grpc.StatusCode.ABORTED, f"job {job} is gone")
            if Status(row.status) in TERMINAL:
                await _abort(context, grpc.StatusCode.ABORTED, f"job {job} is {row.status}")
            # A coordinator that has just taken over: the trainer keeps what it has and asks again.
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"job {job} is being taken up")
        if fence != run.scope.row.fence:
            try:
                await run.refresh()
            except NotFound:
                await _abort(context, grpc.StatusCode.ABORTED, f"job {job} is gone")
        if fence != run.scope.row.fence:
            reason = f"claim {fence} of job {job} is over; claim {run.scope.row.fence} has it"
            await _abort(context, grpc.StatusCode.ABORTED, reason)
        run.trainer_heard = self.clock.monotonic()
        return run

    async def _lead(self, context: Context) -> int:
        epoch = self.epoch()
        if not epoch:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, NOT_LEADER)
        return epoch


async def _abort(context: Context, code: grpc.StatusCode, details: str) -> NoReturn:
    await context.abort(code, shortened(details))
    raise AssertionError("abort raises")


def _wait(seconds: float) -> float:
    """Return how long a call may wait. NaN would set a timer that disturbs all others."""
    if not math.isfinite(seconds):
        raise InvalidField("wait_s", seconds, "not a number of seconds", f"Send 0 to {MAX_WAIT_S:g}.")
    return min(seconds, MAX_WAIT_S)


def _at_most(field: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidField(field, value, f"at most {most} can be", "Report what was done under this claim.")


def _check_report(request: batches_pb2.ReportStepRequest | batches_pb2.ReportCheckpointRequest) -> None:
    for name, text in (("digest", request.digest), *(("metrics", key) for key in request.metrics)):
        if len(text) > _MAX_TEXT or (text and not text.isprintable()):
            raise InvalidField(name, text, "not a printable line", f"Use at most {_MAX_TEXT} printable characters.")
    if len(request.metrics) > _MAX_METRICS:
        raise InvalidField("metrics", len(request.metrics), "too many", f"Report at most {_MAX_METRICS}.")


def _directive(run: Run) -> batches_pb2.Directive.ValueType:
    if run.scope.status is Status.PAUSING:
        return batches_pb2.DIRECTIVE_PAUSE
    if run.scope.status is Status.CANCELLING or run.scope.status in TERMINAL:
        return batches_pb2.DIRECTIVE_CANCEL
    return batches_pb2.DIRECTIVE_CONTINUE


def _group(run: Run, group: Group, samples: list[Sample]) -> batches_pb2.BatchGroup:
    return batches_pb2.BatchGroup(
        group=group.ordinal,
        position=group.position or 0,
        prompt=group.prompt,
        data_epoch=group.data_epoch,
        prompt_ids=run.scope.prepared.dataset.prompt_ids(group.prompt).astype("<u4").tobytes(),
        samples=[
            batches_pb2.BatchSample(
                handle=sample.handle,
                response_id=sample.response_id,
                ids=sample.ids,
                logprobs=sample.logprobs,
                run_n=[n for n, _ in sample.runs],
                run_version=[version for _, version in sample.runs],
                reward=sample.reward,
                finish=Finish[sample.finish.upper()].value,
                masked=group.masked,
            )
            for sample in samples
        ],
        staleness=group.staleness or 0,
    )


_MOVES = {
    batches_pb2.OUTCOME_SUCCEEDED: Move.SUCCEED,
    batches_pb2.OUTCOME_FAILED: Move.FAIL,
    batches_pb2.OUTCOME_PAUSED: Move.PAUSED,
    batches_pb2.OUTCOME_CANCELLED: Move.CANCELLED,
    batches_pb2.OUTCOME_RELEASED: Move.RELEASE,
}

"""Work from the SCORES queue, results into the ledger's log.

Invariants: a request is acknowledged only after the PubAck of its result, so a lost replica loses none; while a request
is in work its delivery is kept alive; the result's id is the question's, so doing a request twice is harmless, and an
answer that the ledger lost is not taken for a duplicate when it is asked for again. The queue is opened again after any
fault, and after SILENCE_S without any word from the server; readiness says so meanwhile.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import FetchTimeoutError
from rlharvest import bus
from rlharvest.errors import CorruptData
from rlharvest.supervise import Supervisor, cancel
from rlharvest.v1 import scores_pb2

from rlharvest_reward import metrics
from rlharvest_reward.scoring import Scorer
from rlharvest_reward.settings import RewardSettings

log = structlog.get_logger(__name__)

CONSUMER = "reward"
"""Durable name that all replicas share."""

MAX_ACK_PENDING = 4096
"""Most requests in work over all replicas."""

MAX_DIGEST = 200
"""Characters of a reward_digest, which names the result."""

FETCH_S = 2.0
SILENCE_S = 10.0


class RewardService:
    """One replica. Its tasks run under a supervisor."""

    def __init__(self, nc: Client, scorer: Scorer, settings: RewardSettings, supervisor: Supervisor) -> None:
        self._nc = nc
        self._js: JetStreamContext = nc.jetstream(timeout=5)
        self._scorer = scorer
        self._settings = settings
        self._supervisor = supervisor
        self._places: list[asyncio.Task[None]] = []
        self._in_work: set[asyncio.Task[None]] = set()
        self._heard = time.monotonic()

    async def ready(self) -> str | None:
        """Readiness: None while the queue answers."""
        if not self._nc.is_connected:
            return "not connected to NATS"
        silent = time.monotonic() - self._heard
        return None if silent < SILENCE_S else f"the queue has not answered for {silent:.0f} s"

    def start(self) -> None:
        """Take requests for ever, whatever happens to NATS: as many at a time as processes run, and one that waits for each.

        Each place asks for one request at a time: the client's call for several waits until it has them all.
        """
        for place in range(2 * self._settings.processes):
            self._places.append(self._supervisor.spawn(f"take {place}", self._take(place)))

    async def stop_taking(self) -> None:
        """Ask for no more; what is in work goes on until `drain`."""
        await cancel(self._places)

    async def _take(self, place: int) -> None:
        while True:
            try:
                await bus.ensure_streams(self._js)
                queue = await self._open()
                if place == 0:
                    log.info("reward.queue", consumer=CONSUMER, places=2 * self._settings.processes)
                self._heard = time.monotonic()
                await self._take_from(queue)
                await queue.unsubscribe()
            except (NatsError, TimeoutError, OSError) as error:
                log.warning("reward.queue_lost", error=str(error) or repr(error))
            metrics.QUEUE_ERRORS.inc()
            await asyncio.sleep(0.5)

    async def _open(self) -> JetStreamContext.PullSubscription:
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._settings.ack_wait_s,
            max_ack_pending=MAX_ACK_PENDING,
            max_deliver=-1,
        )
        return await self._js.pull_subscribe(
            bus.subject("score", "*", "*"), durable=CONSUMER, stream=bus.SCORES, config=config
        )

    async def _take_from(self, queue: JetStreamContext.PullSubscription) -> None:
        """Take requests until the server has said nothing, not even "none there", for SILENCE_S."""
        heard = time.monotonic()
        while time.monotonic() - heard < SILENCE_S:
            try:
                # The server's idle heartbeat tells an empty queue from a dead one.
                (message,) = await queue.fetch(1, timeout=FETCH_S, heartbeat=FETCH_S / 4)
            except FetchTimeoutError:
                heard = self._heard = time.monotonic()
                continue
            except TimeoutError:
                continue
            task = self._supervisor.spawn("score", self._handle(message), may_end=True)
            self._in_work.add(task)
            task.add_done_callback(self._in_work.discard)
            await asyncio.wait([task])
            heard = self._heard = time.monotonic()
        log.warning("reward.queue_silent", seconds=SILENCE_S)

    async def _handle(self, message: Msg) -> None:
        metrics.REQUESTS.inc()
        if message.metadata.num_delivered > 1:
            metrics.REDELIVERED.inc()
        request = scores_pb2.ScoreRequest()
        try:
            request.ParseFromString(message.data)
            if request.job != bus.parse_subject(message.subject)[1] or not bus.names_one(request.job):
                # An empty message is a ScoreRequest too, of no job.
                raise CorruptData(f"it names job {request.job!r}")
            if len(request.reward_digest) > MAX_DIGEST:
                raise CorruptData(f"its reward_digest has {len(request.reward_digest)} characters")
        except (DecodeError, CorruptData) as error:
            # Nothing can be said about a response that has no name; the queue would deliver it for ever.
            metrics.UNREADABLE.inc()
            log.error("reward.unreadable", subject=message.subject, error=str(error), bytes=len(message.data))
            await message.term()
            return
        with metrics.IN_WORK.track_inprogress(), metrics.SECONDS.time():
            alive = self._supervisor.spawn("keep-alive", self._keep_alive(message))
            try:
                result = await self._scorer.score(request)
                await self._publish(result, request.question)
                await message.ack()
            except asyncio.CancelledError:
                if self._nc.is_connected:
                    await message.nak()
                raise
            except NatsError as error:
                # The log has the result; the queue will deliver the request again, which is harmless.
                log.warning("reward.not_acknowledged", job=request.job, handle=request.handle, error=repr(error))
            except OSError as error:
                log.error("reward.no_process", job=request.job, handle=request.handle, error=repr(error))
                await message.nak(delay=1)
                return
            finally:
                alive.cancel()
        metrics.RESULTS.labels("error" if result.HasField("error") else "reward").inc()

    async def _keep_alive(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self._settings.ack_wait_s / 3)
            try:
                await message.in_progress()
            except NatsError as error:
                log.warning("reward.keep_alive", error=repr(error))

    async def _publish(self, result: scores_pb2.ScoreResult, question: str) -> None:
        """Publish until the log has it: a full or absent stream pushes back on the queue."""
        subject = bus.subject("scored", result.job, CONSUMER)
        identity = f"{result.job}:{result.handle}:{result.reward_digest}:{question}"
        data = result.SerializeToString()
        wait_s = 0.1
        while True:
            try:
                await self._js.publish(subject, data, headers={"Nats-Msg-Id": identity}, stream=bus.LEDGER)
                return
            except (NatsError, TimeoutError) as error:
                log.warning("reward.publish_waits", job=result.job, handle=result.handle, error=repr(error))
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 2.0)

    async def drain(self) -> None:
        """Let requests in work end for a while, then hand the rest back."""
        if self._in_work:
            _, left = await asyncio.wait(self._in_work, timeout=self._settings.drain_s)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

"""What a worker process promises, with a real NATS between it and a small coordinator."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time

import httpx
import numpy as np
from rlharvest import bus
from rlharvest.spans import Finish
from rlharvest.speculation.history import PastResponse, prompt_key
from rlharvest.speculation.segment import Segment, pack
from rlharvest.testing.coordinator import Response
from rlharvest.testing.stub import StubOptions, stub_response
from rlharvest.v1 import fleet_pb2

from .conftest import JOB

OPTIONS = StubOptions(vocab=100, eos_id=0)


def assert_uninterrupted(response: Response, options: StubOptions = OPTIONS) -> None:
    """The response is exactly what one worker would have generated without any fault."""
    ids, logprobs, finish = stub_response(response.prompt, response.seed, response.budget, options)
    assert response.tokens.ids == ids.tolist()
    assert np.asarray(response.tokens.logprobs, np.float32).tolist() == logprobs.tolist()
    assert sum(run.n for run in response.tokens.runs) == len(ids)
    versions = [run.version for run in response.tokens.runs]
    assert versions == sorted(versions)
    assert response.finish is finish


def length(world, handle: int) -> int:
    return len(world.coordinator.ledger[handle].tokens.ids)


async def test_responses_come_out_whole_and_are_let_go(world):
    """Tokens, finishes and versions reach the ledger; acknowledged responses leave the heartbeat's held set."""
    name, _ = await world.join(stub={"mean_length": 20})
    c = world.coordinator
    reply = await c.assign(name, [c.assignment(h, prompt=[h, 1], budget=64) for h in range(1, 9)])
    assert reply.accepted
    assert not reply.refused
    await c.until(c.finished(8), "8 finished")
    options = OPTIONS.model_copy(update={"mean_length": 20})
    for response in c.ledger.values():
        assert_uninterrupted(response, options)
    await c.until(lambda: not c.workers[name].beat.held, "nothing held")
    assert {one.finish for one in c.ledger.values()} <= {Finish.EOS, Finish.LENGTH}
    beat = c.workers[name].beat
    assert beat.generated_tokens == sum(len(one.tokens.ids) for one in c.ledger.values())
    assert c.counts["gap"] == c.counts["fenced"] == c.counts["trimmed"] == 0


async def test_an_assignment_twice_is_one_and_old_orders_are_refused(world):
    name, _ = await world.join()
    c = world.coordinator
    c.epoch = 5
    one = c.assignment(1, budget=40)
    assert (await c.assign(name, [one])).accepted
    assert (await c.assign(name, [one])).accepted
    stale = await c.assign(name, [c.assignment(2)], epoch=4)
    assert not stale.accepted
    assert "epoch 4" in stale.reason
    below = c.assignment(3)
    below.min_version = 9
    reply = await c.assign(name, [below])
    assert list(reply.refused) == [3]
    assert "9 is asked for" in reply.reason
    await c.until(lambda: c.ledger[1].finish, "1 finished")
    assert_uninterrupted(c.ledger[1])
    assert c.counts["trimmed"] == 0


async def test_sigkill_loses_only_what_was_not_flushed(world):
    """Another worker goes on from the ledger's tokens; the result is the uninterrupted one."""
    first, process = await world.join()
    c = world.coordinator
    await c.assign(first, [c.assignment(h, budget=600) for h in range(4)])
    await c.until(lambda: all(length(world, h) > 40 for h in range(4)), "40 tokens each")
    process.kill()
    second, _ = await world.join()
    before = [length(world, h) for h in range(4)]
    reply = await c.assign(second, [c.assignment(h) for h in range(4)])
    assert not reply.refused
    await c.until(c.finished(4), "all finished")
    for response in c.ledger.values():
        assert_uninterrupted(response)
        assert response.workers == [first, second]
    assert min(before) > 0


async def test_responses_of_64k_tokens_are_split_and_disturb_no_other(world):
    """What two of them wait with at once exceeds NATS's largest message, which would end the connection."""
    name, process = await world.join(stub={"tokens_per_s": 50_000}, flush_s=4.0, flush_tokens=1 << 20)
    c = world.coordinator
    budgets = {handle: 1 << 16 if handle < 2 else 64 for handle in range(16)}
    await c.assign(name, [c.assignment(handle, budget=budget) for handle, budget in budgets.items()])
    await c.until(c.finished(16), "all finished")
    options = OPTIONS.model_copy(update={"tokens_per_s": 50_000})
    for handle, response in c.ledger.items():
        assert_uninterrupted(response, options)
        assert len(response.tokens.ids) == budgets[handle]
    assert c.counts["gap"] == c.counts["fenced"] == c.counts["trimmed"] == 0
    assert "nats." not in process.log.read_text(), "the connection went on"


async def test_a_prefix_is_fetched_when_the_assignment_names_it_only(world):
    first, process = await world.join()
    c = world.coordinator
    await c.assign(first, [c.assignment(7, budget=100)])
    await c.until(lambda: length(world, 7) > 20, "20 tokens")
    process.kill()
    second, _ = await world.join()
    one = c.assignment(7)
    one.prefix_by_reference = True
    one.ClearField("prompt")
    one.ClearField("prefix")
    assert not (await c.assign(second, [one])).refused
    await c.until(c.finished(1), "finished")
    assert_uninterrupted(c.ledger[7])


async def test_history_that_an_assignment_names_is_fetched_and_a_corrupt_one_stops_nothing(world):
    """It is said of the group and asked for once; the responses are those that they are without it."""
    name, _ = await world.join()
    c = world.coordinator
    past = PastResponse(ids=np.array([1, 2, 3], np.uint32), epoch=0, version=0, reward=1.0)
    segment = pack(Segment(prompt=prompt_key([1, 2, 3]), responses=(past,)))
    c.history = {1: [segment], 2: [segment[:-1]]}
    assert (await c.assign(name, [c.assignment(handle, budget=20) for handle in (1, 2, 3)])).accepted
    await c.until(c.finished(3), "finished")
    for response in c.ledger.values():
        assert_uninterrupted(response)
    assert c.history_asked == {1: 1, 2: 1}


async def test_sigterm_hands_every_token_over_and_is_quick(world):
    """The last message is final, the worker leaves, exits 0; what it had generated was not lost."""
    name, process = await world.join(stub={"step_s": 0.002}, flush_s=5.0)
    c = world.coordinator
    await c.assign(name, [c.assignment(h, budget=4000) for h in range(4)])
    await c.until(lambda: (c.workers[name].beat.generated_tokens or 0) > 200, "200 tokens generated")
    start = time.monotonic()
    process.terminate()
    await c.until(lambda: c.workers[name].left is not None, "left")
    handed_over = time.monotonic() - start
    assert await process.exit_code() == 0
    assert c.workers[name].final
    await c.until(lambda: c.flushes and c.flushes[-1].final, "final flush")
    assert sum(len(one.tokens.ids) for one in c.ledger.values()) >= 200
    print(f"handed over in {handed_over:.3f} s")
    assert handed_over < 1.5, f"{handed_over:.2f} s"
    second, _ = await world.join()
    await c.assign(second, [c.assignment(h) for h in range(4)])
    have = {h: length(world, h) for h in range(4)}
    await c.until(lambda: all(length(world, h) > have[h] for h in range(4)), "goes on")
    for handle, response in c.ledger.items():
        ids, _, _ = stub_response(response.prompt, response.seed, 4000, OPTIONS)
        assert response.tokens.ids == ids[: length(world, handle)].tolist()


async def test_a_drain_order_does_the_same(world):
    name, process = await world.join()
    c = world.coordinator
    await c.assign(name, [c.assignment(1, budget=4000)])
    await c.until(lambda: length(world, 1) > 10, "10 tokens")
    await c.order("drain", name, fleet_pb2.DrainOrder(incarnation=c.workers[name].incarnation, reason="scaled down"))
    assert await process.exit_code() == 0
    assert c.workers[name].left == "scaled down"


async def test_nats_killed_in_the_middle_loses_no_token(world):
    """SIGKILL of NATS and a restart on its files: the worker keeps what has no PubAck and goes on."""
    name, _ = await world.join()
    c = world.coordinator
    await c.assign(name, [c.assignment(h, budget=500) for h in range(4)])
    await c.until(lambda: all(length(world, h) > 30 for h in range(4)), "30 tokens each")
    world.nats.kill()
    await asyncio.sleep(0.5)
    world.nats.start()
    await c.until(c.finished(4), "all finished", timeout_s=30)
    for response in c.ledger.values():
        assert_uninterrupted(response)
        assert response.workers == [name]
    await c.until(lambda: not c.workers[name].beat.held, "nothing held", timeout_s=20)


async def test_nats_that_answers_nothing_for_a_while_loses_no_token(world):
    """Stopped, not killed: connections stay open, requests time out, repeated messages are recognised by their id."""
    name, _ = await world.join()
    c = world.coordinator
    await c.assign(name, [c.assignment(h, budget=1500) for h in range(4)])
    await c.until(lambda: all(length(world, h) > 30 for h in range(4)), "30 tokens each")
    world.nats.signal(signal.SIGSTOP)
    await asyncio.sleep(4)
    world.nats.signal(signal.SIGCONT)
    await c.until(c.finished(4), "all finished", timeout_s=30)
    for response in c.ledger.values():
        assert_uninterrupted(response)
        assert response.workers == [name]


async def test_a_nats_that_lost_its_files_gets_everything_again_that_was_not_acknowledged(world):
    name, _ = await world.join(stub={"step_s": 0.002})
    c = world.coordinator
    await c.assign(name, [c.assignment(h, budget=1000) for h in range(4)])
    await c.until(lambda: all(length(world, h) > 30 for h in range(4)), "30 tokens each")
    c.acks = False
    await asyncio.sleep(0.3)
    world.nats.kill()
    shutil.rmtree(world.nats.directory / "jetstream")
    world.nats.start()
    c.acks = True
    await c.recover_stream()
    await c.until(c.finished(4), "all finished", timeout_s=30)
    for response in c.ledger.values():
        assert_uninterrupted(response)
        assert response.workers == [name]


async def test_dead_acknowledgements_pause_generation_and_cost_no_token(world):
    """Without LedgerAcks the buffer fills and generation pauses; once they come again it goes on by itself."""
    name, _ = await world.join(stub={"step_s": 0.002}, buffer_tokens=100)
    c = world.coordinator
    c.acks = False
    await c.assign(name, [c.assignment(h, budget=400) for h in range(4)])
    await c.until(lambda: sum(length(world, h) for h in range(4)) >= 100, "buffer full")
    await asyncio.sleep(0.5)
    stuck = c.workers[name].beat.generated_tokens
    assert stuck < 400
    await asyncio.sleep(0.5)
    assert c.workers[name].beat.generated_tokens == stuck
    c.acks = True
    await c.until(c.finished(4), "all finished")
    for response in c.ledger.values():
        assert_uninterrupted(response)


async def test_versions_switch_in_flight_and_a_failed_one_keeps_the_old(world):
    name, _ = await world.join()
    c = world.coordinator
    await c.assign(name, [c.assignment(1, budget=10_000)])
    await c.until(lambda: length(world, 1) > 20, "20 tokens")
    await world.lease(name, 1)  # does not exist
    await c.until(lambda: "version 1 failed, version 0 is served on" in c.workers[name].beat.note, "failure is said")
    assert c.workers[name].beat.version == 0
    assert c.workers[name].beat.state == fleet_pb2.WORKER_STATE_READY
    world.weights.publish(2)
    await world.lease(name, 2)
    await c.ready(name, 2)
    tokens = c.ledger[1].tokens
    await c.until(lambda: tokens.runs[-1].version == 2, "tokens of version 2")
    assert [run.version for run in tokens.runs] == [0, 2]
    ids, _, _ = stub_response([1, 2, 3], 1, 10_000, OPTIONS)
    assert tokens.ids == ids[: len(tokens.ids)].tolist()
    stream = await c.nc.jetstream().get_last_msg("RLHARVEST_EVENTS", f"rlharvest.v1.events.{c.job}.{name}")
    assert b"weights.failed" in stream.data


async def test_a_version_that_takes_long_to_come_is_asked_for_once_and_the_worker_goes_on_meanwhile(world):
    """An impatient coordinator says again which version it wants; that neither starts a second load nor ends the first."""
    name, _ = await world.join()
    c = world.coordinator
    world.weights.publish(1)
    world.weights.open.clear()
    before = sum(world.weights.asked.values())
    await c.assign(name, [c.assignment(1, budget=200)])
    for _ in range(5):
        assert (await world.lease(name, 1)).accepted
    await c.until(lambda: sum(world.weights.asked.values()) >= before + 2, "manifest and blob to be asked for")
    await c.until(lambda: c.ledger[1].finish, "the response to end on the version before")
    beats = c.workers[name].beats
    await c.until(lambda: c.workers[name].beats > beats + 2, "it to beat while it loads")
    assert (await world.lease(name, 1)).accepted
    world.weights.open.set()
    await c.ready(name, 1)
    assert_uninterrupted(c.ledger[1])
    assert {run.version for run in c.ledger[1].tokens.runs} == {0}
    assert sum(world.weights.asked.values()) == 2 * before, "no more than for the first version"
    assert c.workers[name].incarnation == 1, "it never had to join again"


async def test_messages_that_pile_up_while_it_stands_still_cost_nothing(world):
    """Its loop is blocked, and thousands of small messages come: what matters is asked for again, or comes again."""
    name, process = await world.join()
    c = world.coordinator
    await c.assign(name, [c.assignment(h, budget=300) for h in range(4)])
    await c.until(lambda: all(length(world, h) > 20 for h in range(4)), "20 tokens each")
    process.process.send_signal(signal.SIGSTOP)
    client = await bus.connect(world.nats.url, "flood")
    for number in range(50_000):
        await client.publish(bus.subject("acks", JOB, name) if number % 2 else bus.subject("version", JOB, "weights"))
    await client.flush(60)
    process.process.send_signal(signal.SIGCONT)
    await c.until(c.finished(4), "all finished")
    for response in c.ledger.values():
        assert_uninterrupted(response)
        assert response.workers == [name]
    await c.until(lambda: not c.workers[name].beat.held, "nothing held")
    await client.close()


async def test_a_rejoin_drops_everything_and_joins_anew(world):
    name, _ = await world.join()
    c = world.coordinator
    old = c.workers[name].incarnation
    await c.assign(name, [c.assignment(1, budget=4000)])
    await c.until(lambda: length(world, 1) > 5, "5 tokens")
    await c.order("rejoin", name, fleet_pb2.Rejoin(incarnation=old, reason="was dead", epoch=c.epoch))
    await c.until(lambda: c.workers[name].incarnation > old and c.workers[name].beat, "joined anew")
    assert not c.workers[name].beat.held
    reply = await world.lease(name)
    assert reply.accepted
    await c.assign(name, [c.assignment(1)])
    have = length(world, 1)
    await c.until(lambda: length(world, 1) > have + 20, "goes on")


async def test_a_rejoin_of_a_coordinator_that_was_replaced_is_ignored(world):
    """It knows nothing of who joined since; following it would throw tokens away."""
    name, _ = await world.join()
    c = world.coordinator
    incarnation = c.workers[name].incarnation
    await c.assign(name, [c.assignment(1, budget=4000)])
    await c.until(lambda: length(world, 1) > 5, "5 tokens")
    await c.order("rejoin", name, fleet_pb2.Rejoin(incarnation=incarnation, reason="unknown", epoch=c.epoch - 1))
    have = length(world, 1)
    await c.until(lambda: length(world, 1) > have + 20, "goes on")
    assert c.workers[name].incarnation == incarnation


async def test_an_abort_with_flush_publishes_first(world):
    name, _ = await world.join(flush_s=0.3)
    c = world.coordinator
    one = c.assignment(1, budget=4000)
    await c.assign(name, [one])
    await c.until(lambda: length(world, 1) > 5, "5 tokens")
    abort = fleet_pb2.Abort(
        epoch=c.epoch, incarnation=c.workers[name].incarnation, handle=[1], attempt=[one.attempt], flush=True
    )
    await c.order("abort", name, abort)
    await c.until(lambda: not c.workers[name].beat.held, "let go")
    have = length(world, 1)
    await asyncio.sleep(0.5)
    assert length(world, 1) == have


async def test_a_broken_engine_hands_over_and_exits_non_zero(world):
    name, process = await world.join(stub={"crash_token": 66})
    c = world.coordinator
    await c.assign(name, [c.assignment(1, budget=4000)])
    await c.until(lambda: length(world, 1) > 5, "5 tokens")
    await c.assign(name, [c.assignment(2, prompt=[66])])
    assert await process.exit_code() == 1
    await c.until(lambda: c.workers[name].left is not None and c.workers[name].final, "left in order")


async def test_bad_stub_options_are_said_and_the_worker_stays(world):
    name, _ = await world.join()
    c = world.coordinator
    assert (await world.lease(name, stub={"speed": 3})).accepted
    await c.until(lambda: "rollout.stub.speed" in c.workers[name].beat.note, "the key is named")
    assert c.workers[name].beat.state == fleet_pb2.WORKER_STATE_WARMING
    assert (await world.lease(name)).accepted
    await c.ready(name)


async def test_health_and_metrics_are_served(world):
    _, process = await world.join(log_format="json")
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    (address,) = [line["health"] for line in lines if line["event"] == "worker.starts"]
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as client:
        assert (await client.get("/readyz")).status_code == 200
        assert "rlharvest_rollout_version 0.0" in (await client.get("/metrics")).text

"""The reward service on a real NATS: every request gets one result in the ledger's log, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from rlharvest import bus
from rlharvest.supervise import Supervisor
from rlharvest.testing.servers import NatsServer, free_port
from rlharvest.v1 import scores_pb2
from rlharvest_reward.scoring import Scorer
from rlharvest_reward.service import RewardService
from rlharvest_reward.settings import RewardSettings

JOB = "rljob_rewards"
DIGEST = "d" * 64


def request(handle: int, completion: str, rewards: list[dict[str, Any]], **columns: Any) -> scores_pb2.ScoreRequest:
    return scores_pb2.ScoreRequest(
        job=JOB,
        handle=handle,
        response_id=f"resp_rewards_{handle}",
        reward_digest=DIGEST,
        rewards_json=json.dumps(rewards),
        prompt_json=json.dumps("2 + 2 = "),
        prompt_text="2 + 2 = ",
        completion=completion,
        columns_json=json.dumps(columns),
    )


class World:
    """A NATS server, a client of it, and replicas of the service."""

    def __init__(self, server: NatsServer, root: Path) -> None:
        self.server = server
        self.root = root
        self.replicas: list[asyncio.subprocess.Process] = []
        self.ports: list[int] = []
        """Health ports of the replicas, in order of start."""
        self.nc: Client
        self.js: JetStreamContext

    async def connect(self) -> None:
        self.nc = await bus.connect(self.server.url, "test")
        self.js = self.nc.jetstream(timeout=5)
        await bus.ensure_streams(self.js)

    async def serve(self, *, ack_wait_s: int = 2) -> asyncio.subprocess.Process:
        self.ports.append(free_port())
        replica = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "rlharvest-reward"),
            "serve",
            env={
                **os.environ,
                "RLHARVEST_NATS_URL": self.server.url,
                "RLHARVEST_ROOTS": json.dumps([str(self.root)]),
                "RLHARVEST_PROCESSES": "2",
                "RLHARVEST_ACK_WAIT_S": str(ack_wait_s),
                "RLHARVEST_DRAIN_S": "0.2",
                "RLHARVEST_HEALTH_PORT": str(self.ports[-1]),
            },
        )
        self.replicas.append(replica)
        return replica

    async def ask(self, asked: scores_pb2.ScoreRequest, again: int = 0) -> None:
        identity = f"{JOB}:{asked.handle}:{DIGEST}:{again}"
        await self.js.publish(
            bus.subject("score", JOB, "reward"), asked.SerializeToString(), headers={"Nats-Msg-Id": identity}
        )

    async def results(self, n: int, seconds: float = 90) -> dict[int, scores_pb2.ScoreResult]:
        """Wait for n results in the log; return them by handle. More than n is a failure."""
        found: list[scores_pb2.ScoreResult] = []
        async with asyncio.timeout(seconds):
            while len(found) < n:
                await asyncio.sleep(0.05)
                found = await self.log()
        assert len(found) == n
        by_handle = {result.handle: result for result in found}
        assert len(by_handle) == n
        return by_handle

    async def log(self) -> list[scores_pb2.ScoreResult]:
        found = []
        state = (await self.js.stream_info(bus.LEDGER)).state
        for sequence in range(max(state.first_seq, 1), state.last_seq + 1):
            try:
                stored = await self.js.get_msg(bus.LEDGER, sequence)
            except NotFoundError:
                continue
            assert stored.subject == bus.subject("scored", JOB, "reward")
            found.append(scores_pb2.ScoreResult.FromString(stored.data or b""))
        return found

    async def queued(self) -> int:
        return (await self.js.stream_info(bus.SCORES)).state.messages

    async def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Read a page of a replica, by default of the one that was started last."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.ports[-1])
        writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        return int(answer.split()[1]), answer

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
        for _ in range(int(seconds * 20)):
            if await condition():
                return
            await asyncio.sleep(0.05)
        pytest.fail("the condition did not come true")


@pytest.fixture
async def world(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[World]:
    root = tmp_path / "root"
    root.mkdir()
    each = World(nats_server, root)
    await each.connect()
    yield each
    for replica in each.replicas:
        if replica.returncode is None:
            replica.kill()
        await replica.wait()
    await each.nc.close()


NUMERIC = [{"builtin": "numeric"}]


async def test_a_right_answer_is_one_a_wrong_one_zero_and_a_fault_an_error(world: World) -> None:
    (world.root / "rewards.py").write_text("def compute_score(solution_str, **kw): return float('nan')\n")
    await world.serve()
    nothing = [{"path": "rewards.py"}]
    await world.ask(request(0, "so #### 4", NUMERIC, ground_truth="4"))
    await world.ask(request(1, "so #### 5", NUMERIC, ground_truth="4"))
    await world.ask(request(2, "4", nothing, ground_truth="4"))
    await world.ask(request(3, "4", [{"path": "/etc/passwd"}]))
    await world.ask(request(4, "#### 4", [{"builtin": "numeric", "weight": 2}, *nothing], ground_truth="4"))
    weighted = [{"builtin": "numeric", "weight": 2}, {"builtin": "exact_match", "weight": -0.5}]
    await world.ask(request(5, "4", weighted, ground_truth="4"))
    results = await world.results(6)
    assert (results[0].reward, results[0].HasField("error")) == (1.0, False)
    assert (results[1].reward, results[1].HasField("error")) == (0.0, False)
    assert results[0].reward_digest == DIGEST
    assert [(each.name, each.value, each.weight) for each in results[0].components] == [("numeric", 1.0, 1.0)]
    assert (results[2].error.kind, results[2].error.function) == ("not_finite", "rewards.py:compute_score")
    assert json.loads(results[2].error.sample)["completion"] == "4"
    assert results[3].error.kind == "not_found"
    assert results[4].error.kind == "not_finite"
    assert [each.name for each in results[4].components] == ["numeric"]
    assert results[5].reward == 1.5

    async def empty() -> bool:
        return await world.queued() == 0

    await world.until(empty)
    status, body = await world.get("/readyz")
    assert (status, json.loads(body.split("\r\n\r\n")[1])["status"]) == (200, "ok")
    _, text = await world.get("/metrics")
    assert 'rlharvest_reward_results_total{outcome="error"} 3.0' in text
    assert 'rlharvest_reward_faults_total{kind="not_found"} 1.0' in text


async def test_none_from_one_function_is_ignored_and_from_all_an_error(world: World) -> None:
    (world.root / "none.py").write_text("def f(completions, **columns): return [None]\n")
    await world.serve()
    none = {"path": "none.py", "name": "f"}
    await world.ask(request(0, "4", [none, {"builtin": "exact_match"}], ground_truth="4"))
    await world.ask(request(1, "4", [none, none]))
    results = await world.results(2)
    assert results[0].reward == 1.0
    assert [each.HasField("value") for each in results[0].components] == [False, True]
    assert (results[1].error.kind, results[1].error.function) == ("none", "f, f")


async def test_a_slow_call_is_kept_alive_and_done_once(world: World) -> None:
    (world.root / "slow.py").write_text(
        "import time\ndef compute_score(solution_str, **kw): time.sleep(5); return 1\n"  # ack_wait is 2 s
    )
    await world.serve()
    await world.serve()
    await world.ask(request(0, "4", [{"path": "slow.py", "timeout_s": 20}]))
    assert (await world.results(1))[0].reward == 1.0
    taken = sum([await _taken(world, port) for port in world.ports])
    assert taken == 1


async def test_what_a_killed_replica_had_another_one_does(world: World) -> None:
    (world.root / "slow.py").write_text(
        "import time\ndef compute_score(solution_str, **kw): time.sleep(0.2); return 1\n"
    )
    first = await world.serve()
    rewards = [{"path": "slow.py"}]
    for handle in range(12):
        await world.ask(request(handle, "4", rewards))

    async def begun() -> bool:
        return len(await world.log()) >= 2

    await world.until(begun)
    first.kill()
    await world.serve()
    results = await world.results(12)
    assert all(result.reward == 1.0 for result in results.values())


async def test_a_stop_hands_back_what_is_in_work(world: World) -> None:
    (world.root / "slow.py").write_text("import time\ndef compute_score(solution_str, **kw): time.sleep(1000)\n")
    replica = await world.serve()
    await world.ask(request(0, "4", [{"path": "slow.py", "timeout_s": 1000}]))

    async def taken() -> bool:
        try:
            return bool((await world.js.consumer_info(bus.SCORES, "reward")).num_ack_pending == 1)
        except NotFoundError:
            return False

    await world.until(taken)
    replica.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await replica.wait() == 0
    (world.root / "slow.py").write_text("def compute_score(solution_str, **kw): return 1\n")
    await world.serve()
    assert (await world.results(1, seconds=10))[0].reward == 1.0


@pytest.mark.parametrize("empty", [False, True], ids=["restarted", "emptied"])
async def test_a_new_nats_is_served_without_a_restart_of_the_service(world: World, empty: bool) -> None:
    await world.serve()
    await world.ask(request(0, "#### 4", NUMERIC, ground_truth="4"))
    await world.results(1)
    world.server.kill()
    if empty:
        (world.server.directory / "jetstream").rename(world.server.directory / "lost")
    world.server.start()

    await world.nc.close()
    await world.connect()
    await world.ask(request(1, "#### 4", NUMERIC, ground_truth="4"))
    results = await world.results(1 if empty else 2, seconds=20)
    assert results[1].reward == 1.0


async def test_a_queue_whose_consumer_was_deleted_is_opened_again(world: World) -> None:
    await world.serve()
    await world.ask(request(0, "#### 4", NUMERIC, ground_truth="4"))
    await world.results(1)
    await world.js.delete_consumer(bus.SCORES, "reward")
    await world.ask(request(1, "#### 4", NUMERIC, ground_truth="4"))
    assert (await world.results(2))[1].reward == 1.0


async def test_a_question_that_comes_twice_gives_one_result(world: World) -> None:
    await world.serve()
    asked = request(0, "#### 4", NUMERIC, ground_truth="4")
    await world.ask(asked)
    await world.ask(asked, again=1)

    async def empty() -> bool:
        return await world.queued() == 0

    await world.until(empty)
    await world.results(1)


async def test_replicas_share_one_queue_and_no_question_goes_to_two(world: World) -> None:
    """All of them have the same durable consumer."""
    for _ in range(3):
        await world.serve(ack_wait_s=60)  # so that none comes again because this machine is slow
    for port in world.ports:
        await world.until(lambda port=port: _ready(world, port), 60)
    for handle in range(60):
        await world.ask(request(handle, "#### 4", NUMERIC, ground_truth="4"))
    results = await world.results(60)
    assert all(result.reward == 1.0 for result in results.values())

    async def empty() -> bool:
        return await world.queued() == 0

    await world.until(empty)
    assert sum([await _taken(world, port) for port in world.ports]) == 60


async def _ready(world: World, port: int) -> bool:
    try:
        return (await world.get("/readyz", port))[0] == 200
    except OSError:
        return False


async def _taken(world: World, port: int) -> float:
    """Return how many requests a replica took from the queue."""
    _, text = await world.get("/metrics", port)
    name = "rlharvest_reward_requests_total "
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name))


class Unable(Scorer):
    """Cannot start a process the first times."""

    def __init__(self, settings: RewardSettings, failures: int) -> None:
        super().__init__(settings)
        self.tries = 0
        self.failures = failures

    async def score(self, request: scores_pb2.ScoreRequest) -> scores_pb2.ScoreResult:
        self.tries += 1
        if self.tries <= self.failures:
            raise OSError("out of processes")
        return await super().score(request)


async def test_a_question_that_is_handed_back_again_and_again_is_never_given_up(world: World) -> None:
    """A queue with a largest number of deliveries keeps the message after the last one and tells nobody."""
    settings = RewardSettings(processes=1, reward_sandbox="best_effort")
    supervisor = Supervisor("reward")
    scorer = Unable(settings, failures=4)
    service = RewardService(world.nc, scorer, settings, supervisor)
    service.start()
    await world.ask(request(0, "#### 4", NUMERIC, ground_truth="4"))
    assert (await world.results(1))[0].reward == 1.0
    assert scorer.tries == 5
    assert (await world.js.consumer_info(bus.SCORES, "reward")).config.max_deliver == -1
    await service.stop_taking()
    await service.drain()
    await supervisor.close()
    await scorer.pool.close()


async def test_an_answer_that_the_ledger_lost_is_given_again(world: World) -> None:
    """NATS remembers the ids of messages that were purged: the answer to a second question must not look like the first."""
    await world.serve()
    asked = request(0, "#### 4", NUMERIC, ground_truth="4")
    asked.question, asked.attempt = "1.1", 7
    await world.ask(asked)
    await world.results(1)
    await world.js.purge_stream(bus.LEDGER)
    asked.question = "2.1"
    await world.ask(asked, again=1)
    assert (await world.results(1))[0].attempt == 7


async def test_a_message_that_is_no_request_does_not_stop_the_queue(world: World) -> None:
    await world.serve()
    await world.js.publish(bus.subject("score", JOB, "reward"), b"\xff\xff\xff")
    broken = request(0, "4", NUMERIC)
    broken.columns_json = '{"x": NaN}'
    await world.ask(broken)
    unknown = request(1, "4", [{"builtin": "nope"}])
    await world.ask(unknown)
    results = await world.results(2)
    assert (results[0].error.kind, results[0].error.function) == ("wrong_type", "request")
    assert (results[1].error.kind, results[1].error.function) == ("wrong_type", "rewards")

    async def empty() -> bool:
        return await world.queued() == 0

    await world.until(empty)


async def test_without_nats_it_says_so_and_ends(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    code = (
        "import asyncio\nfrom rlharvest import bus\nfrom rlharvest.errors import Unavailable\n"
        "from rlharvest_reward.main import serve\nfrom rlharvest_reward.settings import RewardSettings\n"
        "import functools\nbus.connect = functools.partial(bus.connect, timeout_s=0.5)\n"
        "try:\n    asyncio.run(serve(RewardSettings()))\nexcept Unavailable as error:\n    print(error)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        env={**os.environ, "RLHARVEST_NATS_URL": url},
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert f"NATS does not answer at {url}" in output.decode()

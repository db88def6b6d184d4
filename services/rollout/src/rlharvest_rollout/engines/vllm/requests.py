"""A response between the two protocols: what vLLM is asked for, and what its outputs mean.

Pure: no process, no loop. Invariants: vLLM is never told to stop at anything but its token budget and the job's own
end-of-sequence ids, so that `rlharvest.terminal` alone decides how a response ends; no seed is sent, since vLLM's
generator would start again at each continuation, and on a CPU a seed with a chunked prefill kills the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from rlharvest.engine import Request, Sampling
from rlharvest.errors import InvalidField, RlharvestError
from rlharvest.spans import Finish
from rlharvest.speculation.history import DraftSource, prompt_key
from rlharvest.speculation.segment import Segment, pack
from rlharvest.terminal import terminal

from rlharvest_rollout.engines.outbox import Token
from rlharvest_rollout.engines.stops import StopText
from rlharvest_rollout.engines.vllm.drafts import HISTORY, PROMPT_TOKENS


class NotFinite(RlharvestError):
    """vLLM gives log-probabilities that are not finite numbers."""


@dataclass(slots=True)
class Response:
    """A response that vLLM generates."""

    request: Request
    stop_text: StopText | None
    ids: list[int] = field(default_factory=list)
    """Tokens of the response, prefix included."""
    finish: Finish = Finish.NONE
    parameters: Any = None
    """vllm.SamplingParams, until it ends."""
    internal: str | None = None
    """vLLM's own name for its request, once it has it."""

    @classmethod
    def of(cls, request: Request, stop_text: StopText | None) -> Response:
        """Return the response of a request; it may have ended already."""
        response = cls(request=request, stop_text=stop_text, ids=np.asarray(request.prefix).tolist())
        response.finish = response._end(whole=True)
        return response

    @property
    def key(self) -> tuple[int, int]:
        """(handle, attempt)."""
        return self.request.handle, self.request.attempt

    @property
    def name(self) -> str:
        """The request's name in vLLM's log."""
        return f"{self.request.handle}-{self.request.attempt}"

    def prompt(self) -> list[int]:
        """Return what vLLM prefills: the prompt and the tokens so far."""
        return [*np.asarray(self.request.prompt).tolist(), *self.ids]

    def ended(self) -> Token:
        """Return the finish of a response that a prefix ended, without a token."""
        handle, attempt = self.key
        return Token(handle=handle, attempt=attempt, offset=len(self.ids), id=None, finish=self.finish)

    def take(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[Token]:
        """Append new tokens; return them up to the one that ends the response.

        Raises:
            NotFinite: a log-probability is no number.
        """
        handle, attempt = self.key
        tokens = []
        for id_, logprob in zip(ids, logprobs, strict=True):
            if self.finish is not Finish.NONE:
                break
            if not math.isfinite(logprob):
                raise NotFinite
            self.ids.append(int(id_))
            self.finish = self._end()
            tokens.append(
                Token(
                    handle=handle,
                    attempt=attempt,
                    offset=len(self.ids) - 1,
                    id=int(id_),
                    logprob=logprob,
                    finish=self.finish,
                )
            )
        return tokens

    def _end(self, *, whole: bool = False) -> Finish:
        sampling = self.request.sampling
        text = None
        if sampling.stop and self.stop_text is not None:
            text = self.stop_text.whole(self.ids) if whole else self.stop_text.tail(self.ids, sampling.stop)
        return terminal(self.ids, eos_ids=sampling.eos_ids, budget=self.request.budget, stop=sampling.stop, text=text)


def sampling_arguments(sampling: Sampling, *, budget: int, vocab: int, drafts: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's SamplingParams, but for the kind of its output.

    Args:
        budget: most tokens from here on.
        vocab: rows of the model's head.
        drafts: whether vLLM verifies drafts.
    """
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": budget,
        "ignore_eos": True,
        "stop_token_ids": sorted(sampling.eos_ids),
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
    if 0 < sampling.vocab < vocab and drafts:  # with drafts vLLM takes no bias
        arguments["allowed_token_ids"] = list(range(sampling.vocab))
    elif 0 < sampling.vocab < vocab:
        arguments["logit_bias"] = dict.fromkeys(range(sampling.vocab, vocab), -math.inf)
    return arguments


def draft_arguments(request: Request) -> dict[str, Any]:
    """Return the extra arguments by which vLLM's worker knows the prompt and the history of a request."""
    extra: dict[str, Any] = {PROMPT_TOKENS: len(request.prompt)}
    if request.drafts is not None:
        extra[HISTORY] = [_packed(request.drafts, request)]
    return extra


def _packed(source: DraftSource, request: Request) -> bytes:
    """Return a history segment, made once for all siblings."""
    found = _segments.get(source)
    if found is None:
        found = _segments[source] = pack(Segment(prompt=prompt_key(request.prompt), responses=source.responses))
    return found


_segments: WeakKeyDictionary[DraftSource, bytes] = WeakKeyDictionary()


def check_fits(request: Request, *, context: int, vocab: int, stop_text: StopText | None, drafts: bool = False) -> None:
    """Check a request against the job's context and the model.

    Raises:
        InvalidField: it does not fit; names what is too large or missing.
    """
    at = f"requests[{request.handle}]"
    longest = len(request.prompt) + request.budget
    if len(request.prompt) == 0:
        raise InvalidField(f"{at}.prompt", [], "it is empty", "Give at least one token.")
    if longest > context:
        raise InvalidField(
            f"{at}.budget", request.budget, f"with its prompt that is {longest} tokens, the context is {context}",
            "Lower it.",
        )  # fmt: skip
    top = max(int(ids.max()) for ids in (request.prompt, request.prefix) if len(ids))
    if top >= vocab:
        raise InvalidField(f"{at}.prompt", top, f"the model has {vocab} tokens", "Use the model's own tokenizer.")
    if request.sampling.stop and stop_text is None:
        raise InvalidField(
            "sampling.stop", list(request.sampling.stop), "the model directory has no tokenizer.json",
            "Add it, or remove the stop strings.",
        )  # fmt: skip
    if drafts and request.sampling.min_p > 0:
        raise InvalidField(
            "sampling.min_p", request.sampling.min_p, "vLLM does not know it where it verifies drafts",
            "Set it to 0, or `rollout.speculation.enabled: off`, or `engine: torch`.",
        )  # fmt: skip


def sampling_parameters(response: Response, *, vocab: int, drafts: bool = False) -> Any:
    """Return the vllm.SamplingParams of a response.

    Raises:
        InvalidField: vLLM refuses them.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    sampling = response.request.sampling
    left = response.request.budget - len(response.ids)
    try:
        return SamplingParams(
            **sampling_arguments(sampling, budget=left, vocab=vocab, drafts=drafts),
            extra_args=draft_arguments(response.request) if drafts else None,
            output_kind=RequestOutputKind.DELTA,
        )
    except VLLMValidationError as error:  # it allows temperatures up to 2, for one
        raise InvalidField("sampling", str(sampling), f"vLLM refuses it: {error}", "Use `engine: torch`.") from error


def sampled_logprobs(completion: Any) -> list[float]:
    """Return the log-probability of each token of a completion; vLLM's rows begin with the sampled one."""
    flat = completion.logprobs
    return [flat.logprobs[start] for start in flat.start_indices]


def version_runs(labels: Sequence[tuple[str, int]], start: int, end: int) -> list[tuple[int, int, int]]:
    """Return (start, end, version) of the tokens from `start` to `end` that one version sampled each.

    Args:
        labels: (version, index of its first token), ascending.
    """
    runs = []
    for at, (label, first) in enumerate(labels):
        last = labels[at + 1][1] if at + 1 < len(labels) else end
        run = max(first, start), min(last, end), int(label)
        if run[0] < run[1]:
            runs.append(run)
    return runs

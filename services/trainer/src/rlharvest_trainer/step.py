"""One optimizer step: gradients summed over groups as they arrive, divided once, applied once.

Invariants: parameters change only in `apply`, all at once; the gradient of a step doesn't depend on how its groups
were cut into micro-batches, but for rounding; with the same groups in one `accumulate` call it is the same bit for
bit; nothing that is not finite reaches the optimiser: such a step leaves the parameters and the moments as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlharvest_trainer.batches import Group, Sample
from rlharvest_trainer.losses import LossTerms, Objective, clipped_loss, token_logprobs
from rlharvest_trainer.microbatches import Layout, lay_out, plan
from rlharvest_trainer.model import CausalLM, parameters
from rlharvest_trainer.optimizer import AdamWConfig, MasterAdamW
from rlharvest_trainer.statistics import StepStatistics


class Interrupted(Exception):
    """The step was stopped between two micro-batches; nothing of it is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """What a job says about its steps."""

    objective: Objective
    adamw: AdamWConfig
    temperature: float
    vocab: int
    """Ids at or above are never sampled; 0: all of the head's can be."""
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did."""

    applied: bool
    """False: the parameters did not change."""
    metrics: dict[str, float]
    """By the names that TRL gives them; finite values only."""
    suspects: tuple[int, ...] = ()
    """Groups whose loss or gradient was not finite."""
    problem: str = ""
    """Why it was not applied, one sentence."""


@dataclass(slots=True)
class _Pending:
    statistics: StepStatistics = field(default_factory=StepStatistics)
    tokens: int = 0
    """Loss tokens so far."""
    loss: float = 0.0
    suspects: set[int] = field(default_factory=set)


class Learner:
    """A model, its frozen reference where the job wants one, its optimiser, and the step in progress. Not
    thread-safe."""

    def __init__(self, model: CausalLM, config: StepConfig, *, reference: CausalLM | None = None) -> None:
        if config.objective.beta > 0 and reference is None:
            raise ValueError("beta > 0 needs a reference model")
        self.model = model
        self.config = config
        self.optimizer = MasterAdamW(parameters(model), config.adamw)
        self._reference = reference
        self._device = next(iter(parameters(model).values())).device
        self._pending = _Pending()

    def accumulate(self, groups: Iterable[Group], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Add the gradients of whole groups to the step.

        Args:
            stop: asked before each micro-batch.

        Raises:
            Interrupted: `stop` said so; the step is discarded.
        """
        groups = sorted(groups, key=lambda group: group.ordinal)
        for group in groups:
            self._pending.statistics.add_group(group)
        samples = [sample for group in groups for sample in group.samples if sample.in_loss]
        learned = [sample for sample in samples if self._learns(sample)]
        watched = [sample for sample in samples if not self._learns(sample)]
        for part in (learned, watched):
            for micro in plan(part, self.config.micro_batch_tokens):
                if stop():
                    self.discard()
                    raise Interrupted
                self._pass(micro, learns=part is learned)

    def apply(self, learning_rate: float) -> StepResult:
        """Divide, clip, step; start a new one."""
        pending, self._pending = self._pending, _Pending()
        metrics = pending.statistics.metrics()
        metrics["learning_rate"] = learning_rate
        if pending.suspects:
            self.optimizer.discard()
            suspects = tuple(sorted(pending.suspects))
            return _refused(metrics, f"the loss of group {_listed(suspects)} is not finite", suspects)
        if pending.tokens == 0:
            self.optimizer.discard()
            return _refused(metrics, "no token of the batch counts in the loss", ())
        metrics["loss"] = pending.loss / pending.tokens
        norm = self.optimizer.step(learning_rate=learning_rate, divisor=float(pending.tokens))
        if norm is None:
            return _refused(metrics, "the gradient is not finite", ())
        metrics["grad_norm"] = norm
        return StepResult(applied=True, metrics=_finite(metrics))

    def discard(self) -> None:
        """Forget the step in progress."""
        self._pending = _Pending()
        self.optimizer.discard()

    def logprobs(self, samples: Sequence[Sample]) -> tuple[Layout, Tensor, Tensor]:
        """Return a micro-batch's layout, and log-probabilities and entropies of its response tokens, shape
        (tokens,)."""
        layout = lay_out(samples, self._device)
        policy, entropy = self._forward(self.model, layout)
        return layout, policy, entropy

    def _learns(self, sample: Sample) -> bool:
        """Equal rewards leave nothing to learn but the KL term: such samples are spared the backward pass."""
        return self.config.objective.beta > 0 or sample.advantage != 0

    def _pass(self, samples: Sequence[Sample], *, learns: bool) -> None:
        objective = self.config.objective
        with torch.set_grad_enabled(learns):
            layout, policy, entropy = self.logprobs(samples)
            reference = None
            if objective.beta > 0:
                with torch.no_grad():
                    reference, _ = self._forward(self._reference, layout)
            terms = clipped_loss(policy, layout.behaviour, layout.advantages, objective, reference)
        loss = float(terms.loss.detach())
        self._pending.tokens += len(layout.targets)
        self._pending.statistics.add_tokens(policy.detach(), layout.behaviour, entropy, terms)
        if not math.isfinite(loss):
            self._pending.suspects |= _suspects(samples, policy.detach(), terms)
            return
        self._pending.loss += loss
        if learns and not self._pending.suspects:
            terms.loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation there
            self.optimizer.absorb()

    def _forward(self, model: CausalLM, layout: Layout) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=layout.input_ids, use_cache=False, logits_to_keep=layout.keep).logits
        return token_logprobs(
            logits[layout.rows, layout.columns],
            layout.targets,
            temperature=self.config.temperature,
            vocab=self.config.vocab,
        )


def _suspects(samples: Sequence[Sample], policy: Tensor, terms: LossTerms) -> set[int]:
    """Return the groups whose tokens are not finite; all of the micro-batch where the sum alone overflowed."""
    bad = ~(torch.isfinite(policy) & torch.isfinite(terms.ratio))
    if terms.kl is not None:
        bad |= ~torch.isfinite(terms.kl)
    found = set()
    at = 0
    for sample in samples:
        if bool(bad[at : at + len(sample.ids)].any()):
            found.add(sample.group)
        at += len(sample.ids)
    return found or {sample.group for sample in samples}


def _refused(metrics: dict[str, float], problem: str, suspects: tuple[int, ...]) -> StepResult:
    return StepResult(applied=False, metrics=_finite(metrics), suspects=suspects, problem=problem)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _listed(groups: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, groups[:5]))
    return shown if len(groups) <= 5 else f"{shown} and {len(groups) - 5} more"

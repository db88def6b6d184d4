"""What is told of a step: where its time went, its metrics, one line for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from rlharvest_trainer import metrics
from rlharvest_trainer.step import StepResult

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class StepClock:
    """What the step in hand took: seconds by what they went to, and tokens."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    computed: float = 0.0
    tokens: int = 0
    """Prompt and response tokens of its batch."""


def step_metrics(
    result: StepResult, clock: StepClock, *, published_s: float, saved_s: float, tokens: int, skipped: int
) -> dict[str, float]:
    """Return the metrics of a step that is published, and count its seconds.

    Args:
        published_s: from the end of the step to the version.
        saved_s: that checkpoints took since the step before.
        tokens: trained so far, prompts included.
        skipped: steps so far that changed nothing.
    """
    seconds = {
        "step_s": time.monotonic() - clock.started,
        "rollout_wait_s": clock.waited,
        "compute_s": clock.computed,
        "publish_s": published_s,
        "save_s": saved_s,
    }
    for phase, spent in seconds.items():
        metrics.SECONDS.labels(phase.removesuffix("_s")).inc(spent)
    return {
        **result.metrics,
        **{f"perf/{name}": value for name, value in seconds.items()},
        "perf/tokens_per_s": clock.tokens / max(clock.computed, 1e-9),
        "num_tokens": float(tokens),
        "skipped_steps": float(skipped),
    }


def moved(values: Mapping[str, float]) -> bool:
    """Whether a step with these metrics was to change the weights."""
    return values.get("grad_norm", 0.0) > 0 and values.get("learning_rate", 0.0) > 0


def show_step(job: str, step: int, last: int, version: int, values: Mapping[str, float], result: StepResult) -> None:
    """Write a step's line, and set the gauges."""
    for gauge, name in (
        (metrics.REWARD, "reward"),
        (metrics.LOSS, "loss"),
        (metrics.GRAD_NORM, "grad_norm"),
        (metrics.KL, "kl"),
        (metrics.STALENESS, "staleness/mean"),
    ):
        if name in values:
            gauge.set(values[name])
    log.info(f"step {step}/{last}", job=job, version=version, **_shown(values), **_problem(result))


def _shown(values: Mapping[str, float]) -> dict[str, object]:
    """Return what the line says, each number as short as it may be."""
    shown = (
        ("reward", "reward", ".3f"),
        ("loss", "loss", ".4f"),
        ("grad_norm", "grad_norm", ".3g"),
        ("tokens_per_response", "completions/mean_length", ".1f"),
        ("wait_s", "perf/rollout_wait_s", ".2f"),
        ("compute_s", "perf/compute_s", ".2f"),
        ("publish_s", "perf/publish_s", ".2f"),
        ("tokens_per_s", "perf/tokens_per_s", ".0f"),
    )
    return {name: float(format(values[key], style)) for name, key, style in shown if key in values}


def _problem(result: StepResult) -> dict[str, str]:
    return {} if result.applied else {"skipped": result.problem}

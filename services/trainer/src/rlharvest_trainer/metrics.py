"""What Prometheus sees of the trainer."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

STEP = Gauge("rlharvest_trainer_step", "Optimizer steps done of the job in hand")
REWARD = Gauge("rlharvest_trainer_reward", "Mean reward of the last batch")
LOSS = Gauge("rlharvest_trainer_loss", "Loss of the last step, a mean over its loss tokens")
GRAD_NORM = Gauge("rlharvest_trainer_grad_norm", "Norm of the last gradient before clipping")
KL = Gauge("rlharvest_trainer_kl_nats", "Mean KL divergence to the initial model in the last step")
STALENESS = Gauge("rlharvest_trainer_staleness_steps", "Mean staleness of the last batch")
PHASE = Gauge("rlharvest_trainer_phase", "1 for what the trainer does now", ["phase"])
STEPS = Counter("rlharvest_trainer_steps_total", "Optimizer steps")
SKIPPED_STEPS = Counter("rlharvest_trainer_skipped_steps_total", "Steps that changed nothing: not finite, or no token")
SKIPPED_GROUPS = Counter(
    "rlharvest_trainer_skipped_groups_total", "Groups left out of their step because of bad values"
)
TOKENS = Counter("rlharvest_trainer_tokens_total", "Prompt and response tokens trained")
SECONDS = Counter("rlharvest_trainer_seconds_total", "Seconds spent", ["phase"])
CHECKPOINTS = Counter("rlharvest_trainer_checkpoints_total", "Checkpoints written")
PUBLICATIONS = Counter("rlharvest_trainer_publications_total", "Versions published")
CLAIMS = Counter("rlharvest_trainer_claims_total", "Jobs claimed")
FENCED = Counter("rlharvest_trainer_fenced_total", "Claims lost to a newer one")
EVENTS_LOST = Counter("rlharvest_trainer_events_lost_total", "Events that the bus did not take")

PHASES = ("idle", "loading", "waiting", "computing", "publishing", "saving")


def phase(current: str) -> None:
    """Show what the trainer does now."""
    for name in PHASES:
        PHASE.labels(name).set(1.0 if name == current else 0.0)

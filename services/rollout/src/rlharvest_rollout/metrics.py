"""Prometheus metrics of a rollout worker."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

TOKENS = Counter("rlharvest_rollout_tokens_total", "Tokens generated.")
UNWANTED_TOKENS = Counter("rlharvest_rollout_unwanted_tokens_total", "Tokens generated for a response that was gone.")
FLUSHES = Counter("rlharvest_rollout_flushes_total", "TokenSpans messages with a PubAck.")
PUBLISH_FAILURES = Counter("rlharvest_rollout_publish_failures_total", "Failed tries to publish.", ["kind"])
BUFFERED = Gauge("rlharvest_rollout_buffered_tokens", "Tokens that no LedgerAck covers.")
HELD = Gauge("rlharvest_rollout_held_responses", "Responses held.")
PAUSED = Gauge("rlharvest_rollout_paused", "1 while generation waits for the ledger.")
VERSION = Gauge("rlharvest_rollout_version", "Version that samples; -1: none.")
PULL_SECONDS = Histogram(
    "rlharvest_rollout_pull_seconds",
    "From the lease to the loaded version.",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300),
)
PULL_FAILURES = Counter("rlharvest_rollout_pull_failures_total", "Versions that could not be pulled or loaded, tries.")
ABORTS = Counter("rlharvest_rollout_aborts_total", "Responses given up before their end.", ["reason"])
RESENDS = Counter("rlharvest_rollout_resends_total", "Times that tokens were made due again.", ["reason"])
PROBES = Counter("rlharvest_rollout_probes_total", "Responses whose acknowledgement was asked for.")
REFUSALS = Counter("rlharvest_rollout_refusals_total", "Messages of the coordinator that were refused.", ["kind"])
PREFILL_TOKENS = Counter(
    "rlharvest_rollout_prefill_tokens_total", "Tokens of prompts and prefixes that were prefilled."
)
PREFILL_SAVED_TOKENS = Counter(
    "rlharvest_rollout_prefill_saved_tokens_total", "Tokens of prompts that another response had prefilled."
)
DRAFTED_TOKENS = Counter("rlharvest_rollout_drafted_tokens_total", "Tokens of history that were verified.")
ACCEPTED_TOKENS = Counter("rlharvest_rollout_accepted_tokens_total", "Drafted tokens that were what was sampled.")
DRAFT_WINDOW = Gauge("rlharvest_rollout_draft_window_tokens", "Mean length of the drafts since the last heartbeat.")
JOINS = Counter("rlharvest_rollout_joins_total", "Times this process joined.")

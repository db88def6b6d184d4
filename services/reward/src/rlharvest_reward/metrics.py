"""What Prometheus sees of the reward service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("rlharvest_reward_requests_total", "Requests taken from the queue.")
REDELIVERED = Counter("rlharvest_reward_redelivered_total", "Requests that had been delivered before.")
RESULTS = Counter("rlharvest_reward_results_total", "Results in the ledger's log.", ["outcome"])
UNREADABLE = Counter("rlharvest_reward_unreadable_total", "Queue messages that are no score request.")
FAULTS = Counter("rlharvest_reward_faults_total", "Samples that a function gave no usable number for.", ["kind"])
SECONDS = Histogram(
    "rlharvest_reward_seconds",
    "Seconds from taking a request to its result.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
IN_WORK = Gauge("rlharvest_reward_in_work", "Requests in work.")
PROCESSES = Gauge("rlharvest_reward_processes", "Processes of reward functions.", ["state"])
STARTED = Counter("rlharvest_reward_processes_started_total", "Processes of reward functions started.")
QUEUE_ERRORS = Counter("rlharvest_reward_queue_errors_total", "Faults of the queue, after which it was opened again.")
SANDBOX = Gauge(
    "rlharvest_reward_sandbox",
    "1: reward code is kept from it here; 0: it is not, see RLHARVEST_REWARD_SANDBOX.",
    ["wall"],
)

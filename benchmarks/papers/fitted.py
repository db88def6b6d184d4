"""Every constant of `benchmarks.papers` that was fitted or taken from somewhere, with its source. Nothing else is fitted.

Fitted, to two figures of RLBoost (arXiv 2510.19225) for its 14B model, which are calibration points and no predictions:

- MEDIAN_TOKENS, to the T_seed of 346 s that its open code's table has for one instance;
- TRAINING_FLOPS_SHARE, to the rollout's share of 73 % of a veRL step.

The 8B and 32B models use the same two values.
"""

from __future__ import annotations

from typing import Any

MEDIAN_TOKENS = 4000.0
TRAINING_FLOPS_SHARE = 0.52

ROLLOUT_SHARE = 0.73
"""Of a veRL step (RLBoost, section 2)."""
SEED_S = {1: 346, 2: 212, 3: 145, 4: 60, 5: 8, 6: 5}
"""Instances -> T_seed of the 14B model, seconds (PolyRL 836120a, rollout-manager/src/balance.rs, in a comment)."""

RESERVED_USD, SPOT_USD = "83.79", "5.32"
"""An hour of 8 x H100 on demand and of 2 x H100 preemptible: averages that satisfy the paper's own figures."""

H100: dict[str, Any] = {"tflops": 989, "bandwidth_tb_s": 3.35, "memory_gb": 80}
"""Data sheet of the SXM5, bf16 dense; the shares that are reached are the simulator's defaults."""

MODELS: dict[str, dict[str, Any]] = {
    # Layers x 2 x KV heads x head size x 2 bytes, of the published configurations of Qwen3.
    "8B": {"parameters_b": 8.2, "kv_bytes_per_token": 36 * 2 * 8 * 128 * 2},
    "14B": {"parameters_b": 14.8, "kv_bytes_per_token": 40 * 2 * 8 * 128 * 2},
    "32B": {"parameters_b": 32.8, "kv_bytes_per_token": 64 * 2 * 8 * 128 * 2},
}
NODES = {"8B": 1, "14B": 1, "32B": 2}
"""Reserved machines (RLBoost, section 6)."""
SPOTS = {"8B": 3.76, "14B": 5.07, "32B": 5.66}
"""Mean preemptible instances, which follow from the paper's own speedups and costs by the cost identity; the
market of a trace is capped at one more, so the rows of traces are given how many there are."""


def scenario(model: str = "14B", **market: Any) -> dict[str, Any]:
    """Return the values of RLBoost's set-up with a model."""
    return {
        "name": f"rlboost-{model}",
        "seed": 7,
        "steps": 14,
        "model": MODELS[model],
        "devices": {"h100": H100},
        "reserved": {"nodes": NODES[model], "device": "h100", "gpus_per_node": 8, "engine_gpus": 2}
        | {"usd_per_node_hour": RESERVED_USD},
        "training": {"flops_share": TRAINING_FLOPS_SHARE, "micro_batch": 16},
        "workload": {
            "prompts_per_step": 128,
            "num_generations": 8,
            "median_tokens": MEDIAN_TOKENS,
            "max_tokens": 14336,
        },
        "market": {"usd_per_hour": SPOT_USD, "workers": {"device": "h100", "gpus": 2}} | market,
    }

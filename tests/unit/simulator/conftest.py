"""A small scenario that runs in a moment."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def values() -> dict[str, Any]:
    return {
        "name": "small",
        "seed": 3,
        "steps": 4,
        "max_hours": 10,
        "strategies": ["rlharvest"],
        "model": {"parameters_b": 8, "kv_bytes_per_token": 131072},
        "devices": {"gpu": {"tflops": 900, "bandwidth_tb_s": 3, "memory_gb": 80}},
        "reserved": {
            "device": "gpu",
            "gpus_per_node": 4,
            "engine_gpus": 2,
            "usd_per_node_hour": "40",
            "billing": {"increment": "millisecond"},
        },
        "workload": {"prompts_per_step": 12, "num_generations": 4, "median_tokens": 600, "max_tokens": 4000},
        "training": {"micro_batch": 8},
        "market": {
            "generated": {"places": 4, "hours": 1, "up_minutes": 6, "down_minutes": 2, "storms_per_day": 200},
            "usd_per_hour": "5",
            "boot_s": 20,
            "workers": {"device": "gpu", "gpus": 2},
        },
    }

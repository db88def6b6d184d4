"""What vLLM is started with: pure functions from a job's configuration and this machine's settings.

The same for a GPU and for a CPU but for what each needs: on a CPU nothing is compiled (there may be no compiler, and it
takes minutes), threads are not bound to cores (two workers of one machine would be bound to the same ones), and the
memory for keys and values is a number of bytes; on a GPU it is what is left of a share of the device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.engine import EngineConfig

OWNER_VARIABLE = "RLHARVEST_ENGINE_OWNER"
"""Process id of the worker, for the processes of its engine; see `guards`."""

GUARDS = "rlharvest_rollout.engines.vllm.guards.WorkerGuards"
PROPOSER = "rlharvest_rollout.engines.vllm.drafts.HistoryProposer"
_LONGEST_DRAFT = 127
"""vLLM's sampler takes no longer ones."""

_CPU_BLOCK = 32
"""Tokens of a block of keys and values; smaller ones share more of a prompt, 32 is the least the CPU kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this worker gives to its engine."""

    device: str
    """`cpu` or the name of the GPU."""
    isa: str = ""
    """Instruction set of a CPU."""
    threads: int = 1
    slots: int = 64
    kv_memory_bytes: int = 1 << 30
    """For keys and values, on a CPU."""
    tensor_parallel: int = 1
    gpu_memory: float = 0.9
    """Share of a GPU's memory for weights, keys and values together."""

    @property
    def is_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"


def drafts(config: EngineConfig, machine: Machine) -> bool:
    """Return whether vLLM is started so that it can verify drafts.

    On a GPU that costs its asynchronous scheduling, which the switch of `auto` cannot measure against: only `on` does.
    """
    enabled = config.speculation.enabled
    return enabled == "on" or (enabled == "auto" and machine.is_cpu)


def engine_arguments(config: EngineConfig, machine: Machine, directory: Path, *, seed: int) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's AsyncEngineArgs.

    Args:
        directory: of the first version, with config and weights.
        seed: of the engine's own generator. Two engines with one seed would draw alike, so it must differ between them.
    """
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "generation_config": "vllm",
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": config.context,
        "max_num_seqs": min(machine.slots, config.slots),
        "tensor_parallel_size": machine.tensor_parallel,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": GUARDS,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if machine.is_cpu:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": machine.kv_memory_bytes,
            "block_size": _CPU_BLOCK,
        }
    else:
        arguments |= {"gpu_memory_utilization": machine.gpu_memory, "enable_sleep_mode": True}
    if drafts(config, machine):
        longest = min(config.speculation.window_max, _LONGEST_DRAFT)
        speculative: dict[str, Any] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": longest}
        if machine.is_cpu:
            # A table, though of one row: without it a request that is cached but for one token is filled up with as
            # many placeholders as a draft may have tokens, for CUDA graphs.
            speculative["num_speculative_tokens_per_batch_size"] = [(1, arguments["max_num_seqs"], longest)]
        arguments |= {"speculative_config": speculative, "per_request_spec_decode_metrics": "summary"}
    return arguments


def environment(machine: Machine) -> dict[str, str]:
    """Return the variables that vLLM's processes must find; one that is set already is kept, but for the owner's."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # A fork of a process with threads of gRPC and of torch would hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if machine.is_cpu:
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(machine.threads)}
    found = {name: value for name, value in wanted.items() if name not in os.environ}
    return {**found, OWNER_VARIABLE: str(os.getpid())}


def numerics_key(config: EngineConfig, machine: Machine, *, release: str) -> str:
    """Return what decides the bits, as far as anything does: vLLM sums in an order that depends on the batch."""
    unit = f"cpu-{machine.isa}-threads{machine.threads}" if machine.is_cpu else machine.device.replace(" ", "-")
    return f"vllm/{release}/{unit}/{config.dtype}/tp{machine.tensor_parallel}/any-order"

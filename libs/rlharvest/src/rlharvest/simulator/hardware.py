"""From data sheets to the times of an engine and of the trainer."""

from __future__ import annotations

from rlharvest.simulator.engine import Speed
from rlharvest.simulator.scenario import Device, Model, Scenario


def _active(model: Model) -> float:
    """Return the parameters that a token goes through."""
    return (model.parameters_b if model.active_b is None else model.active_b) * 1e9


def weights_bytes(model: Model) -> float:
    """Return the bytes of a full version."""
    return model.parameters_b * 1e9 * model.bytes_per_parameter


def speed(model: Model, device: Device, *, gpus: int, memory_share: float, overhead_ms: float, slots: int) -> Speed:
    """Return what one engine can do.

    A token takes 2 operations for each parameter that it goes through; a step reads the weights and all keys and values.
    """
    bandwidth = gpus * device.bandwidth_tb_s * 1e12 * device.bandwidth_share
    flops = gpus * device.tflops * 1e12 * device.flops_share
    room = gpus * device.memory_gb * 1e9 * memory_share - weights_bytes(model)
    per_token = 2 * _active(model) / flops
    return Speed(
        overhead_s=overhead_ms / 1000,
        weights_s=_active(model) * model.bytes_per_parameter / bandwidth,
        flop_s=per_token,
        context_s=model.kv_bytes_per_token / bandwidth,
        prefill_s=per_token,
        cache=int(room / model.kv_bytes_per_token),
        slots=slots,
    )


def remote_speed(scenario: Scenario) -> Speed:
    """Return what a preemptible worker can do."""
    kind = scenario.market.workers
    device = scenario.devices[kind.device]
    return speed(
        scenario.model,
        device,
        gpus=kind.gpus,
        memory_share=kind.memory_share,
        overhead_ms=kind.overhead_ms,
        slots=kind.slots,
    )


def reserved_speed(scenario: Scenario) -> Speed:
    """Return what an engine on the trainer's GPUs can do."""
    kind = scenario.reserved
    return speed(
        scenario.model,
        scenario.devices[kind.device],
        gpus=kind.engine_gpus,
        memory_share=kind.engine_memory_share,
        overhead_ms=kind.overhead_ms,
        slots=kind.slots,
    )


def train_token_s(scenario: Scenario) -> float:
    """Return the seconds that training takes for a token: 6 operations a parameter, and 2 for each forward pass besides."""
    kind = scenario.reserved
    flops = kind.nodes * kind.gpus_per_node * scenario.devices[kind.device].tflops * 1e12
    operations = (6 + 2 * scenario.training.forwards) * _active(scenario.model)
    return operations / (flops * scenario.training.flops_share)

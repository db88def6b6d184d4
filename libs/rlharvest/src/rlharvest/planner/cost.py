"""How long things take: decoding, training, memory. Every constant of the planner with its source.

Decoding reads all weights and the caches of the batch once a token, or is bound by arithmetic, whichever is longer; training
is arithmetic at some share of the peak (the roofline that AReaL-Hex's cost model, HexGen's, builds on). Functions take numpy
arrays or numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Numbers = Any
"""A number, or an array of them; arrays are of one shape."""

TRAIN_EFFICIENCY = 0.40
"""Share of peak FLOPS in training: dense models of 1 to 32 billion parameters reach 0.35 to 0.45."""

DECODE_EFFICIENCY = 0.65
"""Share of peak memory bandwidth in decoding: engines reach 0.6 to 0.7 at large batches."""

COMPUTE_EFFICIENCY = 0.45
"""Share of peak FLOPS in prefill, and in a decode step that arithmetic binds."""

H20_TRAIN_EFFICIENCY = 0.23
H20_DECODE_EFFICIENCY = 0.31
"""Fitted to AReaL-Hex, table 1: a token costs 2.7 times less to generate on an H20 than on an H800 and 3.1 times more to
train, at $1.85 and $5.28 an hour and responses of 7,000 tokens. The H800's own are the defaults above."""

LATENCY_S = 10e-6
"""Of one collective inside a machine; two for each layer."""

MEMORY_SHARE = 0.90
"""Of a GPU's memory that weights, caches and states may take."""

STATE_BYTES = 6.0
"""A parameter in training: BF16 weights and FP32 gradients."""

OPTIMIZER_BYTES = 12.0
"""A parameter in training: FP32 master weights and the two moments of Adam, divided among the data-parallel ranks."""

ACTIVATION_BYTES = 2.0
"""A token, layer and unit of width that is kept for the backward pass, when layers are recomputed."""


def decode_step_s(
    *,
    weight_bytes: float,
    active: float,
    kv_bytes: float,
    context: float,
    batch: Numbers,
    layers: int,
    hidden: int,
    tensor: int,
    pipeline: int,
    tflops: float,
    bandwidth: float,
    link: float,
) -> Numbers:
    """Return the seconds in which every sequence of a replica gets one token.

    A pipeline of p stages keeps p parts of the batch on their way; each part reads its stage's weights anew, so a round
    reads the weights p times in all, p GPUs at a time.

    Args:
        batch: sequences. context: mean tokens of context. tflops: of one GPU, per second. bandwidth: reached by one GPU, in
        bytes per second. link: between two GPUs of a machine, bytes per second.
    """
    memory = (weight_bytes + batch * context * kv_bytes / pipeline) / (tensor * bandwidth)
    compute = 2 * active * batch / (tensor * pipeline * tflops * COMPUTE_EFFICIENCY)
    talk = 0.0
    if tensor > 1:
        volume = batch / pipeline * hidden * 2 * 2 * (tensor - 1) / tensor
        talk = 2 * layers * (LATENCY_S + volume / link)
    return np.maximum(memory, compute) + talk


def prefill_s(*, active: float, prompt: float, gpus: int, tflops: float) -> float:
    """Return the seconds that a replica spends on one prompt."""
    return 2 * active * prompt / (gpus * tflops * COMPUTE_EFFICIENCY)


def cache_sequences(*, weight_bytes: float, kv_bytes: float, context: float, gpus: int, hbm: float) -> int:
    """Return how many sequences fit into the memory of a replica beside its weights. `hbm`: bytes of one GPU."""
    return int(max(0.0, gpus * hbm * MEMORY_SHARE - weight_bytes) / (context * kv_bytes))


def training_bytes(
    *, parameters: Numbers, data: Numbers, tensor: Numbers, tokens: float, layers: Numbers, hidden: int, logits: Numbers
) -> Numbers:
    """Return the bytes that a stage needs on one GPU.

    Args:
        parameters: of the stage. layers: of the stage. tokens: of a micro-batch. logits: width of the output on this stage,
        0 where it is not the last.
    """
    states = parameters * (STATE_BYTES + OPTIMIZER_BYTES / data)
    return (states + tokens * (layers * hidden * ACTIVATION_BYTES + logits * 4.0)) / tensor


def training_flops(*, active: Numbers, forwards: int) -> Numbers:
    """Return the operations for one token: forward and backward, and `forwards` more forward passes."""
    return (6 + 2 * forwards) * active

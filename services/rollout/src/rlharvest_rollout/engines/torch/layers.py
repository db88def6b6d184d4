"""The blocks of a network as they are computed: norms in the dtype of activations, linear layers in the machine's layout."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlharvest_rollout.engines.torch.checkpoint import Layer, Weights
from rlharvest_rollout.engines.torch.linear import Linear, linear
from rlharvest_rollout.engines.torch.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block; see `checkpoint.Layer`."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """All of a network."""

    embedding: Tensor
    """(vocab, hidden), of the dtype that weights are rounded to: rows are only looked up."""
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Linear
    """Never int8: its rounding would go straight into the log-probabilities."""
    shapes: frozenset[tuple[int, int, bool]]
    """(outputs, inputs, whether it is int8) of every linear layer."""


def network(weights: Weights, numerics: Numerics) -> Network:
    """Return the network of some weights, which are copied as far as the layout asks for."""
    int8 = numerics.weights == "int8"
    inner = {
        (weight.shape[0], weight.shape[1], int8)
        for layer in weights.layers
        for weight in (layer.qkv, layer.o, layer.gate_up, layer.down)
    }
    return Network(
        embedding=weights.embedding,
        blocks=tuple(_block(layer, numerics, int8=int8) for layer in weights.layers),
        norm=weights.norm.to(numerics.compute_dtype),
        head=linear(weights.head, None, numerics),
        shapes=frozenset(inner | {(weights.head.shape[0], weights.head.shape[1], False)}),
    )


def _block(layer: Layer, numerics: Numerics, *, int8: bool) -> Block:
    dtype = numerics.compute_dtype
    return Block(
        input_norm=layer.input_norm.to(dtype),
        qkv=linear(layer.qkv, layer.qkv_bias, numerics, int8=int8),
        q_norm=None if layer.q_norm is None else layer.q_norm.to(dtype),
        k_norm=None if layer.k_norm is None else layer.k_norm.to(dtype),
        o=linear(layer.o, layer.o_bias, numerics, int8=int8),
        mlp_norm=layer.mlp_norm.to(dtype),
        gate_up=linear(layer.gate_up, layer.gate_up_bias, numerics, int8=int8),
        down=linear(layer.down, layer.down_bias, numerics, int8=int8),
    )

"""A linear layer, its weight laid out as this machine multiplies it fastest.

On a CPU a weight is packed once for oneDNN, when a version is read: an ordinary product packs it again in every step,
which at a few rows costs more than the product itself. An int8 layer holds a quarter of float32's bytes: one signed byte
a weight and one scale an output, symmetric (QeRL, arXiv 2510.11696, samples from a quantised policy too).

Invariant: what a layer computes is a function of its weight, the machine and the number of rows; `row_blocks` probes which
numbers of rows give equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn import functional

from rlharvest_rollout.engines.torch.numerics import ROW_BLOCK, ROW_BLOCKS, Numerics

PACKED_FOR = 32
"""Rows that the packed layout is chosen for."""

INT8_MOST = 127
PROBED = 4
"""Blocks of each size that are compared."""

Linear = Callable[[Tensor], Tensor]
"""Takes (rows, inputs), returns (rows, outputs), both of the numerics' compute_dtype."""


def linear(weight: Tensor, bias: Tensor | None, numerics: Numerics, *, int8: bool = False) -> Linear:
    """Return the layer of a weight (outputs, inputs) and maybe a bias (outputs,)."""
    bias = None if bias is None else bias.to(numerics.compute_dtype)
    if int8:
        return _Int8(weight, bias, numerics)
    if numerics.device == "cpu" and torch._C._has_mkldnn:
        return _Packed(weight, bias, numerics)
    return _Plain(weight, bias, numerics)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 of shape (outputs, inputs) and a float32 scale of each output; their product is the weight, rounded."""
    weight = weight.float()
    scale = weight.abs().amax(-1).div_(INT8_MOST)
    # A row of zeros has no scale; any will do.
    scale.masked_fill_(scale == 0, 1.0)
    return (weight / scale[:, None]).round_().to(torch.int8), scale


class _Plain:
    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        self._weight, self._bias = weight.to(numerics.compute_dtype), bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class _Packed:
    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(numerics.compute_dtype), PACKED_FOR)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class _Int8:
    def __init__(self, weight: Tensor, bias: Tensor | None, numerics: Numerics) -> None:
        self._weight, scale = quantise(weight)
        self._bias = bias
        # torch's kernel of int8 weights is made for bfloat16 rows, and slow in anything else.
        self._kernel = numerics.device == "cpu" and numerics.dtype == "bfloat16"
        self._scale = scale.to(torch.bfloat16 if self._kernel else numerics.compute_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel:
            y = torch._weight_int8pack_mm(x.to(torch.bfloat16), self._weight, self._scale).to(x.dtype)
        else:
            y = functional.linear(x, self._weight.to(x.dtype)).mul_(self._scale)
        return y if self._bias is None else y.add_(self._bias)


def row_blocks(shapes: Collection[tuple[int, int, bool]], numerics: Numerics) -> tuple[int, ...]:
    """Return the row blocks, largest first, that give the bits of ROW_BLOCK for linear layers of all these shapes.

    Args:
        shapes: (outputs, inputs, whether it is int8) of each linear layer.

    Returns:
        Never without ROW_BLOCK, except (): rows of a block of ROW_BLOCK depend on each other, nothing can be promised.
    """
    allowed = set(ROW_BLOCKS)
    for outputs, inputs, int8 in set(shapes):
        allowed &= _equal_blocks(outputs, inputs, int8, numerics)
    return tuple(sorted(allowed, reverse=True)) if ROW_BLOCK in allowed else ()


@functools.lru_cache(maxsize=256)
def _equal_blocks(outputs: int, inputs: int, int8: bool, numerics: Numerics) -> frozenset[int]:
    generator = torch.Generator().manual_seed(outputs * 1_000_003 + inputs)

    def randn(rows: int) -> Tensor:
        return torch.randn(rows, inputs, generator=generator).to(numerics.device, numerics.compute_dtype)

    layer, rows = linear(randn(outputs), None, numerics, int8=int8), randn(max(ROW_BLOCKS))
    wanted = _in_blocks(rows, layer, ROW_BLOCK)
    order = torch.randperm(len(rows), generator=generator).to(numerics.device)
    if not torch.equal(_in_blocks(rows[order], layer, ROW_BLOCK), wanted[order]):
        return frozenset()
    few = {size: min(len(rows) // size, PROBED) * size for size in ROW_BLOCKS}
    return frozenset(size for size, n in few.items() if torch.equal(_in_blocks(rows[:n], layer, size), wanted[:n]))


def _in_blocks(rows: Tensor, layer: Linear, size: int) -> Tensor:
    return torch.cat([layer(block) for block in torch.split(rows, size)])

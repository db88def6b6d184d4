"""How to compute so that a row's bits do not depend on the rows beside it.

A matrix product may sum in another order when it has another number of rows, and then the same token gets other bits
in another batch, and prefill other bits than decode. The batch-invariant mode holds the shapes fixed instead: every
linear layer runs in blocks of rows that give the very bits of a block of 16 (`row_blocks` finds which sizes do, on
this machine, for these shapes), attention sums over keys in blocks of KEY_BLOCK in ascending order, and every row is
a multiple of LANES wide, so that no element is computed by the scalar tail of a vector loop, whose exp rounds
differently.

The probe is evidence, not proof: it compares random data, in which another order of summation shows in nearly every
element.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rlharvest_rollout.engines.torch.attention import attend_blocks

ROW_BLOCK = 16
"""The block of rows whose bits are the reference."""

ROW_BLOCKS = (64, 32, 16, 8, 4)
KEY_BLOCK = 64
LANES = 64
"""Every width is padded to a multiple of it: bf16 fills a 512-bit register with 32, and loops are unrolled twice."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What decides the bits of a model's output, besides weights and tokens."""

    dtype: Literal["float32", "bfloat16"]
    invariant: bool
    threads: int
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """Weights and activations are rounded to it."""
        return DTYPES[self.dtype]

    @property
    def compute_dtype(self) -> torch.dtype:
        """What linear layers multiply in: float32 for bfloat16 on a CPU without instructions for it.

        Sums of bfloat16 products are kept in float32 either way; there it is 4 to 16 times as fast.
        """
        if self.device == "cpu" and not _native_bfloat16():
            return torch.float32
        return self.torch_dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values, and of attention: on a CPU always float32, its products are slow in anything else."""
        return torch.float32 if self.device == "cpu" else self.torch_dtype

    @property
    def key(self) -> str:
        """Equal keys promise equal bits, for equal weights and tokens."""
        if self.device == "cpu":
            unit = f"cpu-{torch.backends.cpu.get_cpu_capability()}-threads{self.threads}"
        else:
            unit = torch.cuda.get_device_name(self.device).replace(" ", "-")
        order = f"rows{ROW_BLOCK}-keys{KEY_BLOCK}" if self.invariant else "any-order"
        compute = str(self.compute_dtype).removeprefix("torch.")
        return f"torch/{torch.__version__}/{unit}/{self.dtype}-in-{compute}/{order}"


def _native_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded(n: int, multiple: int) -> int:
    """Return the smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def split(rows: int, blocks: Collection[int]) -> list[int]:
    """Return block sizes that hold `rows` rows, the last one maybe padded; without blocks, just one of these rows.

    A block is padded by at most 3/8 where a smaller one exists: a few idle rows are cheaper than another call.
    """
    if not blocks:
        return [rows]
    sizes: list[int] = []
    while rows > 0:
        fitting = min((size for size in blocks if size >= rows), default=None)
        smaller = max((size for size in blocks if size <= rows), default=None)
        if fitting is not None and (smaller is None or (fitting - rows) * 8 <= fitting * 3):
            sizes.append(fitting)
        else:
            assert smaller is not None
            sizes.append(smaller)
        rows -= sizes[-1]
    return sizes


def bucket(rows: int) -> int:
    """Return a number of rows not below `rows`, one of few: each up to 8, then four for each power of two."""
    step = max(1, 1 << max(0, (rows - 1).bit_length() - 3))
    return padded(rows, step)


def row_blocks(shapes: Collection[tuple[int, int]], numerics: Numerics) -> tuple[int, ...]:
    """Return the row blocks, largest first, that give the bits of ROW_BLOCK for linear layers of all these shapes.

    Args:
        shapes: (outputs, inputs) of each linear layer.

    Returns:
        Never without ROW_BLOCK, except (): rows of a block of ROW_BLOCK depend on each other, nothing can be promised.
    """
    allowed = set(ROW_BLOCKS)
    for outputs, inputs in set(shapes):
        allowed &= _equal_blocks(outputs, inputs, numerics.compute_dtype, numerics.device, numerics.threads)
    return tuple(sorted(allowed, reverse=True)) if ROW_BLOCK in allowed else ()


@functools.lru_cache(maxsize=256)
def _equal_blocks(outputs: int, inputs: int, dtype: torch.dtype, device: str, threads: int) -> frozenset[int]:
    # `threads` is part of the key only: torch is set to it already.
    generator = torch.Generator().manual_seed(outputs * 1_000_003 + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(device, dtype)
    rows = torch.randn(max(ROW_BLOCKS), inputs, generator=generator).to(device, dtype)
    wanted = _in_blocks(rows, weight, ROW_BLOCK)
    order = torch.randperm(len(rows), generator=generator).to(device)
    if not torch.equal(_in_blocks(rows[order], weight, ROW_BLOCK), wanted[order]):
        return frozenset()
    return frozenset(size for size in ROW_BLOCKS if torch.equal(_in_blocks(rows, weight, size), wanted))


def _in_blocks(rows: Tensor, weight: Tensor, size: int) -> Tensor:
    return torch.cat([functional.linear(block, weight) for block in torch.split(rows, size)])


@functools.lru_cache(maxsize=16)
def attention_is_invariant(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, threads: int
) -> bool:
    """Return whether a query's attention has the same bits alone, among others, and against keys that all share.

    The last is how prefill calls it: the keys of one sequence, expanded over its queries.
    """
    assert threads > 0
    group, batch, keys = heads // kv_heads, 33, 3 * KEY_BLOCK
    generator = torch.Generator().manual_seed(head_dim)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, v = randn(batch, group, head_dim), randn(1, keys, head_dim), randn(1, keys, head_dim)
    seen = torch.arange(keys) <= torch.randint(0, keys, (batch, 1), generator=generator)
    bias = torch.zeros(batch, 1, keys).masked_fill(~seen[:, None], float("-inf")).to(device, dtype)
    shared = attend_blocks(q, k.expand(batch, -1, -1), v.expand(batch, -1, -1), bias, KEY_BLOCK)
    own_k, own_v = k.repeat(batch, 1, 1), v.repeat(batch, 1, 1)

    def same(rows: Sequence[int]) -> bool:
        own = attend_blocks(q[rows], own_k[rows], own_v[rows], bias[rows], KEY_BLOCK)
        return torch.equal(own, shared[rows])

    return all(same(list(range(n))) for n in (1, 2, 3, 8, batch)) and all(same([row]) for row in range(batch))

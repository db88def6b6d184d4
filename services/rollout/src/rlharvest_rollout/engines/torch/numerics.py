"""How to compute so that a row's bits do not depend on the rows beside it.

A matrix product may sum in another order when it has another number of rows, and then the same token gets other bits
in another batch, and prefill other bits than decode. The batch-invariant mode holds the shapes fixed instead: every
linear layer runs in blocks of rows that give the very bits of a block of 16 (`linear.row_blocks` finds which sizes do,
on this machine, for these shapes), attention sums over keys in blocks of KEY_BLOCK in ascending order, and every row is
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

from rlharvest_rollout.engines.torch.attention import attend_blocks

ARITHMETIC = 2
"""Raised with every change of this engine that gives other bits: part of the numerics key."""

ROW_BLOCK = 16
"""The block of rows whose bits are the reference."""

ROW_BLOCKS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
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
    weights: Literal["full", "int8"] = "full"
    """How linear layers but the head hold theirs: as they are, or as int8."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Weights are rounded to it."""
        return DTYPES[self.dtype]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations and products: float32 for bfloat16 on a CPU without instructions for it.

        There it is 4 to 16 times as fast, and rounds less.
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
        weights = "" if self.weights == "full" else f"-{self.weights}"
        return f"torch/{torch.__version__}-{ARITHMETIC}/{unit}/{self.dtype}{weights}-in-{compute}/{order}"


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

"""The network: logits of the next token, for rows of any sequences together.

A row is one token at one position. Rows know each other only through the attention they are given, so prefill of one
sequence and decode of many are the same code. In the batch-invariant mode a row's logits have the same bits in any
company.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlharvest_rollout.engines.torch.architecture import Architecture, Rope
from rlharvest_rollout.engines.torch.attention import attend, attend_blocks
from rlharvest_rollout.engines.torch.checkpoint import Weights
from rlharvest_rollout.engines.torch.kv_cache import KvCache
from rlharvest_rollout.engines.torch.layers import Block, network
from rlharvest_rollout.engines.torch.linear import Linear, row_blocks
from rlharvest_rollout.engines.torch.numerics import (
    KEY_BLOCK,
    LANES,
    Numerics,
    attention_is_invariant,
    bucket,
    padded,
    split,
)


class Attention(Protocol):
    """Stores keys and values of rows and attends over what their sequences have."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Return (n, heads * head_dim) of the n rows that are not padding.

        Args:
            q: (rows, heads, head_dim).
            kv: (rows, 2, kv_heads, head_dim).
        """
        ...


class Model:
    """A network with its weights; immutable."""

    def __init__(self, shape: Architecture, weights: Weights, numerics: Numerics, *, context: int) -> None:
        """Probe how to compute, and tabulate `context` positions."""
        self.shape = shape
        self.numerics = numerics
        self._network = network(weights, numerics)
        self.blocks = row_blocks(self._network.shapes, numerics) if numerics.invariant else ()
        self.invariant = bool(self.blocks) and attention_is_invariant(
            shape.heads, shape.kv_heads, shape.head_dim, numerics.cache_dtype, numerics.device, numerics.threads
        )
        """Whether a row's bits are independent of its company; False also where the machine does not allow it."""
        cos, sin = rope_table(shape.rope, shape.head_dim, padded(context, LANES))
        self._cos, self._sin = cos.to(numerics.device), sin.to(numerics.device)

    def prefill(
        self, cache: KvCache, slot: int, tokens: Sequence[int], start: int, *, want_logits: bool
    ) -> Tensor | None:
        """Run the tokens at positions start .. of a slot; return logits (padded vocab,) after the last, if wanted."""
        attention = _Prefill(self, cache, slot, start, len(tokens))
        x = self._run(tokens, range(start, start + len(tokens)), attention)
        if not want_logits:
            return None
        last = x[len(tokens) - 1 : len(tokens)]
        return self._head(last)[0]

    def decode(self, cache: KvCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Run one token of each of the slots 0 .. len(tokens) - 1; return logits (slots, padded vocab), float32."""
        x = self._run(tokens, positions, _Decode(self, cache, positions))
        return self._head(x[: len(tokens)])

    def verify(self, cache: KvCache, windows: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Run a few tokens in a row of each of the slots 0 .. len(windows) - 1.

        The keys and values of all of them are stored; those of tokens that are rejected lie behind the end of their
        sequence, where nothing looks before they are overwritten.

        Args:
            windows: tokens of each slot, at least one.
            starts: position of the first of each.

        Returns:
            Logits (tokens of all windows, padded vocab), float32, slot after slot.
        """
        tokens = [token for window in windows for token in window]
        positions = [
            position
            for start, window in zip(starts, windows, strict=True)
            for position in range(start, start + len(window))
        ]
        lengths = [len(window) for window in windows]
        # Other numbers of rows than these would each have kernels of their own made for them.
        rows = len(tokens) if self.blocks else bucket(len(tokens))
        attention = (_VerifyBlocks if self.numerics.invariant else _Verify)(self, cache, lengths, starts)
        x = self._run(tokens, positions, attention, rows=rows)
        return self._head(x[: len(tokens)])

    def _run(self, tokens: Sequence[int], positions: Sequence[int], attention: Attention, *, rows: int = 0) -> Tensor:
        plan = split(max(rows, len(tokens)), self.blocks)
        idle = [0] * (sum(plan) - len(tokens))
        given = torch.tensor([[*tokens, *idle], [*positions, *idle]], device=self.numerics.device)
        x = functional.embedding(given[0], self._network.embedding).to(self.numerics.compute_dtype)
        cos, sin = self._cos[given[1]].unsqueeze(1), self._sin[given[1]].unsqueeze(1)
        for index, layer in enumerate(self._network.blocks):
            q, kv = self._qkv(layer, x, plan, cos, sin)
            attended = attention(index, q, kv).to(x.dtype)
            if idle:
                attended = functional.pad(attended, (0, 0, 0, len(idle)))
            x = x.add_(_in_parts(layer.o, attended, plan))
            x = x.add_(self._mlp(layer, x, plan))
        return x

    def _qkv(self, layer: Block, x: Tensor, plan: list[int], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        y = _in_parts(layer.qkv, self._norm(x, layer.input_norm), plan)
        y = y.view(len(x), shape.heads + 2 * shape.kv_heads, shape.head_dim)
        qk, v = torch.split(y, [shape.heads + shape.kv_heads, shape.kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = torch.split(qk, [shape.heads, shape.kv_heads], 1)
            qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], 1)
        # rotate_half: (x1, x2) -> (-x2, x1); the sign is in the table of sines. The product with it is float32.
        qk = (qk * cos).add_(torch.cat(qk.chunk(2, -1)[::-1], -1) * sin)
        q, k = torch.split(qk, [shape.heads, shape.kv_heads], 1)
        return q, torch.stack([k, v.to(k.dtype)], 1)

    def _mlp(self, layer: Block, x: Tensor, plan: list[int]) -> Tensor:
        y = _in_parts(layer.gate_up, self._norm(x, layer.mlp_norm), plan)
        gate, up = y.chunk(2, -1)
        return _in_parts(layer.down, functional.silu(gate).mul_(up), plan)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 2019); torch computes it in float32."""
        return functional.rms_norm(x, weight.shape, weight, self.shape.eps)

    def _head(self, x: Tensor) -> Tensor:
        """Return logits (rows, padded vocab) in float32; with float32 products they are not rounded to the dtype."""
        rows, plan = len(x), split(len(x), self.blocks)
        x = functional.pad(x, (0, 0, 0, sum(plan) - rows))
        return _in_parts(self._network.head, self._norm(x, self._network.norm), plan)[:rows].float()


def _in_parts(layer: Linear, x: Tensor, plan: list[int]) -> Tensor:
    """Return a linear layer's output, computed in blocks of so many rows."""
    return layer(x) if len(plan) == 1 else torch.cat([layer(block) for block in torch.split(x, plan)])


class _Decode:
    """One row of each of the slots 0 .. n-1."""

    def __init__(self, model: Model, cache: KvCache, positions: Sequence[int]) -> None:
        self._cache, self._shape, self._blocked = cache, model.shape, model.numerics.invariant
        self._rows = len(positions)
        self._keys = padded(max(positions) + 1, KEY_BLOCK) if self._blocked else max(positions) + 1
        at = torch.tensor(positions, device=model.numerics.device)
        self._places = cache.places(at)
        bias = _bias(at, self._keys, cache.data.dtype)
        self._bias = bias[:, None].expand(-1, model.shape.kv_heads, -1).reshape(-1, 1, self._keys)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        shape, cache, rows = self._shape, self._cache, self._rows
        q, kv = q[:rows].to(cache.data.dtype), kv[:rows].to(cache.data.dtype)
        cache.put(layer, self._places, kv)
        k, v = (part[: rows * shape.kv_heads, : self._keys] for part in (cache.keys[layer], cache.values[layer]))
        own = q.reshape(rows * shape.kv_heads, -1, shape.head_dim)
        out = attend_blocks(own, k, v, self._bias, KEY_BLOCK) if self._blocked else attend(own, k, v, self._bias)
        return out.view(rows, -1)


class _Prefill:
    """Rows in a row of one slot."""

    def __init__(self, model: Model, cache: KvCache, slot: int, start: int, rows: int) -> None:
        self._cache, self._shape, self._blocked = cache, model.shape, model.numerics.invariant
        self._slot, self._start, self._rows = slot, start, rows
        self._keys = padded(start + rows, KEY_BLOCK) if self._blocked else start + rows
        positions = torch.arange(start, start + rows, device=model.numerics.device)
        self._bias = _bias(positions, self._keys, cache.data.dtype)[:, None]

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        shape, rows, data = self._shape, self._rows, self._cache.data[layer, :, self._slot]
        data[:, :, self._start : self._start + rows] = kv[:rows].permute(1, 2, 0, 3).to(data.dtype)
        k, v = data[:, :, : self._keys]
        own = q[:rows].reshape(rows, shape.kv_heads, -1, shape.head_dim).to(data.dtype)
        if self._blocked:
            # Each query is a matrix product of its own, of the shape that decode has, against keys that all share.
            heads = [
                attend_blocks(own[:, h], k[h].expand(rows, -1, -1), v[h].expand(rows, -1, -1), self._bias, KEY_BLOCK)
                for h in range(shape.kv_heads)
            ]
            out = torch.stack(heads, 1)
        else:
            group = own.shape[2]
            bias = self._bias.expand(-1, group, -1).reshape(1, rows * group, -1)
            out = attend(own.transpose(0, 1).reshape(shape.kv_heads, rows * group, -1), k, v, bias)
            out = out.view(shape.kv_heads, rows, group, -1).transpose(0, 1)
        return out.reshape(rows, -1)


class _Verify:
    """A few rows in a row of each of the slots 0 .. n-1, in one product: a grid of as many rows for each slot."""

    def __init__(self, model: Model, cache: KvCache, lengths: Sequence[int], starts: Sequence[int]) -> None:
        self._cache, self._shape = cache, model.shape
        self._rows, self._slots, self._wide = sum(lengths), len(lengths), max(lengths)
        self._keys = max(start + length for start, length in zip(starts, lengths, strict=True))
        device, kv_heads = model.numerics.device, model.shape.kv_heads
        group = model.shape.heads // kv_heads
        self._places = cache.places(*_positions(lengths, starts, device))
        first = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        within = [min(column, length - 1) for length in lengths for column in range(self._wide)]
        cells = range(self._slots * self._wide)
        at = torch.tensor([starts[cell // self._wide] + within[cell] for cell in cells], device=device)
        bias = _bias(at, self._keys, cache.data.dtype).view(self._slots, 1, self._wide, 1, self._keys)
        self._bias = bias.expand(-1, kv_heads, -1, group, -1).reshape(-1, self._wide * group, self._keys)
        self._grid: Tensor | None = None
        """Row of each cell; a cell too many repeats its slot's last row. None: there is none too many."""
        self._cells: Tensor | None = None
        """Cell of each row."""
        if self._slots * self._wide != self._rows:
            self._grid = torch.tensor([first[cell // self._wide] + within[cell] for cell in cells], device=device)
            own = [slot * self._wide + column for slot, length in enumerate(lengths) for column in range(length)]
            self._cells = torch.tensor(own, device=device)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        shape, cache, slots, wide = self._shape, self._cache, self._slots, self._wide
        q, kv = q[: self._rows].to(cache.data.dtype), kv[: self._rows].to(cache.data.dtype)
        cache.put(layer, self._places, kv)
        k, v = (part[: slots * shape.kv_heads, : self._keys] for part in (cache.keys[layer], cache.values[layer]))
        if self._grid is not None:
            q = q.index_select(0, self._grid)
        own = q.reshape(slots, wide, shape.kv_heads, -1, shape.head_dim).transpose(1, 2)
        out = attend(own.reshape(slots * shape.kv_heads, -1, shape.head_dim), k, v, self._bias)
        out = out.view(slots, shape.kv_heads, wide, -1, shape.head_dim).transpose(1, 2).reshape(slots * wide, -1)
        return out if self._cells is None else out.index_select(0, self._cells)


class _VerifyBlocks:
    """The same with the bits of one row at a time: products of the very shape that decode has, over blocks of keys.

    Either the n-th rows of all slots go together, as in a decode step, or the rows of each slot, as in prefill: whichever
    takes fewer products.
    """

    def __init__(self, model: Model, cache: KvCache, lengths: Sequence[int], starts: Sequence[int]) -> None:
        self._cache, self._shape = cache, model.shape
        self._lengths, self._rows = lengths, sum(lengths)
        device, kv_heads = model.numerics.device, model.shape.kv_heads
        at, slots = _positions(lengths, starts, device)
        self._places = cache.places(at, slots)
        self._first = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
        ends = [padded(start + length, KEY_BLOCK) for start, length in zip(starts, lengths, strict=True)]
        self._keys = max(ends)
        self._columns: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []
        """Of each product of one row of every slot: these rows, the bias, the slots that have such a row (None: all
        have) and the rows of those. A slot without one repeats its last row."""
        self._own: list[tuple[int, int, int, Tensor]] = []
        """First row, rows, keys and bias of each slot."""
        bias = _bias(at, self._keys, cache.data.dtype)
        if max(lengths) <= len(lengths) * kv_heads:
            for column in range(max(lengths)):
                rows = [first + min(column, length - 1) for first, length in zip(self._first, lengths, strict=True)]
                chosen = torch.tensor(rows, device=device)
                part = bias[chosen][:, None].expand(-1, kv_heads, -1).reshape(-1, 1, self._keys)
                having = [slot for slot, length in enumerate(lengths) if column < length]
                if len(having) == len(lengths):
                    self._columns.append((chosen, part, None, chosen))
                else:
                    some = torch.tensor(having, device=device)
                    self._columns.append((chosen, part, some, chosen[some]))
        else:
            for first, length, keys in zip(self._first, lengths, ends, strict=True):
                self._own.append((first, length, keys, bias[first : first + length, None, :keys]))

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        shape, cache = self._shape, self._cache
        q, kv = q[: self._rows].to(cache.data.dtype), kv[: self._rows].to(cache.data.dtype)
        cache.put(layer, self._places, kv)
        q = q.reshape(self._rows, shape.kv_heads, -1, shape.head_dim)
        out = torch.empty_like(q)
        slots = len(self._lengths)
        if self._columns:
            k, v = (part[: slots * shape.kv_heads, : self._keys] for part in (cache.keys[layer], cache.values[layer]))
            for rows, bias, having, theirs in self._columns:
                own = q.index_select(0, rows).flatten(0, 1)
                part = attend_blocks(own, k, v, bias, KEY_BLOCK).view(slots, shape.kv_heads, -1, shape.head_dim)
                out.index_copy_(0, theirs, part if having is None else part.index_select(0, having))
        for slot, (first, length, keys, bias) in enumerate(self._own):
            for head in range(shape.kv_heads):
                row = slot * shape.kv_heads + head
                k, v = (part[row, :keys].expand(length, -1, -1) for part in (cache.keys[layer], cache.values[layer]))
                out[first : first + length, head] = attend_blocks(
                    q[first : first + length, head], k, v, bias, KEY_BLOCK
                )
        return out.view(self._rows, -1)


def _positions(lengths: Sequence[int], starts: Sequence[int], device: str) -> tuple[Tensor, Tensor]:
    """Return position and slot of each row."""
    at = [start + column for start, length in zip(starts, lengths, strict=True) for column in range(length)]
    slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    both = torch.tensor([at, slots], device=device)
    return both[0], both[1]


def _bias(positions: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Return (rows, keys): 0 up to a row's own position, -inf behind it."""
    hidden = torch.arange(keys, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -math.inf)


def rope_table(rope: Rope, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of shape (positions, head_dim), float32.

    The signs are those of rotate_half: x cos + flip(x) sin is the rotation. llama3 scaling is that of Llama 3.1
    (Meta, 2024): long waves are stretched, short ones kept, those between blended.
    """
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        wave = 2 * math.pi / frequency
        low, high = rope.low_freq_factor, rope.high_freq_factor
        blend = (rope.original_context / wave - low) / (high - low)
        blended = (1 - blend) * frequency / rope.factor + blend * frequency
        stretched = torch.where(wave > rope.original_context / low, frequency / rope.factor, blended)
        frequency = torch.where(wave < rope.original_context / high, frequency, stretched)
    angle = torch.arange(positions).float()[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

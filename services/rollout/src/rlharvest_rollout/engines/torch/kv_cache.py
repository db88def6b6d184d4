"""Keys and values of running sequences, in slots, and of prompts that a group shares.

The running sequences have the slots 0 .. n-1 without a hole, so that a decode step reads plain slices and copies
nothing; one slot more is the stage in which a sequence is prefilled before it joins them. Memory is bounded when the
cache is made; on a CPU the system commits a page of it only when it is written.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from rlharvest.errors import InvalidField
from torch import Tensor

from rlharvest_rollout.engines.torch.architecture import Architecture
from rlharvest_rollout.engines.torch.numerics import KEY_BLOCK, Numerics, padded

PROMPT_SHARE = 8
"""One part in so many of the memory is for prompts."""


class KvCache:
    """Keys and values of shape (layers, 2, slots + 1, kv_heads, context, head_dim)."""

    def __init__(self, model: Architecture, numerics: Numerics, *, slots: int, context: int, memory_bytes: int) -> None:
        """Take memory for as many of `slots` as fit.

        Raises:
            InvalidField: not even one sequence of `context` tokens fits.
        """
        context = padded(context, KEY_BLOCK)
        item = 4 if numerics.cache_dtype is torch.float32 else 2
        slot_bytes = model.layers * 2 * model.kv_heads * context * model.head_dim * item
        prompts = memory_bytes // PROMPT_SHARE
        fitting = (memory_bytes - prompts) // slot_bytes - 1
        if fitting < 1:
            raise InvalidField(
                "kv_memory_bytes",
                memory_bytes,
                f"one sequence of {context} tokens takes {slot_bytes} bytes, and two must fit into 7/8 of it",
                f"Give at least {3 * slot_bytes} bytes, or lower the job's max_completion_length.",
            )
        self.slots = min(slots, fitting)
        self.context = context
        self.stage = self.slots
        """Slot of the sequence that is prefilled."""
        self.prompts = PromptCache(prompts)
        shape = (model.layers, 2, self.slots + 1, model.kv_heads, context, model.head_dim)
        # Zeros, not garbage: a hidden key counts 0 times its value, and 0 times NaN is NaN. calloc gives them for free.
        if numerics.device == "cpu":
            self.data = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        else:
            self.data = torch.zeros(shape, dtype=numerics.cache_dtype, device=numerics.device)
        # Views are made once: a small model's step is so short that slicing shows.
        self.keys = [layer[0].flatten(0, 1) for layer in self.data]
        """Of each layer, (slots + 1) * kv_heads rows of (context, head_dim)."""
        self.values = [layer[1].flatten(0, 1) for layer in self.data]
        self._places = [layer.view(-1, model.head_dim) for layer in self.data]
        self._kv_heads = model.kv_heads

    def places(self, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return where `put` stores the keys and values of some positions.

        Args:
            positions: (n,).
            slots: (n,), of each position; None: one of each of the slots 0 .. n-1.
        """
        row = torch.arange(2 * (self.slots + 1) * self._kv_heads, device=positions.device)
        row = row.view(2, self.slots + 1, self._kv_heads)
        rows = row[:, : len(positions)] if slots is None else row.index_select(1, slots)
        return (rows.transpose(0, 1) * self.context + positions[:, None, None]).flatten()

    def put(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Store kv (n, 2, kv_heads, head_dim)."""
        self._places[layer].index_copy_(0, places, kv.flatten(0, 2))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def keep_prompt(self, prompt: bytes, length: int, logits: Tensor) -> None:
        """Keep the first `length` tokens of the stage for the rest of the prompt's group."""
        kv = self.data[:, :, self.stage, :, :length].clone()
        self.prompts.put(prompt, Prompt(kv=kv, logits=logits.clone()))

    def stage_prompt(self, prompt: Prompt) -> None:
        """Copy a kept prompt to the stage."""
        self.data[:, :, self.stage, :, : prompt.kv.shape[3]] = prompt.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that was prefilled."""

    kv: Tensor
    """(layers, 2, kv_heads, tokens, head_dim)."""
    logits: Tensor
    """(vocab,), after its last token."""

    @property
    def bytes(self) -> int:
        return self.kv.nbytes + self.logits.nbytes


class PromptCache:
    """Prompts by their tokens, least recently used out first. Of one version only: clear it at a switch."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, tokens: bytes) -> Prompt | None:
        """Return the prompt with these tokens, if it is kept."""
        found = self._prompts.get(tokens)
        if found is not None:
            self._prompts.move_to_end(tokens)
        return found

    def put(self, tokens: bytes, prompt: Prompt) -> None:
        """Keep a prompt, unless it is larger than the whole cache."""
        if prompt.bytes > self._limit or tokens in self._prompts:
            return
        self._prompts[tokens] = prompt
        self._held += prompt.bytes
        while self._held > self._limit:
            _, dropped = self._prompts.popitem(last=False)
            self._held -= dropped.bytes

    def clear(self) -> None:
        """Forget all: other weights give other keys and values."""
        self._prompts.clear()
        self._held = 0

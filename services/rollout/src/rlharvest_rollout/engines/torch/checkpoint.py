"""Read the weights of a Hugging Face directory into the network's own layout.

Invariants: safetensors only; every tensor the architecture has is read once and checked for shape and finite values; a
tensor it has no place for is refused, since ignoring one would silently compute another model. Nothing that exists is
changed: a failed load leaves no trace. Besides the new weights, one tensor at a time is held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rlharvest.errors import CorruptData, InvalidField
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlharvest_rollout.engines.torch.architecture import Architecture
from rlharvest_rollout.engines.torch.numerics import LANES, Numerics, padded

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one block. Linear ones have shape (outputs, inputs)."""

    input_norm: Tensor
    qkv: Tensor
    """Queries, keys, values one below the other: one product instead of three."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """Gate above up, each padded with zero rows to a multiple of LANES."""
    gate_up_bias: Tensor | None
    down: Tensor
    """Padded with zero columns in the same way."""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights of a model."""

    embedding: Tensor
    """(vocab, hidden)."""
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    """(vocab padded with zero rows to a multiple of LANES, hidden); shares memory with the embedding if tied."""

    @property
    def bytes(self) -> int:
        """Memory they take."""
        own = [self.embedding, self.norm] + ([] if self.head.data_ptr() == self.embedding.data_ptr() else [self.head])
        parts = [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        return sum(tensor.nbytes for tensor in [*own, *parts] if tensor is not None)


def read_weights(directory: Path, model: Architecture, numerics: Numerics) -> Weights:
    """Return the weights in a directory, rounded to the numerics' dtype.

    Raises:
        InvalidField: a tensor is missing, superfluous, of a wrong shape or not finite (it is named), or there are none.
        CorruptData: a file is not what its header says.
    """
    weights, places = _empty(model, numerics)
    for path, names in _files(directory).items():
        with _opened(path) as tensors:
            for name in tensors.keys() if names is None else names:
                _place(path, name, tensors.get_tensor(name), places, model, weights, numerics)
    if places:
        name = min(places)
        untied = " (config.json says the head is not tied to the embedding)" if name == HEAD else ""
        raise InvalidField(
            f"model.{name}",
            str(directory),
            f"the tensor is missing{untied}",
            "Save the model again, with all its tensors.",
        )
    return weights


def _place(
    path: Path,
    name: str,
    tensor: Tensor,
    places: dict[str, Tensor],
    model: Architecture,
    weights: Weights,
    numerics: Numerics,
) -> None:
    """Copy a tensor to its place in the weights."""
    if name.endswith(".rotary_emb.inv_freq"):
        return  # older releases saved this constant
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise InvalidField(
            f"model.{name}", path.name, "it holds values that are not finite numbers", "Save a sound model."
        )
    rounded = tensor.to(numerics.torch_dtype)
    if name == HEAD and model.tied:
        # The embedding may come later, or from another file, so compare when both are there.
        places["_" + HEAD] = rounded
    elif name not in places:
        raise InvalidField(
            f"model.{name}",
            path.name,
            f"a {model.kind} model has no such tensor",
            "Correct model_type, or the weights.",
        )
    else:
        place = places.pop(name)
        if place.shape != tensor.shape:
            raise InvalidField(
                f"model.{name}", list(tensor.shape), f"config.json wants {list(place.shape)}", "Correct one of the two."
            )
        place.copy_(rounded)
    if "_" + HEAD in places and EMBEDDING not in places:
        head = places.pop("_" + HEAD)
        if not torch.equal(head.to(weights.embedding), weights.embedding):
            raise InvalidField(
                "model.tie_word_embeddings",
                True,
                f"{HEAD} differs from {EMBEDDING}",
                "Set it to false, or save the model without the head.",
            )


def _files(directory: Path) -> dict[Path, list[str] | None]:
    """Return the files to read and which tensors of each (None: all)."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return {single: None}
    if not index.exists():
        binary = any(directory.glob("*.bin"))
        problem = "it has weights only as .bin, which can run code" if binary else "it has no model.safetensors"
        raise InvalidField("model", str(directory), problem, "Save the model as safetensors.")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise InvalidField("model.weight_map", file, "a shard must lie in the model's directory", "Correct it.")
            names = files.setdefault(directory / file, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidField(
            "model", str(index), f"not a safetensors index ({error!r})", "Save the model again."
        ) from error
    for path in files:
        if not path.exists():
            raise InvalidField("model.weight_map", path.name, "the index names it, but it is missing", "Add the shard.")
    return files


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CorruptData(f"{path} ({path.stat().st_size} bytes) is not a sound safetensors file: {error}") from error


def _empty(model: Architecture, numerics: Numerics) -> tuple[Weights, dict[str, Tensor]]:
    """Return zero weights, and for each tensor of a directory the part of them that it fills."""
    places: dict[str, Tensor] = {}

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=numerics.torch_dtype, device=numerics.device)

    width, hidden = padded(model.intermediate, LANES), model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layers = []
    for index in range(model.layers):
        layer = Layer(
            input_norm=zeros(hidden),
            qkv=zeros(queries + 2 * keys, hidden),
            qkv_bias=zeros(queries + 2 * keys) if model.qkv_bias else None,
            q_norm=zeros(model.head_dim) if model.qk_norm else None,
            k_norm=zeros(model.head_dim) if model.qk_norm else None,
            o=zeros(hidden, queries),
            o_bias=zeros(hidden) if model.o_bias else None,
            mlp_norm=zeros(hidden),
            gate_up=zeros(2 * width, hidden),
            gate_up_bias=zeros(2 * width) if model.mlp_bias else None,
            down=zeros(hidden, width),
            down_bias=zeros(hidden) if model.mlp_bias else None,
        )
        layers.append(layer)
        prefix = f"model.layers.{index}"
        parts = (slice(0, queries), slice(queries, queries + keys), slice(queries + keys, None))
        for part, name in zip(parts, "qkv", strict=True):
            places[f"{prefix}.self_attn.{name}_proj.weight"] = layer.qkv[part]
            if layer.qkv_bias is not None:
                places[f"{prefix}.self_attn.{name}_proj.bias"] = layer.qkv_bias[part]
        for start, name in ((0, "gate"), (width, "up")):
            part = slice(start, start + model.intermediate)
            places[f"{prefix}.mlp.{name}_proj.weight"] = layer.gate_up[part]
            if layer.gate_up_bias is not None:
                places[f"{prefix}.mlp.{name}_proj.bias"] = layer.gate_up_bias[part]
        optional = {
            "self_attn.o_proj.bias": layer.o_bias,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "mlp.down_proj.bias": layer.down_bias,
        }
        places |= {f"{prefix}.{name}": tensor for name, tensor in optional.items() if tensor is not None}
        places[f"{prefix}.self_attn.o_proj.weight"] = layer.o
        places[f"{prefix}.mlp.down_proj.weight"] = layer.down[:, : model.intermediate]
        places[f"{prefix}.input_layernorm.weight"] = layer.input_norm
        places[f"{prefix}.post_attention_layernorm.weight"] = layer.mlp_norm
    head = zeros(padded(model.vocab, LANES), hidden)
    embedding = head[: model.vocab] if model.tied else zeros(model.vocab, hidden)
    weights = Weights(embedding=embedding, layers=tuple(layers), norm=zeros(hidden), head=head)
    places |= {EMBEDDING: embedding, "model.norm.weight": weights.norm}
    if not model.tied:
        places[HEAD] = head[: model.vocab]
    return weights, places

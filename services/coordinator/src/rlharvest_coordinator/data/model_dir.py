"""A model directory, looked at before anything loads it: the configuration, and that its safetensors files are whole.

Only headers are read, so this takes milliseconds for any size. What cannot be trained or generated from (other kinds of
models, quantised weights, pickled weights, custom code, adapters) is refused here, with what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.errors import CorruptData, InvalidField
from rlharvest.weights import safetensors_check

from rlharvest_coordinator.data.tokenizer import read_json

KINDS = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that the engines and the trainer run."""

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_MOST = {"num_hidden_layers": 10_000}
_MOST_ANY = 2**31 - 1
_LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the coordinator needs to know of a model."""

    kind: str
    context: int
    """Most tokens of a prompt and its response together."""
    vocab: int
    """Rows of the head, padding included."""
    eos_ids: frozenset[int]
    """Those that config.json and generation_config.json name."""


def check(directory: Path, *, field: str = "model") -> ModelInfo:
    """Look at a Hugging Face directory.

    Raises:
        InvalidField: for `field`; names the file, what was found and what to do.
    """
    _whole(directory, field)
    config = read_json(directory / "config.json", field)
    kind = _kind(directory, config, field)
    for size in _SIZES:
        value, most = config.get(size), _MOST.get(size, _MOST_ANY)
        if type(value) is not int or not 0 < value <= most:
            raise _refuse(
                field, directory, f"config.json has {size} = {value!r:.100}", f"It must be a number from 1 to {most}."
            )
    shapes = _tensors(directory, field)
    _complete(directory, config, shapes, field)
    generation = read_json(directory / "generation_config.json", field)
    return ModelInfo(
        kind=kind,
        context=config["max_position_embeddings"],
        vocab=config["vocab_size"],
        eos_ids=_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
    )


def _whole(directory: Path, field: str) -> None:
    if not directory.is_dir():
        raise _refuse(field, directory, "is a file, not a directory", "Name the directory that holds config.json.")
    if (directory / "adapter_config.json").is_file():
        raise _refuse(
            field,
            directory,
            "is an adapter (adapter_config.json), not a whole model",
            "Merge it into its base: PeftModel.from_pretrained(base, DIR).merge_and_unload().save_pretrained(OUT).",
        )
    if not (directory / "config.json").is_file():
        found = ", ".join(sorted(file.name for file in directory.iterdir())[:8]) or "nothing"
        raise _refuse(field, directory, f"there is no config.json; found {found}", "Name a Hugging Face directory.")
    for name in ("config.json", "tokenizer.json"):
        _no_pointer(directory / name, field)


def _kind(directory: Path, config: dict[str, Any], field: str) -> str:
    kind = config.get("model_type")
    if "auto_map" in config:
        raise _refuse(
            field,
            directory,
            "needs code of its own (auto_map in config.json, for trust_remote_code), which is never run",
            f"Use a model of kind {', '.join(KINDS)}; if it is one, remove auto_map.",
        )
    if "quantization_config" in config:
        method = config["quantization_config"]
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise _refuse(field, directory, f"its weights are quantised ({name})", "Use the float or bfloat16 weights.")
    if kind not in KINDS:
        why = "is a model of several parts" if "text_config" in config else f"has model_type {kind!r}"
        raise _refuse(
            field, directory, f"config.json {why}", f"Use a causal language model of kind {', '.join(KINDS)}."
        )
    heads = config.get("architectures") or []
    if not isinstance(heads, list):
        raise _refuse(
            field, directory, f"config.json has architectures = {heads!r:.100}", "It must be a list of names."
        )
    if heads and not any(str(head).endswith("ForCausalLM") for head in heads):
        raise _refuse(field, directory, f"is a {heads[0]}, not a causal language model", "Use a ...ForCausalLM.")
    if config.get("use_sliding_window"):
        raise _refuse(field, directory, "uses sliding-window attention", "Set use_sliding_window: false if it may.")
    return str(kind)


def _tensors(directory: Path, field: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor, each file checked against its size and against the index."""
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if single.is_file():
        return _header(single, field)
    if not index.is_file():
        pickled = next(iter(sorted(directory.glob("*.bin"))), None)
        if pickled is not None:
            raise _refuse(
                field,
                directory,
                f"has its weights only in {pickled.name}, a pickle, which is never loaded",
                "Save it again: model.save_pretrained(DIR), which writes safetensors.",
            )
        raise _refuse(field, directory, "there is no model.safetensors", "Add it, or its shards with their index.")
    places = read_json(index, field).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise _refuse(field, index, "has no weight_map", "Copy the index again.")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(set(map(str, places.values()))):
        shard = directory / name
        if "/" in name or not shard.is_file():
            raise _refuse(field, directory, f"the index names {name!r}, which is not there", "Copy this file too.")
        held = _header(shard, field)
        lacking = [tensor for tensor, place in places.items() if place == name and tensor not in held]
        if lacking:
            raise _refuse(field, shard, f"lacks {lacking[0]!r}, which the index puts there", "Copy this file again.")
        shapes |= {tensor: shape for tensor, shape in held.items() if places.get(tensor) == name}
    return shapes


def _header(path: Path, field: str) -> dict[str, tuple[int, ...]]:
    _no_pointer(path, field)
    try:
        return safetensors_check.check(path)
    except CorruptData as error:
        raise _refuse(field, path, str(error), "Copy this file again.") from error


def _complete(directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], field: str) -> None:
    """Check that every tensor of this kind is there and the embedding fits the configuration."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{i}.{part}.weight" for i in range(config["num_hidden_layers"]) for part in _LAYER]
    if not config.get("tie_word_embeddings", False):
        names.append("lm_head.weight")
    missing = [name for name in names if name not in shapes]
    if missing:
        fix = (
            "Set tie_word_embeddings: true in config.json if the head is the embedding."
            if missing == ["lm_head.weight"]
            else "Copy the weights again."
        )
        raise _refuse(field, directory, f"{len(missing)} tensors are missing, e.g. {missing[0]!r}", fix)
    wanted = (config["vocab_size"], config["hidden_size"])
    found = shapes["model.embed_tokens.weight"]
    if found != wanted:
        raise _refuse(
            field,
            directory,
            f"the embedding is {found}, config.json says {wanted}",
            "Correct vocab_size or hidden_size.",
        )


def _no_pointer(path: Path, field: str) -> None:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise _refuse(field, path, "is a git-lfs pointer, not the file itself", "Run `git lfs pull` there.")


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _refuse(field: str, path: Path, problem: str, fix: str) -> InvalidField:
    return InvalidField(field, str(path), problem, fix)

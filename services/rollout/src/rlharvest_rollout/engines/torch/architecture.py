"""What a model directory's config.json says, as the few numbers that the network needs.

Only plain JSON is read: no code of a model directory ever runs. Whatever the network does not compute exactly as the
model's authors do is refused here, by the name of the setting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlharvest.errors import InvalidField

KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., "RoFormer", 2021), and how its frequencies are scaled."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape of a decoder-only transformer of the Llama family."""

    kind: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    """The output head is the embedding."""
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


def read_architecture(directory: Path) -> Architecture:
    """Return the architecture of a Hugging Face model directory.

    Raises:
        InvalidField: it is no model directory, or none this engine computes; names the setting.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        adapter = (directory / "adapter_config.json").exists()
        problem = "an adapter without its model" if adapter else "there is no config.json"
        fix = "Merge it into its base model first" if adapter else "Give a Hugging Face model directory"
        raise InvalidField("model", str(directory), problem, f"{fix}.") from None
    except (OSError, ValueError) as error:
        raise InvalidField("model", str(path), f"not readable as JSON ({error})", "Save the model again.") from error
    if not isinstance(config, dict):
        raise InvalidField("model", str(path), "not a JSON object", "Save the model again.")
    return architecture(config)


def architecture(config: dict[str, Any]) -> Architecture:
    """Return the architecture that a decoded config.json describes; raise InvalidField for what is not supported."""
    kind = config.get("model_type")
    supported = f"Use a model whose model_type is one of {', '.join(KINDS)}."
    if "vision_config" in config or "text_config" in config or "audio_config" in config:
        raise InvalidField("model.model_type", kind, "a multimodal model", supported)
    if kind not in KINDS:
        raise InvalidField("model.model_type", kind, "not supported by the torch engine", supported)
    if config.get("quantization_config"):
        method = config["quantization_config"]
        raise InvalidField(
            "model.quantization_config", method, "a quantised model", "Give the float32 or bfloat16 original."
        )
    if config.get("auto_map"):
        raise InvalidField(
            "model.auto_map",
            config["auto_map"],
            "the model brings its own code (trust_remote_code), which is never run",
            supported,
        )
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidField("model.hidden_act", config["hidden_act"], "not supported", "Use a model with silu.")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or layer_types:
        shown = sorted(layer_types) or True
        raise InvalidField(
            "model.use_sliding_window", shown, "sliding-window attention is not supported", "Use full attention."
        )
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", heads if kind == "llama" else None)
    if heads % kv_heads:
        raise InvalidField(
            "model.num_key_value_heads",
            kv_heads,
            f"{heads} attention heads are no multiple of it",
            "Correct config.json.",
        )
    head_dim = _count(config, "head_dim", 128 if kind == "qwen3" else hidden // heads)
    if head_dim % 8:
        raise InvalidField("model.head_dim", head_dim, "not a multiple of 8", "Use a model with such heads.")
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        kind=kind,
        vocab=_count(config, "vocab_size"),
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=kind != "qwen2" and attention_bias,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def _count(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidField(f"model.{name}", value, "not a positive number", "Correct config.json.")
    return value


def _rope(config: dict[str, Any]) -> Rope:
    # transformers 5 writes everything into rope_parameters; before it there were rope_theta and rope_scaling.
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise InvalidField("model.partial_rotary_factor", partial, "not supported", "Use a model that rotates all.")
    try:
        if kind == "default":
            return Rope(theta=theta)
        if kind == "linear":
            return Rope(theta=theta, kind="linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            return Rope(
                theta=theta,
                kind="llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_context=int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise InvalidField(
            "model.rope_parameters", scaling, f"{error.args[0]} is missing", "Correct config.json."
        ) from error
    raise InvalidField(
        "model.rope_parameters.rope_type", kind, "not supported", "Use a model with default, linear or llama3."
    )

"""A whole model directory of a few kilobytes, made in milliseconds and without torch: config, tokenizer, safetensors.

Its weights are zeros, so it is for whatever reads model directories, not for what generates. One id is one character.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Special tokens, by id from 0."""

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template."""

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


def write_tiny_model(
    directory: Path,
    *,
    template: str | None = None,
    bos: bool = False,
    words: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a Llama of one layer into a new directory and return it.

    Args:
        directory: must not exist.
        template: chat template; None makes a base model.
        bos: whether tokenizer.json itself puts `<s>` first.
        words: more keys of tokenizer_config.json.
        config: keys of config.json to change; None removes one.
    """
    directory.mkdir(parents=True)
    tokenizer = _tokenizer(bos=bos)
    tokenizer.save(str(directory / "tokenizer.json"))
    said = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "unk_token": "<unk>",
        **(words or {}),
    }
    if template is not None:
        said["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    vocab = config.get("vocab_size", tokenizer.get_vocab_size())
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    kept = {key: value for key, value in values.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    tensors: dict[str, Any] = {f"model.layers.0.{name}.weight": np.zeros((8, 8), np.float32) for name in _LAYER}
    tensors["model.embed_tokens.weight"] = np.zeros((vocab, 8), np.float32)
    tensors["model.norm.weight"] = np.zeros(8, np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def _tokenizer(*, bos: bool) -> Tokenizer:
    characters = [*map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(
        models.WordLevel({text: id for id, text in enumerate([*SPECIAL, *characters])}, unk_token="<unk>")  # noqa: S106
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer

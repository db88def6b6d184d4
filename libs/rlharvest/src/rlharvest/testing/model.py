"""A whole model directory of a few kilobytes, made in milliseconds and without torch: config, tokenizer, safetensors.

Enough for every service to load, too small to be any good. One id is one character.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ALPHABET = "0123456789+-*/=()? abcdefghijklmnopqrstuvwxyz"
EOS = "</s>"
PAD = "<pad>"

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template for CHAT."""


@dataclass(frozen=True, slots=True)
class Words:
    """The tokens of a tokenizer by id from 0, and what tokenizer_config.json says of them."""

    specials: tuple[str, ...]
    characters: str
    unknown: str
    said: dict[str, Any]

    @property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return {token: index for index, token in enumerate([*self.specials, *self.characters])}


PLAIN = Words((PAD, EOS), ALPHABET, PAD, {"eos_token": EOS, "pad_token": PAD})
"""What the stub engine and the small datasets of tests use."""

CHAT = Words(
    ("<unk>", "<s>", EOS, "<|im_start|>", "<|im_end|>"),
    "".join([*map(chr, range(32, 127)), "\n"]),
    "<unk>",
    {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": EOS}, "unk_token": "<unk>"},
)
"""Every printable character, and the special tokens of a chat model."""


def tiny_model(
    directory: Path,
    *,
    words: Words = PLAIN,
    template: str | None = None,
    bos: bool = False,
    said: dict[str, Any] | None = None,
    hidden: int = 16,
    layers: int = 1,
    context: int = 512,
    seed: int = 0,
    generation_config: bool = True,
    **config: Any,
) -> Path:
    """Write a Llama directory with a character tokenizer and seeded random weights; return it.

    Args:
        template: chat template; None makes a base model.
        bos: whether tokenizer.json itself puts `<s>` first.
        said: more keys of tokenizer_config.json.
        generation_config: whether there is a generation_config.json.
        config: keys of config.json to change; None removes one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocab = words.vocab
    heads = 2
    special_ids = {f"{name}_token_id": vocab[token] for name, token in (("bos", "<s>"), ("eos", EOS), ("pad", PAD))
                   if token in vocab}  # fmt: skip
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        **special_ids,
        **config,
    }
    _write(directory / "config.json", {key: value for key, value in values.items() if value is not None})
    if generation_config:
        _write(directory / "generation_config.json", special_ids)
    _write(directory / "tokenizer.json", _tokenizer(words, bos=bos))
    spoken = {"tokenizer_class": "PreTrainedTokenizerFast", **words.said, **(said or {})}
    if template is not None:
        spoken["chat_template"] = template
    _write(directory / "tokenizer_config.json", spoken)
    _safetensors(directory / "model.safetensors", _weights(config.get("vocab_size", len(vocab)), hidden, layers, seed))
    return directory


def questions(path: Path, n: int = 32) -> Path:
    """Write a JSONL dataset of `n` additions in question/answer shape; return its path."""
    lines = (json.dumps({"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1)}) for i in range(n))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _tokenizer(words: Words, *, bos: bool) -> dict[str, object]:
    vocab = words.vocab
    special = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in words.specials
    ]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    first = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab.get("<s>", 0)], "tokens": ["<s>"]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False,
        },
        "post_processor": first if bos else None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words.unknown},
    }  # fmt: skip


def _weights(vocab: int, hidden: int, layers: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0, 0.02, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(vocab, hidden), "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{name}.self_attn.{projection}.weight"] = normal(hidden, hidden)
        tensors[f"{name}.mlp.gate_proj.weight"] = normal(2 * hidden, hidden)
        tensors[f"{name}.mlp.up_proj.weight"] = normal(2 * hidden, hidden)
        tensors[f"{name}.mlp.down_proj.weight"] = normal(hidden, 2 * hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = np.ones(hidden, np.float32)
    return tensors


def _safetensors(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensor, dtype="<f4").tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)

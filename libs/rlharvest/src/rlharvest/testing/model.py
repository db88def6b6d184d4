"""A model directory of a few kilobytes, made without torch: enough for every service to load, too small to be any good."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

ALPHABET = "0123456789+-*/=()? abcdefghijklmnopqrstuvwxyz"
EOS = "</s>"
PAD = "<pad>"


def tiny_model(directory: Path, *, hidden: int = 16, layers: int = 1, context: int = 512, seed: int = 0) -> Path:
    """Write a Llama directory with a character tokenizer and seeded random weights; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate([PAD, EOS, *ALPHABET])}
    heads = 2
    config = {
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
        "eos_token_id": vocab[EOS],
        "pad_token_id": vocab[PAD],
        "dtype": "float32",
    }
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"eos_token_id": vocab[EOS], "pad_token_id": vocab[PAD]})
    _write(directory / "tokenizer.json", _tokenizer(vocab))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
    _write(directory / "tokenizer_config.json", tokenizer)
    _safetensors(directory / "model.safetensors", _weights(len(vocab), hidden, layers, seed))
    return directory


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _tokenizer(vocab: dict[str, int]) -> dict[str, object]:
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
        for token in (PAD, EOS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": PAD},
    }


def _weights(
    vocab: int, hidden: int, layers: int, seed: int
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
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


def _safetensors(path: Path, tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensor, dtype="<f4").tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def questions(path: Path, n: int = 32) -> Path:
    """Write a JSONL dataset of `n` additions in question/answer shape; return its path."""
    lines = (json.dumps({"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1)}) for i in range(n))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path

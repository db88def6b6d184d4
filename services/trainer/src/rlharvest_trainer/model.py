"""Loading a Hugging Face directory as a causal language model, and refusing what can't be trained from it.

Invariants: nothing is fetched, no code of the directory runs, no pickle is opened; a model that loads has every
tensor from the files (none made up at random), and its head is tied if and only if its config says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from rlharvest.errors import InvalidField
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

Dtype = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager"]
CausalLM = Any
"""A transformers model: PreTrainedModel with a language head. transformers has no types to speak of."""

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load(
    directory: Path, *, dtype: Dtype, attention: Attention = "sdpa", device: torch.device, field: str = "model"
) -> CausalLM:
    """Return the model of a directory, in evaluation mode (no dropout: the policy that is trained is the one that
    samples).

    Args:
        field: how errors name the directory.

    Raises:
        InvalidField: there is no such directory, or it holds no model that can be trained; says why and what to do.
    """
    config = read_config(directory, field)
    names = _tensor_names(directory, field)
    _check_tying(directory, config, names, field)
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise InvalidField(
            field,
            str(directory),
            f"transformers cannot load it: {_first_line(error)}",
            "Give a directory that AutoModelForCausalLM.from_pretrained loads without trust_remote_code.",
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise InvalidField(
            field,
            str(directory),
            f"the files lack {len(missing)} tensors, first {missing[0]!r}",
            "Save the whole model with save_pretrained; for a head that shares the embedding set tie_word_embeddings.",
        )
    model.requires_grad_(True)
    return model.eval().to(device)


def read_config(directory: Path, field: str = "model") -> dict[str, Any]:
    """Return config.json of a directory; raise InvalidField if it is absent, unreadable, quantised, or needs own
    code."""
    shown = str(directory)
    if not directory.is_dir():
        raise InvalidField(
            field, shown, "there is no such directory on the trainer's machine", "Put the model there, or fix the path."
        )
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidField(
            field, shown, "it has no config.json", "Give a Hugging Face directory, as save_pretrained writes it."
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidField(field, shown, f"config.json cannot be read: {error}", "Save the model again.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise InvalidField(
            field, shown, "config.json names no model_type", "Save the model again with save_pretrained."
        )
    if config.get("auto_map"):
        raise InvalidField(
            field,
            shown,
            "it needs code of its own (auto_map in config.json, for trust_remote_code), which is never run",
            "Give a model that transformers has the code of; if it is one, remove auto_map.",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise InvalidField(
            field,
            shown,
            f"its weights are quantised ({method})",
            "Give the float32 or bfloat16 model it was made from.",
        )
    return config


def vocabulary(model: CausalLM, tokenizer_directory: Path) -> int:
    """Return how many ids can be sampled: the tokenizer's, where the head is padded beyond them; else all of the
    head."""
    head = int(model.get_output_embeddings().weight.shape[0])
    path = tokenizer_directory / "tokenizer.json"
    if not path.is_file():
        return head
    return min(
        head, max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values(), default=head - 1) + 1
    )


def parameters(model: CausalLM) -> dict[str, Tensor]:
    """Return the trainable tensors by name, sorted: the model's own order depends on how it was made. A tied one once."""
    return dict(sorted((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad))


def _tensor_names(directory: Path, field: str) -> dict[str, str]:
    """Return {tensor: file}."""
    shown = str(directory)
    if (directory / _INDEX).is_file():
        try:
            names = dict(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidField(field, shown, f"{_INDEX} cannot be read: {error!r}", "Save the model again.") from error
        absent = sorted(file for file in set(names.values()) if not (directory / file).is_file())
        if absent:
            raise InvalidField(
                field, shown, f"{absent[0]}, which the index names, is missing", "Copy the whole directory."
            )
        return names
    if not (directory / _SINGLE).is_file():
        found = sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
        problem = f"its weights are in {found[0]}, not in safetensors" if found else "it has no model.safetensors"
        raise InvalidField(field, shown, problem, "Save it with save_pretrained(..., safe_serialization=True).")
    try:
        with safe_open(directory / _SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except (OSError, SafetensorError) as error:
        raise InvalidField(
            field, shown, f"{_SINGLE} cannot be read: {error}", "The file is cut short or damaged: copy it again."
        ) from error


def _check_tying(directory: Path, config: dict[str, Any], names: dict[str, str], field: str) -> None:
    head = next((name for name in names if name.endswith("lm_head.weight")), None)
    embedding = next((name for name in names if name.endswith("embed_tokens.weight")), None)
    if not config.get("tie_word_embeddings") or head is None or embedding is None:
        return
    tensors = []
    for name in (head, embedding):
        with safe_open(directory / names[name], framework="pt") as file:
            tensors.append(file.get_tensor(name))
    if not torch.equal(*tensors):
        raise InvalidField(
            field,
            str(directory),
            f"config.json ties the embeddings, but {head!r} and {embedding!r} differ",
            "Set tie_word_embeddings to false in config.json if the head has weights of its own, else remove the head.",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]

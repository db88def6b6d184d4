"""A version's directory, checked before vLLM sees it: what vLLM has begun to load it cannot take back.

Invariant: a version that passes has the tensors, shapes and dtypes of the one that the engine was started with, and
every value is finite; so a reload fails only for reasons outside of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlharvest.errors import CorruptData, InvalidField
from safetensors import SafetensorError, safe_open

_SAME = ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
"""Keys of config.json that a running engine cannot change and that every release of transformers writes alike."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What two versions of one engine have in common."""

    config: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    def check_same(self, other: Layout, directory: Path) -> None:
        """Check that `other`, found in a directory, can go into an engine that was started with this.

        Raises:
            InvalidField: it cannot; names the first difference.
        """
        mine, theirs = dict(self.config), dict(other.config)
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise InvalidField(
                    f"model.{key}",
                    theirs.get(key),
                    f"the versions before have {mine.get(key)}",
                    "Publish the same model.",
                )
        shapes, found = dict(self.tensors), dict(other.tensors)
        for name in sorted(shapes.keys() | found.keys()):
            if shapes.get(name) != found.get(name):
                raise InvalidField(
                    f"model.{name}",
                    found.get(name, "missing"),
                    f"the versions before have {shapes.get(name, 'no such tensor')}",
                    f"Save the same model again in {directory.name}.",
                )


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a model.

    Raises:
        InvalidField: there is none, or it is no JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidField("model", str(path), f"it cannot be read ({error})", "Save the model again.") from error
    if not isinstance(config, dict):
        raise InvalidField("model", str(path), "it is not a JSON object", "Save the model again.")
    return config


def read_layout(directory: Path) -> Layout:
    """Read a directory whole and return its layout. Blocks; afterwards its bytes are in the page cache.

    Raises:
        InvalidField: it has no safetensors, or one with values that are not finite.
        CorruptData: a file is not what its header says.
    """
    config = read_config(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidField("model", str(directory), "it has no safetensors file", "Save the model as safetensors.")
    tensors: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    tensor = opened.get_tensor(name)
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        raise InvalidField(
                            f"model.{name}", path.name, "it holds values that are not finite", "Save a sound model."
                        )
                    tensors[name] = tuple(tensor.shape)
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size if path.exists() else 0
            raise CorruptData(f"{path} ({size} bytes) is not a sound safetensors file: {error}") from error
    kept = tuple((key, json.dumps(config.get(key), sort_keys=True)) for key in _SAME)
    return Layout(kept, tuple(sorted(tensors.items())))

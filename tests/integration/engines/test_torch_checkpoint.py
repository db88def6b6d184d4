"""Which model directories load, and what the others are told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlharvest.errors import CorruptData, InvalidField
from rlharvest_rollout.engines.torch.architecture import read_architecture
from rlharvest_rollout.engines.torch.checkpoint import Weights, read_weights
from rlharvest_rollout.engines.torch.numerics import Numerics
from safetensors.torch import load_file, save_file

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


def read(directory: Path) -> Weights:
    numerics = Numerics(dtype="float32", invariant=True, threads=1)
    return read_weights(directory, read_architecture(directory), numerics)


@pytest.fixture
def changed(make_model: Any, tmp_path: Path) -> Callable[[bool, Callable[[Tensors], None]], Path]:
    """Return a copy of a model with its tensors changed."""

    def change(tied: bool, edit: Callable[[Tensors], None]) -> Path:
        copy = tmp_path / "model"
        shutil.copytree(make_model("llama", tied=tied), copy)
        tensors = load_file(copy / "model.safetensors")
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
        return copy

    return change


def test_tied_without_head_loads(changed: Any) -> None:
    weights = read(changed(True, lambda tensors: None))
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


def test_tied_with_an_equal_head_loads(changed: Any) -> None:
    read(changed(True, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()})))


def test_tied_with_a_different_head_is_refused(changed: Any) -> None:
    directory = changed(True, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1e-3}))
    with pytest.raises(InvalidField, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        read(directory)


def test_untied_without_head_is_refused_with_its_name(changed: Any) -> None:
    with pytest.raises(InvalidField, match=r"model\.lm_head\.weight.*missing"):
        read(changed(False, lambda tensors: tensors.pop(HEAD)))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight.*missing"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight.*\[64\]"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(1)}), r"model\.extra.*no such tensor"),
        (lambda tensors: tensors["model.norm.weight"].fill_(float("nan")), r"model\.norm\.weight.*not finite"),
    ],
)
def test_a_wrong_tensor_is_refused_with_its_name(edit: Any, words: str, changed: Any) -> None:
    with pytest.raises(InvalidField, match=words):
        read(changed(False, edit))


def sharded(directory: Path) -> Path:
    """Split a model into two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def test_shards_are_one_model(changed: Any) -> None:
    directory = changed(False, lambda tensors: None)
    whole = read(directory)
    parts = read(sharded(directory))
    assert torch.equal(whole.head, parts.head)
    assert torch.equal(whole.layers[1].qkv, parts.layers[1].qkv)


def test_a_missing_shard_is_named(changed: Any) -> None:
    directory = sharded(changed(False, lambda tensors: None))
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidField, match=r"model-00002-of-00002\.safetensors.*missing"):
        read(directory)


def test_an_index_cannot_point_out_of_the_directory(changed: Any) -> None:
    directory = sharded(changed(False, lambda tensors: None))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(InvalidField, match=r"must lie in"):
        read(directory)


@pytest.mark.parametrize(
    "data", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"\xff" * 7 + b"\x7f" + b"{}"]
)
def test_a_file_that_is_no_safetensors_is_named(data: bytes, changed: Any) -> None:
    directory = changed(False, lambda tensors: None)
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptData, match=rf"model\.safetensors \({len(data)} bytes\)"):
        read(directory)


def test_a_directory_with_only_bin_files_is_refused(changed: Any) -> None:
    directory = changed(False, lambda tensors: None)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InvalidField, match=r"\.bin.*safetensors"):
        read(directory)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidField, match=r"adapter"):
        read_architecture(tmp_path)


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidField, match=r"config\.json.*JSON"):
        read_architecture(tmp_path)

"""Model directories of all the kinds that people have, judged by their headers alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlharvest.errors import InvalidField
from rlharvest_coordinator.data.model_dir import check
from safetensors.numpy import load_file, save_file

MakeModel = Callable[..., Path]

VOCAB = 101


def shard(directory: Path) -> dict[str, Any]:
    """Replace model.safetensors by two shards and return their index."""
    held = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(held)
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in halves.items():
        save_file({name: held[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_a_whole_directory_says_what_the_coordinator_needs(make_model: MakeModel) -> None:
    directory = make_model(eos_token_id=[2, 4], model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    (directory / "generation_config.json").write_text('{"eos_token_id": 3}')
    info = check(directory)
    assert (info.kind, info.context, info.vocab, info.eos_ids) == ("qwen2", 128, VOCAB, {2, 3, 4})


def test_shards_with_an_index_are_whole_too(make_model: MakeModel) -> None:
    directory = make_model()
    shard(directory)
    assert check(directory).vocab == VOCAB


def test_an_untied_head_must_be_there(make_model: MakeModel) -> None:
    directory = make_model(tie_word_embeddings=False)
    with pytest.raises(InvalidField, match=r"lm_head\.weight.*tie_word_embeddings: true"):
        check(directory)
    held = load_file(directory / "model.safetensors")
    save_file(held | {"lm_head.weight": np.zeros((VOCAB, 8), np.float32)}, directory / "model.safetensors")
    check(directory)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "code of its own"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "qwen2_vl", "text_config": {}}, "several parts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"max_position_embeddings": None}, "max_position_embeddings = None"),
        ({"hidden_size": "8"}, "hidden_size = '8'"),
        ({"num_hidden_layers": 2}, "9 tensors are missing"),
        ({"hidden_size": 16}, "the embedding is"),
    ],
)
def test_what_cannot_be_run_is_refused(make_model: MakeModel, config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField, match=says) as caught:
        check(make_model(**config))
    assert caught.value.field == "model"


def _pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _adapter(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _list_config(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def _pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _longer(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def _empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def _no_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)


def _bad_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0" + b"[1, 2] x" + b"\0" * 8)


def _shard_missing(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def _tensor_missing(directory: Path) -> None:
    index = shard(directory)
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _index_leads_out(directory: Path) -> None:
    index = shard(directory)
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _no_map(directory: Path) -> None:
    shard(directory)
    (directory / "model.safetensors.index.json").write_text('{"metadata": {}}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_pickled, "a pickle"),
        (_adapter, "is an adapter"),
        (_no_config, r"no config\.json; found model\.safetensors"),
        (_no_weights, "no model.safetensors"),
        (_broken_config, "is not JSON"),
        (_list_config, "not an object"),
        (_pointer, "git lfs pull"),
        (_cut, "cut short"),
        (_longer, "trail behind"),
        (_empty, "at least 8"),
        (_no_header, "header of"),
        (_bad_header, "is not JSON"),
        (_shard_missing, "'model-00002-of-00002.safetensors', which is not there"),
        (_tensor_missing, "lacks 'model.extra.weight'"),
        (_index_leads_out, "'../model.safetensors', which is not there"),
        (_no_map, "has no weight_map"),
    ],
)
def test_damage_is_named_with_the_file(make_model: MakeModel, damage: Callable[[Path], None], says: str) -> None:
    directory = make_model()
    damage(directory)
    with pytest.raises(InvalidField, match=says) as caught:
        check(directory)
    assert caught.value.field == "model"
    assert str(directory) in str(caught.value)


def test_a_file_instead_of_a_directory_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(InvalidField, match="is a file"):
        check(make_model() / "config.json")

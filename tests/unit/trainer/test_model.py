"""Model directories: what loads, and how what doesn't is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rlharvest.errors import InvalidField
from rlharvest_trainer import model, versions
from safetensors.torch import load_file, save_file

Maker = Callable[..., torch.nn.Module]


def load(directory: Path) -> model.CausalLM:
    return model.load(directory, dtype="float32", device=torch.device("cpu"))


def configure(directory: Path, **values: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def add_head(tensors: dict[str, torch.Tensor], *, scale: float) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * scale


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def test_each_way_to_tie_the_embeddings_is_right_or_refused(tmp_path: Path, make_model: Maker) -> None:
    tied = tmp_path / "tied"
    make_model().save_pretrained(tied)
    load(tied)
    rewrite(tied, lambda tensors: add_head(tensors, scale=1.0))
    loaded = load(tied)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    rewrite(tied, lambda tensors: add_head(tensors, scale=2.0))
    with pytest.raises(InvalidField, match=r"'lm_head.weight' and 'model.embed_tokens.weight' differ"):
        load(tied)
    untied = tmp_path / "untied"
    make_model(tied=False).save_pretrained(untied)
    load(untied)
    rewrite(untied, drop_head)
    with pytest.raises(InvalidField, match=r"lack 1 tensors, first 'lm_head.weight'"):
        load(untied)


def test_what_cannot_be_trained_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: configure(model_dir, quantization_config={"quant_method": "gptq"}), r"quantised \(gptq\)"),
        (lambda: configure(model_dir, quantization_config=None, model_type="nonesuch"), "cannot load it"),
        (lambda: (model_dir / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda: (model_dir / "config.json").write_text("{}"), "no model_type"),
        (lambda: (model_dir / "config.json").unlink(), "no config.json"),
    ]
    for spoil, said in cases:
        spoil()
        with pytest.raises(InvalidField, match=said) as refused:
            load(model_dir)
        assert refused.value.field == "model"
    with pytest.raises(InvalidField, match="no such directory"):
        load(tmp_path / "absent")


def test_weights_must_be_whole_safetensors(model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(InvalidField, match="cut short"):
        load(model_dir)
    weights.rename(model_dir / "pytorch_model.bin")
    with pytest.raises(InvalidField, match=r"pytorch_model.bin, not in safetensors"):
        load(model_dir)
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(InvalidField, match=r"model-1.safetensors, which the index names, is missing"):
        load(model_dir)


def test_code_in_a_model_directory_never_runs(model_dir: Path, tmp_path: Path) -> None:
    configure(model_dir, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (model_dir / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InvalidField, match="trust_remote_code"):
        load(model_dir)
    assert not (tmp_path / "ran").exists()


def test_a_version_is_a_directory_that_loads_again_to_the_same_bits_and_digest(
    tmp_path: Path, make_model: Maker, model_dir: Path
) -> None:
    (model_dir / "tokenizer.json").write_text("{}")
    first = versions.write(make_model(), tmp_path / "a", tokenizer=model_dir, shard_bytes=1 << 13)
    names = [entry.name for entry in first]
    assert "model.safetensors.index.json" in names
    assert "tokenizer.json" in names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    again = versions.write(load(tmp_path / "a"), tmp_path / "b", tokenizer=model_dir, shard_bytes=1 << 13)
    assert versions.digest("j", 0, first) == versions.digest("j", 9, again)
    assert all(entry.size < 3 << 13 for entry in first)


def test_a_padded_head_is_cut_at_the_tokenizer_s_last_id(make_model: Maker, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    loaded = make_model()
    assert model.vocabulary(loaded, tmp_path) == 32
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(27)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    assert model.vocabulary(loaded, tmp_path) == 27

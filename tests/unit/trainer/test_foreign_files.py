"""A model directory gives the trainer tensors and JSON, never code, and nothing from outside of the roots."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import JobSpec, parse
from rlharvest_trainer import model, versions
from rlharvest_trainer.checkpoints import Checkpoints
from rlharvest_trainer.preparation import Prepared, prepare


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (open, (os.fspath(self.path), "w"))


@pytest.fixture
def root(model_dir: Path, tmp_path: Path) -> Path:
    root = tmp_path / "root"
    shutil.copytree(model_dir, root / "model")
    (root / "model" / "merges.txt").write_text("a b")
    return root


def load(directory: Path) -> None:
    model.load(directory, dtype="float32", device=torch.device("cpu"))


def test_weights_that_are_only_pickled_are_refused_by_name_with_the_fix(root: Path, tmp_path: Path) -> None:
    (root / "model" / "model.safetensors").unlink()
    (root / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(InvalidField, match=r"pytorch_model\.bin, not in safetensors.*save_pretrained"):
        load(root / "model")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_under_the_name_of_safetensors_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "model" / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(InvalidField, match=r"model\.safetensors cannot be read"):
        load(root / "model")
    assert not (tmp_path / "ran").exists()


def test_pickles_beside_the_weights_are_never_opened(root: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pkl"):
        (root / "model" / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    load(root / "model")
    assert not (tmp_path / "ran").exists()


def test_a_model_that_needs_code_of_its_own_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    path = root / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}))
    (root / "model" / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InvalidField, match=r"auto_map in config\.json, for trust_remote_code\), which is never run"):
        load(root / "model")
    assert not (tmp_path / "ran").exists()


def job(directory: Path) -> JobSpec:
    return parse({"model": str(directory), "dataset": {"path": "d.jsonl"}, "rewards": [{"builtin": "exact_match"}]})


def prepared(root: Path, tmp_path: Path) -> Prepared:
    saved = Checkpoints(tmp_path / "saved", keep=1)
    return prepare("j", job(root / "model"), saved, attention="sdpa", device=torch.device("cpu"), roots=[root])


def test_links_of_the_model_that_lead_outside_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    (root / "model" / "merges.txt").unlink()
    (root / "model" / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidField, match=r"merges\.txt is a link that leads outside of the trainer's roots"):
        prepared(root, tmp_path)
    shutil.move(root / "model", tmp_path / "elsewhere")
    (root / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidField, match="outside of the trainer's roots"):
        prepared(root, tmp_path)


def test_versions_carry_the_tokenizer_as_it_was_checked_whatever_becomes_of_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    ready = prepared(root, tmp_path)
    (root / "model" / "merges.txt").unlink()
    (root / "model" / "merges.txt").symlink_to(tmp_path / "secret")
    versions.write(ready.learner.model, tmp_path / "version", tokenizer=ready.tokenizer, shard_bytes=1 << 20)
    assert (tmp_path / "version" / "merges.txt").read_text() == "a b"

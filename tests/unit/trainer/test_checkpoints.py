"""Checkpoints are complete or invisible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rlharvest.errors import Conflict, CorruptData, DiskFull
from rlharvest_trainer import checkpoints, versions
from rlharvest_trainer.checkpoints import Checkpoints, State
from rlharvest_trainer.model import parameters
from rlharvest_trainer.step import Learner
from transformers import AutoModelForCausalLM

Maker = Callable[..., object]
JOB = "rljob_test"


def state(step: int, *, job: str = JOB) -> State:
    return State(
        job=job, job_digest="d", fence=1, step=step, version=step, parent=None, seed=0, tokens=10 * step, skipped=0,
        metrics={"reward": 0.5},
    )  # fmt: skip


@pytest.fixture
def save(tmp_path: Path, make_model: Maker, model_dir: Path) -> Callable[..., Path]:
    saved = Checkpoints(tmp_path / "ckpt", keep=2)

    def one(step: int, *, job: str = JOB) -> Path:
        path, _ = saved.save(
            state(step, job=job),
            make_model(step),
            {"t": torch.tensor([step])},
            tokenizer=model_dir,
            shard_bytes=1 << 20,
        )
        return path

    return one


def test_what_is_saved_is_read_back(tmp_path: Path, save: Callable[..., Path], make_model: Maker) -> None:
    path = save(3)
    found = Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB)
    assert found is not None
    assert found[0] == path
    assert (found[1].step, found[1].tokens, found[1].metrics) == (3, 30, {"reward": 0.5})
    assert checkpoints.tensors(path)["t"].tolist() == [3]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), make_model(3).parameters(), strict=True))


def test_the_newest_k_are_kept(tmp_path: Path, save: Callable[..., Path]) -> None:
    for step in range(1, 5):
        save(step)
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["step_3", "step_4"]


def break_state(path: Path) -> None:
    (path / "state.json").unlink()


def cut_state(path: Path) -> None:
    (path / "state.json").write_bytes((path / "state.json").read_bytes()[:50])


def cut_weights(path: Path) -> None:
    os.truncate(path / "model.safetensors", 100)


def flip_optimizer(path: Path) -> None:
    file = path / checkpoints.OPTIMIZER
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose_config(path: Path) -> None:
    (path / "config.json").unlink()


@pytest.mark.parametrize("damage", [break_state, cut_state, cut_weights, flip_optimizer, lose_config])
def test_an_incomplete_or_damaged_one_is_never_resumed_from(
    tmp_path: Path, save: Callable[..., Path], damage: Callable[[Path], None]
) -> None:
    save(1)
    damage(save(2))
    found = Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB)
    assert found is not None
    assert found[1].step == 1


def test_what_a_crash_left_is_ignored_and_swept_away(tmp_path: Path, save: Callable[..., Path]) -> None:
    path = save(1)
    os.rename(path, path.with_name(".writing_9_1"))
    assert Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB) is None
    save(2)
    assert [entry.name for entry in (tmp_path / "ckpt").iterdir()] == ["step_2"]


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path, save: Callable[..., Path]) -> None:
    cut_weights(save(1))
    save(1)
    assert Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB) is not None


def test_checkpoints_of_another_job_are_refused(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(1, job="rljob_other")
    with pytest.raises(Conflict, match="rljob_other"):
        Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB)


def test_a_full_disk_is_named_and_leaves_the_previous_one(
    tmp_path: Path, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)

    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(DiskFull, match="writing_2"):
        save(2)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["step_1"]
    found = Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB)
    assert found is not None
    assert found[1].step == 1


def test_the_optimiser_goes_on_from_its_saved_state_as_if_never_stopped(
    tmp_path: Path, model_dir: Path, make_group: Maker, step_config: Maker
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = Learner(AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype), step_config())
        for step in range(2):
            whole.accumulate([make_group(0, seed=step)])
            whole.apply(1e-2)
        versions.write(whole.model, tmp_path / "m", tokenizer=tmp_path, shard_bytes=1 << 20)
        kept = {name: tensor.clone() for name, tensor in whole.optimizer.state().items()}
        resumed = Learner(AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=dtype), step_config())
        resumed.optimizer.restore(kept)
        for learner in (whole, resumed):
            learner.accumulate([make_group(0, seed=2)])
            learner.apply(1e-2)
        for a, b in zip(parameters(whole.model).values(), parameters(resumed.model).values(), strict=True):
            assert torch.equal(a, b)
        assert all(torch.equal(t, resumed.optimizer.state()[n]) for n, t in whole.optimizer.state().items())


def test_a_state_of_another_model_is_refused(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    learner = Learner(make_model(), step_config())
    learner.accumulate([make_group(0)])
    learner.apply(1e-2)
    kept = learner.optimizer.state()
    other = Learner(make_model(tied=False), step_config())
    missing = {name: tensor for name, tensor in kept.items() if not name.startswith("exp_avg_sq.model.norm")}
    with pytest.raises(CorruptData, match=r"exp_avg_sq.model.norm.weight"):
        other.optimizer.restore(missing)
    with pytest.raises(CorruptData, match="strange"):
        other.optimizer.restore({**kept, "strange": torch.zeros(1)})
    with pytest.raises(CorruptData, match="is \\(1,\\)"):
        other.optimizer.restore({**kept, "exp_avg.model.norm.weight": torch.zeros(1)})

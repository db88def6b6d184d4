"""Checkpoints are complete or invisible."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlharvest.errors import Conflict, CorruptData, DiskFull, Fenced
from rlharvest_trainer import checkpoints, versions
from rlharvest_trainer.checkpoints import Checkpoints, State
from rlharvest_trainer.model import parameters
from rlharvest_trainer.step import Learner
from transformers import AutoModelForCausalLM

Maker = Callable[..., object]
JOB = "rljob_test"


def names(root: Path) -> list[str]:
    """What lies in a directory of checkpoints, but for the note of who was there."""
    return sorted(path.name for path in root.iterdir() if path.name != ".fence")


def state(step: int, *, job: str = JOB, fence: int = 1) -> State:
    return State(
        job=job, job_digest="d", fence=fence, step=step, version=step, parent=None, seed=0, tokens=10 * step, skipped=0,
        metrics={"reward": 0.5},
    )  # fmt: skip


@pytest.fixture
def save(tmp_path: Path, make_model: Maker, model_dir: Path) -> Callable[..., Path]:
    saved = Checkpoints(tmp_path / "ckpt", keep=2)

    def one(step: int, *, job: str = JOB, fence: int = 1) -> Path:
        path, _ = saved.save(
            state(step, job=job, fence=fence),
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
    assert names(tmp_path / "ckpt") == ["step_3", "step_4"]


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
    assert names(tmp_path / "ckpt") == ["step_2"]


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
    assert names(tmp_path / "ckpt") == ["step_1"]
    found = Checkpoints(tmp_path / "ckpt", keep=2).newest(JOB)
    assert found is not None
    assert found[1].step == 1


def test_a_claim_that_a_newer_one_followed_changes_nothing(tmp_path: Path, save: Callable[..., Path]) -> None:
    """A trainer that was stopped, lost its claim and wakes in the middle of a save: the step is the new claim's."""
    saved = Checkpoints(tmp_path / "ckpt", keep=2)
    save(1, fence=1)
    saved.claim(2)
    with pytest.raises(Fenced, match="claim 2 was here, claim 1 is over"):
        save(2, fence=1)
    assert names(tmp_path / "ckpt") == ["step_1"]
    path = save(2, fence=2)
    before = (path / "state.json").read_bytes()
    with pytest.raises(Fenced):
        save(2, fence=1)
    with pytest.raises(Fenced):
        saved.claim(1)
    assert (path / "state.json").read_bytes() == before


def test_a_newer_claim_that_comes_during_a_save_wins(
    tmp_path: Path, save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Checkpoints(tmp_path / "ckpt", keep=2)
    write = checkpoints.save_file

    def overtaken(*given: Any) -> None:
        saved.claim(2)
        write(*given)

    monkeypatch.setattr(checkpoints, "save_file", overtaken)
    with pytest.raises(Fenced):
        save(1, fence=1)
    assert names(tmp_path / "ckpt") == []


def test_leftovers_are_swept_by_the_same_or_a_newer_claim_alone(tmp_path: Path, save: Callable[..., Path]) -> None:
    root = tmp_path / "ckpt"
    for name in (".writing_7_1", ".writing_7_2", ".writing_8_3", ".writing_mine"):
        (root / name).mkdir(parents=True)
    save(1, fence=2)
    assert names(root) == [".writing_8_3", ".writing_mine", "step_1"]


def test_a_checkpoint_without_room_is_not_begun(tmp_path: Path, make_model: Maker, model_dir: Path) -> None:
    left = [1 << 30]
    saved = Checkpoints(tmp_path / "ckpt", keep=2, reserve=1 << 20, free=lambda _path: left[0])

    def save(step: int) -> None:
        saved.save(state(step), make_model(step), {"t": torch.zeros(1 << 20)}, tokenizer=model_dir, shard_bytes=1 << 20)

    save(1)
    left[0] = 20 << 20  # the tensor has 4 MiB, small files are given 16, one must stay free
    with pytest.raises(DiskFull, match=r"writing_2.* are needed and 1048576 must stay free"):
        save(2)
    assert names(tmp_path / "ckpt") == ["step_1"]
    left[0] = 22 << 20
    save(2)
    assert names(tmp_path / "ckpt") == ["step_1", "step_2"]


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

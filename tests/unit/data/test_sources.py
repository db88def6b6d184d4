"""What `dataset.path` may name, and what the rows depend on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import Dataset
from rlharvest_coordinator.data.rows import Limits
from rlharvest_coordinator.data.sources import open_source


def prompts(root: Path, path: str, *, seed: int = 0, limits: Limits | None = None, **settings: Any) -> list[Any]:
    source = open_source(Dataset(path=path, **settings), seed=seed, roots=[root])
    return [row.columns.get("prompt") for row in source.rows(limits or Limits())]


def fingerprint(root: Path, path: str, *, seed: int = 0, **settings: Any) -> str:
    return open_source(Dataset(path=path, **settings), seed=seed, roots=[root]).fingerprint()


def test_a_directory_gives_its_shards_by_name(tmp_path: Path) -> None:
    for number in (1, 0):
        table = pa.table({"prompt": [f"{number}a", f"{number}b"]})
        pq.write_table(table, tmp_path / f"train-0000{number}-of-00002.parquet")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "README.md").write_text("x")
    assert prompts(tmp_path, ".") == ["0a", "0b", "1a", "1b"]


def test_a_directory_with_two_kinds_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="found nothing"):
        prompts(tmp_path, str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    pq.write_table(pa.table({"prompt": ["p"]}), tmp_path / "rows.parquet")
    with pytest.raises(InvalidField, match="both Parquet"):
        prompts(tmp_path, str(tmp_path))


def test_size_takes_the_first_rows_and_too_many_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(5)))
    assert prompts(tmp_path, "rows.jsonl", size=2) == ["0", "1"]
    assert len(prompts(tmp_path, "rows.jsonl", size=9)) == 5
    assert len(prompts(tmp_path, "rows.jsonl", limits=Limits(rows=5))) == 5
    with pytest.raises(InvalidField, match="more than 4 rows"):
        prompts(tmp_path, "rows.jsonl", limits=Limits(rows=4))


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt", "rows", "rows.jsonl.zst"])
def test_other_kinds_are_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(InvalidField, match=r"Use a \.jsonl, \.jsonl\.gz, \.json or \.parquet file"):
        prompts(tmp_path, name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch(mode=0o000)
    with pytest.raises(InvalidField, match="may not be read"):
        prompts(tmp_path, "rows.jsonl")


def test_a_link_out_of_the_roots_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "rows.jsonl"
    (root / "shards").mkdir(parents=True)
    outside.write_text('{"prompt": "p"}\n')
    (root / "shards" / "a.jsonl").symlink_to(outside)
    (root / "b.jsonl").symlink_to(outside)
    for path in ("shards", "b.jsonl"):
        with pytest.raises(InvalidField, match="outside"):
            prompts(root, path)


def test_a_generator_is_seeded_and_says_what_rewards_need(tmp_path: Path) -> None:
    source = open_source(Dataset(path="reasoning-gym:chain_sum", size=3), seed=5, roots=[tmp_path])
    first, *_ = rows = list(source.rows(Limits()))
    assert len(rows) == 3
    assert set(first.columns) == {"prompt", "ground_truth", "task", "entry"}
    assert first.columns["entry"]["answer"] == first.columns["ground_truth"]
    assert first.columns["task"] == "chain_sum"
    assert rows == list(source.rows(Limits()))
    assert prompts(tmp_path, "reasoning-gym:chain_sum", size=3, seed=6) != [row.columns["prompt"] for row in rows]


def test_a_generator_takes_parameters_and_refuses_unknown_ones(tmp_path: Path) -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert all(len(prompt) < 80 for prompt in prompts(tmp_path, "reasoning-gym:chain_sum", size=5, params=params))
    with pytest.raises(InvalidField, match=r"^dataset\.params"):
        prompts(tmp_path, "reasoning-gym:chain_sum", params={"terms": 2})
    with pytest.raises(InvalidField, match=r"^dataset\.params"):
        prompts(tmp_path, "reasoning-gym:chain_sum", params={"min_terms": 9, "max_terms": 2})
    with pytest.raises(InvalidField, match="Did you mean chain_sum"):
        prompts(tmp_path, "reasoning-gym:chainsum")


def test_the_fingerprint_covers_content_and_not_names(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "p"}\n')
    (tmp_path / "c.jsonl").write_text('{"prompt": "q"}\n')
    assert fingerprint(tmp_path, "a.jsonl") == fingerprint(tmp_path, "b.jsonl") != fingerprint(tmp_path, "c.jsonl")
    task = "reasoning-gym:chain_sum"
    assert fingerprint(tmp_path, task) == fingerprint(tmp_path, task)
    changed = [{"seed": 1}, {"size": 7}, {"params": {"max_terms": 3}}]
    assert len({fingerprint(tmp_path, task), *(fingerprint(tmp_path, task, **change) for change in changed)}) == 4

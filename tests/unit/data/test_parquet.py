"""Parquet files of all the kinds that libraries write."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rlharvest.errors import InvalidField
from rlharvest_coordinator.data import parquet


def test_rows_come_in_order_across_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(1000)]}), path, row_group_size=300)
    rows = list(parquet.read(path))
    assert [row.columns["prompt"] for row in rows] == [f"p{i}" for i in range(1000)]
    assert rows[999].where == "rows.parquet, row 999"


def test_large_and_dictionary_types_and_structs_come_as_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    table = pa.table(
        {
            "prompt": pa.array([[{"role": "user", "content": "q"}]], pa.large_list(message)),
            "source": pa.array(["a"]).dictionary_encode(),
            "when": pa.array([datetime.date(2024, 1, 2)]),
            "rate": pa.array([float("nan")]),
        }
    )
    pq.write_table(table, path)
    assert [row.columns for row in parquet.read(path)] == [
        {
            "prompt": [{"role": "user", "content": "q", "name": None}],
            "source": "a",
            "when": "2024-01-02",
            "rate": None,
        }
    ]


def test_bytes_are_refused_with_the_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["p"], "image": [b"\x89PNG"]}), path)
    with pytest.raises(InvalidField, match="row 0: column 'image' holds bytes"):
        list(parquet.read(path))


@pytest.mark.parametrize("content", [b"", b"PAR1", b'{"prompt": "p"}\n'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(InvalidField, match="no readable Parquet file"):
        list(parquet.read(path))


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["p"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidField, match="no readable Parquet file"):
        list(parquet.read(path))

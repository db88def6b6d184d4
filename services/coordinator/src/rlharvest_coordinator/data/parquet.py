"""Parquet files, read one row group at a time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlharvest_coordinator.data.rows import Row, Rows, plain, refuse

_BATCH = 256


def read(path: Path) -> Rows:
    """Yield the rows of a .parquet file, in order; dictionary-encoded and large types come as plain values.

    Raises:
        InvalidField: the file is damaged, or a column has no JSON form.
    """
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH):
                for columns in batch.to_pylist():
                    where = f"{path.name}, row {number}"
                    yield Row(where, {name: plain(value, where, name) for name, value in columns.items()})
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise refuse(path.name, path.name, f"is no readable Parquet file ({error})", "Write it again.") from error

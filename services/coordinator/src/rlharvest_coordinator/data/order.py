"""Which row of the dataset a group gets.

Pure: the row is a function of the seed, the number of rows and the group's ordinal alone, so that it needs no state
and no coordinator can disagree with the one before it. Each pass over the data (`data_epoch`) has a permutation of
its own, made by sorting the words of a Philox counter generator, whose output no release of NumPy changes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


class Order:
    """Rows by group ordinal.

    Invariant: ordinals e*rows .. (e+1)*rows - 1 get every row once.
    """

    def __init__(self, rows: int, *, seed: int, shuffle: bool) -> None:
        """`rows` is at least 1."""
        if rows < 1:
            raise ValueError("a dataset without rows has no order")
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle

    def row(self, ordinal: int) -> tuple[int, int]:
        """Return (row, data_epoch) of the group with this ordinal, counted from 0."""
        data_epoch, place = divmod(ordinal, self.rows)
        if not self.shuffle:
            return place, data_epoch
        return int(_permutation(self.rows, self.seed, data_epoch)[place]), data_epoch


@lru_cache(maxsize=8)
def _permutation(rows: int, seed: int, data_epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(rows), shape (rows,)."""
    words = np.random.Philox(key=[seed, data_epoch]).random_raw(rows)
    return np.argsort(words, kind="stable")

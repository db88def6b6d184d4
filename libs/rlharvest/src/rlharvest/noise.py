"""Position-indexed sampling noise: the uniform of a response at a position depends on its seed and the position alone.

So a response that moves to another worker goes on with the very numbers it would have used, and a draft that is verified
k tokens at a time uses the same ones as one token at a time. The generator is Philox 4x64-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011) with key = seed; position p is word p % 4 of block p // 4, of which the upper
53 bits make a uniform in [0, 1).
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt


def response_seed(job_seed: int, prompt: int, data_epoch: int, sample: int) -> int:
    """Return the 64-bit seed of a response: H(job seed, prompt ordinal, epoch, sample ordinal)."""
    packed = struct.pack("<4Q", job_seed & (2**64 - 1), prompt, data_epoch, sample)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def uniforms(seed: int, start: int, n: int) -> npt.NDArray[np.float64]:
    """Return the uniforms of positions start .. start + n - 1, shape (n,), float64 in [0, 1)."""
    # A block of the counter yields four words.
    block, skip = divmod(start, 4)
    bits = np.random.Philox(key=seed, counter=block)
    words = bits.random_raw(skip + n)[skip:]
    return (np.asarray(words, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53

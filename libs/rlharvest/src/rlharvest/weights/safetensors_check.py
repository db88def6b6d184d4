"""Whether a file is a whole safetensors file, told from its size and header alone: no torch, no tensor is read.

Format: 8 bytes, the header's length as a little-endian u64; the header, a JSON object {name: {dtype, shape,
data_offsets}} with an optional `__metadata__` of strings; then the tensors' bytes, which the offsets cover without gap
or overlap to the very end of the file. A download that broke off, an error page saved under the name, and a pointer
file of Git LFS all break one of these.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from rlharvest.errors import CorruptData

MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def check(path: Path) -> dict[str, tuple[int, ...]]:
    """Return {tensor: shape} of a safetensors file that is whole.

    Raises:
        CorruptData: names the file, its size, and the size or form it should have.
        FileNotFoundError: there is no such file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CorruptData(f"{path.name}: {size} bytes; a safetensors file has at least 8. {_looks_like(prefix)}")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CorruptData(
                f"{path.name}: {size} bytes; its first 8 bytes ask for a header of {length} bytes, at most "
                f"{MAX_HEADER_BYTES} are allowed. {_looks_like(prefix + file.read(56))}"
            )
        if 8 + length > size:
            raise CorruptData(
                f"{path.name}: {size} bytes; the header alone ends at byte {8 + length}. It is cut short."
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path.name}: {size} bytes; its header of {length} bytes is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptData(f"{path.name}: its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path.name, name, entry) for name, entry in header.items()}
    expected = 8 + length + _covered(path.name, {name: extent for name, (_, extent) in tensors.items()})
    if size != expected:
        problem = "It is cut short." if size < expected else "Bytes trail behind the last tensor."
        raise CorruptData(f"{path.name}: {size} bytes; its header describes {expected}. {problem}")
    return {name: shape for name, (shape, _) in tensors.items()}


def _tensor(file: str, name: str, entry: object) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return (shape, (start, end)) of a header entry."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if all(
            type(number) is int and number >= 0 for number in [*shape, start, end]
        ):
            pass
        case _:
            raise CorruptData(f"{file}: the header entry of tensor {name!r} is malformed: {entry!r:.200}")
    if dtype not in _BITS:
        raise CorruptData(f"{file}: tensor {name!r} has the unknown dtype {dtype!r}")
    wanted = -(-prod(shape) * _BITS[dtype] // 8)
    if end - start != wanted:
        raise CorruptData(f"{file}: tensor {name!r} has {end - start} bytes; {dtype} of shape {shape} takes {wanted}")
    return tuple(shape), (start, end)


def _covered(file: str, extents: dict[str, tuple[int, int]]) -> int:
    """Return how many bytes the tensors cover; they must follow each other without gap or overlap."""
    position = 0
    for name, (start, end) in sorted(extents.items(), key=lambda item: item[1]):
        if start != position:
            raise CorruptData(f"{file}: tensor {name!r} starts at byte {start} of the data, {position} was expected")
        position = end
    return position


def _looks_like(head: bytes) -> str:
    text = head.lstrip().lower()
    if text.startswith(b"<"):
        return "It looks like a web page, e.g. an error page that was saved under this name."
    if text.startswith(b"version https://git-lfs"):
        return "It looks like a Git LFS pointer; fetch the real file (git lfs pull)."
    if head.startswith((b"PK\x03\x04", b"\x80")):
        return "It looks like a pickle (torch.save), which is never loaded: save the model again as safetensors."
    return "It is no safetensors file, or its start is damaged." if head else "It is empty."

"""Writing a model as an ordinary Hugging Face directory, and what the trainer needs of whoever publishes one.

Invariant: equal parameters give equal files, so the digest of a directory (rlharvest.weights.manifest) says whether two
states of training are the same.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlharvest import disk
from rlharvest.credentials import Caller
from rlharvest.errors import NotFound
from rlharvest.weights.catalog import list_versions
from rlharvest.weights.manifest import FileEntry, Manifest, describe
from rlharvest.weights.publisher import Publisher
from safetensors import SafetensorError

from rlharvest_trainer.model import CausalLM

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that make up a tokenizer, of whatever kind; those that exist are copied."""


@dataclass(frozen=True, slots=True)
class Version:
    """A publication."""

    number: int
    digest: str


class Publications(Protocol):
    """Where versions go."""

    async def publish(
        self, directory: Path, *, job: str, key: str, step: int, parent: int | None, tokenizer_digest: str, least: int
    ) -> Version:
        """Upload a directory and make it a version. Idempotent by (job, key).

        Args:
            tokenizer_digest: of what the job was tokenised with; workers refuse a version that says another.
            least: the version's number is at least this.

        Raises:
            Unavailable: the weight service does not answer.
            DiskFull: it has no space left.
            DataError: it refuses the files.
        """
        ...

    async def newest(self, job: str) -> Version | None:
        """Return the last version of a job, or None. Raises Unavailable."""
        ...


class WeightService:
    """Publications on the weight service.

    Args:
        http_url: for blobs and lists.
        grpc_address: for publishing.
        caller: how this trainer shows itself.
    """

    def __init__(
        self, http_url: str, grpc_address: str, *, total_s: float = 1800.0, caller: Caller | None = None
    ) -> None:
        self._http_url = http_url
        self._caller = caller
        self._publisher = Publisher(http_url, grpc_address, total_s=total_s, caller=caller)

    async def publish(
        self, directory: Path, *, job: str, key: str, step: int, parent: int | None, tokenizer_digest: str, least: int
    ) -> Version:
        """See Publications."""
        published = await self._publisher.publish(
            directory, job=job, key=key, step=step, parent=parent, tokenizer_digest=tokenizer_digest, least=least
        )
        return Version(published.version, published.digest)

    async def newest(self, job: str) -> Version | None:
        """See Publications."""
        try:
            entries = await list_versions(self._http_url, job, caller=self._caller)
        except NotFound:
            return None
        return Version(entries[-1].version, entries[-1].digest) if entries else None

    async def close(self) -> None:
        """Close the channel."""
        await self._publisher.close()


def write(model: CausalLM, directory: Path, *, tokenizer: Path, shard_bytes: int) -> list[FileEntry]:
    """Write config, weights in shards of at most `shard_bytes`, and tokenizer files; return an entry for each, by name.

    Args:
        directory: is emptied first.
        tokenizer: directory that the tokenizer files are copied from.

    Raises:
        DiskFull: names the directory; what was written of it stays behind, incomplete.
    """
    with disk.naming(directory, also=(SafetensorError,)):
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        # Sorted, because the order decides which shard a tensor is in, and a loaded model has another than a new one.
        model.save_pretrained(
            directory, state_dict=dict(sorted(model.state_dict().items())), max_shard_size=shard_bytes
        )
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, directory / name)
        for path in directory.iterdir():
            path.chmod(0o644)  # safetensors writes files that only the owner can read
        return [describe(path) for path in sorted(directory.iterdir())]


def digest(job: str, step: int, files: list[FileEntry]) -> str:
    """Return the digest that a version of these files has."""
    return Manifest(job=job, version=0, step=step, files=tuple(files)).digest


def model_bytes(model: CausalLM) -> int:
    """Return the bytes that a model's weights take on a disk, without the tokenizer and headers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())

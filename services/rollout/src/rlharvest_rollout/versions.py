"""Where a session gets versions from: the weight service, by way of this machine's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rlharvest.credentials import Caller
from rlharvest.errors import DataError
from rlharvest.weights import catalog, puller

from rlharvest_rollout.lease import Target


class TokenizerMismatch(DataError):
    """A version comes with another tokenizer than the job was tokenised with."""


class Versions(Protocol):
    """Brings a version onto this machine."""

    async def bring(self, target: Target, version: int, progress: Callable[[int, int], None]) -> Path:
        """Return a directory that holds the version, every byte verified.

        Args:
            progress: called with (bytes verified, bytes in all).

        Raises:
            InfrastructureError: it could not be had now.
            DataError, NotFound: it cannot be had at all.
        """
        ...


class PulledVersions:
    """Versions over HTTP."""

    def __init__(self, root: Path, *, threads: int, keep: int, caller: Caller) -> None:
        self._root = root
        self._options = puller.PullOptions(threads=threads, keep=keep, caller=caller)

    async def bring(self, target: Target, version: int, progress: Callable[[int, int], None]) -> Path:
        caller = self._options.caller
        manifest = await catalog.fetch_manifest(target.weights_url, target.job, version, caller=caller)
        digest, wanted = manifest.tokenizer_digest, target.tokenizer_digest
        if digest and wanted and digest != wanted:
            raise TokenizerMismatch(f"version {version} has tokenizer {digest}, the job was tokenised with {wanted}")
        return await puller.pull(target.weights_url, manifest, self._root, options=self._options, progress=progress)

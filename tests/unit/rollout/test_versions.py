"""A version is served only to the job whose tokenizer it comes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlharvest.engine import EngineConfig
from rlharvest.weights import catalog, puller
from rlharvest.weights.manifest import FileEntry, Manifest
from rlharvest_rollout.lease import Target
from rlharvest_rollout.versions import PulledVersions, TokenizerMismatch


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PulledVersions:
    """Versions of a service that has one, made with the tokenizer `theirs`."""
    entry = FileEntry(name="f", size=0, blake3="0" * 64, parts=())

    async def fetched(*_given: Any, **_more: Any) -> Manifest:
        return Manifest(job="rljob_1", version=3, step=0, tokenizer_digest="theirs", files=(entry,))

    async def pulled(*_given: Any, **_more: Any) -> Path:
        return tmp_path

    monkeypatch.setattr(catalog, "fetch_manifest", fetched)
    monkeypatch.setattr(puller, "pull", pulled)
    return PulledVersions(tmp_path, threads=1, keep=1, caller=puller.PullOptions().caller)


def target(digest: str) -> Target:
    config = EngineConfig(slots=1, context=8, dtype="float32", batch_invariant=False, kv="recompute", options={})
    return Target(
        job="rljob_1", engine="stub", weights_url="http://w", version=3, tokenizer_digest=digest, config=config
    )


async def test_another_tokenizer_is_refused_with_both_digests(source: PulledVersions) -> None:
    """Ids of one tokenizer under the weights of another are plausible nonsense."""
    with pytest.raises(TokenizerMismatch, match="version 3 has tokenizer theirs, the job was tokenised with ours"):
        await source.bring(target("ours"), 3, lambda _done, _total: None)


@pytest.mark.parametrize("digest", ["theirs", ""])
async def test_the_same_or_none_is_taken(source: PulledVersions, tmp_path: Path, digest: str) -> None:
    assert await source.bring(target(digest), 3, lambda _done, _total: None) == tmp_path

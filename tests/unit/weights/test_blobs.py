"""The blob store: only verified content gets a name, a crash or a full disk leaves what was there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import blake3
import pytest
from rlharvest.errors import CorruptData, DiskFull, LimitReached, NotFound
from rlharvest_weights.blobs import BlobStore


def _store(root: Path, *, grace_s: float = 600, min_free_bytes: int = 0) -> BlobStore:
    return BlobStore(root, min_free_bytes=min_free_bytes, grace_s=grace_s)


def _digest(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def _put(store: BlobStore, data: bytes) -> str:
    upload = store.begin(_digest(data), len(data))
    upload.write(data)
    upload.commit()
    return _digest(data)


def _files(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()}


def test_what_is_put_is_there_after_a_restart(tmp_path: Path) -> None:
    digest = _put(_store(tmp_path), b"hello")
    with _store(tmp_path).open(digest) as file:
        assert file.read() == b"hello"
    assert (tmp_path / "blobs" / digest[:2] / digest).exists()


def test_other_bytes_or_another_size_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for size, data in [(5, b"hallo"), (5, b"hell"), (None, b"hallo"), (4, b"hello")]:
        upload = store.begin(_digest(b"hello"), size)
        upload.write(data)
        with pytest.raises(CorruptData, match=_digest(b"hello")):
            upload.commit()
        upload.abort()
    assert _files(tmp_path) == set()
    with pytest.raises(NotFound):
        store.open(_digest(b"hello"))


def test_uploads_that_a_crash_cut_are_swept_at_start(tmp_path: Path) -> None:
    store = _store(tmp_path)
    upload = store.begin(_digest(b"x" * 10), 10)
    upload.write(b"x")
    assert len(_files(tmp_path)) == 1
    _store(tmp_path)
    assert _files(tmp_path) == set()
    upload.abort()


def test_two_uploads_of_one_blob_end_in_one(tmp_path: Path) -> None:
    store = _store(tmp_path)
    uploads = [store.begin(_digest(b"hello"), 5) for _ in range(2)]
    for upload in uploads:
        upload.write(b"hello")
    assert [upload.commit() for upload in uploads] == [True, False]
    for upload in uploads:
        upload.abort()
    assert _files(tmp_path) == {_digest(b"hello")}


def test_an_upload_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    free = _store(tmp_path).free_bytes()
    with pytest.raises(DiskFull, match="are needed"):
        _store(tmp_path).begin("0" * 64, free * 2)
    with pytest.raises(DiskFull):
        _store(tmp_path, min_free_bytes=free * 2).begin("0" * 64, 1)


def test_a_disk_that_fills_up_leaves_everything_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    kept = _put(store, b"kept")
    upload = store.begin(_digest(b"more"), 4)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    upload.write(b"more")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match="no space left"):
            upload.commit()
    upload.abort()
    assert _files(tmp_path) == {kept}


def test_a_download_keeps_its_bytes_when_the_blob_is_deleted(tmp_path: Path) -> None:
    store = _store(tmp_path)
    digest = _put(store, b"hello")
    with store.open(digest) as file:
        assert store.delete(digest) == 5
        assert store.size(digest) is None
        assert file.read() == b"hello"


def test_leases(tmp_path: Path) -> None:
    store = _store(tmp_path)
    digest = _put(store, b"hello")
    assert store.leased(digest)
    store.settle(digest)
    assert not store.leased(digest)
    assert store.renew(digest)
    assert store.leased(digest)
    assert not store.renew("0" * 64)
    assert not store.leased("0" * 64)
    assert not _store(tmp_path, grace_s=0).leased(digest)


def test_uploads_at_a_time_cannot_together_eat_the_reserve(tmp_path: Path) -> None:
    """Each of them alone would fit."""
    store = BlobStore(tmp_path, min_free_bytes=1000, grace_s=600, free=lambda _path: 2500)
    first = store.begin("0" * 64, 1000)
    assert store.free_bytes() == 500
    with pytest.raises(DiskFull, match="500 bytes are free for blobs besides the 1000"):
        store.begin("1" * 64, 1000)
    store.begin("2" * 64, 500).abort()
    first.abort()
    store.begin("1" * 64, 1000).abort()
    assert store.free_bytes() == 1500


def test_a_disk_that_others_fill_ends_an_upload_before_the_reserve_is_gone(tmp_path: Path) -> None:
    left = [5000]
    store = BlobStore(tmp_path, min_free_bytes=1000, grace_s=600, free=lambda _path: left[0])
    for size in (None, 3000):
        left[0] = 5000
        upload = store.begin("0" * 64, size)
        upload.write(bytes(1000))
        left[0] = 999
        with pytest.raises(DiskFull):
            upload.write(bytes(1000))
        upload.abort()
    assert _files(tmp_path) == set()


def test_more_uploads_at_a_time_than_allowed_are_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, min_free_bytes=0, grace_s=600, most_uploads=1)
    upload = store.begin("0" * 64, 1)
    with pytest.raises(LimitReached, match="uploads at a time: the limit of 1 is reached"):
        store.begin("1" * 64, 1)
    upload.abort()
    store.begin("1" * 64, 1).abort()

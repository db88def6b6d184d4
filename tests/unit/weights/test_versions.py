"""Versions: numbers are never used twice, one key makes one version, and no crash or deletion changes that."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import blake3
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from rlharvest.errors import Conflict, CorruptData, DiskFull, InvalidField, LimitReached, NotFound
from rlharvest.weights.manifest import FileEntry, Manifest, part_hash
from rlharvest_weights import durable
from rlharvest_weights import versions as versions_module
from rlharvest_weights.blobs import BlobStore
from rlharvest_weights.versions import KEYS_KEPT, MOST_KEY_CHARACTERS, VersionStore, claim

JOB = "rljob_a"


class Root:
    """A data directory, and the stores opened on it; `reopen` is what a restart does."""

    def __init__(self, path: Path, *, grace_s: float = 0.0) -> None:
        self.path = path
        self.grace_s = grace_s
        self.reopen()

    def reopen(self) -> None:
        self.blobs = BlobStore(self.path, min_free_bytes=0, grace_s=self.grace_s)
        self.versions = VersionStore(self.path, self.blobs)

    def put(self, data: bytes) -> str:
        digest = blake3.blake3(data).hexdigest()
        upload = self.blobs.begin(digest, len(data))
        upload.write(data)
        upload.commit()
        return digest

    def publish(self, key: str, *contents: bytes, job: str = JOB, parent: int | None = None) -> int:
        for data in contents:
            self.put(data)
        return self.versions.publish(job, key, manifest(*contents, job=job, parent=parent))[0].version

    def numbers(self, job: str = JOB) -> list[int]:
        return [made.version for made in self.versions.listed(job)]


def manifest(*contents: bytes, job: str = JOB, parent: int | None = None) -> Manifest:
    entries = [
        FileEntry(name=f"f{index}", size=len(data), blake3=blake3.blake3(data).hexdigest(), parts=_parts(data))
        for index, data in enumerate(contents)
    ]
    return Manifest(job=job, step=0, parent=parent, files=tuple(entries))


def _parts(data: bytes) -> tuple[str, ...]:
    return (part_hash(data),) if data else ()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def test_numbers_rise_from_0_and_a_key_makes_one_version(root: Root) -> None:
    assert [root.publish(key, key.encode()) for key in ["a", "b", "a", "c", "b"]] == [0, 1, 0, 2, 1]
    root.reopen()
    assert root.publish("a", b"a") == 0
    assert root.publish("d", b"d", parent=2) == 3
    assert root.versions.get(JOB, 3).parent == 2
    assert root.publish("a", b"a", job="rljob_b") == 0


def test_what_is_remembered_of_a_job_does_not_grow_with_it(root: Root) -> None:
    """Every publication writes it all: after the first few steps it has the size that it keeps."""
    sizes = []
    for step in range(100, 100 + 2 * KEYS_KEPT):
        root.publish(f"1:{step}", b"same")
        root.versions.retain(JOB, [], 2)
        sizes.append((root.path / "jobs" / JOB / "state.json").stat().st_size)
    assert KEYS_KEPT <= 100, "a job of 300 steps must reach its bound early"
    assert max(sizes[KEYS_KEPT:]) - min(sizes[KEYS_KEPT:]) < 200
    assert root.publish(f"1:{99 + 2 * KEYS_KEPT}", b"same") == 2 * KEYS_KEPT - 1, "who comes again soon gets its number"


def test_a_key_with_other_content_is_a_conflict(root: Root) -> None:
    root.publish("a", b"one")
    with pytest.raises(Conflict, match="stands for version 0"):
        root.publish("a", b"two")
    assert root.numbers() == [0]


def test_numbers_are_not_used_again_after_deletion_and_restart(root: Root) -> None:
    for key in "abc":
        root.publish(key, key.encode())
    assert root.versions.retain(JOB, [], 0) == ([0, 1, 2], 3)
    root.reopen()
    assert root.numbers() == []
    assert root.publish("d", b"d") == 3
    # A publisher that comes again for a version that was deleted meanwhile gets its number, not a second one.
    assert root.publish("c", b"c") == 2
    assert root.numbers() == [3]


def test_retain_keeps_the_named_and_the_newest(root: Root) -> None:
    for number in range(6):
        root.publish(str(number), b"shared", f"own {number}".encode())
    deleted, freed = root.versions.retain(JOB, [1, 99], 2)
    assert deleted == [0, 2, 3]
    assert freed == 3 * len("own 0")
    assert root.numbers() == [1, 4, 5]
    assert set(root.blobs.digests()) == {
        blake3.blake3(data).hexdigest() for data in [b"shared", b"own 1", b"own 4", b"own 5"]
    }
    assert root.versions.retain(JOB, [1], 2) == ([], 0)
    with pytest.raises(NotFound, match="newest is 5"):
        root.versions.get(JOB, 0)


def test_blobs_of_other_jobs_and_recent_uploads_stay(tmp_path: Path) -> None:
    root = Root(tmp_path, grace_s=600)
    root.publish("a", b"both", b"mine")
    root.publish("a", b"both", job="rljob_b")
    waiting = root.put(b"waiting")
    root.blobs.renew(blake3.blake3(b"mine").hexdigest())
    root.versions.forget(JOB)
    assert root.versions.collect() == 0
    assert root.blobs.size(waiting) == 7
    root.grace_s = 0
    root.reopen()
    assert root.versions.collect() == len("waiting") + len("mine")
    assert root.versions.get("rljob_b", 0).files[0].size == 4


def test_a_forgotten_job_gets_no_new_versions(root: Root) -> None:
    root.publish("a", b"a")
    assert root.versions.forget(JOB) == 1
    assert root.versions.forget(JOB) == 0
    for _ in range(2):
        assert root.numbers() == []
        with pytest.raises(Conflict, match="was deleted"):
            root.publish("b", b"b")
        root.reopen()


def test_manifests_that_cannot_be_pulled_are_refused_by_field(root: Root) -> None:
    root.put(b"here")
    with pytest.raises(InvalidField, match=r"manifest\.files\.f1 .*no such blob"):
        root.versions.publish(JOB, "a", manifest(b"here", b"not here"))
    lying = manifest(b"here").files[0].model_copy(update={"size": 3})
    with pytest.raises(InvalidField, match=r"manifest\.files\.f0\.size = 3: the blob has 4 bytes"):
        root.versions.publish(JOB, "a", manifest(b"here").model_copy(update={"files": (lying,)}))
    with pytest.raises(InvalidField, match=r"manifest\.parent = 0"):
        root.versions.publish(JOB, "a", manifest(b"here", parent=0))
    with pytest.raises(InvalidField, match=r"manifest\.job"):
        root.versions.publish("rljob_b", "a", manifest(b"here"))
    with pytest.raises(InvalidField, match="key"):
        root.versions.publish(JOB, "", manifest(b"here"))
    with pytest.raises(InvalidField, match="job"):
        root.versions.publish("../x", "a", manifest(b"here"))
    assert root.numbers() == []
    assert root.publish("a", b"here") == 0


def test_a_crash_between_number_and_manifest_keeps_the_number_for_the_key(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = durable.write

    def crash(path: Path, data: bytes) -> None:
        if path.parent.name == "versions":
            raise KeyboardInterrupt
        write(path, data)

    root.publish("a", b"a")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            root.publish("b", b"b")
    root.reopen()
    assert root.numbers() == [0]
    assert root.publish("c", b"c") == 2
    assert root.publish("b", b"b") == 1
    assert root.numbers() == [0, 1, 2]


@pytest.mark.parametrize("at", ["state.json", "1.json"])
def test_a_full_disk_publishes_nothing_and_leaves_everything(
    root: Root, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    root.publish("a", b"a")
    root.put(b"b")
    real = Path.replace

    def full(path: Path, target: Path) -> Path:
        if Path(target).name == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(DiskFull, match="no space left"):
            root.versions.publish(JOB, "b", manifest(b"b"))
    assert root.numbers() == [0]
    assert not list(root.path.rglob("*.tmp"))
    root.reopen()
    assert root.numbers() == [0]
    assert root.publish("b", b"b") == 1


def test_damaged_files_are_not_served_and_their_numbers_not_used_again(root: Root) -> None:
    for key in "abc":
        root.publish(key, key.encode())
    (root.path / "jobs" / JOB / "versions" / "2.json").write_text("{")
    root.blobs.delete(blake3.blake3(b"b").hexdigest())
    root.reopen()
    assert root.numbers() == [0]
    assert root.publish("d", b"d") == 3
    (root.path / "jobs" / JOB / "state.json").write_text("")
    root.reopen()
    assert root.numbers() == [0, 3]
    with pytest.raises(CorruptData, match=r"state\.json"):
        root.publish("e", b"e")


def test_one_process_has_the_directory(tmp_path: Path) -> None:
    with claim(tmp_path), pytest.raises(Conflict, match="another weight service"):
        claim(tmp_path)
    claim(tmp_path).close()


class Machine(RuleBasedStateMachine):
    """Random publications, deletions and restarts against a model."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        # In memory where there is such a directory: hundreds of fsyncs say nothing here.
        memory = Path("/dev/shm")
        self.root = Root(Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None)))
        self.model: dict[str, tuple[int, bytes]] = {}
        self.alive: set[int] = set()
        self.next = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root.path)

    @rule(target=keys, data=st.binary(max_size=2))
    def publish(self, data: bytes) -> str:
        key = f"k{len(self.model)}"
        assert self.root.publish(key, data) == self.next
        self.model[key] = (self.next, data)
        self.alive.add(self.next)
        self.next += 1
        return key

    @rule(key=keys)
    def publish_again(self, key: str) -> None:
        number, data = self.model[key]
        assert self.root.publish(key, data) == number

    @rule(key=consumes(keys), other=st.binary(min_size=3, max_size=4))
    def publish_other_content(self, key: str, other: bytes) -> None:
        with pytest.raises(Conflict):
            self.root.publish(key, other)

    @rule(keep=st.sets(st.integers(0, 12)), last=st.integers(0, 3))
    def retain(self, keep: set[int], last: int) -> None:
        kept = {number for number in self.alive if number in keep}
        kept |= set(sorted(self.alive)[len(self.alive) - min(last, len(self.alive)) :])
        deleted, _ = self.root.versions.retain(JOB, keep, last)
        assert set(deleted) == self.alive - kept
        self.alive = kept

    @rule()
    def restart(self) -> None:
        self.root.reopen()

    @rule()
    def collect(self) -> None:
        self.root.versions.collect()
        wanted = {blake3.blake3(data).hexdigest() for number, data in self.model.values() if number in self.alive}
        assert set(self.root.blobs.digests()) == wanted

    @invariant()
    def what_is_listed_can_be_pulled(self) -> None:
        assert set(self.root.numbers()) == self.alive
        for made in self.root.versions.listed(JOB):
            assert all(self.root.blobs.size(entry.blake3) == entry.size for entry in made.files)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_what_a_publication_lacks_is_told_and_what_is_there_is_kept(tmp_path: Path) -> None:
    root = Root(tmp_path, grace_s=600)
    there = root.put(b"there")
    assert root.versions.begin(manifest(b"there", b"new")) == [blake3.blake3(b"new").hexdigest()]
    root.versions.collect()
    assert root.blobs.size(there) == 5


def test_a_publication_without_room_is_refused_before_a_byte_is_sent(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, min_free_bytes=100, grace_s=0, free=lambda _path: 109)
    store = VersionStore(tmp_path, blobs)
    with pytest.raises(DiskFull, match="10 are needed"):
        store.begin(manifest(b"12345", b"67890"))
    assert len(store.begin(manifest(b"12345", b"1234"))) == 2


def test_a_file_over_the_limit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path, min_free_bytes=0, grace_s=0)
    with pytest.raises(
        InvalidField, match=r"manifest.files.f1.size = 5: the limit is 4 bytes.*RLHARVEST_MAX_BLOB_BYTES"
    ):
        VersionStore(tmp_path, blobs, max_blob_bytes=4).begin(manifest(b"1234", b"12345"))


def test_numbers_go_on_above_all_that_were_seen_where_the_directory_was_lost(tmp_path: Path) -> None:
    """Number 0 again would stand for two versions, and workers would keep the old one."""
    root = Root(tmp_path)
    assert [root.publish("1:0", b"a"), root.publish("1:1", b"b")] == [0, 1]
    shutil.rmtree(tmp_path)
    root.reopen()
    root.put(b"c")
    made, new = root.versions.publish(JOB, "1:1", manifest(b"c", parent=1), least=2)
    assert (made.version, new, root.numbers()) == (2, True, [2])
    assert root.versions.publish(JOB, "1:1", manifest(b"c", parent=1), least=3)[0].version == 2, "one key, one version"
    assert root.publish("1:2", b"d") == 3
    root.reopen()
    assert root.numbers() == [2, 3]


def test_keys_and_numbers_of_versions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(tmp_path)
    for key in ("", "k" * (MOST_KEY_CHARACTERS + 1)):
        with pytest.raises(InvalidField, match="key = "):
            root.publish(key, b"a")
    monkeypatch.setattr(versions_module, "MOST_VERSIONS", 1)
    root.publish("1:0", b"a")
    with pytest.raises(LimitReached, match="versions of rljob_a: the limit of 1"):
        root.publish("1:1", b"b")
    assert root.publish("1:0", b"a") == 0

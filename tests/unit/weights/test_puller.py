"""Pulling: whatever the server does, the directory ends verified whole or does not appear."""

from __future__ import annotations

import asyncio
import errno
import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rlharvest.errors import CorruptData, DiskFull, InvalidField, NotFound, Unavailable
from rlharvest.weights.manifest import Manifest, verify
from rlharvest.weights.puller import PullOptions, pull

OPTIONS = PullOptions(threads=3, timeout_s=2.0, total_s=10.0, strikes=3)


def ignores_range(handler, asked):
    handler.reply(200, asked.data)


def earlier_start(handler, asked):
    if not asked.ranged:
        return handler.part(asked)
    start = max(0, asked.start - 10)
    handler.reply(206, asked.data[start : asked.end], Content_Range=f"bytes {start}-{asked.end - 1}/{len(asked.data)}")


def lying_start(handler, asked):
    """The head says what was asked for; the bytes are earlier ones."""
    if not asked.ranged:
        return handler.part(asked)
    start = max(0, asked.start - 10)
    where = f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}"
    handler.reply(206, asked.data[start : start + len(asked.wanted)], Content_Range=where)


def short_part(handler, asked):
    if not asked.ranged:
        return handler.part(asked)
    where = f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}"
    handler.reply(206, asked.wanted[:-5], announce=len(asked.wanted), Content_Range=where)


def short_head(handler, asked):
    if not asked.ranged:
        return handler.part(asked)
    where = f"bytes {asked.start}-{asked.end - 2}/{len(asked.data)}"
    handler.reply(206, asked.wanted[:-1], Content_Range=where)


def no_content_range(handler, asked):
    handler.reply(206 if asked.ranged else 200, asked.wanted)


def range_not_satisfiable(handler, asked):
    if asked.ranged:
        handler.reply(416, b"", Content_Range=f"bytes */{len(asked.data)}")
    else:
        handler.part(asked)


def wrong_bytes_now_and_then(handler, asked):
    if asked.count % 3:
        return handler.part(asked)
    where = f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}"
    handler.reply(206, bytes(len(asked.wanted)), Content_Range=where)


def unavailable_now_and_then(handler, asked):
    if asked.count % 2:
        handler.part(asked)
    else:
        handler.reply(503, b"busy")


def hangs_up_now_and_then(handler, asked):
    if asked.count % 3:
        handler.part(asked)
    else:
        handler.close_connection = True


def chunked(handler, asked):
    handler.send_response(206 if asked.ranged else 200)
    handler.send_header("Transfer-Encoding", "chunked")
    if asked.ranged:
        handler.send_header("Content-Range", f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}")
    handler.end_headers()
    for start in range(0, len(asked.wanted), 300):
        block = asked.wanted[start : start + 300]
        handler.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")


def ignores_range_and_breaks_off(handler, asked):
    """Each reply is longer than the one before, the whole comes in the end."""
    handler.reply(200, asked.data[: 1500 * (asked.count + 1)], announce=len(asked.data))


RECOVERABLE = [
    ignores_range,
    earlier_start,
    lying_start,
    short_part,
    short_head,
    no_content_range,
    range_not_satisfiable,
    wrong_bytes_now_and_then,
    unavailable_now_and_then,
    hangs_up_now_and_then,
    chunked,
    ignores_range_and_breaks_off,
]


@pytest.mark.parametrize("behaviour", RECOVERABLE, ids=lambda behaviour: behaviour.__name__)
async def test_the_file_ends_whole_in_spite_of(behaviour, blob_server, versions, content, tmp_path: Path) -> None:
    manifest = versions.make({"weights.bin": content(9_876), "config.json": b"{}", "empty.txt": b""})
    blob_server.behaviour = behaviour
    directory = await pull(blob_server.url, manifest, tmp_path / "cache", options=OPTIONS)
    assert directory == tmp_path / "cache" / "rljob_t" / "0"
    _whole(directory, manifest)
    assert all(headers["Accept-Encoding"] == "identity" for headers in blob_server.headers)
    assert all("If-Range" in headers for headers in blob_server.headers if "Range" in headers)


def compresses(handler, asked):
    handler.reply(206 if asked.ranged else 200, gzip.compress(asked.wanted), Content_Encoding="gzip")


def error_page(handler, asked):
    handler.reply(200, b"<html>quota exceeded</html>", Content_Type="text/html")


def error_page_of_the_right_size(handler, asked):
    handler.reply(200, b"<html>".ljust(len(asked.data)), Content_Type="text/html")


def wrong_bytes(handler, asked):
    wrong = bytes([asked.wanted[0] ^ 1]) + asked.wanted[1:]
    if asked.ranged:
        handler.reply(206, wrong, Content_Range=f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}")
    else:
        handler.reply(200, wrong)


def always_breaks_off(handler, asked):
    handler.reply(200, asked.data[:2500], announce=len(asked.data))


def redirects(handler, asked):
    handler.reply(302, b"", Location="http://127.0.0.1:1/")


HOPELESS = [
    compresses,
    error_page,
    error_page_of_the_right_size,
    wrong_bytes,
    always_breaks_off,
    redirects,
]


@pytest.mark.parametrize("behaviour", HOPELESS, ids=lambda behaviour: behaviour.__name__)
async def test_nothing_is_used_of(behaviour, blob_server, versions, content, tmp_path: Path) -> None:
    manifest = versions.make({"weights.bin": content(9_876)})
    blob_server.behaviour = behaviour
    with pytest.raises(CorruptData, match=r"weights\.bin"):
        await pull(blob_server.url, manifest, tmp_path, options=OPTIONS)
    assert not (tmp_path / "rljob_t" / "0").exists()
    # What came and verified is kept; when the server has come to its senses, the pull ends well.
    blob_server.behaviour = _good
    _whole(await pull(blob_server.url, manifest, tmp_path, options=OPTIONS), manifest)


def _good(handler, asked):
    handler.part(asked)


async def test_a_blob_that_is_gone_is_not_found(blob_server, versions, content, tmp_path: Path) -> None:
    manifest = versions.make({"weights.bin": content(5_000)})
    blob_server.behaviour = lambda handler, asked: handler.reply(404, b"{}")
    with pytest.raises(NotFound, match=r"weights\.bin"):
        await pull(blob_server.url, manifest, tmp_path, options=OPTIONS)


async def test_time_limits_hold(blob_server, versions, content, tmp_path: Path) -> None:
    """No server, one that says "later", and one that says nothing: Unavailable, within the limit, naming the address."""
    manifest = versions.make({"weights.bin": content(5_000)})
    release = threading.Event()
    behaviours = [
        lambda handler, asked: handler.reply(503, b""),
        lambda handler, asked: release.wait(5) and None,
    ]
    options = PullOptions(threads=2, timeout_s=0.2, total_s=0.7)
    for behaviour in behaviours:
        blob_server.behaviour = behaviour
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
            await pull(blob_server.url, manifest, tmp_path, options=options)
        assert time.monotonic() - started < 2
    release.set()
    with pytest.raises(Unavailable):
        await pull("http://127.0.0.1:1", manifest, tmp_path, options=options)


async def test_a_pull_that_goes_on_outlives_its_timeout(blob_server, versions, content, tmp_path: Path) -> None:
    """The limit is on standing still, not on how long a large version takes; nothing is asked for a second time."""
    manifest = versions.make({"weights.bin": content(40_000)}, part_bytes=40_000)
    options = PullOptions(threads=1, timeout_s=1.5, total_s=120)

    def trickle(handler, asked):
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(asked.wanted)))
        handler.send_header("Content-Range", f"bytes {asked.start}-{asked.end - 1}/{len(asked.data)}")
        handler.end_headers()
        for start in range(0, len(asked.wanted), 1000):
            time.sleep(3 * options.timeout_s / 40)
            handler.wfile.write(asked.wanted[start : start + 1000])

    blob_server.behaviour = trickle
    started = time.monotonic()
    _whole(await pull(blob_server.url, manifest, tmp_path, options=options), manifest)
    assert time.monotonic() - started > 2 * options.timeout_s
    assert blob_server.requests == 1


async def test_an_address_that_is_none_is_refused_by_name(versions, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="weights_url"):
        await pull("ftp://x", versions.make({"a": b"x"}), tmp_path)


async def test_cancelling_ends_every_thread_and_keeps_what_verified(
    blob_server, versions, content, tmp_path: Path
) -> None:
    manifest = versions.make({"weights.bin": content(20_000)})
    stuck = threading.Event()

    def half(handler, asked):
        if asked.start < 10_000:
            handler.part(asked)
        else:
            stuck.wait(10)

    blob_server.behaviour = half
    some = asyncio.Event()
    verified = 0

    def progress(done: int, total: int) -> None:
        nonlocal verified
        verified = done
        some.set()

    task = asyncio.create_task(pull(blob_server.url, manifest, tmp_path, options=OPTIONS, progress=progress))
    await asyncio.wait_for(some.wait(), 5)
    await asyncio.sleep(0.2)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    stuck.set()
    before = blob_server.sent
    blob_server.behaviour = _good
    _whole(await pull(blob_server.url, manifest, tmp_path, options=OPTIONS), manifest)
    assert verified > 0
    assert blob_server.sent - before <= 20_000 - verified


async def test_sigkill_in_the_middle_resumes_from_verified_parts(
    blob_server, versions, content, tmp_path: Path
) -> None:
    """Fewer bytes than all are fetched after the crash; a part that rotted on the disk meanwhile is fetched again."""
    manifest = versions.make({"weights.bin": content(40_000)})
    enough = threading.Event()

    def slow_after_half(handler, asked):
        if blob_server.sent >= 20_000:
            enough.set()
            time.sleep(30)
        handler.part(asked)

    blob_server.behaviour = slow_after_half
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from rlharvest.weights.manifest import Manifest\n"
        "from rlharvest.weights.puller import pull\n"
        "manifest = Manifest.model_validate_json(Path(sys.argv[2]).read_text())\n"
        "asyncio.run(pull(sys.argv[1], manifest, Path(sys.argv[3])))\n"
    )
    command = [sys.executable, "-c", program, blob_server.url, tmp_path / "manifest.json", tmp_path / "cache"]
    process = await asyncio.to_thread(subprocess.Popen, command)
    try:
        assert await asyncio.to_thread(enough.wait, 20)
        await asyncio.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    home = tmp_path / "cache" / "rljob_t"
    assert not (home / "0").exists()
    partial = home / ".incoming" / manifest.files[0].blake3
    with partial.open("r+b") as file:
        file.write(bytes(10))
    blob_server.behaviour = _good
    before = blob_server.sent
    _whole(await pull(blob_server.url, manifest, tmp_path / "cache", options=OPTIONS), manifest)
    again = blob_server.sent - before
    in_flight = PullOptions().threads * 1_000  # parts that were sent and not verified when the process died
    assert 40_000 - before < again <= 40_000 - before + in_flight + 1_000  # the last one rotted


async def test_a_warm_cache_is_verified_and_only_what_rotted_is_fetched(
    blob_server, versions, content, tmp_path: Path
) -> None:
    manifest = versions.make({"weights.bin": content(9_000), "other.bin": content(4_000)})
    directory = await pull(blob_server.url, manifest, tmp_path, options=OPTIONS)
    before = blob_server.sent
    assert await pull(blob_server.url, manifest, tmp_path, options=OPTIONS) == directory
    assert blob_server.sent == before
    rotten = directory / "other.bin"
    rotten.chmod(0o644)
    rotten.write_bytes(bytes(4_000))
    _whole(await pull(blob_server.url, manifest, tmp_path, options=OPTIONS), manifest)
    assert blob_server.sent == before + 4_000


async def test_equal_files_of_versions_are_linked_not_fetched(blob_server, versions, content, tmp_path: Path) -> None:
    tokenizer = content(7_000)
    first = versions.make({"tokenizer.json": tokenizer, "weights.bin": content(2_000)})
    second = versions.make({"tokenizer.json": tokenizer, "copy.json": tokenizer, "weights.bin": content(3_000)})
    one = await pull(blob_server.url, first, tmp_path, options=OPTIONS)
    before = blob_server.sent
    seen: list[tuple[int, int]] = []
    two = await pull(
        blob_server.url, second, tmp_path, options=OPTIONS, progress=lambda done, total: seen.append((done, total))
    )
    await asyncio.sleep(0)
    _whole(two, second)
    assert blob_server.sent - before == 3_000
    assert (one / "tokenizer.json").stat().st_ino == (two / "copy.json").stat().st_ino
    assert seen[-1] == (10_000, 10_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


async def test_the_newest_versions_are_kept(blob_server, versions, content, tmp_path: Path) -> None:
    made = [versions.make({"weights.bin": content(1_500)}) for _ in range(5)]
    for manifest in made:
        await pull(blob_server.url, manifest, tmp_path, options=PullOptions(keep=2))
    assert _directories(tmp_path) == {"3", "4"}
    await pull(blob_server.url, made[0], tmp_path, options=PullOptions(keep=2))
    assert _directories(tmp_path) == {"0", "4"}
    await pull(blob_server.url, made[1], tmp_path, options=PullOptions(keep=9))
    assert _directories(tmp_path) == {"0", "1", "4"}


async def test_concurrent_pulls_fetch_once(blob_server, versions, content, tmp_path: Path) -> None:
    manifest = versions.make({"weights.bin": content(30_000)})
    directories = await asyncio.gather(
        *(pull(blob_server.url, manifest, tmp_path, options=OPTIONS) for _ in range(3)),
        pull(blob_server.url, manifest, tmp_path / "elsewhere", options=OPTIONS),
    )
    for directory in directories:
        _whole(directory, manifest)
    assert blob_server.sent == 60_000


async def test_a_full_disk_is_one_clear_error(
    blob_server, versions, content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = versions.make({"weights.bin": content(5_000)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DiskFull, match=r"weights\.bin \(5000 bytes\)"):
            await pull(blob_server.url, manifest, tmp_path, options=OPTIONS)
    assert not list((tmp_path / "rljob_t" / ".incoming").iterdir())
    _whole(await pull(blob_server.url, manifest, tmp_path, options=OPTIONS), manifest)


async def test_a_manifest_that_contradicts_itself_is_refused(blob_server, versions, content, tmp_path: Path) -> None:
    manifest = versions.make({"weights.bin": content(5_000)})
    wrong = "f" * 64
    blob_server.blobs[wrong] = blob_server.blobs[manifest.files[0].blake3]
    entry = manifest.files[0].model_copy(update={"blake3": wrong})
    with pytest.raises(CorruptData, match="contradicts itself"):
        await pull(blob_server.url, manifest.model_copy(update={"files": (entry,)}), tmp_path, options=OPTIONS)


async def test_a_broken_safetensors_file_never_becomes_a_version(
    blob_server, versions, content, tmp_path: Path
) -> None:
    manifest = versions.make({"model.safetensors": content(500)})
    with pytest.raises(CorruptData, match=r"model\.safetensors"):
        await pull(blob_server.url, manifest, tmp_path, options=OPTIONS)
    assert _directories(tmp_path) == set()


def _whole(directory: Path, manifest: Manifest) -> None:
    for entry in manifest.files:
        verify(directory / entry.name, entry)
    assert not (directory.parent / ".incoming").exists() or not list((directory.parent / ".incoming").iterdir())


def _directories(root: Path) -> set[str]:
    return {path.name for path in (root / "rljob_t").iterdir() if not path.name.startswith(".")}

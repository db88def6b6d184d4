"""Which paths a sandbox opens for reading: all of a root that is not hidden, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest_reward.sandbox import readable


def covered(paths: list[str], file: Path) -> bool:
    return any(file.is_relative_to(path) for path in paths)


names = st.sampled_from(["a", "b", ".c"])
trees = st.sets(st.lists(names, min_size=1, max_size=4).map(tuple), max_size=12)


@given(files=trees, hidden=trees, dotted=st.booleans())
def test_what_is_hidden_is_never_covered_and_the_rest_is(
    tmp_path_factory: pytest.TempPathFactory, files: set[tuple[str, ...]], hidden: set[tuple[str, ...]], dotted: bool
) -> None:
    root = tmp_path_factory.mktemp("root").resolve()
    for parts in files:
        root.joinpath(*parts).mkdir(parents=True, exist_ok=True)
        (root.joinpath(*parts) / "file").write_text("")
    kept_out = [root.joinpath(*parts) for parts in hidden]
    paths = readable(root, [os.fspath(path) for path in kept_out], dotted=dotted)
    for path in root.rglob("file"):
        secret = any(path.is_relative_to(each) for each in kept_out)
        secret |= not dotted and path.relative_to(root).parts[0].startswith(".")
        assert covered(paths, path) is not secret, path


def test_links_cover_nothing_of_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("/etc")
    assert readable(tmp_path / "root", [], dotted=False) == []


def test_a_root_that_lies_in_a_hidden_directory_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "data" / "root").mkdir(parents=True)
    assert readable(tmp_path / "data" / "root", [str(tmp_path / "data")], dotted=True) == []


OLDER = """
import os, signal, subprocess, sys
from rlharvest_reward import seccomp
other = subprocess.Popen(["sleep", "5"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
seccomp.restrict(seccomp.rules(own_signals_only=True, no_truncation=True))
def refused(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False
path = sys.argv[1]
assert refused(lambda: os.kill(other.pid, 0)), "signals"
assert refused(lambda: os.kill(os.getppid(), 0)), "signals"
os.kill(os.getpid(), 0)
assert refused(lambda: os.truncate(path, 0)), "truncate"
assert refused(lambda: os.open(path, os.O_RDONLY | os.O_TRUNC)), "open"
os.close(os.open("new", os.O_WRONLY | os.O_TRUNC | os.O_CREAT))
print(open(path).read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is of Linux")
def test_what_older_landlocks_lack_the_filter_has(tmp_path: Path) -> None:
    """Before its ABI 6 signals, before 3 truncation."""
    (tmp_path / "file").write_text("as it was")
    command = [sys.executable, "-c", OLDER, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("as it was\n", "")

"""A full disk has one name and one sentence, whoever meets it and however it is said."""

from __future__ import annotations

import errno
import os

import pytest
from rlharvest import disk
from rlharvest.errors import DiskFull
from safetensors import SafetensorError


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        OSError(errno.EFBIG, os.strerror(errno.EFBIG), "file"),
        SafetensorError(f"IO error: {os.strerror(errno.ENOSPC)} (os error 28)"),
    ],
)
def test_no_space_is_named_with_what_was_written_and_the_fix(error: Exception) -> None:
    with (
        pytest.raises(
            DiskFull, match=r"^no space left for the file \(.*(space|quota|large).*\)\. Give it more\.$"
        ) as caught,
        disk.naming("the file", "Give it more.", also=(SafetensorError,)),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "no"), SafetensorError("cut off"), DiskFull("mine")])
def test_everything_else_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, disk.naming("the file", also=(SafetensorError,)):
        raise error
    assert caught.value is error

"""Which files a job may name: only what lies, after symbolic links, under the server's roots.

A relative path is looked for under each root in turn. Whether a path outside of the roots exists is never told. Nothing is
ever fetched from an address that a job names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlharvest.confinement import inside
from rlharvest.errors import InvalidField

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")


def confine(field: str, value: str, roots: Sequence[Path]) -> Path:
    """Return the real path of `value`, which exists under one of `roots`.

    Raises:
        InvalidField: it is a URL, lies outside, or does not exist; names `field` and the roots.
    """
    if _URL.match(value):
        raise InvalidField(
            field, value, "is a URL, and the server fetches none", f"Copy it below one of {', '.join(map(str, roots))}."
        )
    shown = ", ".join(str(root) for root in roots)
    if "\0" in value:
        raise InvalidField(field, value, "a path cannot hold a NUL character", "Remove it.")
    given = Path(value).expanduser()
    candidates = [given] if given.is_absolute() else [root / given for root in roots]
    allowed = [path for path in candidates if inside(path, roots)]
    if not allowed:
        raise InvalidField(
            field,
            value,
            f"lies outside of the directories that jobs may use ({shown})",
            "Move it below one of them, or add its directory to RLHARVEST_ROOTS of the coordinator.",
        )
    for path in allowed:
        if path.exists():
            return path.resolve()
    raise InvalidField(field, value, f"there is no such file or directory (looked under {shown})", "Check the path.")

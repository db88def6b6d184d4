"""From errors to exit codes and one clear line."""

from __future__ import annotations

import sys

from rlharvest.errors import (
    Conflict,
    DataError,
    InfrastructureError,
    NotFound,
    NotLeader,
    RlharvestError,
    Unavailable,
)

OK = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
INTERRUPTED = 130


def code(error: RlharvestError) -> int:
    """Return the exit code that an error ends the command with."""
    if isinstance(error, (Unavailable, NotLeader)):
        return UNREACHABLE
    if isinstance(error, InfrastructureError):
        return FAILED
    return USAGE if isinstance(error, (DataError, NotFound, Conflict)) else FAILED


def complain(error: RlharvestError) -> int:
    """Write an error to standard error; return the exit code."""
    colour = sys.stderr.isatty()
    head = "\x1b[31merror:\x1b[0m" if colour else "error:"
    print(f"{head} {error}", file=sys.stderr)
    return code(error)

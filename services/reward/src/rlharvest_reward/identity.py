"""Who reward code runs as, where the service is root: a user of its own, with the right to read files and no other.

A user that nobody else is cannot signal, trace or change the limits of others, owns nothing but its scratch folder, and
has a count of processes of its own. Where the service is no root, its user stays, and the count is shared with it.
"""

from __future__ import annotations

import ctypes
import os

FIRST_USER = 0x6000_0000
"""Plus the process's id: no two live processes share one, and no system gives such numbers to people."""

_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAPABILITY_VERSION_3 = 0x20080522
_DAC_READ_SEARCH = 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def leave_root(scratch: str, *, keep_reading: bool) -> None:
    """Become a user of one's own if this process is root; `scratch` becomes that user's.

    Args:
        keep_reading: go on reading files that only root can read, e.g. an interpreter below /root. Landlock, which must
            be there then, decides which.

    Raises:
        OSError: the user namespace has no such user, or this root may not change.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    user = FIRST_USER + os.getpid()
    kept = 1 << _DAC_READ_SEARCH if keep_reading and _permitted(libc) >> _DAC_READ_SEARCH & 1 else 0
    os.chown(scratch, user, user)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    sets = (_Sets * 2)(_Sets(kept, kept, kept), _Sets(0, 0, 0))
    if libc.capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    if kept:  # also for programs that the function runs
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _DAC_READ_SEARCH, 0, 0)


def _permitted(libc: ctypes.CDLL) -> int:
    sets = (_Sets * 2)()
    libc.capget(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), sets)
    return int(sets[0].permitted)

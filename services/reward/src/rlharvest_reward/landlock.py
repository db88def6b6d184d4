"""Landlock: which files this process and its descendants may open, run, make and remove, whoever they are.

Rules are tied to directories and files themselves, and checked by the kernel when a file is opened: no link, rename or
race leads around them. Also, from the ABI on that has it: no signals to processes outside (6), no TCP (4), no abstract
unix sockets (6). Source: the kernel's documentation, userspace-api/landlock; the numbers are those of its UAPI header.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights of files that an ABI knows; those between have the ones of the ABI below."""

_PR_SET_NO_NEW_PRIVS = 38

_TCP = 0b11
_SCOPES = 0b11

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = ~(_MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | _IOCTL_DEV)
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

SIGNALS = 6
"""The ABI from which on signals stay inside."""

TRUNCATION = 3
"""The ABI from which on emptying a file counts as writing to it."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result


def abi() -> int:
    """Return which version of Landlock the kernel has; 0: none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict(*, names: Iterable[str], read: Iterable[str], write: Iterable[str]) -> None:
    """Leave this thread, and what it starts, the right to list directories beneath `names`, to read and run what lies
    beneath `read`, and to change what lies beneath `write`.

    Paths are opened without following a link in their last place; what is a link or absent is passed over.

    Raises:
        OSError: the kernel has no Landlock, or refuses.
    """
    version = abi()
    if version == 0:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    known = next(rights for since, rights in sorted(_RIGHTS.items(), reverse=True) if version >= since)
    rules = _Ruleset(known, _TCP if version >= 4 else 0, _SCOPES if version >= SIGNALS else 0)
    size = 8 if version < 4 else 16 if version < SIGNALS else 24
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for paths, rights in ((names, _READ_DIR), (read, _READ), (write, _WRITE)):
            for path in paths:
                _allow(ruleset, path, rights & known)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no_new_privs")
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return
        rule = _Beneath(rights if stat.S_ISDIR(mode) else rights & _OF_FILES, descriptor)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)

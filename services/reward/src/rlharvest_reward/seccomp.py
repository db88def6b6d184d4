"""Seccomp: system calls that reward code has no use for, refused by the kernel for this process and its descendants.

libseccomp (the C library) knows the numbers of calls on every architecture and writes the filter. Everything is allowed
but what REFUSED and the rules below name: an unknown call cannot leave what Landlock and the user's rights allow, and
numerical libraries use many.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import NamedTuple

_LIBRARY = "libseccomp.so.2"

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOT_EQUAL, _EQUAL, _MASKED = 1, 4, 7

REFUSED = (
    # The network, and sockets of other programs. Pairs stay: see `_rules`.
    *("socket", "connect", "bind", "listen", "accept", "accept4", "io_uring_setup", "io_uring_enter"),
    # Memory and descriptors of other processes.
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise", "kcmp", "perf_event_open"),
    *("move_pages", "migrate_pages", "process_mrelease", "userfaultfd", "bpf", "add_key", "keyctl", "request_key"),
    # What outlives a process, or takes memory that its limit does not count.
    *("shmget", "shmat", "msgget", "semget", "mq_open", "memfd_create", "memfd_secret"),
    # Another view of the file system, or a way around paths.
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_by_handle_at", "name_to_handle_at"),
    *("open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    # Files outside of the scratch folder, by other ways than opening them.
    *("chmod", "fchmod", "fchmodat", "chown", "lchown", "fchown", "fchownat", "utime", "utimes", "utimensat"),
    *("futimesat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
    *("inotify_init", "inotify_init1", "fanotify_init", "quotactl", "swapon", "swapoff", "acct"),
    # A process group of its own would outlive a kill of the group.
    *("setsid", "setpgid"),
    # Signals without a process that the rules below could look at; other processes' limits and places.
    *("pidfd_send_signal", "setpriority", "ioprio_set", "syslog"),
)

_NUMBERED = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469}
"""Calls that are younger than the library may be; such numbers are the same on every architecture."""

_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF
_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP, _TIOCSTI = 0x8901, 0x8902, 0x5412
_RLIMIT_NPROC = 6
_NEGATIVE = 1 << 31
_INT = 0xFFFFFFFF


class Argument(NamedTuple):
    """What must hold of argument `place` of a call for a rule to refuse it."""

    place: int
    operator: int
    value: int
    mask: int = 0


Rule = tuple[str, int, tuple[Argument, ...]]
"""Name of a call, the error that it gives, and when (always if empty)."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def _masked(place: int, mask: int, value: int) -> Argument:
    return Argument(place, _MASKED, value, mask)


def rules(*, own_signals_only: bool, no_truncation: bool) -> list[Rule]:
    """Return the rules of the filter.

    Args:
        own_signals_only: refuse signals to any process but this one, where Landlock does not keep them inside.
        no_truncation: refuse to empty files by other ways than opening them for writing, where Landlock does not.
    """
    made: list[Rule] = [(name, errno.EPERM, ()) for name in (*REFUSED, *_NUMBERED)]
    # Its flags lie in memory that a filter cannot read; the C library falls back to `clone`.
    made.append(("clone3", errno.ENOSYS, ()))
    made += [("clone", errno.EPERM, (_masked(0, flag, flag),)) for flag in _NAMESPACES]
    # asyncio and multiprocessing need connected pairs. Of the other types one can send to any address.
    made.append(("socketpair", errno.EPERM, (Argument(0, _NOT_EQUAL, _AF_UNIX),)))
    made += [
        ("socketpair", errno.EPERM, (_masked(1, _SOCK_TYPES, kind),)) for kind in range(16) if kind != _SOCK_STREAM
    ]
    # All of a sandbox is one process group, so a signal to a group hits the function itself, or others.
    made += [("kill", errno.EPERM, (_masked(0, _NEGATIVE, _NEGATIVE),)), ("kill", errno.EPERM, (_masked(0, _INT, 0),))]
    if own_signals_only:
        own = Argument(0, _NOT_EQUAL, os.getpid())
        made += [(call, errno.EPERM, (own,)) for call in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")]
        made.append(("tkill", errno.EPERM, ()))
    made += [("fcntl", errno.EPERM, (_masked(1, _INT, command),)) for command in (_F_SETOWN, _F_SETOWN_EX)]
    made += [("ioctl", errno.EPERM, (_masked(1, _INT, command),)) for command in (_FIOSETOWN, _SIOCSPGRP, _TIOCSTI)]
    # Limits and processors of this process only, and its limit of processes stays.
    for call in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        made.append((call, errno.EPERM, (Argument(0, _NOT_EQUAL, 0),)))
    made.append(("prlimit64", errno.EPERM, (_masked(1, _INT, _RLIMIT_NPROC), Argument(2, _NOT_EQUAL, 0))))
    made.append(("setrlimit", errno.EPERM, (_masked(0, _INT, _RLIMIT_NPROC),)))
    if no_truncation:
        made.append(("truncate", errno.EPERM, ()))
        access_and_truncation = os.O_ACCMODE | os.O_TRUNC
        made += [
            (call, errno.EPERM, (_masked(place, access_and_truncation, os.O_RDONLY | os.O_TRUNC),))
            for call, place in (("open", 1), ("openat", 2))
        ]
        made.append(("openat2", errno.ENOSYS, ()))
    return made


def restrict(made: list[Rule]) -> None:
    """Put the rules into force, for ever; no program that is run from now on gains rights.

    Raises:
        OSError: there is no libseccomp, or the kernel refuses.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise OSError(errno.ENOSYS, f"{_LIBRARY} is not installed") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not context:
        raise OSError(errno.ENOMEM, "seccomp_init")
    try:
        for name, error_number, arguments in made:
            number = _NUMBERED.get(name, library.seccomp_syscall_resolve_name(name.encode()))
            if number < 0:
                continue  # this architecture, or this kernel's time, has no such call
            comparisons = (_Comparison * len(arguments))(
                *(
                    _Comparison(each.place, each.operator, *((each.mask, each.value) if each.mask else (each.value, 0)))
                    for each in arguments
                )
            )
            status = library.seccomp_rule_add_array(
                context, ctypes.c_uint32(_ERRNO | error_number), number, len(arguments), comparisons
            )
            if status != 0:
                raise OSError(-status, f"seccomp: {name}: {os.strerror(-status)}")
        if (status := library.seccomp_load(context)) != 0:
            raise OSError(-status, f"seccomp: {os.strerror(-status)}")
    finally:
        library.seccomp_release(context)

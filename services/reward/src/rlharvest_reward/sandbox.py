"""The walls around reward code. The child enters them before it loads anything of the user's; they hold for all it starts.

    who        identity   where the service is root: a user of its own, without root's rights
    how much   limits     memory, files, processes; what goes beyond in sum: usage
    files      landlock   reads libraries and the roots of jobs, writes only its scratch folder
    calls      seccomp    no sockets, no other processes' memory or limits, no group of its own

Invariants: nothing of a wall is undone later; each is kept even where another one is missing. With `required` a missing one
ends the process, else it is left out; `trial` finds at the service's start which promises hold.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlharvest_reward import identity, landlock, limits, seccomp

Wall = Literal["who", "tasks", "files", "calls"]

_SYSTEM = (
    *("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/group", "/etc/ssl/openssl.cnf", "/etc/mime.types", "/etc/alternatives"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/sys/devices/system", "/dev/zero"),
    *("/dev/random", "/dev/urandom"),
)
_OF_ITSELF = ("fd", "maps", "stat", "statm", "status", "limits", "cgroup", "environ", "cmdline", "comm")
"""Of /proc/self; not `net`, which shows who is connected to whom on this machine."""

_WRITABLE_DEVICES = ("/dev/null",)
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the C library puts semaphores


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What the walls let through."""

    roots: tuple[str, ...]
    """Directories of jobs' files: readable, but for their entries that begin with a dot."""
    hidden: tuple[str, ...] = ()
    """Directories that are not readable though they lie under a root."""
    shared_memory: bool = False
    """Whether /dev/shm may be used."""
    required: bool = True
    """Whether a wall that the system cannot build ends the process."""

    @classmethod
    def of(cls, message: dict[str, Any]) -> Sandbox:
        """Return what `message` made of one."""
        return cls(tuple(message["roots"]), tuple(message["hidden"]), message["shared_memory"], message["required"])

    def message(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def enter(self, parent: int, memory_mb: int, file: str | None) -> list[Wall]:
        """Build the walls around this process, which has one thread; return those that stand.

        Args:
            parent: id of the process whose end is this one's end.
            memory_mb: MiB of address space of each process.
            file: of the reward function, absolute; readable wherever it lies.

        Raises:
            OSError: a wall that is required cannot be built.
        """
        scratch = os.getcwd()
        version = landlock.abi()
        limits.confine(memory_mb)
        read = [*_SYSTEM, *_libraries(), *(f"/proc/{os.getpid()}/{name}" for name in _OF_ITSELF)]
        names = list(self.roots)
        for root in self.roots:
            read += readable(Path(root), self.hidden, dotted=False)
        if file is not None:
            read += [file, *readable(Path(file).parent, self.hidden, dotted=Path(file).parent.name.startswith("."))]
            names.append(os.path.dirname(file))
        write = [scratch, *_WRITABLE_DEVICES, *([_SHARED_MEMORY] if self.shared_memory else [])]

        walls: tuple[tuple[Wall, Callable[[], None]], ...] = (
            ("who", lambda: identity.leave_root(scratch, keep_reading=version > 0)),
            ("tasks", limits.confine_tasks),
            ("files", lambda: landlock.restrict(names=names, read=read, write=write)),
            ("calls", lambda: seccomp.restrict(_rules(version))),
        )
        standing: list[Wall] = []
        for wall, build in walls:
            try:
                build()
                standing.append(wall)
            except OSError:
                if self.required:
                    raise
            if wall == "who":  # a change of user has forgotten both
                limits.die_with_parent(parent)
                limits.show_environment()
        return standing


def _rules(version: int) -> list[seccomp.Rule]:
    # A user of its own may signal no one else anyway.
    shared_user = os.geteuid() < identity.FIRST_USER
    return seccomp.rules(
        own_signals_only=version < landlock.SIGNALS and shared_user, no_truncation=version < landlock.TRUNCATION
    )


def _libraries() -> Iterator[str]:
    """Yield where this interpreter and what it can import lie."""
    for path in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path}:
        if path:
            yield os.path.realpath(path)


def readable(directory: Path, hidden: Sequence[str], *, dotted: bool) -> list[str]:
    """Return paths that together cover a directory without what is hidden in it.

    Args:
        hidden: absolute directories; neither they nor what lies beneath is covered.
        dotted: whether the entries of `directory` itself that begin with a dot are covered.
    """
    directory = Path(os.path.realpath(directory))
    kept_out = [path for path in map(Path, hidden) if path.is_relative_to(directory)]
    if any(directory.is_relative_to(path) for path in map(Path, hidden)):
        return []
    if dotted and not kept_out:
        return [os.fspath(directory)]
    covered: list[str] = []
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        if entry.is_symlink() or (entry.name.startswith(".") and not dotted):
            continue  # what a link leads to is covered where it lies, or not at all
        if entry.is_dir(follow_symlinks=False):
            covered += readable(Path(entry.path), hidden, dotted=True)
        else:
            covered.append(entry.path)
    return covered

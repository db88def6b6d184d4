"""Run a program that ends with its parent: `python exec.py PARENT_PID PROGRAM ARGUMENT…`.

The kernel is told to send SIGKILL to this process when the thread that started it ends, then the program takes its
place, so that nothing outlives a launcher that was killed itself. The setting survives exec. Standard library only: it
is run as a file, without site-packages, to start in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main(arguments: list[str]) -> None:
    """Replace this process by the program; leave with 1 when the parent is gone already."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(f"{command[0]}: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
            sys.exit(1)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])

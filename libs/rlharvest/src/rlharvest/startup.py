"""The first seconds of a process, before anything in it can be stopped in order.

A service imports for up to some seconds. A SIGTERM in that time would end it by the signal, which reads as a crash to
whoever started it. Nothing is begun yet, so there is nothing to undo: the process just exits with 0. This module
imports nothing that takes time; Supervisor.run replaces the handlers.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave_on_signals() -> None:
    """Exit with 0 at once on SIGTERM and SIGINT, until something else handles them. Call it first thing in `main`."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # An exception would run into whatever is being imported, some of which catches everything.
    os._exit(0)

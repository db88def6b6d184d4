"""How many tokens to draft next: additive increase, reset on a rejection (RhymeRL, arXiv 2508.18588)."""

from __future__ import annotations

WINDOW_START = 2
WINDOW_STEP = 2


def next_window(window: int, *, drafted: int, accepted: int, most: int) -> int:
    """Return the window after a draft: one step wider if all of it was accepted, else the first one again.

    Args:
        window: at present.
        drafted: tokens verified; 0 leaves the window as it is.
        accepted: of these.
        most: bound of the window.
    """
    if not drafted:
        return window
    return min(window + WINDOW_STEP, most) if accepted == drafted else min(WINDOW_START, most)

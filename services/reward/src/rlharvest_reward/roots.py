"""Where reward files may lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlharvest_reward.fault import RewardFault


def confined(path: str, roots: Sequence[Path]) -> Path:
    """Return the real path of a reward file, symbolic links followed.

    Args:
        path: absolute, or relative to one of the roots (the first that has it).
        roots: directories that the real path must lie in.

    Raises:
        RewardFault: not_found; there is no such file, or it lies outside of the roots.
    """
    allowed = [root.resolve() for root in roots]
    names = ", ".join(str(root) for root in allowed)
    candidates = [Path(path)] if Path(path).is_absolute() else [root / path for root in allowed]
    for candidate in candidates:
        real = candidate.resolve()
        inside = any(real.is_relative_to(root) for root in allowed)
        if not inside:
            raise RewardFault(
                "not_found",
                f"rewards.path = {path!r} lies outside of the reward roots ({names}). "
                "Move the file there, or add its directory to RLHARVEST_ROOTS of the reward service",
                function=Path(path).name,
            )
        if real.is_file():
            return real
    raise RewardFault(
        "not_found",
        f"rewards.path = {path!r}: there is no such file under the reward roots ({names}). "
        "Correct the path, or copy the file to the machine of the reward service",
        function=Path(path).name,
    )

"""Which return values are rewards: pure checks between what a user's function gave back and the sum.

A reward is one finite number a sample, or None for "says nothing about this one". bool, int, float and scalars of array
libraries (anything of shape () with `item()`) are numbers; a string never is. Nothing is broadcast, nothing is guessed.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from rlharvest_reward.fault import RewardFault, shown


def number(value: Any, function: str) -> float | None:
    """Return a reward as float, or None for None.

    Raises:
        RewardFault: wrong_type or not_finite; names the function, what was expected and what came.
    """
    if value is None:
        return None
    given = value
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardFault(
            "wrong_type",
            f"{function} returned {shown(given)} ({type(given).__name__}); expected a finite number or None",
            function=function,
        )
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardFault(
            "not_finite",
            f"{function} returned {shown(given)}; expected a finite number. Return None for a sample it cannot judge",
            function=function,
        )
    return result


def one_each(values: Any, n: int, function: str) -> list[float | None]:
    """Return the rewards of n samples from what a TRL-style function gave back.

    Raises:
        RewardFault: wrong_type (no list), wrong_length (one for many, too many, none), or as `number`.
    """
    if not isinstance(values, list | tuple) and len(getattr(values, "shape", ())) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardFault(
            "wrong_type",
            f"{function} returned {shown(values)} ({type(values).__name__}); expected a list of {n} number(s), "
            "one for each completion",
            function=function,
        )
    if len(values) != n:
        raise RewardFault(
            "wrong_length",
            f"{function} returned {len(values)} values {shown(list(values))}; expected {n}, one for each completion",
            function=function,
        )
    return [number(value, function) for value in values]


def verl_score(value: Any, function: str) -> float | None:
    """Return the reward of one sample from what a verl-style function gave back: a number, or a dict with `score`."""
    if isinstance(value, dict):
        if "score" not in value:
            raise RewardFault(
                "wrong_type",
                f"{function} returned a dict with keys {shown(list(value))}; expected the key 'score'",
                function=function,
            )
        value = value["score"]
    return number(value, function)

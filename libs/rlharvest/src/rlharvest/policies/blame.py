"""When a prompt is to blame for dying workers.

A preemption never counts. A prompt is suspected only when workers died without notice and without a new token of it since
the assignment; after `SUSPECT_AFTER` of those it runs alone, and after `DROP_AFTER` more its group is dropped. Any new token
clears it (rlharvest.ledger.book).
"""

from __future__ import annotations

SUSPECT_AFTER = 3
DROP_AFTER = 2


def suspected(deaths: int) -> bool:
    """Whether a response runs alone from now on."""
    return deaths >= SUSPECT_AFTER


def condemned(deaths: int) -> bool:
    """Whether its group is dropped."""
    return deaths >= SUSPECT_AFTER + DROP_AFTER

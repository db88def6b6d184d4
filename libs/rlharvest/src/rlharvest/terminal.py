"""When a response has ended: one pure rule for workers, for the coordinator after a loss, and for the simulator."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlharvest.spans import Finish


def terminal(
    ids: Sequence[int],
    *,
    eos_ids: Collection[int],
    budget: int,
    stop: Sequence[str] = (),
    text: str | None = None,
) -> Finish:
    """Return why a response with these tokens has ended, or Finish.NONE.

    Args:
        ids: tokens of the response so far, without the prompt.
        budget: most tokens of the response, for its whole life.
        stop: stop strings.
        text: the decoded response; needed only where there are stop strings.
    """
    if len(ids) and int(ids[-1]) in eos_ids:
        return Finish.EOS
    if stop and text is not None and any(string in text for string in stop):
        return Finish.STOP
    return Finish.LENGTH if len(ids) >= budget else Finish.NONE

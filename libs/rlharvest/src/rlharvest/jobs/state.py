"""The life of a job, as one pure function.

    validating → queued → running ⇄ pausing → paused → queued
                    running → succeeded | failed | cancelling → cancelled

Invariants: a terminal status never changes; every change has a reason that a person can read; zero workers is no failure
(`running` with reason WaitingForWorkers).
"""

from __future__ import annotations

from enum import StrEnum

from rlharvest.errors import Conflict


class Status(StrEnum):
    """Where a job is in its life."""

    VALIDATING = "validating"
    """Model, dataset and rewards are being checked."""

    QUEUED = "queued"
    """Waits for a trainer."""

    RUNNING = "running"
    """A trainer has it."""

    PAUSING = "pausing"
    """Responses are handed back and the trainer saves a checkpoint."""

    PAUSED = "paused"
    """Nothing runs; resume goes on where it stopped."""

    CANCELLING = "cancelling"
    """The trainer and the workers let go."""

    SUCCEEDED = "succeeded"
    """All steps are done."""

    FAILED = "failed"
    """It cannot go on; `error` says why."""

    CANCELLED = "cancelled"
    """A user ended it."""


class Move(StrEnum):
    """What happens to a job."""

    VALIDATED = "validated"
    """Its inputs are good."""

    CLAIM = "claim"
    """A trainer takes it."""

    RELEASE = "release"
    """The trainer let go of it: another one may take it."""

    PAUSE = "pause"
    """A user asks it to pause."""

    PAUSED = "paused"
    """The trainer saved and let go, or there was none."""

    RESUME = "resume"
    """A user asks it to go on."""

    CANCEL = "cancel"
    """A user asks it to end."""

    CANCELLED = "cancelled"
    """Trainer and workers let go, or there were none."""

    SUCCEED = "succeed"
    """The last step is done and saved."""

    FAIL = "fail"
    """It cannot go on."""


TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED})

_MOVES: dict[tuple[Status, Move], Status] = {
    (Status.VALIDATING, Move.VALIDATED): Status.QUEUED,
    (Status.VALIDATING, Move.FAIL): Status.FAILED,
    (Status.VALIDATING, Move.CANCEL): Status.CANCELLED,
    (Status.QUEUED, Move.CLAIM): Status.RUNNING,
    (Status.QUEUED, Move.PAUSE): Status.PAUSED,
    (Status.QUEUED, Move.CANCEL): Status.CANCELLED,
    (Status.QUEUED, Move.FAIL): Status.FAILED,
    (Status.RUNNING, Move.CLAIM): Status.RUNNING,
    (Status.RUNNING, Move.RELEASE): Status.QUEUED,
    (Status.RUNNING, Move.PAUSE): Status.PAUSING,
    (Status.RUNNING, Move.CANCEL): Status.CANCELLING,
    (Status.RUNNING, Move.SUCCEED): Status.SUCCEEDED,
    (Status.RUNNING, Move.FAIL): Status.FAILED,
    (Status.PAUSING, Move.PAUSED): Status.PAUSED,
    (Status.PAUSING, Move.RELEASE): Status.PAUSED,
    (Status.PAUSING, Move.CLAIM): Status.PAUSING,
    (Status.PAUSING, Move.PAUSE): Status.PAUSING,
    (Status.PAUSING, Move.RESUME): Status.RUNNING,
    (Status.PAUSING, Move.CANCEL): Status.CANCELLING,
    (Status.PAUSING, Move.SUCCEED): Status.SUCCEEDED,
    (Status.PAUSING, Move.FAIL): Status.FAILED,
    (Status.PAUSED, Move.PAUSE): Status.PAUSED,
    (Status.PAUSED, Move.RESUME): Status.QUEUED,
    (Status.PAUSED, Move.CANCEL): Status.CANCELLED,
    (Status.PAUSED, Move.FAIL): Status.FAILED,
    (Status.CANCELLING, Move.CANCEL): Status.CANCELLING,
    (Status.CANCELLING, Move.CANCELLED): Status.CANCELLED,
    (Status.CANCELLING, Move.RELEASE): Status.CANCELLED,
    (Status.CANCELLING, Move.SUCCEED): Status.SUCCEEDED,
    (Status.CANCELLING, Move.FAIL): Status.FAILED,
    (Status.CANCELLED, Move.CANCEL): Status.CANCELLED,
}


def advance(status: Status, move: Move) -> Status:
    """Return the status after a move.

    Raises:
        Conflict: the move is not allowed in this status; says which are.
    """
    try:
        return _MOVES[status, move]
    except KeyError:
        allowed = ", ".join(sorted(step.value for state, step in _MOVES if state is status)) or "none"
        raise Conflict(
            f"{move.value!r} is not possible for a job that is {status.value}; possible: {allowed}"
        ) from None

"""Every error of rlharvest.

    RlharvestError
    ├── InfrastructureError      something outside failed; trying again may help
    │   ├── Unavailable          a service does not answer
    │   ├── NotLeader            another coordinator leads
    │   ├── DiskFull
    │   └── LimitReached     as much is there as may be
    ├── DataError                something that was given is wrong; trying again will not help
    │   ├── InvalidField         names the field, the value and the fix
    │   └── CorruptData          bytes that do not verify
    ├── NotFound
    ├── Conflict                 the state does not allow it
    └── Fenced                   a newer owner took over

An error's docstring is its message unless one is given. Infrastructure faults are apart from data faults: the first are
retried by whoever can, the second are shown to the user and never retried.
"""

from __future__ import annotations


class RlharvestError(Exception):
    """Something went wrong in rlharvest."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class InfrastructureError(RlharvestError):
    """Something outside of rlharvest failed."""


class Unavailable(InfrastructureError):
    """A service does not answer."""


class NotLeader(InfrastructureError):
    """This coordinator does not lead; ask another one."""


class DiskFull(InfrastructureError):
    """There is no space left on the disk."""


class LimitReached(InfrastructureError):
    """As much is there as may be; something must end first.

    Attributes:
        what: that is counted, e.g. `unfinished jobs`.
        limit: how many there may be.
        fix: what to do, one sentence.
    """

    def __init__(self, what: str, limit: int, fix: str) -> None:
        self.what = what
        self.limit = limit
        self.fix = fix
        super().__init__(f"{what}: the limit of {limit} is reached. {fix}")


class DataError(RlharvestError):
    """Something that was given is wrong."""


class InvalidField(DataError):
    """A field has a value that cannot be used.

    Attributes:
        field: dotted path, e.g. `dataset.path`.
        value: what was given.
        fix: what to do, one sentence.
    """

    def __init__(self, field: str, value: object, problem: str, fix: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.fix = fix
        try:
            shown = repr(value)
        except ValueError:  # an integer of more digits than Python writes
            shown = f"a {type(value).__name__} too long to be shown"
        if len(shown) > 200:
            shown = shown[:197] + "..."
        super().__init__(f"{field} = {shown}: {problem}. {fix}")


class CorruptData(DataError):
    """Bytes do not verify against their digest or size."""


class NotFound(RlharvestError):
    """There is no such thing.

    Attributes:
        field: dotted path of what names it in a request, None where its address does.
    """

    def __init__(self, message: str | None = None, *, field: str | None = None) -> None:
        self.field = field
        super().__init__(message or "There is no such thing.")


class Conflict(RlharvestError):
    """The present state does not allow this."""


class Fenced(RlharvestError):
    """A newer owner took over; this one must stop."""

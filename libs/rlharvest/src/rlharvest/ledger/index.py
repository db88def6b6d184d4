"""The live responses of a book by state, by owner and by blame, so that nobody has to look through all of them.

Invariants: every live response is under its state, or under `served` if it is that; one with an owner is under it as well;
`blamed` holds exactly those on which a worker died that sent no token of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlharvest.ledger.response import OWNED, Response, State

Owner = tuple[str, int]
"""A worker and its incarnation."""


@dataclass(slots=True)
class Index:
    """Follows what the book does to its responses."""

    blamed: dict[int, Response] = field(default_factory=dict)
    """By handle."""
    served: dict[int, Response] = field(default_factory=dict)
    """By handle, in whatever state."""
    _states: dict[State, dict[int, Response]] = field(default_factory=lambda: {state: {} for state in State})
    _owners: dict[Owner, dict[int, Response]] = field(default_factory=dict)

    def add(self, response: Response) -> None:
        """A response is live from now on, as it is."""
        where = self.served if response.served else self._states[response.state]
        where[response.handle] = response
        if response.state in OWNED:
            self._owners.setdefault(response.owner, {})[response.handle] = response
        if response.deaths:
            self.blamed[response.handle] = response

    def remove(self, response: Response) -> None:
        """Forget a response, which is still as it was when it was added."""
        where = self.served if response.served else self._states[response.state]
        del where[response.handle]
        if response.state in OWNED:
            owned = self._owners[response.owner]
            del owned[response.handle]
            if not owned:
                del self._owners[response.owner]
        self.blamed.pop(response.handle, None)

    def within(self, state: State) -> Mapping[int, Response]:
        """The responses in a state that are trained, by handle."""
        return self._states[state]

    def owners(self) -> Mapping[Owner, Mapping[int, Response]]:
        """The responses of each owner that has any, by handle."""
        return self._owners

    def owned_by(self, worker: str, incarnation: int) -> Mapping[int, Response]:
        """The responses that this incarnation of a worker owns, by handle."""
        return self._owners.get((worker, incarnation), {})

    def owned(self) -> Iterator[Response]:
        """All responses that have an owner."""
        for responses in self._owners.values():
            yield from responses.values()

"""One request while it is answered: its groups in the ledger on one side, the choices of its client on the other.

Invariant: however it ends, `close` lets go of everything that it had sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from rlharvest.spans import ids_bytes

from rlharvest_coordinator.courier import Asked, sampling_of
from rlharvest_coordinator.gateway.choice import Choice, Piece
from rlharvest_coordinator.gateway.request import Ask, Order, seeds
from rlharvest_coordinator.run import Run


class Completion:
    """One request of one job.

    Args:
        leave: called once, when it is closed.
    """

    def __init__(self, run: Run, ask: Ask, order: Order, leave: Callable[[], None]) -> None:
        self._run = run
        self._leave = leave
        self._news = asyncio.Event()
        self._closed = False
        tokenizer = run.scope.prepared.tokenizer
        sampling = sampling_of(ask, tokenizer)
        self._answers = [
            run.serving.ask(Asked(ids_bytes(prompt), seed, sampling), n=ask.n, budget=order.budget, news=self._news)
            for prompt, seed in zip(order.prompts, seeds(order.seed, order.prompts), strict=True)
        ]
        self.choices = [Choice(index, tokenizer.decode, ask.stop) for index in range(len(order.prompts) * ask.n)]
        self._n = ask.n

    @property
    def done(self) -> bool:
        """Whether the client has all of it."""
        return all(choice.reason is not None for choice in self.choices)

    async def pieces(self, patience_s: float) -> AsyncIterator[Piece | None]:
        """Yield what comes, until all choices have ended; None when nothing came for `patience_s`.

        Raises:
            RlharvestError: nothing more will come.
        """
        while not self.done:
            try:
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
            except TimeoutError:
                yield None
            self._news.clear()
            for piece in self._take():
                yield piece

    def _take(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        for at, answer in enumerate(self._answers):
            choices = self.choices[at * self._n : (at + 1) * self._n]
            found = (choices[delta.place].add(delta) for delta in self._run.serving.take(answer))
            pieces += [piece for piece in found if piece is not None]
            if all(choice.reason is not None for choice in choices):
                self._run.serving.close(answer, complete=True)
        return pieces

    def close(self) -> None:
        """The client has it, or is gone: what still runs is aborted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for answer in self._answers:
            self._run.serving.close(answer, complete=self.done)
        self._leave()

"""What the simulated workers of the ingest benchmark publish: every token is a pure function of response and position.

Invariant: the flushes of a worker, one after another, give each of its responses all tokens from 0 to `length`, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import Response, State, attempt_of
from rlharvest.spans import Finish, Ids, Logprobs, Run
from rlharvest.v1 import ledger_pb2, spans_pb2

EPOCH = 1
VERSION = 7
VOCAB = 50_000


@dataclass(frozen=True, slots=True)
class Load:
    """One job: workers that each sample waves of responses, all responses of a wave at the same pace."""

    job: str
    workers: int
    live: int = 64
    """Responses of a worker at a time; one group."""
    span: int = 16
    """Tokens of a response in one flush."""
    length: int = 512
    """Tokens of a response when it is finished."""
    waves: int = 1

    @property
    def flushes(self) -> int:
        """Messages of one worker."""
        return self.waves * self.length // self.span

    @property
    def tokens(self) -> int:
        """Tokens of one worker."""
        return self.waves * self.live * self.length

    @property
    def responses(self) -> int:
        """Responses of all workers."""
        return self.workers * self.waves * self.live

    def worker(self, index: int) -> str:
        """Return the name of a worker."""
        return f"wkr_{self.job[-8:]}_{index}"

    def transitions(self, most: int = 4096) -> Iterator[list[ledger_pb2.Change]]:
        """Yield the changes that admit every group and give its responses to their worker, `most` at a time or fewer."""
        changes: list[ledger_pb2.Change] = []
        for ordinal in range(self.workers * self.waves):
            first = ordinal * self.live
            admit = ledger_pb2.Admit(group=ordinal, first_handle=first, n=self.live, budget=self.length)
            if len(changes) + 1 + self.live > most:
                yield changes
                changes = []
            changes.append(ledger_pb2.Change(admit=admit))
            owner = self.worker(ordinal // self.waves)
            for handle in range(first, first + self.live):
                value = ledger_pb2.Assign(handle=handle, attempt=attempt_of(EPOCH, 1), worker=owner, incarnation=1)
                changes.append(ledger_pb2.Change(assign=value))
        yield changes

    def payloads(self, index: int) -> Iterator[bytes]:
        """Yield the TokenSpans messages of a worker, as rlharvest.spans.pack makes them."""
        for number in range(self.flushes):
            wave, step = divmod(number, self.length // self.span)
            first = (index * self.waves + wave) * self.live
            handles = np.arange(first, first + self.live, dtype=np.uint32)
            offset = step * self.span
            ids = token_ids(handles, offset, self.span)
            finish = Finish.LENGTH if offset + self.span == self.length else Finish.NONE
            yield spans_pb2.TokenSpans(
                worker=self.worker(index),
                incarnation=1,
                flush=number + 1,
                numerics_key="simulated",
                handle=handles.tolist(),
                attempt=[attempt_of(EPOCH, 1)] * self.live,
                offset=[offset] * self.live,
                n=[self.span] * self.live,
                finish=[finish.value] * self.live,
                ids=ids.tobytes(),
                logprobs=logprobs_of(ids).tobytes(),
                run_n=[self.span] * self.live,
                run_version=[VERSION] * self.live,
            ).SerializeToString()

    def wrong(self, book: Book) -> int:
        """Return how many tokens of the job are not in a book exactly as they were published."""
        missing = self.responses - len(book.responses)
        return missing * self.length + sum(self._wrong(response) for response in book.responses.values())

    def _wrong(self, response: Response) -> int:
        ids = token_ids(np.asarray([response.handle], np.uint32), 0, self.length)[0]
        whole = (
            response.length == self.length
            and response.state is State.FINISHED
            and response.finish is Finish.LENGTH
            and response.runs == (Run(self.length, VERSION),)
            and np.array_equal(response.ids, ids)
            and np.array_equal(response.logprobs, logprobs_of(ids))
        )
        return 0 if whole else self.length


def token_ids(handles: Ids, offset: int, n: int) -> Ids:
    """Return the tokens `offset` .. `offset + n` of responses, shape (len(handles), n)."""
    positions = np.arange(offset, offset + n, dtype=np.uint32)
    return (handles[:, None] * np.uint32(2_654_435_761) + positions * np.uint32(40_503)) % np.uint32(VOCAB)


def logprobs_of(ids: Ids) -> Logprobs:
    """Return the log-probability that goes with each token, same shape."""
    return np.divide(-(ids % np.uint32(997)).astype(np.float32), np.float32(97), dtype=np.float32)


def share(workers: int, publishers: int, index: int) -> Sequence[int]:
    """Return the workers that one of the publishing processes simulates."""
    return range(index, workers, publishers)

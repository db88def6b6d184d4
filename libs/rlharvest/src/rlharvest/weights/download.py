"""Fetch the missing parts of one partial file from a server that may misbehave, until the whole verifies.

Every part is asked for with Range and If-Range and checked twice: the reply's head must say that it is this part,
the bytes must have the part's hash. A server that ignores ranges, or fails on the same part again and again, is asked
for the whole file instead. The end is a file whose blake3 is right, or an error:

- the network fails, or the server says "later": tried again with growing pauses until the time limit (Unavailable);
- the server sends what was not asked for, `strikes` times in a row: CorruptData;
- the server does not have the file: NotFound.
"""

from __future__ import annotations

import http.client
import threading

import blake3

from rlharvest.errors import CorruptData, NotFound
from rlharvest.weights.manifest import part_range
from rlharvest.weights.partial import PartialFile
from rlharvest.weights.ranges import Verdict, judge
from rlharvest.weights.transfer import BLOCK_BYTES, TRANSIENT, Progress, Transfer


class WrongReply(Exception):
    """A server sent what was not asked for. Stays inside of this module."""


class Download:
    """The download of one file; `part` may run in many threads, `rest` afterwards in one."""

    def __init__(self, partial: PartialFile, transfer: Transfer, progress: Progress, *, strikes: int) -> None:
        self.partial = partial
        self._entry = partial.entry
        self._transfer = transfer
        self._progress = progress
        self._strikes = strikes
        self._by_range = threading.Event()
        self._by_range.set()

    def part(self, index: int) -> None:
        """Fetch one part; leaves it to `rest` when the server does not serve ranges."""
        strikes = tries = 0
        while self._by_range.is_set():
            problem: Exception
            try:
                self._ask_for_part(index)
                return
            except WrongReply as error:
                strikes, problem = strikes + 1, error
            except TRANSIENT as error:
                problem = error
            self._transfer.drop()
            if strikes >= self._strikes:
                self._by_range.clear()
                return
            self._transfer.pause(tries, f"{self._entry.name}, part {index}: {problem!r}")
            tries += 1

    def rest(self) -> None:
        """Fetch what is missing by asking for the whole file, then check the whole."""
        for again in (True, False):
            self._whole_until_complete()
            hasher = blake3.blake3()
            if self._entry.size:
                hasher.update_mmap(self.partial.path)
            found = hasher.hexdigest()
            if found == self._entry.blake3:
                return
            self._progress.add(-self._entry.size)
            self.partial.reset()
            if not again:
                raise CorruptData(
                    f"{self._entry.name}: every part is right, yet the file's blake3 is {found}; the manifest says "
                    f"{self._entry.blake3}. The manifest contradicts itself; publish the version again."
                )

    def _whole_until_complete(self) -> None:
        strikes = tries = 0
        while left := len(self.partial.missing):
            problem: Exception
            try:
                self._ask_for_whole()
                continue
            except WrongReply as error:
                # Parts that verified stay; only a reply that brought none counts against the server.
                strikes, problem = strikes + 1 if len(self.partial.missing) == left else 0, error
                if strikes >= self._strikes:
                    raise CorruptData(
                        f"{self._entry.name}: {self._transfer.base_url} sent wrong bytes {strikes} times: {error}"
                    ) from error
            except TRANSIENT as error:
                problem = error
            self._transfer.drop()
            self._transfer.pause(tries, f"{self._entry.name}: {problem!r}")
            tries += 1

    def _ask_for_part(self, index: int) -> None:
        start, end = part_range(self._entry, index)
        headers = {"Range": f"bytes={start}-{end - 1}", "If-Range": f'"{self._entry.blake3}"'}
        reply, verdict = self._ask(headers, start, end)
        if verdict is Verdict.WHOLE:
            # The body is left unread: another request, for the whole, reads it once for all parts.
            self._by_range.clear()
            self._transfer.drop()
            return
        self._read_part(reply, index)
        self._expect_end(reply)

    def _ask_for_whole(self) -> None:
        reply, _ = self._ask({}, 0, self._entry.size)
        missing = set(self.partial.missing)
        scratch = memoryview(bytearray(BLOCK_BYTES))
        for index in range(len(self._entry.parts)):
            if index in missing:
                self._read_part(reply, index)
                continue
            start, end = part_range(self._entry, index)
            while start < end:
                start += self._read(reply, scratch[: end - start])
        self._expect_end(reply)

    def _ask(self, headers: dict[str, str], start: int, end: int) -> tuple[http.client.HTTPResponse, Verdict]:
        connection = self._transfer.connection()
        path = f"{self._transfer.prefix}/v1/blobs/{self._entry.blake3}"
        headers = {"Accept-Encoding": "identity", **headers}
        connection.request("GET", path, headers={**headers, **self._transfer.caller.headers})
        reply = connection.getresponse()
        verdict, why = judge(
            reply.status,
            {name.lower(): value for name, value in reply.getheaders()},
            start=start,
            end=end,
            size=self._entry.size,
        )
        if verdict is Verdict.GONE:
            raise NotFound(f"{self._entry.name}: {self._transfer.base_url} does not have it ({why}); was it deleted?")
        if verdict is Verdict.LATER:
            raise ConnectionError(why)
        if verdict is Verdict.WRONG:
            raise WrongReply(why)
        return reply, verdict

    def _read_part(self, reply: http.client.HTTPResponse, index: int) -> None:
        with self.partial.window(index) as window:
            done = 0
            while done < len(window):
                with window[done : done + BLOCK_BYTES] as block:
                    done += self._read(reply, block)
        if not self.partial.verified(index):
            raise WrongReply(f"the bytes of part {index} do not have the hash that the manifest names")
        self.partial.mark(index)
        start, end = part_range(self._entry, index)
        self._progress.add(end - start)

    def _read(self, reply: http.client.HTTPResponse, block: memoryview) -> int:
        self._transfer.check()
        try:
            count = reply.readinto(block)
        except http.client.IncompleteRead as error:
            raise WrongReply("the body breaks off") from error
        if not count:
            raise WrongReply("the body is shorter than it should be")
        return count

    def _expect_end(self, reply: http.client.HTTPResponse) -> None:
        if reply.read(1):
            raise WrongReply("the body is longer than it should be")

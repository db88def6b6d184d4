"""When preemptible instances are to be had: traces from files of three public formats, and made-up ones.

A trace is a list of changes: at a time, a place of the pool becomes free or is taken away. Formats:

    events   rows `ms,add|remove,node`; adding what is there, or removing what is not, changes nothing
    counts   rows `YYYY-MM-DD, HH:MM:SS, count`; rows out of order are sorted
    samples  JSON `{"metadata": {"gap_seconds": n}, "data": [count, ...]}`

Where only counts are known, which places go is drawn at random, so a place's life is as long as the counts allow.

Invariants (property-tested): changes are in order of time, and up and down alternate for each place; at any time as many
places are up as the file says; the same file and seed give the same trace.
"""

from __future__ import annotations

import bisect
import datetime
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.errors import InvalidField
from rlharvest.simulator.scenario import Generated, Market, TraceFormat

MOST_BYTES = 64 << 20
_FIX = "docs/simulator.md shows the formats."


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One place comes or goes."""

    at_s: float
    place: str
    up: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """The changes of a pool, in order of time, and how long it was watched."""

    changes: tuple[Change, ...]
    seconds: float

    @property
    def places(self) -> list[str]:
        """All places that are ever up."""
        return sorted({change.place for change in self.changes})

    def counts(self) -> list[tuple[float, int]]:
        """Return (second, places that are up from then on)."""
        result: list[tuple[float, int]] = []
        up = 0
        for change in self.changes:
            up += 1 if change.up else -1
            if result and result[-1][0] == change.at_s:
                result[-1] = (change.at_s, up)
            else:
                result.append((change.at_s, up))
        return result

    def mean(self) -> float:
        """Return the places that are up, mean over time."""
        counts = [*self.counts(), (self.seconds, 0)]
        total = sum(n * (after - at) for (at, n), (after, _) in itertools.pairwise(counts))
        return total / self.seconds if self.seconds else 0.0

    def window(self, start_s: float, seconds: float | None) -> Trace:
        """Return a part; what is up at its start comes at 0."""
        end = self.seconds if seconds is None else min(self.seconds, start_s + seconds)
        up: set[str] = set()
        inside = []
        for change in self.changes:
            if change.at_s <= start_s:
                (up.add if change.up else up.discard)(change.place)
            elif change.at_s < end:
                inside.append(Change(change.at_s - start_s, change.place, change.up))
        first = [Change(0.0, place, True) for place in sorted(up)]
        return Trace((*first, *inside), max(0.0, end - start_s))

    def sample(self, share: float, rng: random.Random) -> Trace:
        """Return the trace of a share of the places, drawn at random."""
        places = self.places
        kept = set(rng.sample(places, round(share * len(places))))
        return Trace(tuple(change for change in self.changes if change.place in kept), self.seconds)


def of(market: Market, seed: int) -> Trace:
    """Return the trace of a scenario.

    Raises:
        InvalidField: its file cannot be read, or is in no format that is known.
    """
    rng = random.Random(seed)
    if market.fixed is not None:
        return Trace(tuple(Change(0.0, f"p{n:05d}", True) for n in range(market.fixed)), 1e12)
    made_up = market.trace is None
    whole = generate(market.generated, rng) if made_up else read(Path(market.trace or ""), market.format, rng)
    seconds = None if market.hours is None else market.hours * 3600
    part = whole.window(market.start_h * 3600, seconds)
    if part.seconds <= 0:
        raise InvalidField(
            "market.start_h", market.start_h, f"the trace has {whole.seconds / 3600:.1f} h", "Start within it."
        )
    return part.sample(market.share, rng) if market.share < 1 else part


def read(path: Path, format: TraceFormat = "auto", rng: random.Random | None = None) -> Trace:
    """Return the trace in a file.

    Raises:
        InvalidField: it cannot be read, or a row is not of the format.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InvalidField("market.trace", str(path), "is larger than 64 MiB", _FIX)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("market.trace", str(path), str(error), _FIX) from error
    kind = _format_of(text) if format == "auto" else format
    try:
        if kind == "events":
            return events(_rows(text))
        counted = samples(json.loads(text)) if kind == "samples" else counts(_rows(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidField("market.trace", str(path), f"is not of the format {kind!r}: {error}", _FIX) from error
    return from_counts(*counted, rng or random.Random(0))


def _format_of(text: str) -> TraceFormat:
    head = text.lstrip()[:200]
    if head.startswith("{"):
        return "samples"
    return "events" if ",add," in head.partition("\n")[0] or ",remove," in head.partition("\n")[0] else "counts"


def _rows(text: str) -> Iterable[list[str]]:
    for line in text.splitlines():
        if line.strip():
            yield [cell.strip() for cell in line.split(",")]


def events(rows: Iterable[Sequence[str]]) -> Trace:
    """Return the trace of rows `ms,add|remove,node`.

    Raises:
        ValueError: a row is something else.
    """
    parsed = []
    for number, row in enumerate(rows, 1):
        if len(row) != 3 or row[1] not in ("add", "remove"):
            raise ValueError(f"row {number}: {','.join(row)[:80]!r}")
        parsed.append((float(row[0]) / 1000, row[2], row[1] == "add"))
    up: set[str] = set()
    changes = []
    for at, place, comes in sorted(parsed, key=lambda item: item[0]):
        if comes != (place in up):
            changes.append(Change(at, place, comes))
            (up.add if comes else up.discard)(place)
    return Trace(tuple(changes), max((at for at, _, _ in parsed), default=0.0))


def counts(rows: Iterable[Sequence[str]]) -> tuple[list[tuple[float, int]], float]:
    """Return ((second, count) in order, seconds) of rows `date, time, count`.

    Raises:
        ValueError: a row is something else.
    """
    parsed = []
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            raise ValueError(f"row {number}: {','.join(row)[:80]!r}")
        when = datetime.datetime.fromisoformat(f"{row[0]}T{row[1]}").replace(tzinfo=datetime.UTC)
        parsed.append((when.timestamp(), int(row[2])))
    parsed.sort(key=lambda item: item[0])
    start = parsed[0][0] if parsed else 0.0
    return [(at - start, n) for at, n in parsed], (parsed[-1][0] - start if parsed else 0.0)


def samples(values: dict[str, Any]) -> tuple[list[tuple[float, int]], float]:
    """Return ((second, count) in order, seconds) of `{"metadata": {"gap_seconds": n}, "data": [count, ...]}`.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    gap = float(values["metadata"]["gap_seconds"])
    if gap <= 0:
        raise ValueError(f"gap_seconds is {gap}")
    data = [int(count) for count in values["data"]]
    return [(n * gap, count) for n, count in enumerate(data)], len(data) * gap


def from_counts(points: Sequence[tuple[float, int]], seconds: float, rng: random.Random) -> Trace:
    """Return a trace with so many places up at each time; which ones go is drawn."""
    up: list[str] = []
    down: list[str] = []
    made = 0
    changes = []
    for at, count in points:
        while len(up) > max(0, count):
            place = up.pop(rng.randrange(len(up)))
            bisect.insort(down, place)
            changes.append(Change(at, place, False))
        while len(up) < count:
            if down:
                place = down.pop(rng.randrange(len(down)))
            else:
                place, made = f"p{made:05d}", made + 1
            up.append(place)
            changes.append(Change(at, place, True))
    return Trace(tuple(changes), seconds)


def generate(spec: Generated, rng: random.Random) -> Trace:
    """Return a made-up trace: lives and gaps are exponential, and storms take a share of all that is up at once."""
    end = spec.hours * 3600
    storms: list[float] = []
    if (rate := spec.storms_per_day / 86400) > 0:
        at = rng.expovariate(rate)
        while at < end:
            storms.append(at)
            at += rng.expovariate(rate)
    likely_up = spec.up_minutes / (spec.up_minutes + spec.down_minutes)
    changes = []
    for n in range(spec.places):
        place, at, up = f"p{n:05d}", 0.0, rng.random() < likely_up
        if up:
            changes.append(Change(0.0, place, True))
        while at < end:
            mean = 60 * (spec.up_minutes if up else spec.down_minutes)
            until = at + (rng.expovariate(1 / mean) if mean > 0 else 0.0)
            if up:
                until = next(
                    (storm for storm in storms if at < storm < until and rng.random() < spec.storm_share), until
                )
            at, up = until, not up
            if at < end:
                changes.append(Change(at, place, up))
    return Trace(tuple(sorted(changes, key=lambda change: change.at_s)), end)

"""What a run gave: its steps, its bill, what happened; as JSON and as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from rlharvest.money import figures
from rlharvest.money.amount import Money
from rlharvest.money.lease import Bill
from rlharvest.simulator.timeline import Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. Times in seconds; the first two are of the run."""

    step: int
    start_s: float
    end_s: float
    tokens: int
    """Trained: of prompts and responses."""
    seed_asked_s: float
    """T_seed."""
    seeded_s: float
    """How long reserved engines were awake."""
    train_s: float
    trainer_idle_s: float
    remote_idle_s: float
    generation_s: float
    """From its start to the last response that was finished in it."""
    instances: float
    """Preemptible ones that could serve, mean."""
    reason: str
    """For what the next step does."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of one strategy."""

    scenario: str
    strategy: str
    seed: int
    steps: tuple[Step, ...]
    spent: tuple[Money, ...]
    """The bill at the end of each step, if every lease ended then."""
    seconds: float
    """Virtual."""
    finished: bool
    """It did all its steps."""
    reserved: Bill
    spot: Bill
    lost_instances: int
    orphans: int
    moves: int
    generated_tokens: int
    regenerated_tokens: int
    prefilled_tokens: int
    weights_gb: float
    """Sent."""
    events: int
    wall_s: float = field(compare=False)
    """Seconds that the simulation took."""
    stretches: tuple[Stretch, ...] = field(default=(), repr=False)

    @property
    def total(self) -> Money:
        """The whole bill."""
        return self.reserved.total + self.spot.total

    @property
    def tokens(self) -> int:
        """Trained."""
        return sum(step.tokens for step in self.steps)

    def settled(self, skip: int = 0) -> tuple[Step, ...]:
        """Return the steps without the first few, in which the controllers settle."""
        return self.steps[skip:] if len(self.steps) > skip else self.steps

    def tokens_per_s(self, skip: int = 0) -> float:
        """Return trained tokens/s."""
        steps = self.settled(skip)
        seconds = steps[-1].end_s - steps[0].start_s if steps else 0.0
        return sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0

    def instances(self, skip: int = 0) -> float:
        """Return the mean of the instances that could serve."""
        steps = self.settled(skip)
        seconds = sum(step.seconds for step in steps)
        return sum(step.instances * step.seconds for step in steps) / seconds if seconds > 0 else 0.0

    @property
    def usd_per_million(self) -> float | None:
        """Dollars for a million trained tokens."""
        value: Fraction | None = figures.per_million(self.total, self.tokens)
        return None if value is None else float(value)

    def values(self) -> dict[str, Any]:
        """Return everything as JSON values; amounts in dollars."""
        return {
            "scenario": self.scenario,
            "strategy": self.strategy,
            "seed": self.seed,
            "finished": self.finished,
            "seconds": round(self.seconds, 3),
            "trained_tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s(), 3),
            "usd": {"total": _usd(self.total), "reserved": _bill(self.reserved), "spot": _bill(self.spot)},
            "usd_per_million_tokens": self.usd_per_million,
            "instances_mean": round(self.instances(), 4),
            "counts": {
                "lost_instances": self.lost_instances,
                "orphans": self.orphans,
                "moves": self.moves,
                "generated_tokens": self.generated_tokens,
                "regenerated_tokens": self.regenerated_tokens,
                "prefilled_tokens": self.prefilled_tokens,
                "weights_gb": round(self.weights_gb, 3),
                "events": self.events,
            },
            "steps": [
                {name: _rounded(value) for name, value in asdict(step).items()} | {"usd": _usd(spent)}
                for step, spent in zip(self.steps, self.spent, strict=True)
            ],
            "timeline": [[who, state, round(start, 3), round(end, 3)] for who, state, start, end in self.stretches],
        }

    def json(self) -> str:
        """Return everything as JSON; the same run gives the same text."""
        return json.dumps(self.values(), allow_nan=False)


def compare(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of a table of strategies; the first one is what the others are compared with."""
    head = ["strategy", "steps", "hours", "tokens/s", "x", "$ total", "$ spot", "$/M tokens", "tokens/$ x", "instances"]
    head += ["lost", "moved"]
    rows = []
    base = outcomes[0]
    for one in outcomes:
        speed = one.tokens_per_s() / base.tokens_per_s() if base.tokens_per_s() else math.nan
        price, other = one.usd_per_million, base.usd_per_million
        rows.append(
            [
                one.strategy + ("" if one.finished else " (not done)"),
                str(len(one.steps)),
                f"{one.seconds / 3600:.2f}",
                f"{one.tokens_per_s():,.0f}",
                f"{speed:.2f}",
                str(one.total),
                str(one.spot.total),
                "" if price is None else f"{price:.3f}",
                "" if not price or not other else f"{other / price:.2f}",
                f"{one.instances():.2f}",
                str(one.lost_instances),
                str(one.moves),
            ]
        )
    return head, rows


def _usd(amount: Money) -> float:
    return float(amount.dollars)


def _bill(bill: Bill) -> dict[str, float]:
    parts = {"busy": bill.busy, "boot": bill.boot, "idle": bill.idle, "unused": bill.unused, "total": bill.total}
    return {name: _usd(amount) for name, amount in parts.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value

"""The machines that may be used, as users write them in YAML.

Invariants: unknown keys are refused, with the nearest known one named; units are in the names; every machine's GPU type is
known; a machine has a power of two of GPUs, so that replicas of a power of two always pack into what is free.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError, model_validator

from rlharvest.errors import InvalidField
from rlharvest.jobs.blocks import Block, ShortText
from rlharvest.money.price import Dollars, Market
from rlharvest.planner import cost

MOST_GPUS = 65_536


class Gpu(Block):
    """A type of GPU."""

    tflops: float = Field(gt=0, le=1e6)
    """Dense BF16, in 10^12 operations a second."""

    hbm_tb_per_s: float = Field(gt=0, le=1e3)
    """Memory bandwidth."""

    hbm_gb: float = Field(gt=0, le=1e5)
    """Memory, in 10^9 bytes."""

    train_efficiency: float = Field(cost.TRAIN_EFFICIENCY, gt=0, le=1)
    """Share of `tflops` that training reaches (model FLOPS utilisation)."""

    decode_efficiency: float = Field(cost.DECODE_EFFICIENCY, gt=0, le=1)
    """Share of `hbm_tb_per_s` that decoding reaches."""


KNOWN: dict[str, Gpu] = {
    # Vendors' data sheets, without sparsity.
    "A100-80GB": Gpu(tflops=312, hbm_tb_per_s=2.0, hbm_gb=80),
    "B200": Gpu(tflops=2250, hbm_tb_per_s=8.0, hbm_gb=180),
    "H100": Gpu(tflops=989, hbm_tb_per_s=3.35, hbm_gb=80),
    "H200": Gpu(tflops=989, hbm_tb_per_s=4.8, hbm_gb=141),
    "L40S": Gpu(tflops=362, hbm_tb_per_s=0.864, hbm_gb=48),
    # AReaL-Hex, section 6.1; the efficiencies are fitted to its table 1 (cost.py).
    "H20": Gpu(
        tflops=148,
        hbm_tb_per_s=4.0,
        hbm_gb=96,
        train_efficiency=cost.H20_TRAIN_EFFICIENCY,
        decode_efficiency=cost.H20_DECODE_EFFICIENCY,
    ),
    "H800": Gpu(tflops=756, hbm_tb_per_s=2.0, hbm_gb=80),
}


class Machine(Block):
    """Machines of one kind."""

    name: ShortText
    """For people; a plan names it."""

    gpu: ShortText
    """A key of `gpus`, or a known type."""

    gpus: int = Field(ge=1, le=64)
    """GPUs of one machine, a power of two."""

    count: int = Field(1, ge=1, le=MOST_GPUS)
    """Machines of this kind."""

    usd_per_hour: Dollars
    """Of one machine."""

    market: Market = "reserved"
    """`spot` machines roll out, and never train."""

    availability: float = Field(1.0, gt=0, le=1)
    """Share of the time that such a machine is there. It works and costs for so long."""

    link_gb_per_s: float = Field(200.0, gt=0, le=1e5)
    """Between two of its GPUs, one direction, in 10^9 bytes a second."""

    @model_validator(mode="after")
    def _packs(self) -> Machine:
        if self.gpus & (self.gpus - 1):
            raise ValueError(
                f"gpus: {self.gpus} is no power of two. Write such a machine as several kinds, e.g. 4 and 2"
            )
        return self


class Links(Block):
    """Networks between machines, in 10^9 bytes a second, one direction, of one machine."""

    same_gb_per_s: float = Field(5.0, gt=0, le=1e5)
    """Between machines of one kind."""

    cross_gb_per_s: float = Field(1.5, gt=0, le=1e5)
    """Between machines of different kinds."""


class Inventory(Block):
    """Everything that a plan may use."""

    machines: list[Machine] = Field(min_length=1, max_length=64)
    gpus: dict[ShortText, Gpu] = Field(default_factory=dict, max_length=64)
    """Types of GPU that are not known, or are to be other than known."""

    links: Links = Links()

    @model_validator(mode="after")
    def _fits_together(self) -> Inventory:
        known = {**KNOWN, **self.gpus}
        seen: set[str] = set()
        for at, machine in enumerate(self.machines):
            if machine.gpu not in known:
                raise ValueError(
                    f"machines.{at}.gpu: {machine.gpu!r} is not known ({', '.join(sorted(known))}). "
                    f"Describe it: gpus: {{{machine.gpu}: {{tflops: ..., hbm_tb_per_s: ..., hbm_gb: ...}}}}"
                )
            if machine.name in seen:
                raise ValueError(f"machines.{at}.name: {machine.name!r} is there twice. Give each kind its own name")
            seen.add(machine.name)
        if self.total > MOST_GPUS:
            raise ValueError(f"machines: {self.total} GPUs; the limit is {MOST_GPUS}. Make it smaller")
        return self

    @property
    def total(self) -> int:
        """GPUs of all machines."""
        return sum(machine.gpus * machine.count for machine in self.machines)

    def gpu(self, machine: Machine) -> Gpu:
        """Return the type of a machine's GPUs."""
        return self.gpus.get(machine.gpu) or KNOWN[machine.gpu]


def parse(values: Any) -> Inventory:
    """Return the inventory that `values` (from YAML or JSON) describe.

    Raises:
        InvalidField: with the dotted path, the value and what to do.
    """
    if not isinstance(values, dict):
        raise InvalidField("inventory", values, "not a mapping", "Write `machines:` at the top level.")
    try:
        return Inventory.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "inventory"
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidField(field, first.get("input"), message, "docs/planner.md lists every field.") from error

"""A scenario: what the simulator plays, as users write it in YAML.

Invariants: unknown keys are refused with the nearest known one; units are in the names; everything has a bound. A scenario
and its seed decide everything that happens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from rlharvest.errors import InvalidField
from rlharvest.jobs.blocks import Block, Seed, ShortText
from rlharvest.money.price import Billing, Dollars

StrategyName = Literal["reserved", "colocated", "rlboost", "rlharvest"]

TraceFormat = Literal["auto", "events", "counts", "samples"]


class Model(Block):
    """The model that is trained."""

    parameters_b: float = Field(gt=0, le=100_000)
    """Billions of parameters."""

    active_b: float | None = Field(None, gt=0, le=100_000)
    """Of those, how many a token goes through, in billions. Unset: all."""

    bytes_per_parameter: float = Field(2.0, gt=0, le=8)
    """Of the weights that workers serve."""

    kv_bytes_per_token: float = Field(gt=0, le=1e9)
    """Keys and values of one token in all layers."""


class Device(Block):
    """One GPU, and what share of its data sheet is reached."""

    tflops: float = Field(gt=0, le=1e6)
    """Dense, of the type that it computes in; 1e12 operations a second."""

    bandwidth_tb_s: float = Field(gt=0, le=1e4)
    """Of its memory; 1e12 bytes a second."""

    memory_gb: float = Field(gt=0, le=1e5)
    """1e9 bytes."""

    bandwidth_share: float = Field(0.65, gt=0, le=1)
    """Of the bandwidth, in a decode step."""

    flops_share: float = Field(0.45, gt=0, le=1)
    """Of the operations, in decode and prefill."""


class Workers(Block):
    """A type of rollout worker: one engine on some GPUs."""

    device: ShortText
    """A name in `devices`."""

    gpus: int = Field(1, ge=1, le=1024)
    """Of one engine, used as tensor parallel."""

    slots: int = Field(256, ge=1, le=100_000)
    """Responses that it decodes at a time."""

    memory_share: float = Field(0.9, gt=0, le=1)
    """Of the GPUs' memory, for weights and cache."""

    overhead_ms: float = Field(6.0, ge=0, le=10_000)
    """Of each decode step, besides memory and arithmetic: launches, sampling, communication."""

    network_gbit_s: float = Field(50.0, gt=0, le=100_000)
    """Of the worker's own link."""

    load_gb_s: float = Field(20.0, gt=0, le=10_000)
    """From its memory into its GPUs."""


class Reserved(Block):
    """The machines that are there for the whole run: the trainer, and engines that share its GPUs."""

    nodes: int = Field(1, ge=1, le=10_000)
    """Machines."""

    device: ShortText
    """A name in `devices`."""

    gpus_per_node: int = Field(8, ge=1, le=1024)
    """GPUs of a machine."""

    usd_per_node_hour: Dollars
    """Price of a machine."""

    billing: Billing = Billing()
    """How its time is counted."""

    engine_gpus: int = Field(2, ge=1, le=1024)
    """GPUs of one of its engines."""

    engine_memory_share: float = Field(0.6, gt=0, le=1)
    """Of the memory, for weights and cache of the engines: the trainer needs the rest."""

    slots: int = Field(256, ge=1, le=100_000)
    """Responses that an engine decodes at a time."""

    overhead_ms: float = Field(6.0, ge=0, le=10_000)
    """Of each decode step."""

    wake_s: float = Field(8.0, ge=0, le=3600)
    """From training to rollout: weights in the engines' form, cache made."""

    sleep_s: float = Field(3.0, ge=0, le=3600)
    """From rollout to training."""


class Training(Block):
    """What the trainer does with a batch."""

    flops_share: float = Field(0.4, gt=0, le=1)
    """Of the GPUs' operations."""

    forwards: int = Field(2, ge=0, le=10)
    """Forward passes besides the one that is trained: old and reference log-probabilities."""

    micro_batch: int = Field(16, ge=1, le=1_000_000)
    """Responses that it takes at a time, if the strategy streams."""

    optimizer_s: float = Field(5.0, ge=0, le=36_000)
    """Of the step of the optimizer."""

    publish_s: float = Field(5.0, ge=0, le=36_000)
    """Gathering the weights so that workers can pull them."""


class Workload(Block):
    """Prompts and responses."""

    prompts_per_step: int = Field(128, ge=1, le=1_000_000)
    """Groups of a batch."""

    num_generations: int = Field(8, ge=1, le=1024)
    """Responses of a group."""

    prompts: int = Field(20_000, ge=1, le=100_000_000)
    """In the data set; afterwards the next epoch begins."""

    prompt_tokens: int = Field(256, ge=1, le=1_000_000)
    """Of a prompt."""

    median_tokens: float = Field(2000.0, ge=1, le=1_000_000)
    """Of a response, at the first step."""

    prompt_sigma: float = Field(0.8, ge=0, le=5)
    """Standard deviation of the logarithm of the length between prompts."""

    sample_sigma: float = Field(0.5, ge=0, le=5)
    """The same between responses to one prompt."""

    drift_per_step: float = Field(0.0, gt=-0.5, le=1)
    """Relative growth of the lengths with each optimizer step."""

    max_tokens: int = Field(14_336, ge=1, le=10_000_000)
    """Where a response is cut off."""


class Generated(Block):
    """A trace that is made up: every place of the pool comes and goes on its own, and now and then many at once."""

    places: int = Field(8, ge=1, le=100_000)
    """Most instances at a time."""

    hours: float = Field(2.0, gt=0, le=10_000)
    """Length of the trace."""

    up_minutes: float = Field(60.0, ge=0.01, le=1e6)
    """Mean time that an instance is there."""

    down_minutes: float = Field(15.0, ge=0, le=1e6)
    """Mean time until its place is free again."""

    storms_per_day: float = Field(4.0, ge=0, le=10_000)
    """Times that the provider takes many at once."""

    storm_share: float = Field(0.5, ge=0, le=1)
    """Share of the instances that a storm takes."""


class Market(Block):
    """When how many preemptible instances are to be had, and what they cost."""

    trace: str | None = Field(None, max_length=4096)
    """File with a trace, relative to the scenario. Unset: `generated`."""

    format: TraceFormat = "auto"
    """`events`: rows `ms,add|remove,node`; `counts`: rows `date, time, count`; `samples`: JSON, counts at equal gaps."""

    generated: Generated = Generated()
    """The trace that is made up if there is no file."""

    start_h: float = Field(0.0, ge=0, le=1e6)
    """Hour of the trace that the run starts with."""

    hours: float | None = Field(None, gt=0, le=1e6)
    """Hours of the trace that are played; then it starts again. Unset: to its end."""

    share: float = Field(1.0, ge=0, le=1)
    """Share of the trace's instances that are ours, drawn at random."""

    most: int | None = Field(None, ge=0, le=100_000)
    """Instances that are leased at a time at most, whatever the policy asks for."""

    fixed: int | None = Field(None, ge=0, le=100_000)
    """So many instances that never go, instead of a trace."""

    usd_per_hour: Dollars
    """Price of an instance."""

    billing: Billing = Billing()
    """How its time is counted."""

    boot_s: float = Field(60.0, ge=0, le=86_400)
    """From the lease until its engine can load weights."""

    workers: Workers
    """What an instance is."""


class Link(Block):
    """Where weights come from."""

    gbit_s: float = Field(200.0, gt=0, le=1e6)
    """Of the trainer's machine, or of the weight service."""

    delta_share: float = Field(0.05, gt=0, le=1)
    """Size of an exact delta of two versions, relative to all weights; for strategies that send deltas."""


class Coordination(Block):
    """How fast the coordinator is."""

    round_s: float = Field(0.1, gt=0, le=60)
    """Least time between two rounds of decisions."""

    detect_s: float = Field(3.0, ge=0, le=3600)
    """From the death of a worker until its responses go on elsewhere."""

    flush_tokens: int = Field(20, ge=0, le=100_000)
    """Newest tokens of a response that a death loses."""

    balance_s: float = Field(1.0, gt=0, le=3600)
    """Time between two looks at the balance."""


class Scenario(Block):
    """One run, or the same run under several strategies."""

    name: ShortText = "scenario"
    """For people."""

    seed: Seed = 0
    """Of lengths and made-up traces."""

    steps: int = Field(10, ge=1, le=1_000_000)
    """Optimizer steps."""

    max_hours: float = Field(1000.0, gt=0, le=1e6)
    """Virtual hours after which a run is ended, done or not."""

    strategies: list[StrategyName] = Field(["rlharvest"], min_length=1, max_length=4)
    """What is compared; all play the same workload and trace."""

    max_staleness: int = Field(0, ge=0, le=1000)
    """Optimizer steps that a token may be old; 0 is synchronous."""

    model: Model
    """The model that is trained."""

    devices: dict[ShortText, Device] = Field(min_length=1, max_length=64)
    """GPUs by name."""

    reserved: Reserved
    """The machines that are there for the whole run."""

    training: Training = Training()
    """What the trainer does with a batch."""

    workload: Workload = Workload()
    """Prompts and responses."""

    market: Market
    """Preemptible instances."""

    network: Link = Link()
    """Where weights come from."""

    coordinator: Coordination = Coordination()
    """How fast decisions are."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for field, device in (("reserved", self.reserved.device), ("market.workers", self.market.workers.device)):
            if device not in self.devices:
                raise ValueError(f"{field}.device: there is no device {device!r}; known: {', '.join(self.devices)}")
        if self.reserved.engine_gpus > self.reserved.gpus_per_node:
            raise ValueError("reserved.engine_gpus: an engine has no more GPUs than its machine")
        weights = self.model.parameters_b * self.model.bytes_per_parameter
        for field, device, gpus, share in (
            ("reserved", self.reserved.device, self.reserved.engine_gpus, self.reserved.engine_memory_share),
            ("market.workers", self.market.workers.device, self.market.workers.gpus, self.market.workers.memory_share),
        ):
            room = self.devices[device].memory_gb * gpus * share
            longest = (self.workload.prompt_tokens + self.workload.max_tokens) * self.model.kv_bytes_per_token / 1e9
            if weights + 1.1 * longest > room:
                raise ValueError(
                    f"{field}: {gpus} x {device} have {room:.0f} GB for an engine, but the weights take {weights:.0f} GB "
                    f"and the longest response {longest:.1f} GB; use more GPUs"
                )
        if len(set(self.strategies)) < len(self.strategies):
            raise ValueError("strategies: each one once")
        return self


def parse(values: Any) -> Scenario:
    """Return a scenario.

    Raises:
        InvalidField: with the dotted path, the value and what to do.
    """
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "scenario"
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidField(field, first.get("input"), message, "docs/simulator.md lists every field.") from error


def within(scenario: Scenario, directory: Path, traces: Path | None = None) -> Scenario:
    """Return the scenario with the path of its trace made absolute: beside the scenario, or else in `traces`.

    Args:
        directory: of the scenario's file.
    """
    if scenario.market.trace is None:
        return scenario
    name = Path(scenario.market.trace).expanduser()
    beside = directory / name
    found = beside if traces is None or beside.exists() else traces / name
    return scenario.model_copy(update={"market": scenario.market.model_copy(update={"trace": str(found.resolve())})})

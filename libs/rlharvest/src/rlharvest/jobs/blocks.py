"""The blocks of a job: dataset, rewards, sampling, algorithm, staleness, rollout, weights, checkpoints, limits.

Invariants: unknown keys are refused at every level, with the nearest known one named; numbers are bounded in their type;
units are in the names. What two blocks together allow is the job's to say (model.py), by which everybody imports them.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlharvest.speculation.options import MATCH_MAX, MATCH_MIN, WINDOW_MAX

Seed = Annotated[int, Field(ge=0, lt=2**63)]
ShortText = Annotated[str, Field(min_length=1, max_length=512)]
"""A name in somebody else's words: of a column, a split, a function."""
MOST_STOP_CHARACTERS = 256
"""Of one stop string."""

StopString = Annotated[str, Field(max_length=MOST_STOP_CHARACTERS)]
Options = Annotated[dict[str, Any], Field(max_length=64)]
"""Parameters that a task, a function or an engine knows; how much is in them the size of the body bounds."""


class Block(BaseModel):
    """A part of the job that knows its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for key in values:
                if isinstance(key, str) and key not in cls.model_fields:
                    near = difflib.get_close_matches(key, cls.model_fields, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(cls.model_fields)}"
                    raise ValueError(f"unknown key {key!r}; {hint}")
        return values


class Dataset(Block):
    """Where prompts come from."""

    path: str = Field(min_length=1, max_length=4096)
    """A .jsonl, .jsonl.gz, .json or .parquet file, a directory of them, `reasoning-gym:<task>`, or `hf://<name>`."""

    format: Literal["auto", "verl", "trl", "messages", "question-answer"] = "auto"
    """Shape of the rows; `auto` finds it from the columns."""

    split: ShortText = "train"
    """Split of an `hf://` dataset."""

    name: ShortText | None = None
    """Configuration of an `hf://` dataset."""

    prompt_key: ShortText | None = None
    """Column of the prompt: a string or a list of messages. Unset: by the format."""

    label_key: ShortText | None = None
    """Column of the right answer, which rewards get as `ground_truth`. Unset: by the format."""

    system_prompt: str | None = Field(None, max_length=65536)
    """A system message put before every prompt."""

    apply_chat_template: bool | None = None
    """Render prompts with the model's chat template. Unset: messages yes, plain strings no."""

    max_prompt_length: int = Field(1024, ge=1, le=1_000_000)
    """Tokens. Longer prompts are left out and counted."""

    shuffle: bool = True
    """A new order for each pass, from the job's seed."""

    size: int | None = Field(None, ge=1, le=10_000_000)
    """How many rows a generator makes (default 1000), or how many of a file are used."""

    params: Options = Field(default_factory=dict)
    """Parameters of a `reasoning-gym:` task."""


class Reward(Block):
    """One reward function; a response's reward is the weighted sum of all."""

    style: Literal["auto", "trl", "verl", "builtin"] = "auto"
    """How the function is called. `auto`: `builtin` when `builtin` is set, else by its signature."""

    builtin: Literal["exact_match", "numeric", "regex", "reasoning_gym"] | None = None
    """A function that comes with rlharvest."""

    path: str | None = Field(None, max_length=4096)
    """A Python file, under one of the server's reward roots."""

    name: ShortText = "compute_score"
    """Function in `path`."""

    weight: float = Field(1.0, ge=-1_000_000, le=1_000_000)
    """Factor of this function in the sum."""

    timeout_s: float = Field(10.0, gt=0, le=3600)
    """Longest time for one call; then its process is killed and the sample is reported."""

    memory_mb: int = Field(1024, ge=64, le=1_048_576)
    """Most memory of the process that runs the function."""

    params: Options = Field(default_factory=dict)
    """Keyword arguments that each call gets besides; e.g. `pattern` of `regex`, `task` of `reasoning_gym`."""

    @model_validator(mode="after")
    def _one_source(self) -> Reward:
        if (self.builtin is None) == (self.path is None):
            raise ValueError(
                "set either `builtin` (exact_match, numeric, regex, reasoning_gym) or `path` to a Python file"
            )
        if self.style == "builtin" and self.builtin is None:
            raise ValueError(
                "style: builtin needs `builtin`; for a function of yours set `path` and leave style at auto"
            )
        if self.builtin == "regex" and not isinstance(self.params.get("pattern"), str):
            raise ValueError("builtin: regex needs params: {pattern: '...'}")
        return self


class Sampling(Block):
    """How responses are sampled."""

    num_generations: int = Field(8, ge=1, le=1024)
    """Responses of each prompt: the size of a group."""

    max_completion_length: int = Field(512, ge=1, le=1_000_000)
    """Most tokens of a response."""

    temperature: float = Field(1.0, ge=0, le=10)
    """Divides the logits. Rewards with groups need more than 0."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Refused below 1 for training: the trainer could not recompute the truncated distribution."""

    top_k: int = Field(0, ge=0, lt=2**31)
    """0: off. Refused otherwise for training, as top_p."""

    min_p: float = Field(0.0, ge=0, le=1)
    """0: off. Refused otherwise for training, as top_p."""

    stop: list[StopString] = Field(default_factory=list, max_length=16)
    """Strings that end a response; they stay in it."""

    seed: Seed | None = None
    """Of the sampling noise; unset: the job's seed."""

    @model_validator(mode="after")
    def _trainable(self) -> Sampling:
        if self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            raise ValueError(
                "top_p < 1, top_k > 0 and min_p > 0 change the support of the policy, and the loss would compare "
                "log-probabilities of two different distributions. Use top_p: 1.0, top_k: 0, min_p: 0.0"
            )
        if self.temperature == 0 and self.num_generations > 1:
            raise ValueError("temperature: 0 gives the same response to all of a group. Use temperature: 1.0")
        if any(not stop for stop in self.stop):
            raise ValueError("stop holds an empty string, which would end every response at once. Remove it")
        return self


class Algorithm(Block):
    """The learning rule and its optimiser."""

    name: Literal["grpo"] = "grpo"
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

    prompts_per_step: int = Field(8, ge=1, le=65536)
    """Groups in a batch; an optimizer step uses prompts_per_step x num_generations responses."""

    learning_rate: float = Field(1e-6, gt=0, lt=10)
    """Of AdamW."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, over limits.max_steps."""

    warmup_steps: int = Field(0, ge=0, le=10_000_000)
    """Steps over which the learning rate rises from 0."""

    weight_decay: float = Field(0.0, ge=0, le=10)
    """Of AdamW."""

    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Of AdamW."""

    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Of AdamW."""

    max_grad_norm: float = Field(1.0, gt=0, le=1_000_000_000)
    """Gradients are scaled down to this norm."""

    epsilon: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - epsilon."""

    epsilon_high: float | None = Field(None, gt=0, le=1_000_000)
    """The ratio is clipped above at 1 + epsilon_high; unset: epsilon (DAPO's clip-higher sets it)."""

    beta: float = Field(0.0, ge=0, le=1_000_000)
    """Weight of the KL divergence to the initial model; 0: no reference model is kept."""

    scale_rewards: Literal["group", "none"] = "group"
    """`group`: advantages are divided by the group's standard deviation."""

    mask_truncated_completions: bool = False
    """Leave responses that hit the length limit out of the loss; they still count in the baseline."""

    micro_batch_tokens: int = Field(8192, ge=16, le=100_000_000)
    """Tokens, padding included, that go through the model at a time."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model in the trainer; the optimiser's state is float32."""

    deterministic: bool | None = None
    """Fix micro-batches and the order of summation by admission; unset: yes when max_staleness is 0."""


class Staleness(Block):
    """How far rollout may run ahead of training."""

    max_staleness: int = Field(1, ge=0, le=1024)
    """In optimizer steps, of the oldest token of a response. 0 is synchronous training."""

    on_stale: Literal["drop", "mask", "correct"] = "drop"
    """A group over the bound at batch time: drop and replace it, mask it out of the loss, or train it with the ratio."""

    order: Literal["admission", "completion"] = "admission"
    """Which groups form a batch. `completion` favours short answers and may exceed the bound."""


class SpeculationBlock(Block):
    """Drafts: earlier responses propose tokens, the model verifies several at a time. What is sampled stays the same."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto`: while each worker measures that drafts make it faster; `on`: always; `off`: never."""

    window_max: int = Field(WINDOW_MAX, ge=1, le=256)
    """Most tokens of a draft. It starts with 2, grows by 2 when all of it is accepted, and begins anew otherwise."""

    match_max: int = Field(MATCH_MAX, ge=1, le=64)
    """So many of the last tokens are looked up in history first, then fewer and fewer."""

    match_min: int = Field(MATCH_MIN, ge=1, le=64)
    """With fewer matching tokens than this nothing is drafted."""

    history_epochs: int = Field(1, ge=0, le=1000)
    """Epochs of the dataset before the present one whose responses workers are given; 0: siblings alone."""

    @model_validator(mode="after")
    def _least_below_most(self) -> Self:
        if self.match_min > self.match_max:
            raise ValueError(f"match_min {self.match_min} is above match_max {self.match_max}")
        return self


class TorchBlock(Block):
    """The torch engine's own settings."""

    weights: Literal["full", "int8"] = "full"
    """`int8`: linear layers hold a byte a weight, which is faster for few responses at a time and takes a quarter of the
    memory. The log-probabilities are those of the rounded policy that sampled, and the loss corrects for the difference."""


class Rollout(Block):
    """How workers generate."""

    engine: Literal["auto", "vllm", "torch", "stub"] = "auto"
    """`auto`: on each worker vLLM where it is installed and can do what is asked, else torch. `stub` makes tokens up."""

    max_inflight_per_worker: int = Field(64, ge=1, le=65536)
    """Most responses on one worker, whatever it offers."""

    progress_deadline_s: float = Field(60.0, gt=0, le=86400)
    """A response without a new token for this long goes to another worker, though its worker's heart beats."""

    kv: Literal["recompute", "keep"] = "recompute"
    """What running responses do at a version switch: prefill again under the new weights, or keep the old cache."""

    batch_invariant: bool | None = None
    """Bit-exact continuation in the torch engine; unset: yes when max_staleness is 0."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model in the engine."""

    speculation: SpeculationBlock = SpeculationBlock()
    """Drafts from history; see [`rollout.speculation`](#rolloutspeculation) below."""

    torch: TorchBlock = TorchBlock()
    """The torch engine's own settings; see [`rollout.torch`](#rollouttorch) below."""

    stub: Options = Field(default_factory=dict)
    """Settings of the stub engine, for tests."""


class WeightsBlock(Block):
    """How versions travel."""

    shard_bytes: int = Field(1 << 30, ge=1 << 16, le=1 << 36)
    """Largest size of one safetensors file."""

    keep_versions: int = Field(4, ge=2, le=1024)
    """Versions kept besides those that somebody still needs."""


class Checkpoint(Block):
    """Durable states of the trainer."""

    every_steps: int = Field(10, ge=1, le=10_000_000)
    """Steps between two checkpoints; the last step always has one."""

    keep: int = Field(2, ge=1, le=100_000)
    """Newest checkpoints that are kept."""


class Limits(Block):
    """Where the job ends."""

    max_steps: int = Field(100, ge=1, le=10_000_000)
    """Optimizer steps."""

    max_reward_errors: int = Field(32, ge=0, lt=2**31)
    """Responses whose reward failed before the job fails; each is reported and its group replaced."""

"""What may be asked of the gateway: OpenAI's requests for completions, and what they are refused for.

Invariants: a field that would change what is sampled is either done or refused by name, never ignored; one that changes
nothing here (who asks, labels) is taken and ignored. Docs of the words: platform.openai.com, completions and chat.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import MOST_GROUP_TOKENS

from rlharvest_coordinator.data.messages import BadMessages, Message, normalise
from rlharvest_coordinator.data.prepare import Prepared
from rlharvest_coordinator.data.templates import TemplateFailed

MOST_CHOICES = 128
"""n, and prompts of one request."""

MOST_STOPS, MOST_STOP_CHARACTERS = 16, 256

COMPLETION_TOKENS = 16
"""Of a completion whose request names no max_tokens, as OpenAI has it."""

_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True, False),
}
"""Fields that are not offered -> the values of them that ask for nothing."""

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a request: one string, one list of token ids, or a list of either."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) or _is_ids(item) for item in value):
        if len(value) > MOST_CHOICES:
            raise ValueError(f"{len(value)} prompts are more than {MOST_CHOICES}. Send several requests")
        return value
    raise ValueError("not a string, a list of token ids, or a list of either")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _stops(value: Any) -> list[str]:
    """Return the stop strings of a request."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("not a string or a list of strings")
    if len(stops) > MOST_STOPS or any(not 0 < len(stop) <= MOST_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"at most {MOST_STOPS} stop strings of 1 to {MOST_STOP_CHARACTERS} characters are taken")
    return stops


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer"}}


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Ask(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    model: str = Field(min_length=1, max_length=300)
    """Id or name of a running job."""

    n: int = Field(1, ge=1, le=MOST_CHOICES)
    """Choices of each prompt."""

    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 or -1: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    stop: Annotated[list[str], PlainValidator(_stops), WithJsonSchema(_TEXTS)] = Field(default_factory=list)
    """Strings that end a choice; they are not in its text, and their tokens are in its token ids."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    """The same seed and version give the same choices, wherever they are sampled; unset: a random one."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    """Also the token ids of the prompt and of each choice, their log-probabilities and versions."""

    @model_validator(mode="before")
    @classmethod
    def _offered(cls, values: Any) -> Any:
        """Leave out what asks for nothing, and refuse what is not offered. Raises InvalidField."""
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if value is None or name in _IGNORED:
                continue
            if name not in cls.model_fields and name in _NEUTRAL:
                if value not in _NEUTRAL[name]:
                    raise InvalidField(name, value, "not offered here", "Leave it out.")
                continue
            kept[name] = value
        return kept


class CompletionAsk(Ask):
    """POST /v1/completions."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(_prompts),
        WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], _IDS, {"type": "array", "items": _IDS}]}),
    ]
    """Text, token ids, or a list of either; each has `n` choices."""

    max_tokens: int = Field(COMPLETION_TOKENS, ge=1)
    """Most tokens of a choice."""

    logprobs: Literal[0] | None = None
    """0: the log-probability of each token. Those of others are not offered."""


class ChatAsk(Ask):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The conversation, for the chat template of the job's model; text only."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of a choice; unset: as many as the job's own responses may have, and the context has room for."""

    max_tokens: int | None = Field(None, ge=1)
    """The same, by its old name."""

    logprobs: bool = False
    """The log-probability of each token. Those of others (`top_logprobs`) are not offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request against a job's tokenizer and context."""

    prompts: list[list[int]]
    budget: int
    """Most tokens of each choice."""
    seed: int


def completion(ask: CompletionAsk, prepared: Prepared) -> Order:
    """Return what a request for completions asks of a job.

    Raises:
        InvalidField: a prompt cannot be used, or does not fit.
    """
    vocab = prepared.tokenizer.vocab
    prompts = []
    for prompt in ask.prompt:
        if isinstance(prompt, str):
            prompts += prepared.tokenizer.encode_plain([_storable("prompt", prompt)])
            continue
        if (worst := next((id for id in prompt if not 0 <= id < vocab), None)) is not None:
            raise InvalidField("prompt", worst, "not a token id", f"The job's tokenizer has 0 to {vocab - 1}.")
        prompts.append(prompt)
    return _order(ask, "prompt", prompts, lambda _room: ("max_tokens", ask.max_tokens), prepared)


def chat(ask: ChatAsk, prepared: Prepared, *, usual: int) -> Order:
    """Return what a request for chat completions asks of a job.

    Args:
        usual: most tokens of a choice, unless the request or the context says fewer.

    Raises:
        InvalidField: the conversation cannot be used, or does not fit.
    """
    template = prepared.tokenizer.template
    if template is None:
        fix = "Use /v1/completions, or a job whose model has one."
        raise InvalidField("messages", ask.messages, f"the model of job {ask.model} has no chat template", fix)
    try:
        messages: list[Message] = normalise(ask.messages)
        text = template.render(messages)
    except (BadMessages, TemplateFailed) as error:
        raise InvalidField("messages", ask.messages, str(error), "Correct the conversation.") from error
    if None not in (ask.max_tokens, ask.max_completion_tokens) and ask.max_tokens != ask.max_completion_tokens:
        raise InvalidField("max_tokens", ask.max_tokens, "max_completion_tokens says another number", "Send one.")

    def budget(room: int) -> tuple[str, int]:
        name = "max_completion_tokens" if ask.max_tokens is None else "max_tokens"
        value = ask.max_completion_tokens if ask.max_tokens is None else ask.max_tokens
        return name, max(1, min(usual, room)) if value is None else value

    prompts = prepared.tokenizer.encode_rendered([_storable("messages", text)])
    return _order(ask, "messages", prompts, budget, prepared)


def _order(
    ask: Ask,
    field: str,
    prompts: list[list[int]],
    budget_of: Callable[[int], tuple[str, int]],
    prepared: Prepared,
) -> Order:
    longest = max(map(len, prompts))
    if not all(prompts):
        raise InvalidField(field, "", "a prompt has no tokens", "Send at least one token.")
    room = prepared.context - longest
    name, budget = budget_of(room)
    if budget > room:
        raise InvalidField(
            name if room > 0 else field,
            budget if room > 0 else f"{longest} tokens",
            f"does not fit: the prompt has {longest} tokens, the context of job {ask.model} {prepared.context}",
            f"Use at most {room}." if room > 0 else "Shorten it.",
        )
    if (tokens := len(prompts) * ask.n * budget) > MOST_GROUP_TOKENS:
        what = f"prompts x n x {name}"
        raise InvalidField(what, tokens, f"the limit is {MOST_GROUP_TOKENS}", "Make one of them smaller.")
    return Order(prompts=prompts, budget=budget, seed=secrets.randbits(64) if ask.seed is None else ask.seed)


def _storable(field: str, text: str) -> str:
    """Refuse what is no text: JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(field, text[:80], f"not text ({error.reason})", "Send whole characters.") from error
    return text


def seeds(seed: int, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return a seed for each prompt of a request: equal prompts of one request differ."""
    return [seed + place & 2**64 - 1 for place in range(len(prompts))]

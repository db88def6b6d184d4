"""What a child process may answer. The answer comes from a process that runs the user's code, so nothing of it is believed
before it is checked: its call, its kinds, its lengths, and that a number is one.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rlharvest.errors import CorruptData

from rlharvest_reward.fault import Kind


class FaultReply(BaseModel):
    """What the function did instead of giving a number."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Kind
    message: str = Field(max_length=4_000)
    function: str = Field(max_length=400)


class Reply(BaseModel):
    """Answer to one call."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    call: str
    """As the call has it: an answer that was written before its question does not pass."""
    walls: list[str] = Field(default_factory=list, max_length=8)
    value: float | None = None
    fault: FaultReply | None = None


def read(message: dict[str, Any], call: str) -> Reply:
    """Return the answer to `call`.

    Raises:
        CorruptData: it is none.
    """
    try:
        reply = Reply.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "answer"
        raise CorruptData(f"{field[:100]}: {first['msg']}") from error
    if reply.call != call:
        raise CorruptData("it answered what it was not asked")
    return reply

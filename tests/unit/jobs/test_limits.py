"""Nothing that a job says is without a bound, and each bound names the field, the value and the limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rlharvest.errors import InvalidField
from rlharvest.jobs import model
from rlharvest.jobs.model import JobSpec, parse

SCHEMA = JobSpec.model_json_schema()


def minimal() -> dict[str, Any]:
    return {"model": "m", "dataset": {"path": "d.jsonl"}, "rewards": [{"builtin": "exact_match"}]}


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every place of the job that holds a value, by its dotted path."""
    if "$ref" in schema:
        yield from leaves(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], path)
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from leaves(option, path)
    elif "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    elif schema.get("type") == "array":
        yield path, schema
        yield from leaves(schema["items"], f"{path}[]")
    else:
        yield path, schema


BOUNDS = {
    "integer": ("maximum", "exclusiveMaximum"),
    "number": ("maximum", "exclusiveMaximum"),
    "string": ("maxLength", "enum", "const"),
    "array": ("maxItems",),
    "object": ("maxProperties",),
}


@pytest.mark.parametrize(("path", "schema"), sorted(leaves(SCHEMA), key=lambda leaf: leaf[0]))
def test_no_field_of_a_job_is_unbounded(path: str, schema: dict[str, Any]) -> None:
    kind = schema.get("type", "string" if "enum" in schema or "const" in schema else "")
    if kind in ("boolean", "null"):
        return
    assert any(bound in schema for bound in BOUNDS[kind]), f"{path} is a {kind} without a bound: {schema}"


@pytest.mark.parametrize(
    ("path", "value", "limit"),
    [
        ("name", "n" * 201, "200"),
        ("model", "m" * 4097, "4096"),
        ("seed", 2**63, "9223372036854775808"),
        ("metadata", {str(key): "" for key in range(65)}, "64"),
        ("metadata", {"k" * 65: "v"}, "64"),
        ("metadata", {"k": "v" * 513}, "512"),
        ("rewards", [{"builtin": "exact_match"}] * 33, "32"),
        ("dataset.path", "d" * 4097, "4096"),
        ("dataset.prompt_key", "c" * 513, "512"),
        ("dataset.system_prompt", "s" * 65537, "65536"),
        ("dataset.max_prompt_length", 1_000_001, "1000000"),
        ("dataset.size", 10_000_001, "10000000"),
        ("dataset.params", {str(key): 1 for key in range(65)}, "64"),
        ("sampling.num_generations", 1025, "1024"),
        ("sampling.max_completion_length", 1_000_001, "1000000"),
        ("sampling.temperature", 10.5, "10"),
        ("sampling.stop", ["s"] * 17, "16"),
        ("sampling.stop", ["s" * 257], "256"),
        ("algorithm.prompts_per_step", 65537, "65536"),
        ("algorithm.micro_batch_tokens", 100_000_001, "100000000"),
        ("staleness.max_staleness", 1025, "1024"),
        ("rollout.max_inflight_per_worker", 65537, "65536"),
        ("rollout.stub", {str(key): 1 for key in range(65)}, "64"),
        ("weights.shard_bytes", (1 << 36) + 1, "68719476736"),
        ("weights.keep_versions", 1025, "1024"),
        ("checkpoint.keep", 100_001, "100000"),
        ("limits.max_steps", 10_000_001, "10000000"),
    ],
)
def test_every_bound_is_refused(path: str, value: Any, limit: str) -> None:
    """One error, with the field, the value and the limit."""
    spec = minimal()
    block, _, name = path.rpartition(".")
    (spec.setdefault(block, {}) if block else spec)[name] = value
    with pytest.raises(InvalidField) as caught:
        parse(spec)
    assert caught.value.field.startswith(path)
    assert limit in str(caught.value)
    assert "docs/job.md" in caught.value.fix
    assert len(str(caught.value)) < 1000, "a long value is shortened"


@pytest.mark.parametrize(
    ("blocks", "limit"),
    [
        ({"sampling": {"num_generations": 1024, "max_completion_length": 4000}}, model.MOST_GROUP_TOKENS),
        (
            {"algorithm": {"prompts_per_step": 1000}, "sampling": {"num_generations": 100}, "limits": {"max_steps": 1},
             "staleness": {"max_staleness": 10}},
            model.MOST_LIVE_RESPONSES,
        ),
        ({"limits": {"max_steps": 10_000_000}, "algorithm": {"prompts_per_step": 32}}, model.MOST_RESPONSES),
    ],
)  # fmt: skip
def test_products_of_fields_are_bounded(blocks: dict[str, Any], limit: int) -> None:
    with pytest.raises(InvalidField, match=f"the limit is {limit}. Make one of them smaller"):
        parse(minimal() | blocks)


def test_the_largest_that_is_allowed_is_allowed() -> None:
    parse(minimal() | {"sampling": {"num_generations": 4, "max_completion_length": 1_000_000}})

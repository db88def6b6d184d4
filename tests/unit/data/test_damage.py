"""Whatever became of a file that a job names, validation says what is wrong with it and fails in no other way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlharvest.cli import spec as job_file
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import parse
from rlharvest_coordinator.data import jsonlines, model_dir, parquet, tokenizer
from rlharvest_coordinator.data.rows import Limits

MakeModel = Callable[..., Path]

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

ODD: list[Any] = [
    None, True, -1, 0, 10**12, 10**30, 0.5, "", "\0", "8", [], {}, [None], {"a": None}, "\ud800", [[[[]]]], "x" * 5000,
]  # fmt: skip
"""Values that a key of a JSON file may have got."""

fast = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def refused(call: Callable[[], object]) -> str:
    """Return what a call that may fail with InvalidField alone says; an empty text: it took everything."""
    try:
        call()
    except InvalidField as error:
        return f"{error}" if error.fix else "no fix"
    return ""


def look(directory: Path) -> None:
    """Do with a model directory what validation does."""
    info = model_dir.check(directory)
    tokenizer.load(directory, eos_ids=info.eos_ids, field="model")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where every value in a JSON value stands."""
    if isinstance(value, dict):
        return [path, *(inner for key in value for inner in places(value[key], (*path, key)))]
    if isinstance(value, list):
        return [path, *(inner for at in range(len(value)) for inner in places(value[at], (*path, at)))]
    return [path]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a JSON value with another one at a place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


def spoilt(data: bytes, source: random.Random) -> bytes:
    """Return bytes as a bad copy has them: cut, with bits turned over, with a part of something else."""
    match source.randrange(4):
        case 0:
            return data[: source.randrange(len(data))]
        case 1:
            turned = bytearray(data)
            for _ in range(source.choice([1, 3, 30])):
                turned[source.randrange(len(turned))] ^= 1 << source.randrange(8)
            return bytes(turned)
        case 2:
            at = source.randrange(len(data))
            return data[:at] + source.randbytes(20) + data[at:]
        case _:
            return source.choice([b"", b"\0", b"<html>", b"[" * 100_000, b'{"a":' * 100_000, "ä".encode("latin-1")])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    from rlharvest.testing.model import CHAT, tiny_model

    directory = tiny_model(tmp_path_factory.mktemp("whole") / "model", words=CHAT, template="{{ messages }}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [2]}')
    return {name: (directory / name).read_bytes() for name in FILES}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


@fast
@given(source=st.randoms(use_true_random=False), name=st.sampled_from(FILES))
def test_a_model_file_with_broken_bytes_is_used_whole_or_named(
    tmp_path: Path, model: dict[str, bytes], source: random.Random, name: str
) -> None:
    directory = write(tmp_path / "model", {**model, name: spoilt(model[name], source)})
    problem = refused(lambda: look(directory))
    assert not problem or str(directory) in problem


@pytest.mark.parametrize("name", FILES[:-1])
@fast
@given(source=st.randoms(use_true_random=False), value=st.sampled_from(ODD))
def test_a_model_file_with_an_odd_value_is_used_or_named(
    tmp_path: Path, model: dict[str, bytes], name: str, source: random.Random, value: Any
) -> None:
    whole = json.loads(model[name])
    changed = put(whole, source.choice(places(whole)), value)
    directory = write(tmp_path / "model", {**model, name: json.dumps(changed).encode()})
    problem = refused(lambda: look(directory))
    assert not problem or str(directory) in problem


@pytest.mark.parametrize("key", ["max_position_embeddings", "num_hidden_layers", "vocab_size", "hidden_size"])
@pytest.mark.parametrize("value", [2**31, 10**12, 10**30, True])
def test_a_size_that_no_model_has_is_named(make_model: MakeModel, key: str, value: object) -> None:
    """Before anything is counted up to it, and before it is sent to a worker in a field that cannot hold it."""
    directory = make_model()
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(InvalidField, match=key) as caught:
        model_dir.check(directory)
    assert repr(value) in str(caught.value)


ROWS = [{"question": f"{n}+1=", "answer": str(n + 1), "extra": {"deep": [{"none": None}]}} for n in range(20)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@fast
@given(source=st.randoms(use_true_random=False), kind=st.sampled_from(["rows.jsonl", "rows.json", "rows.parquet"]))
def test_a_broken_dataset_gives_rows_or_names_the_place(tmp_path: Path, source: random.Random, kind: str) -> None:
    path = tmp_path / kind
    if kind.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
        path.write_bytes(spoilt(path.read_bytes(), source))
    else:
        path.write_bytes(spoilt(LINES if kind.endswith("l") else json.dumps(ROWS).encode(), source))
    rows = parquet.read(path) if kind.endswith("parquet") else jsonlines.read(path, Limits())
    problem = refused(lambda: [row.columns for row in rows])
    assert not problem or kind in problem


JOB = {
    "model": "m",
    "dataset": {"path": "d.jsonl"},
    "rewards": [{"builtin": "exact_match"}],
    "sampling": {"num_generations": 4, "stop": ["x"]},
    "rollout": {"engine": "stub", "stub": {"step_s": 0.01}},
    "metadata": {"a": "b"},
}


@settings(fast, max_examples=200)
@given(source=st.randoms(use_true_random=False), value=st.sampled_from([*ODD, float("nan"), float("inf"), 10**5000]))
def test_a_job_with_an_odd_value_is_taken_or_named(source: random.Random, value: Any) -> None:
    problem = refused(lambda: parse(put(JOB, source.choice(places(JOB)), value)))
    assert problem != "no fix"
    assert len(problem) < 2000


@fast
@given(source=st.randoms(use_true_random=False))
def test_a_job_file_with_broken_bytes_is_read_or_named(tmp_path: Path, source: random.Random) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(spoilt(yaml.safe_dump(JOB).encode(), source))
    assert refused(lambda: parse(job_file.load(path))) != "no fix"

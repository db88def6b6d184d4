"""A job's inputs from files to prompts, through the one entry point: what comes out, what is refused, what survives."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlharvest.errors import CorruptData, InvalidField
from rlharvest.jobs.model import JobSpec, parse
from rlharvest.testing.model import CHATML
from rlharvest_coordinator.data import Prepared, prepare, reopen
from rlharvest_coordinator.data import prompts as prompts_module

MakeModel = Callable[..., Path]
QA = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(10)]
CHAT = [{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def job(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "model": "model",
        "dataset": {"path": "rows.jsonl", **changes.pop("dataset", {})},
        "rewards": [{"builtin": "exact_match"}],
        "sampling": {"max_completion_length": 8, **changes.pop("sampling", {})},
        **changes,
    }
    return parse(values)


async def ready(root: Path, spec: JobSpec) -> Prepared:
    return await prepare(spec, roots=[root], data_dir=root / "data")


async def test_a_job_gets_prompts_order_tokenizer_and_report(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(max_position_embeddings=32)
    write(
        tmp_path / "rows.jsonl", [*QA, QA[0], {"question": " ", "answer": "x"}, {"question": "9" * 40, "answer": "x"}]
    )
    prepared = await ready(tmp_path, job(dataset={"max_prompt_length": 20}))
    assert prepared.context == 32
    assert prepared.model_dir == tmp_path / "model"
    assert prepared.tokenizer.eos_ids == {2}
    dataset = prepared.dataset
    assert prepared.tokenizer.decode(dataset.prompt_ids(3)) == dataset.prompt_text(3) == "3+3="
    assert json.loads(dataset.prompt_json(3)) == "3+3="
    assert dataset.columns(3) == {"answer": "6", "ground_truth": "6"}
    assert sorted(prepared.order.row(ordinal)[0] for ordinal in range(11)) == list(range(11))
    report = prepared.report
    assert json.loads(json.dumps(report)) == report
    assert (report["format"], report["rows"], report["kept"], report["unique_prompts"]) == (
        "question-answer",
        13,
        11,
        11,
    )
    assert report["dropped"] == {"too_long": 1, "empty": 1}
    assert report["tokens"] == {"min": 4, "median": 4.0, "max": 4, "total": 44}
    assert report["tokenizer_digest"] == prepared.tokenizer.digest


async def test_rows_that_repeat_are_told_and_each_is_a_row_of_its_own(tmp_path: Path, make_model: MakeModel) -> None:
    """A dataset in which everything stands a hundred times is found out before it is trained on; a row's number, not its
    text, says which it is, so equal prompts do not fall together.
    """
    make_model()
    write(tmp_path / "rows.jsonl", QA[:3] * 100)
    prepared = await ready(tmp_path, job())
    assert {name: prepared.report[name] for name in ("rows", "kept", "unique_prompts")} == {
        "rows": 300,
        "kept": 300,
        "unique_prompts": 3,
    }
    assert len(prepared.dataset) == 300
    assert prepared.dataset.prompt_ids(0).tolist() == prepared.dataset.prompt_ids(3).tolist()
    assert sorted(prepared.order.row(ordinal)[0] for ordinal in range(300)) == list(range(300))


async def test_messages_go_through_the_chat_template_once(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(template="{{ bos_token }}" + CHATML, bos=True)
    write(tmp_path / "rows.jsonl", [*CHAT, {"messages": [{"role": "user", "content": "a<|im_end|>"}]}])
    spec = job(dataset={"system_prompt": "Hi"}, rewards=[{"builtin": "regex", "params": {"pattern": "4"}}])
    prepared = await ready(tmp_path, spec)
    expected = "<s><|im_start|>system\nHi<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert prepared.dataset.prompt_text(0) == expected
    ids = prepared.dataset.prompt_ids(0).tolist()
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert json.loads(prepared.dataset.prompt_json(0)) == [{"role": "user", "content": "2+2?"}]
    assert prepared.dataset.columns(0)["ground_truth"] == "4"
    assert prepared.report["assistant_turns_dropped"] == 1
    assert prepared.report["rows_with_special_token_text"] == 1


async def test_plain_strings_are_templated_only_when_asked(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(template=CHATML)
    write(tmp_path / "rows.jsonl", QA[:1])
    assert (await ready(tmp_path, job())).dataset.prompt_text(0) == "0+0="
    rendered = (await ready(tmp_path, job(dataset={"apply_chat_template": True}))).dataset.prompt_text(0)
    assert rendered == "<|im_start|>user\n0+0=<|im_end|>\n<|im_start|>assistant\n"
    assert (await ready(tmp_path, job(dataset={"system_prompt": "Add."}))).dataset.prompt_text(0) == "Add.\n\n0+0="


@pytest.mark.parametrize("ask", [None, False])
async def test_messages_without_a_template_name_three_ways_out(
    tmp_path: Path, make_model: MakeModel, ask: bool | None
) -> None:
    make_model(template=None if ask is None else CHATML)
    write(tmp_path / "rows.jsonl", CHAT)
    with pytest.raises(InvalidField, match=r"^dataset\.apply_chat_template.*rows\.jsonl, line 1") as caught:
        await ready(tmp_path, job(dataset={"apply_chat_template": ask}))
    assert all(way in caught.value.fix for way in ("tokenizer", "chat_template.jinja", "dataset.prompt_key"))


async def test_another_tokenizer_directory_may_bring_the_template(tmp_path: Path, make_model: MakeModel) -> None:
    make_model()
    make_model("instruct", template=CHATML)
    write(tmp_path / "rows.jsonl", CHAT)
    prepared = await ready(tmp_path, job(tokenizer="instruct"))
    assert prepared.dataset.prompt_text(0).startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("model", "changes", "field", "says"),
    [
        ({}, {"dataset": {"path": "no.jsonl"}}, "dataset.path", "no such file"),
        ({}, {"dataset": {"path": "/etc/passwd"}}, "dataset.path", "outside"),
        ({}, {"dataset": {"path": "empty.jsonl"}}, "dataset.path", "has no rows"),
        ({}, {"dataset": {"max_prompt_length": 2}}, "dataset.max_prompt_length", "The longest has 4 tokens"),
        ({}, {"dataset": {"prompt_key": "q"}}, "dataset.prompt_key", "found [answer, question]"),
        ({}, {"sampling": {"max_completion_length": 125}}, "sampling.max_completion_length", "Use at most 124"),
        ({}, {"model": "nowhere"}, "model", "no such file or directory"),
        ({}, {"tokenizer": "nowhere"}, "tokenizer", "no such file or directory"),
        ({}, {"rewards": [{"path": "r.py"}]}, "rewards.0.path", "no such file"),
        ({"model_type": "mamba"}, {}, "model", "mamba"),
        ({"vocab_size": 50}, {}, "model", "the tokenizer has 101 ids, the model only 50"),
        ({"eos_token_id": 500}, {}, "model", "id 500 is not below vocab_size"),
        ({"eos_token_id": None, "said": {"eos_token": None}}, {}, "model", "names no end-of-sequence token"),
        (
            {"template": "{{ raise_exception('no') }}"},
            {"dataset": {"apply_chat_template": True}},
            "dataset.path",
            "line 1",
        ),
    ],
)
async def test_what_cannot_be_used_names_the_field(
    tmp_path: Path, make_model: MakeModel, model: dict[str, Any], changes: dict[str, Any], field: str, says: str
) -> None:
    make_model(**model)
    write(tmp_path / "rows.jsonl", QA)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidField) as caught:
        await ready(tmp_path, job(**changes))
    assert caught.value.field == field
    assert says in str(caught.value)
    datasets = tmp_path / "data" / "datasets"
    assert [path.name for path in datasets.glob(".*")] == []


async def test_a_padded_head_is_masked_at_the_tokenizer(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(vocab_size=128)
    write(tmp_path / "rows.jsonl", QA)
    assert (await ready(tmp_path, job())).tokenizer.vocab == 101


async def test_links_of_a_model_may_lead_within_the_roots_only(tmp_path: Path, make_model: MakeModel) -> None:
    root = tmp_path / "root"
    model = make_model("root/blobs")
    write(root / "rows.jsonl", QA)
    (root / "model").mkdir()
    for file in model.iterdir():
        (root / "model" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert (await ready(root, job())).model_dir == root / "model"
    (root / "model" / "config.json").unlink()
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (root / "model" / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(InvalidField, match=r"config\.json is a link that leads outside"):
        await ready(root, job())


async def test_equal_inputs_are_tokenised_once(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model()
    write(tmp_path / "rows.jsonl", QA)
    first = await ready(tmp_path, job())
    other = await ready(tmp_path, job(dataset={"max_prompt_length": 512}))
    assert other.report["digest"] != first.report["digest"]
    monkeypatch.setattr(prompts_module.Prompts, "write", None)
    assert (await ready(tmp_path, job(seed=9))).report == first.report
    write(tmp_path / "rows.jsonl", QA[:5])
    with pytest.raises(TypeError):
        await ready(tmp_path, job())


async def test_reopening_reads_no_dataset_and_gives_the_same(tmp_path: Path, make_model: MakeModel) -> None:
    make_model()
    write(tmp_path / "rows.jsonl", QA)
    first = await ready(tmp_path, job())
    (tmp_path / "rows.jsonl").unlink()
    again = await reopen(job(), json.loads(json.dumps(first.report)), roots=[tmp_path], data_dir=tmp_path / "data")
    assert again.report == first.report
    assert again.rewards_digest == first.rewards_digest
    assert [again.dataset.prompt_text(row) for row in range(10)] == [
        first.dataset.prompt_text(row) for row in range(10)
    ]


async def test_reopening_makes_a_lost_dataset_anew_but_never_another(tmp_path: Path, make_model: MakeModel) -> None:
    make_model()
    write(tmp_path / "rows.jsonl", QA)
    first = await ready(tmp_path, job())
    first.dataset.directory.rename(tmp_path / "lost")
    again = await reopen(job(), first.report, roots=[tmp_path], data_dir=tmp_path / "data")
    assert again.report == first.report
    again.dataset.directory.rename(tmp_path / "lost again")
    write(tmp_path / "rows.jsonl", QA[:9])
    with pytest.raises(CorruptData, match="have changed since the job began"):
        await reopen(job(), first.report, roots=[tmp_path], data_dir=tmp_path / "data")


async def test_progress_comes_on_the_loop_and_cancelling_leaves_nothing(tmp_path: Path, make_model: MakeModel) -> None:
    make_model()
    write(tmp_path / "rows.jsonl", QA * 2000)
    begun = asyncio.Event()
    seen: list[int] = []

    def progress(rows: int) -> None:
        asyncio.get_running_loop()
        seen.append(rows)
        begun.set()

    task = asyncio.create_task(prepare(job(), roots=[tmp_path], data_dir=tmp_path / "data", progress=progress))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0] == 256
    datasets = tmp_path / "data" / "datasets"
    for _ in range(100):
        if not list(datasets.iterdir()):
            break
        await asyncio.sleep(0.05)
    assert list(datasets.iterdir()) == []


async def test_a_kill_in_the_middle_leaves_nothing_that_counts(tmp_path: Path, make_model: MakeModel) -> None:
    make_model()
    write(tmp_path / "rows.jsonl", QA * 3000)
    script = f"""
        import asyncio
        from pathlib import Path
        from rlharvest.jobs.model import parse
        from rlharvest_coordinator.data import prepare
        spec = parse({job().model_dump(mode="json")!r})
        root = Path({str(tmp_path)!r})
        asyncio.run(prepare(spec, roots=[root], data_dir=root / "data", progress=lambda rows: print(rows, flush=True)))
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(script), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    child.kill()
    await child.communicate()
    datasets = tmp_path / "data" / "datasets"
    assert [path.name for path in datasets.iterdir() if not path.name.startswith(".")] == []
    assert len((await ready(tmp_path, job())).dataset) == 30_000


async def test_a_generated_task_is_ready_without_any_file(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(template=CHATML, max_position_embeddings=512)
    dataset = {"path": "reasoning-gym:chain_sum", "size": 20, "apply_chat_template": True}
    prepared = await ready(tmp_path, job(dataset=dataset, rewards=[{"builtin": "reasoning_gym"}], seed=3))
    again = await ready(tmp_path, job(dataset=dataset, rewards=[{"builtin": "reasoning_gym"}], seed=4))
    assert len(prepared.dataset) == 20
    assert prepared.dataset.columns(0)["entry"]["answer"] == prepared.dataset.columns(0)["ground_truth"]
    assert prepared.report["digest"] != again.report["digest"]


async def test_without_a_hub_the_local_ways_are_named(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make_model()
    with pytest.raises(InvalidField, match=r"^dataset\.path.*no hub gave it.*reasoning-gym:<task>"):
        await ready(tmp_path, job(dataset={"path": "hf://openai/gsm8k"}))
    with pytest.raises(InvalidField, match=r"^model.*no hub gave it.*HF_ENDPOINT"):
        await ready(tmp_path, job(model="nobody/nothing"))


async def test_the_loop_stays_free_while_a_dataset_is_tokenised(tmp_path: Path, make_model: MakeModel) -> None:
    make_model()
    write(tmp_path / "rows.jsonl", QA * 2000)
    task = asyncio.create_task(ready(tmp_path, job()))
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    assert len((await task).dataset) == 20_000
    assert longest < 1.0

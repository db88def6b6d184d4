"""Which column is what: by format, by key, or refused with the columns found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import Dataset
from rlharvest_coordinator.data.rows import Row
from rlharvest_coordinator.data.shapes import Example, Shape, detect, extract, final_answer

CHAT = [{"role": "user", "content": "2+2?"}]


def data(**settings: Any) -> Dataset:
    return Dataset(path="rows.jsonl", **settings)


def example(columns: dict[str, Any], **settings: Any) -> tuple[Shape, Example]:
    shape = detect(columns, data(**settings))
    return shape, extract(shape, Row("rows.jsonl, line 1", columns))


@pytest.mark.parametrize(
    ("columns", "format", "prompt", "truth"),
    [
        pytest.param(
            {"question": "2+2?", "answer": "two <<2+2=4>>\n#### 1,234"}, "question-answer", "2+2?", "1234", id="GSM8K"
        ),
        pytest.param(
            {
                "data_source": "gsm8k",
                "prompt": CHAT,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"index": 0},
            },
            "verl",
            CHAT,
            "4",
            id="verl",
        ),
        pytest.param(
            {
                "data_source": "x",
                "prompt": CHAT,
                "reward_model": {"ground_truth": "-34", "style": "r"},
                "extra_info": {"index": "u"},
            },
            "verl",
            CHAT,
            "-34",
            id="DAPO",
        ),
        pytest.param(
            {"prompt": "2+2?", "solution": "4", "data_source": "x", "reward_model": {"ground_truth": "4"}},
            "verl",
            "2+2?",
            "4",
            id="DAPO, processed",
        ),
        pytest.param(
            {
                "data_source": "x",
                "prompt": CHAT,
                "env_class": "gsm8k",
                "reward_spec": {"method": "rule", "ground_truth": 4},
            },
            "verl",
            CHAT,
            "4",
            id="SkyRL",
        ),
        pytest.param({"prompt": CHAT, "label": "34", "metadata": {}}, "trl", CHAT, "34", id="slime"),
        pytest.param(
            {"problem": "p", "level": "Level 5", "type": "Algebra", "solution": "so \\boxed{\\frac{1}{2}}."},
            "question-answer",
            "p",
            "\\frac{1}{2}",
            id="MATH",
        ),
        pytest.param(
            {"problem": "p", "solution": "long", "answer": "5", "unique_id": "u"},
            "question-answer",
            "p",
            "5",
            id="MATH-500",
        ),
        pytest.param({"prompt": "The sky is"}, "trl", "The sky is", None, id="TRL"),
        pytest.param({"prompt": "p", "solution": "\\boxed{3}"}, "trl", "p", "\\boxed{3}", id="TRL with a column"),
        pytest.param(
            {"messages": [*CHAT, {"role": "assistant", "content": "4"}]}, "messages", CHAT, "4", id="OpenAI messages"
        ),
        pytest.param(
            {"instruction": "Add.", "input": "2 2", "output": "4"}, "question-answer", "Add.\n\n2 2", "4", id="Alpaca"
        ),
        pytest.param(
            {"instruction": "Add.", "input": "", "output": "4"}, "question-answer", "Add.", "4", id="Alpaca, no input"
        ),
        pytest.param({"input": "2+2", "label": 4.0}, "question-answer", "2+2", "4", id="input and label"),
        pytest.param(
            {"problem": "p", "answer": "7", "source": "s", "llama8b_solve_rate": 0.5},
            "question-answer",
            "p",
            "7",
            id="easy",
        ),
    ],
)
def test_known_shapes_are_found(columns: dict[str, Any], format: str, prompt: Any, truth: Any) -> None:
    shape, found = example(columns)
    assert (shape.format, found.prompt, found.columns.get("ground_truth")) == (format, prompt, truth)


def test_rewards_get_every_column_but_the_prompt_as_it_was() -> None:
    _, found = example({"question": "q", "answer": "x\n#### 72", "id": 5})
    assert found.columns == {"answer": "x\n#### 72", "id": 5, "ground_truth": "72"}


def test_keys_win_over_the_format_and_take_values_as_they_are() -> None:
    shape, found = example({"prompt": "no", "q": "yes", "gold": "#### 1"}, prompt_key="q", label_key="gold")
    assert (shape.format, found.prompt, found.columns["ground_truth"]) == ("keys", "yes", "#### 1")
    _, found = example({"prompt": "p", "chosen": "a", "rejected": "b"}, prompt_key="prompt")
    assert found.prompt == "p"


@pytest.mark.parametrize(
    ("columns", "settings", "says"),
    [
        pytest.param(
            {"text": 1, "id": 2},
            {},
            "row 0: no column 'prompt'; found [id, text]. Set dataset.prompt_key",
            id="no prompt",
        ),
        pytest.param(
            {"question": 1}, {}, "no column 'answer'; found [question]. Set dataset.label_key", id="no answer"
        ),
        pytest.param({"question": 1, "answer": 2}, {"format": "verl"}, "no column 'prompt'", id="not verl"),
        pytest.param({"prompt": 1}, {"format": "verl"}, "no column 'reward_model'", id="no reward_model"),
        pytest.param({"prompt": 1}, {"format": "messages"}, "no column 'messages'", id="no messages"),
        pytest.param({"prompt": 1}, {"prompt_key": "q"}, "no column 'q'; found [prompt]", id="no such key"),
        pytest.param({"prompt": 1}, {"label_key": "gold"}, "dataset.label_key = 'gold'", id="no such label"),
        pytest.param({"prompt": 1, "chosen": 2, "rejected": 3}, {}, "not a prompt dataset", id="preferences"),
        pytest.param({"chosen": 2, "rejected": 3}, {}, "not a prompt dataset", id="preferences without prompt"),
        pytest.param({"prompt": 1, "completion": 2}, {}, "not a prompt dataset", id="completions"),
        pytest.param({"conversations": 1}, {}, "ShareGPT", id="ShareGPT"),
        pytest.param({"text": 1}, {}, "plain text", id="text"),
    ],
)
def test_other_data_is_refused_with_what_was_found(
    columns: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        detect(columns, data(**settings))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("first", "row", "says"),
    [
        (
            {"prompt": "a"},
            {"other": "b"},
            "line 9: no column 'prompt'|line 9.*no column 'prompt', which the rows before have",
        ),
        ({"prompt": "a"}, {"prompt": 5}, "is int; wanted a string or a list"),
        ({"prompt": "a"}, {"prompt": None}, "is null; wanted a string"),
        (
            {"question": "a", "answer": "b"},
            {"question": "a", "answer": None},
            "'answer' is null; wanted the right answer",
        ),
        ({"question": "a", "answer": "b"}, {"question": "a"}, "no column 'answer'"),
        ({"prompt": "a", "reward_model": {}}, {"prompt": "a", "reward_model": {"style": "x"}}, "no 'ground_truth'"),
        ({"prompt": "a", "reward_model": {}}, {"prompt": "a", "reward_model": "x"}, "no 'ground_truth'; found str"),
        ({"prompt": "a"}, {"prompt": [{"role": "assistant", "content": "x"}]}, "ends with an assistant's turn"),
        ({"messages": []}, {"messages": [{"role": "assistant", "content": "x"}]}, "only assistant's turns"),
        ({"prompt": "a"}, {"prompt": [{"from": "human", "value": "x"}]}, "ShareGPT"),
        ({"prompt": "a"}, {"prompt": ["x"]}, "message 0 is a str"),
    ],
)
def test_a_row_that_does_not_fit_is_named(first: dict[str, Any], row: dict[str, Any], says: str) -> None:
    shape = detect(first, data())
    with pytest.raises(InvalidField, match=says) as caught:
        extract(shape, Row("rows.jsonl, line 9", row))
    assert "rows.jsonl, line 9" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "42"),
        ("####42", "42"),
        ("x\n#### -3", "-3"),
        ("#### 1,234,567", "1234567"),
        ("#### 1\nthen #### 2", "2"),
        ("#### 42\n", "42"),
        ("#### 1,2", "1,2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{\\text{(E)}}", "\\text{(E)}"),
        ("\\boxed{1", "\\boxed{1"),
        (" bare ", "bare"),
    ],
)
def test_the_answer_is_cut_out_of_a_solution(text: str, answer: str) -> None:
    assert final_answer(text) == answer


NAMES = ["prompt", "messages", "question", "problem", "instruction", "input", "answer", "solution", "output", "label"]
NAMES += [
    "reward_model",
    "reward_spec",
    "data_source",
    "extra_info",
    "chosen",
    "rejected",
    "completion",
    "conversations",
]


@settings(deadline=None, max_examples=40)
@given(columns=st.lists(st.sampled_from(NAMES) | st.text(max_size=4), unique=True), shuffled=st.randoms())
def test_detection_depends_on_names_not_on_their_order(columns: list[str], shuffled: Any) -> None:
    """Property: a permutation of the columns gives the same shape or the same refusal; a found prompt is a column."""
    other = list(columns)
    shuffled.shuffle(other)
    outcomes = []
    for names in (columns, other):
        try:
            shape = detect(names, data())
        except InvalidField as refusal:
            outcomes.append(str(refusal))
        else:
            assert shape.prompt in names
            assert shape.label is None or shape.label in names
            outcomes.append(repr(shape))
    assert outcomes[0] == outcomes[1]


@settings(deadline=None, max_examples=40)
@given(columns=st.lists(st.sampled_from(NAMES), unique=True, min_size=1), pick=st.integers(0, 100))
def test_a_named_column_is_always_taken(columns: list[str], pick: int) -> None:
    """Property: prompt_key beats whatever the other columns suggest."""
    key = columns[pick % len(columns)]
    assert detect(columns, data(prompt_key=key)).prompt == key

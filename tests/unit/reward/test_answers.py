"""Answers in free text: the marked one is found, and read as the number it is."""

from __future__ import annotations

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rlharvest_reward import answers

F = Fraction


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 42", F(42)),
        ("####42", F(42)),
        ("#### 1,234", F(1234)),
        ("#### 80,000.50", F("80000.5")),
        ("#### -3", F(-3)),
        ("#### − 3", F(-3)),
        ("#### $18.00", F(18)),
        ("#### -$5", F(-5)),
        ("#### 42.", F(42)),
        ("#### 42\n" + "and then a long story. " * 30, F(42)),
        ("#### 1\nno, wait\n#### 2", F(2)),
        ("#### Step 2: add\n5 + 7 = 12\n#### 12", F(12)),
        ("#### 12\n#### Check of the result", F(12)),
        ("#### Answer: 7", F(7)),
        ("#### 42 apples", F(42)),
        ("#### x = 9", F(9)),
        ("#### **15**", F(15)),
        (r"so \boxed{\frac{1}{2}}", F(1, 2)),
        (r"\boxed{\dfrac{-3}{4}}", F(-3, 4)),
        (r"\boxed{\frac12}", F(1, 2)),
        (r"\boxed{1\frac{1}{2}}", F(3, 2)),
        (r"\boxed{1{,}234}", F(1234)),
        (r"\boxed{12\text{ cm}}", F(12)),
        (r"\boxed{90^\circ}", F(90)),
        (r"\boxed{3 \times 10^{4}}", F(30000)),
        (r"\boxed{\text{7}}", F(7)),
        (r"\boxed 5", F(5)),
        (r"\boxed{1} then \boxed{2}", F(2)),
        (r"#### 3 and later \boxed{4}", F(4)),
        (r"\boxed{4} and later" + "\n#### 3", F(3)),
        (r"\boxed{6} and a broken \boxed{7", F(6)),
        ("The answer is 12.", F(12)),
        ("Answer: -0.5", F(-1, 2)),
        ("the final answer is **$1,000**", F(1000)),
        ("#### １８", F(18)),
        ("#### 1.5e3", F(1500)),
        ("#### 3/4", F(3, 4)),
    ],
)
def test_a_marked_answer_is_found_and_read(text: str, expected: Fraction) -> None:
    found = answers.marked(text)
    assert found is not None
    value = answers.value(found)
    assert value is not None, found
    assert value.number == expected


@pytest.mark.parametrize("text", ["", "no answer here", "I have 3 apples and 4 pears", r"\boxed{7", "#### "])
def test_without_a_mark_there_is_no_marked_answer(text: str) -> None:
    assert answers.marked(text) is None


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{\text{(E)}}", r"\text{(E)}"),
        (r"\boxed{x^{2^{3}}+{1}}", r"x^{2^{3}}+{1}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ],
)
def test_nested_braces_are_kept_whole(text: str, inside: str) -> None:
    assert answers.marked(text) == inside


@pytest.mark.parametrize(
    "text",
    ["", "x", "2x", "1,2", "1, 2, 3", "1,23", "3 or 4", r"\sqrt{2}", "2 pi", "1/0", "--1", "1e999999", "9" * 400],
)
def test_what_is_not_one_number_is_refused(text: str) -> None:
    assert answers.value(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Reward: 10", "10"),
        ("Reward: -10", "-10"),
        ("5-3", "3"),
        ("from 3 to 1,234.", "1,234"),
        ("it costs $80,000", "$80,000"),
        ("maybe 1/2", "1/2"),
        ("1,2,3", "3"),
        ("none", None),
    ],
)
def test_the_last_number_keeps_its_sign_and_digits(text: str, expected: str | None) -> None:
    assert answers.last_number(text) == expected


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [("18%", "18", True), ("18%", "0.18", True), ("18", r"18\%", True), ("0.18", "18%", True), ("18%", "1800", False)],
)
def test_a_percentage_equals_its_number_and_its_hundredth(answer: str, expected: str, same: bool) -> None:
    left, right = answers.value(answer), answers.value(expected)
    assert left is not None
    assert right is not None
    assert answers.equal(left, right) is same


def test_large_integers_that_differ_by_one_differ() -> None:
    left, right = answers.value("10000000000000001"), answers.value("10000000000000002")
    assert left is not None
    assert right is not None
    assert not answers.equal(left, right)
    assert answers.equal(left, right, tolerance=1e-9)


_DECORATIONS = ["{}", "${}$", "\\({}\\)", "**{}**", " {} ", "{}.", "x = {}", "({})", "{} apples"]


@given(
    number=st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12),
    thousands=st.booleans(),
    full_width=st.booleans(),
    decoration=st.sampled_from(_DECORATIONS),
    mark=st.sampled_from(["#### {}", "####{}", "\\boxed{{{}}}", "The answer is {}"]),
    after=st.sampled_from(["", "\n" + "words without digits " * 30]),
)
def test_however_a_number_is_written_it_is_the_same(
    number: Decimal, thousands: bool, full_width: bool, decoration: str, mark: str, after: str
) -> None:
    written = f"{number:,f}" if thousands else f"{number:f}"
    # In a box, (1,200) is as likely a pair as a number: it is compared as text.
    assume(not (mark.startswith("\\boxed") and decoration == "({})" and "," in written))
    if full_width:
        written = written.translate({ord(ascii): ord(ascii) + 0xFEE0 for ascii in "0123456789-"})
    found = answers.marked(mark.format(decoration.format(written)) + after)
    assert found is not None
    value = answers.value(found)
    assert value is not None
    assert value.number == Fraction(number)


@given(numerator=st.integers(-999, 999), denominator=st.integers(1, 999))
def test_a_latex_fraction_is_its_quotient(numerator: int, denominator: int) -> None:
    value = answers.value(f"\\frac{{{numerator}}}{{{denominator}}}")
    assert value is not None
    assert value.number == Fraction(numerator, denominator)


@given(st.text(max_size=300) | st.text(alphabet="0123456789.,-+/%$\\{}()#= xefrac\n", max_size=300))
@example("\\boxed{" * 50)
def test_any_text_is_read_without_a_fault(text: str) -> None:
    found = answers.marked(text)
    if found is not None:
        answers.value(found)
    answers.value(text)
    last = answers.last_number(text)
    if last is not None:
        answers.value(last)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 40_000,
        "####" * 40_000,
        "#### 1 " + "word " * 40_000 + "1",
        "1,111" * 20_000,
        "answer " * 30_000,
        " " * 200_000,
    ],
    ids=["boxes", "hashes", "words", "thousands", "phrases", "spaces"],
)
def test_a_completion_that_repeats_itself_costs_little(text: str) -> None:
    began = time.process_time()
    answers.marked(text)
    answers.last_number(text)
    answers.value(text)
    assert time.process_time() - began < 2

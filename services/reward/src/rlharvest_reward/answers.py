"""Answers in free text: where the final answer stands, and which number it is.

`marked` finds the last `\\boxed{…}` or `#### …`, else the last "answer is …"; `value` reads one answer as an exact
fraction; `last_number` is for text without a mark. Exact arithmetic throughout: 0.5 = \\frac{1}{2}, and large integers
that differ by one differ. All of it is linear in the text and refuses numbers of more than MAX_DIGITS digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 300

MAX_ANSWER = 1_000
"""Characters; a longer answer is not read as a number."""

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_PLAIN: dict[int, int | str] = {
    **_FULL_WIDTH,
    0x2212: "-",
    0x2010: "-",
    0x2011: "-",
    0xFE63: "-",
    0x00A0: " ",
    0x202F: " ",
    0x2009: " ",
    0x3000: " ",
}

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
_FRACTION = r"\\[dt]?frac\s*(?:\{\s*([+-]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([+-]?[\d.,]+)\s*\}|(\d))"

_NUMBER = re.compile(rf"([+-]?)\s*({_UNSIGNED})")
_RATIO = re.compile(rf"([+-]?)\s*({_UNSIGNED})\s*/\s*([+-]?{_UNSIGNED})")
_LATEX_FRACTION = re.compile(rf"([+-]?)\s*{_FRACTION}")
_MIXED = re.compile(rf"([+-]?)\s*(\d+)\s*(?:{_FRACTION}|\s(\d+)\s*/\s*(\d+))")
_POWER_OF_TEN = re.compile(
    rf"([+-]?)\s*(?:({_UNSIGNED})\s*(?:\\times|\\cdot|×|\*)\s*)?10\s*\^\s*\{{?\s*([+-]?\d+)\s*\}}?"
)

_LAST = re.compile(
    rf"(?<![\w)\]}}.])[+-]?(?:\\?[$€£¥]\s*)?(?:{_FRACTION}|{_UNSIGNED}(?:\s*/\s*{_UNSIGNED})?)\s*(?:\\?%)?|\d[\d,]*(?:\.\d+)?"
)
_HASHES = re.compile(r"(?<!#)####(?!#)[^\S\n]*([^\n]*)")
_BRACES = re.compile(r"\\f?boxed\s*\{|[{}]")
_BOXED_BARE = re.compile(r"\\boxed\s+([^\s{$\\]+)")
_PHRASE = re.compile(r"\banswer\b(?:\s+is)?\s*[:=]?\s*([^\n]*)", re.IGNORECASE)
_LABEL = re.compile(r"^(?:the\s+)?(?:final\s+)?answer\b(?:\s+is)?\s*[:=]?\s*", re.IGNORECASE)
_OPENING = re.compile(r"^[\s*_(]*(?:\\?[\(\[$])?\s*")
_GOES_ON = re.compile(r"[A-Za-z^_+]|\s*,\s*\d|\s+(?:or|and|to)\s|\*(?!\*)|\\(?![)\]])")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNITS = re.compile(r"(?:\s+|(?<=\d)(?=\\?°))(?!(?:pi|or|and|to|sqrt)\b)[A-Za-z°]{2,}[A-Za-z°²³/. ]*$")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad\b|~")


@dataclass(frozen=True, slots=True)
class Value:
    """A number as an answer gives it."""

    number: Fraction
    percent: bool = False
    """It was written with %; `number` is what stood before the sign."""


def plain(text: str) -> str:
    """Return the text with full-width characters, minus signs and odd spaces as their ASCII forms."""
    return text.translate(_PLAIN)


def marked(text: str) -> str | None:
    """Return the final answer that the text marks as such, or None.

    The last of `\\boxed{…}` and `#### …` wins; only without both counts "answer is …". An unclosed brace is no box,
    and a heading (`#### Step 2`) is no answer where a `####` line that starts with one exists.
    """
    text = plain(text)
    found = [(match.start(), match.group(1)) for match in _BOXED_BARE.finditer(text)] + _boxes(text)
    hashes = [(match.start(), line) for match in _HASHES.finditer(text) if (line := match.group(1).strip())]
    leads = [(at, lead) for at, line in hashes if (lead := _leading(line)) is not None]
    found += leads or hashes
    if found:
        return max(found)[1].strip()
    phrases = [lead for match in _PHRASE.finditer(text) if (lead := _leading(match.group(1))) is not None]
    return phrases[-1].strip() if phrases else None


def _boxes(text: str) -> list[tuple[int, str]]:
    """Return (position, inside) of every closed box, in one pass: a text of nothing but open boxes costs no more."""
    found = []
    opened: list[tuple[int, int]] = []  # position of a box or -1, start of its inside
    for match in _BRACES.finditer(text):
        if match.group() != "}":
            opened.append((match.start() if len(match.group()) > 1 else -1, match.end()))
        elif opened:
            at, inside = opened.pop()
            if at >= 0:
                found.append((at, text[inside : match.start()]))
    return found


def _leading(line: str) -> str | None:
    """Return the number that a line starts with, labels and decoration aside."""
    line = _LABEL.sub("", line.strip(" *_"))
    if value(line) is not None:
        return line
    line = _OPENING.sub("", line)
    match = _LAST.match(line)
    if match is None:
        return None
    return None if _GOES_ON.match(line, match.end()) else match.group()


def value(text: str) -> Value | None:
    """Return the number that an answer is, or None if it is not one number.

    Understands signs, thousands separators, decimals, exponents, a/b, \\frac, mixed numbers, powers of ten, %, currency
    signs, \\text{…}, math delimiters, a trailing full stop, a leading `x =` and trailing unit words.
    """
    if len(text) > MAX_ANSWER:
        return None
    text = _SPACES.sub(" ", plain(text)).replace("{,}", ",").replace("\\left", "").replace("\\right", "")
    text = text.rpartition("=")[2] if re.fullmatch(r"\s*\$?\s*[A-Za-z]\w{0,10}\s*=[^=]*", text) else text
    text = text.strip(" \t\r\n*_`")
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.removesuffix("^\\circ").removesuffix("^{\\circ}")
    without = _TEXT.sub("", text)
    text = without if any(character.isdigit() for character in without) else _TEXT.sub(r"\1", text)
    text = text.strip().rstrip(" .*_`")
    text = _UNITS.sub("", text)
    percent = text.endswith("%")
    if percent:
        text = text[:-1].removesuffix("\\").rstrip()
    text = re.sub(r"\\?[$€£¥]", "", text).strip()
    if text.startswith("(") and text.endswith(")") and "," not in text:
        text = text[1:-1].strip()
    text = text.replace("- ", "-", 1) if text.startswith("- ") else text
    number = _exact(text)
    return None if number is None else Value(number, percent)


def _exact(text: str) -> Fraction | None:
    if not 0 < len(text) <= MAX_DIGITS:
        return None
    if match := _NUMBER.fullmatch(text):
        return _signed(match.group(1), _decimal(match.group(2)))
    if match := _RATIO.fullmatch(text):
        return _signed(match.group(1), _quotient(_decimal(match.group(2)), _decimal(match.group(3))))
    if match := _LATEX_FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        return _signed(sign, _parts(parts))
    if match := _MIXED.fullmatch(text):
        sign, whole, *parts, above, below = match.groups()
        fraction = _quotient(_decimal(above), _decimal(below)) if above else _parts(parts)
        return None if fraction is None else _signed(sign, int(whole) + fraction)
    if match := _POWER_OF_TEN.fullmatch(text):
        sign, mantissa, exponent = match.groups()
        if abs(int(exponent)) > MAX_DIGITS:
            return None
        base = _decimal(mantissa) if mantissa else Fraction(1)
        return None if base is None else _signed(sign, base * Fraction(10) ** int(exponent))
    return None


def _parts(parts: list[str | None]) -> Fraction | None:
    above, above_digit, below, below_digit = parts
    return _quotient(_decimal(above or above_digit or ""), _decimal(below or below_digit or ""))


def _decimal(text: str) -> Fraction | None:
    """Return the exact value of a decimal numeral with optional thousands separators and exponent."""
    if len(text) > MAX_DIGITS or not re.fullmatch(rf"[+-]?{_UNSIGNED}", text):
        return None
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    if len(exponent) > 4 or (exponent and abs(int(exponent)) > MAX_DIGITS):
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _quotient(above: Fraction | None, below: Fraction | None) -> Fraction | None:
    return None if above is None or not below else above / below


def _signed(sign: str, number: Fraction | None) -> Fraction | None:
    return -number if sign == "-" and number is not None else number


def last_number(text: str) -> str | None:
    """Return the last number in the text as it stands there, sign included, or None."""
    matches = [match.group() for match in _LAST.finditer(plain(text))]
    return matches[-1].strip() if matches else None


def equal(answer: Value, expected: Value, tolerance: float = 0.0) -> bool:
    """Whether two values are the same number.

    A percentage equals its plain number and its hundredth (18 % is 18 and 0.18): data sets write both.

    Args:
        tolerance: largest relative difference; 0: exact.
    """
    numbers = [answer.number]
    if answer.percent and not expected.percent:
        numbers.append(answer.number / 100)
    elif expected.percent and not answer.percent:
        numbers.append(answer.number * 100)
    bound = Fraction(tolerance) * abs(expected.number)
    return any(abs(number - expected.number) <= bound for number in numbers)

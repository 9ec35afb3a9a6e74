r"""Plain numbers as people write them: `1,000`, `$12`, `50%`, `3/4`, `\frac{1}{2}`, `12 apples`.

Owns reading and exact comparison, with fractions and nothing heavier. Any other mathematics is
for `expressions.py`.
"""

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST_NUMBER = 200
"""Characters beyond which a text is not read as a number; keeps huge literals from stalling."""
TOLERANCE = Fraction(1, 10**6)
"""Distance that still counts as equal where the gold is not a whole number."""

_GROUPED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_POWER = (
    r"(?:[eE](?P<e>[-+]?[0-9]{1,3})(?!\w)"
    r"|\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*\{?(?P<ten>[-+]?[0-9]{1,3})\}?)"
)
NUMBER = (
    r"(?:(?:(?P<whole>[0-9]+)\s*)?\\[dtc]?frac\s*\{\s*(?P<top>[-+]?[0-9]+)\s*\}"
    r"\s*\{\s*(?P<bottom>[0-9]+)\s*\}"
    r"|(?P<mixed>[0-9]+)\s+(?P<over>[0-9]+)/(?P<below>[0-9]+)"
    rf"|(?P<digits>{_GROUPED}(?:\.[0-9]+)?|\.[0-9]+){_POWER}?"
    rf"(?:\s*/\s*(?P<divisor>{_GROUPED}(?:\.[0-9]+)?))?)"
)
"""A number without sign, currency, percent sign or unit."""

_UNIT = r"[A-Za-z]{2,}(?:\s*\^\s*\{?[23]\}?)?(?:[\s/-]+[A-Za-z]+(?:\s*\^\s*\{?[23]\}?)?){0,3}"
_QUANTITY = re.compile(
    rf"=?\s*(?P<sign>[-+]?)\s*[$€£¥]?\s*(?P<inner_sign>[-+]?){NUMBER}"
    rf"\s*(?P<percent>%?)\s*(?:(?<=[\s%])(?P<unit>{_UNIT}))?\s*\.?"
)
_LABEL = re.compile(r"[A-Za-z][A-Za-z' ]{0,60}?(?:\b(?:is|are|equals)\b|[:=])\s*")
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_NOT_UNITS = frozenset(
    "pi phi tau sqrt root squared cubed factorial sin cos tan log ln exp mod or and to plus minus "
    "times over divided half halves third thirds quarter quarters fifths sixths eighths".split()
)

_SUBSTITUTIONS = [
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"[\u00a0\u2009\u202f~]|\\[ ;:]|\\q?quad\b"), " "),
    (re.compile(r"\\[!,]|\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree\b"), ""),
    (
        re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|mbox|operatorname)\s*\{([^{}]*)\}"),
        r" \1 ",
    ),
    (re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9/]))"), ""),
]
_WRAPPERS = [
    (r"\boxed{", "}"),
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("`", "`"),
    ('"', '"'),
]


class Quantity(NamedTuple):
    """A number as written."""

    value: Fraction
    percent: bool
    """A percent sign (or the word) stood behind it; `value` is 50 for `50%`."""


def parse_number(text: str) -> Quantity | None:
    """Reads a text that is one number, with or without currency, percent sign and unit words.

    A label before it (`The answer is`, `x =`) and the unit's name are passed over; `3 million` and
    `2 dozen` are multiplied out.

    Args:
        text: The whole text, such as `$1,200.50`, `12 apples` or `-3/4`.

    Returns:
        The number, or None where the text is anything else (`3x`, `12 or 13`, `5:30`).
    """
    if len(text) > LONGEST_NUMBER:
        return None
    plain = tidy(text)
    match = _QUANTITY.fullmatch(plain) or _QUANTITY.fullmatch(_LABEL.sub("", plain, count=1))
    return None if match is None else _read(match)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether two numbers are equal.

    Whole golds must be met exactly; others within `TOLERANCE * min(1, |gold|)`, so that 0.333333
    meets 1/3. Where only one of the two has a percent sign, 50% meets both 50 and 0.5.

    Source: the six decimals are `math_verify.verify`'s `float_rounding` (math-verify 0.9).
    """
    if _close(gold.value, answer.value):
        return True
    if gold.percent == answer.percent:
        return False
    if gold.percent:
        return _close(gold.value / 100, answer.value)
    return _close(gold.value, answer.value / 100)


def tidy(text: str) -> str:
    """The text without typographic LaTeX (spaces, `\\text`, degree signs) and outer delimiters."""
    text = unwrap(text)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return unwrap(text)


def unwrap(text: str) -> str:
    """The text inside `$…$`, `**…**`, `\\(…\\)` and the like, however nested."""
    text = text.strip()
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)].strip()
        wrapped = text.startswith(opening) and text.endswith(closing)
        if wrapped and inner and opening not in inner and closing not in inner:
            return unwrap(inner)
    return text


def _close(gold: Fraction, answer: Fraction) -> bool:
    if gold == answer:
        return True
    return gold.denominator != 1 and abs(gold - answer) <= TOLERANCE * min(Fraction(1), abs(gold))


def _read(match: re.Match[str]) -> Quantity | None:
    words = re.findall(r"[a-z]+", (match["unit"] or "").lower())
    magnitude = _magnitude(match)
    if magnitude is None or _NOT_UNITS.intersection(words):
        return None
    scale = _SCALES.get(words[0], 1) if words else 1
    negative = (match["sign"] == "-") != (match["inner_sign"] == "-")
    percent = bool(match["percent"]) or words[:1] == ["percent"]
    return Quantity((-1 if negative else 1) * scale * magnitude, percent)


def _magnitude(match: re.Match[str]) -> Fraction | None:
    """The number a match of `NUMBER` stands for, None where it divides by zero."""
    if match["digits"] is None:
        whole = int(match["whole"] or match["mixed"] or 0)
        top, bottom = match["top"] or match["over"], int(match["bottom"] or match["below"])
        return whole + Fraction(int(top), bottom) if bottom else None
    power = int(match["e"] or match["ten"] or 0)
    value = _decimal(match["digits"]) * Fraction(10) ** power
    divisor = _decimal(match["divisor"] or "1")
    return value / divisor if divisor else None


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))

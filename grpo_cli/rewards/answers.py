r"""Answers: where one stands in a completion, what the row's gold is, and when the two are equal.

Plain numbers (`1,000`, `50%`, `\frac{1}{2}`) are compared exactly, with fractions; `expressions.py` has the rest.
"""

import re
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Literal, NamedTuple

from grpo_cli.rewards.contract import Batch, text_of
from grpo_cli.rewards.expressions import is_near, spell

Place = Literal["boxed", "hashes", "answer_tag", "last_number"]
TextOrPlace = Literal["text", "boxed", "hashes", "answer_tag", "last_number"]

LONGEST_NUMBER = 200
"""Characters beyond which a text is not read as a number; keeps huge literals from stalling."""
LONGEST_EXPRESSION = 300
"""Characters beyond which an expression is not parsed."""

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
_RAISED = r"\.?(?:\s*\^\s*\{?-?[1-3]\}?)?"
_UNIT = (
    rf"(?:[A-Za-z]{{2,}}|[mgshLNJWVAKC](?![A-Za-z])){_RAISED}"
    rf"(?:(?:[\s/*-]|\\cdot)+[A-Za-z]+{_RAISED}){{0,3}}"
)
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
    (re.compile(r"≈|\\approx(?![A-Za-z])"), "="),
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
_INTEGER = r"[-+]?\s*[0-9]+"
_RAISE = r"(?:\^|\*\*)"
_EXPLOSIVE = re.compile(
    rf"{_RAISE}[\s{{(\[]*[-+]?[0-9]{{5,}}"  # an exponent of five digits or more
    rf"|[0-9)\]}}]\s*{_RAISE}[\s{{(\[]*{_INTEGER}[\s}})\]]*(?:{_RAISE}|!)"  # a tower of powers
    rf"|{_RAISE}\s*\{{[^{{}}]*[0-9][\s)]*(?:\*|\\times|\\cdot|\()[\s(]*[0-9]"  # 9^{{99*99}}
    rf"|{_RAISE}\s*\([^()]*[0-9]\s*(?:\*|\\times|\\cdot)\s*[0-9]"  # 9^(99*99)
    r"|[0-9]{4,}\s*!|[!)}\]]\s*!"  # factorials of large or unknown numbers
    r"|binom\s*\{?\s*[0-9]{5,}"
)
LONGEST_ANSWER = 1000
"""Characters a box may hold."""
_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u2060\ufeff"))
SHORTEST_ECHO = 12
"""Characters from which a repeated message of the prompt is cut out of a completion."""

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
_OPEN_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+#.-]*)")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-−+])?(?:\\?[$€£]|\b|(?<!\w))(?<![A-Za-z0-9_.^])(?<!\^\{{)"
    rf"(?P<number>{NUMBER}(?:\s?\\?%|_(?:[0-9]|\{{[0-9]+\}}))?)"
)


class Found(NamedTuple):
    """An answer, and where it stood."""

    place: str
    text: str


def find_answer(text: str, places: Sequence[str]) -> Found | None:
    """Find the answer of a completion: the last one in the first place that has any.

    If the completion closes a thinking block, only what follows it is read.
    """
    visible = after_thinking(text)
    for place in places:
        answer = (_FINDERS[place](visible) or "").strip()
        if answer:
            return Found(place, answer)
    return None


def canonical_answer(text: str, places: Sequence[str]) -> str | None:
    """Return the answer of a completion in one spelling, for votes: `1,000` and `1000.0` are the same.

    Expressions are compared as written: evaluating each against each would take too long.
    """
    found = find_answer(text, places)
    if found is None:
        return None
    plain = unwrap(found.text)
    quantity = parse_number(plain)
    if quantity is None:
        return " ".join(plain.casefold().split())
    return f"{quantity.value}{'%' if quantity.percent else ''}"


def after_thinking(text: str) -> str:
    """Return what follows the last `</think>`, or all of `text`, without zero-width spaces."""
    return text.rpartition("</think>")[2].translate(_ZERO_WIDTH)


def _last_tagged(text: str) -> str | None:
    contents = [content for content in _TAG.findall(text) if content.strip()]
    return contents[-1] if contents else None


def read_golds(batch: Batch, column: str, row: int) -> tuple[str, ...]:
    """Return the texts of a gold that is one value or a list of values, without empty ones."""
    cell = batch.cell(column, row)
    cells = cell if isinstance(cell, list | tuple) else [cell]
    texts = (str(each).translate(_ZERO_WIDTH).strip() for each in cells if each is not None)
    return tuple(text for text in texts if text)


def own_text(batch: Batch, row: int) -> str:
    """Return the completion without verbatim copies of the prompt, which may contain answers too.

    A completion that is nothing but the prompt becomes empty. Short messages (below `SHORTEST_ECHO`
    characters) and earlier answers of the assistant stay, since an answer may rightly repeat them.
    """
    prompt, text = batch.prompts[row], batch.texts[row]
    messages = [] if isinstance(prompt, str) else prompt
    copies = [text_of(prompt)]
    copies += [text_of([each]) for each in messages if each.get("role") != "assistant"]
    for copy in sorted((each.strip() for each in copies), key=len, reverse=True):
        if copy and text.strip() == copy:
            return ""
        if len(copy) >= SHORTEST_ECHO:
            text = text.replace(copy, " ")
    return text


def _last_boxed(text: str) -> str | None:
    last_start, last_end, starts = 0, 0, list[int]()
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            starts.append(0 if match[0] == "{" else match.end())
            continue
        start, end = starts.pop() if starts else 0, match.start()
        if start > last_start and end - start < LONGEST_ANSWER and text[start:end].strip():
            last_start, last_end = start, end
    return text[last_start:last_end] or None


def _after_hashes(text: str) -> str | None:
    """Return the line after the last `####`, unless it is a Markdown heading with text below it."""
    _, mark, after = text.rpartition("####")
    line, _, below = after.strip(" \t").partition("\n")
    if not mark or (below.strip() and parse_number(line) is None):
        return None
    return line


def _last_number(text: str) -> str | None:
    # An exponent is part of a unit or an expression.
    matches = deque(_NUMBER_IN_TEXT.finditer(spell(text)), maxlen=1)
    return (matches[0]["sign"] or "") + matches[0]["number"] if matches else None


def _read_blocks(text: str) -> Iterator[tuple[str, str]]:
    fence = label = ""
    content: list[str] = []
    # Not `splitlines`, which also splits at characters that stand in Python's texts.
    for line in text.split("\n"):
        if not fence:
            if opened := _OPEN_FENCE.match(line):
                fence, label, content = opened[1], opened[2].lower(), []
        elif line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            yield label, textwrap.dedent("\n".join(content))
            fence = ""
        else:
            content.append(line)


def _last_block(text: str, labels: frozenset[str] | None = None) -> str | None:
    contents = [each for label, each in _read_blocks(text) if labels is None or label in labels]
    return contents[-1] if contents else None


_FINDERS: Mapping[str, Callable[[str], str | None]] = {
    "text": str,
    "block": _last_block,
    "python": partial(_last_block, labels=frozenset({"python", "python3", "py", "py3"})),
    "boxed": _last_boxed,
    "hashes": _after_hashes,
    "answer_tag": _last_tagged,
    "last_number": _last_number,
}


class Quantity(NamedTuple):
    """A number as written."""

    value: Fraction
    percent: bool
    """Whether a percent sign (or the word) follows; `value` is 50 for `50%`."""


def parse_number(text: str) -> Quantity | None:
    """Read a text that is one number, with or without currency, percent sign and unit words.

    A label before it (`The answer is`, `x =`) and the unit's name are ignored; `3 million` and
    `2 dozen` are multiplied out. Anything else (`3x`, `12 or 13`, `5:30`) is None.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    plain = tidy(text)
    match = _QUANTITY.fullmatch(plain) or _QUANTITY.fullmatch(_LABEL.sub("", plain, count=1))
    return None if match is None else _read_quantity(match)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two numbers are equal, as `is_near` has it; 50% equals both 50 and 0.5."""
    if is_near(gold.value, answer.value):
        return True
    if gold.percent == answer.percent:
        return False
    if gold.percent:
        return is_near(gold.value / 100, answer.value)
    return is_near(gold.value, answer.value / 100)


def tidy(text: str) -> str:
    """Return the text without typographic LaTeX (spaces, `\\text`, degree signs) and outer delimiters."""
    text = spell(unwrap(text))
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return unwrap(text)


def unwrap(text: str) -> str:
    """Return the text inside `$…$`, `**…**`, `\\(…\\)` and the like, however nested."""
    text = text.strip()
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : len(text) - len(closing)].strip()
        wrapped = text.startswith(opening) and text.endswith(closing)
        if wrapped and inner and opening not in inner and closing not in inner:
            return unwrap(inner)
    return text


def is_explosive(text: str, longest: int = LONGEST_EXPRESSION) -> bool:
    """Return whether evaluating `text` might never end: towers of powers, factorials of big numbers.

    Judged by the text alone, on the safe side. Texts of more than `longest` characters count as explosive.
    """
    return len(text) > longest or _EXPLOSIVE.search(text) is not None


def _read_quantity(match: re.Match[str]) -> Quantity | None:
    words = re.findall(r"[a-z]+", (match["unit"] or "").lower())
    magnitude = _magnitude(match)
    if magnitude is None or _NOT_UNITS.intersection(words):
        return None
    scale = _SCALES.get(words[0], 1) if words else 1
    negative = (match["sign"] == "-") != (match["inner_sign"] == "-")
    percent = bool(match["percent"]) or words[:1] == ["percent"]
    return Quantity((-1 if negative else 1) * scale * magnitude, percent)


def _magnitude(match: re.Match[str]) -> Fraction | None:
    """Return the number that a match of `NUMBER` stands for; None if it divides by zero."""
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

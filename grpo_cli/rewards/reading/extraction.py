r"""Where in a completion the answer stands: `\boxed{}`, `####`, `<answer>`, the last number.

Owns finding only. What an answer is worth is for the kinds.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from grpo_cli.rewards.reading.quantities import NUMBER, parse_number, unwrap

Place = Literal["boxed", "hashes", "answer_tag", "last_number"]
TextOrPlace = Literal["text", "boxed", "hashes", "answer_tag", "last_number"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_FIND_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-−+])?(?:\\?[$€£]|\b|(?<!\w))(?<![A-Za-z0-9_.])"
    rf"(?P<number>{NUMBER}(?:\s?\\?%)?)"
)
LONGEST_ANSWER = 1000
"""Characters a box may hold; bounds the search in completions that open boxes without end."""


class Found(NamedTuple):
    """An answer, and where it stood."""

    place: TextOrPlace
    text: str


def find_answer(text: str, places: Sequence[TextOrPlace]) -> Found | None:
    """Finds the answer of a completion: the last one in the first place that has any.

    Where the completion closes a thinking block, only what follows it is read.

    Args:
        text: The completion.
        places: Where to look, in this order.

    Returns:
        The answer, stripped of white space, or None where no place holds one.
    """
    visible = after_thinking(text)
    for place in places:
        answer = (_FINDERS[place](visible) or "").strip()
        if answer:
            return Found(place, answer)
    return None


def canonical_answer(text: str, places: Sequence[TextOrPlace]) -> str | None:
    """The answer of a completion in one spelling, for votes: `1,000` and `1000.0` are the same.

    Expressions are compared as they are written: evaluating each against each would take too long.
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
    """What follows the last `</think>`; all of `text` where there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` that is closed and not empty; braces inside may nest."""
    for match in reversed(list(_BOX.finditer(text))):
        content = _until_closed(text, match.end())
        if content and content.strip():
            return content
    return None


def _until_closed(text: str, start: int) -> str | None:
    depth = 1
    for position in range(start, min(len(text), start + LONGEST_ANSWER)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
        if depth == 0:
            return text[start:position]
    return None


def _after_hashes(text: str) -> str | None:
    """The line after the last `####`, unless it is a Markdown heading with text below it."""
    _, mark, after = text.rpartition("####")
    line, _, below = after.strip(" \t").partition("\n")
    if not mark or (below.strip() and parse_number(line) is None):
        return None
    return line


def _last_tagged(text: str) -> str | None:
    found = [match for match in _TAG.findall(text) if match.strip()]
    return found[-1] if found else None


def _last_number(text: str) -> str | None:
    matches = deque(_FIND_NUMBER.finditer(text), maxlen=1)
    return (matches[0]["sign"] or "") + matches[0]["number"] if matches else None


_FINDERS: Mapping[TextOrPlace, Callable[[str], str | None]] = {
    "text": str,
    "boxed": last_boxed,
    "hashes": _after_hashes,
    "answer_tag": _last_tagged,
    "last_number": _last_number,
}

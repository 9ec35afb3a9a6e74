"""How plain values are written: one of a recipe or manifest on one line, and several by what they differ in."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any

_LONGEST = 400
_ENDLESS = 1_000_000
_WIDE, _WORTH_CUTTING = 60, 12
"""Characters: a value that a column has no room for, and a beginning that is worth leaving out."""
_CUT = re.compile(r"[/\\\s,{\[]")
_ABSENT = object()
"""In the place of a setting that one of two recipes does not have."""


def show(value: Any, most: int = _LONGEST) -> str:
    """A plain value as YAML would have it, on one line, and not without end: the middle is left out."""
    text = (
        value
        if isinstance(value, str) and value
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def show_apart(values: Sequence[Any]) -> list[str]:
    """Values that differ, without the long beginning that all of them share."""
    texts = [show(value, _ENDLESS) for value in values]
    alike = (len(set(letters)) == 1 for letters in zip(*texts, strict=False))
    shared = sum(takewhile(bool, alike))
    # Whole words and folders, and two of them, so that one sees where the rest belongs.
    cut = _CUT.search(texts[0][:shared][::-1])
    start = shared - cut.end() if cut else 0
    if max(map(len, texts)) <= _WIDE or start < _WORTH_CUTTING:
        return [show(text) for text in texts]
    return [show(f"…{text[start:]}") for text in texts]


def say_differences(settings: Mapping[str, Sequence[Any]], base: str, run: str) -> str:
    """In words, what a run's measurement had otherwise than the base's: of nested values, what differs."""
    return "; ".join(
        part
        for name, (then, now) in settings.items()
        for part in _say_pair(name, then, now, (base, run))
    )


def _say_pair(name: str, then: Any, now: Any, runs: tuple[str, str]) -> Iterator[str]:
    if name == "data":
        yield "the data is another"
    elif isinstance(then, list) and isinstance(now, list):
        for index, (old, new) in enumerate(zip_longest(then, now, fillvalue=_ABSENT)):
            yield from _say_pair(f"{name}[{index}]", old, new, runs)
    elif isinstance(then, dict) and isinstance(now, dict) and then.get("kind") == now.get("kind"):
        for key in dict.fromkeys((*then, *now)):
            yield from _say_pair(
                f"{name}.{key}", then.get(key, _ABSENT), now.get(key, _ABSENT), runs
            )
    elif _ABSENT in (then, now):
        found, place = (then, runs[0]) if now is _ABSENT else (now, runs[1])
        yield f"{name}{_say_kind(found, ' ({})')} is in {place} alone"
    elif then != now:
        shown = show_apart([_say_kind(each, "{}") or each for each in (then, now)])
        yield f"{name} is {shown[1]}, and {shown[0]} in {runs[0]}"


def _say_kind(value: Any, form: str) -> str:
    """What a section calls itself, where it has a kind."""
    return form.format(value["kind"]) if isinstance(value, dict) and "kind" in value else ""

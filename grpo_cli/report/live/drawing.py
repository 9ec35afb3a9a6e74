"""Small pictures made of characters: sparklines, bars, a bar in parts; each exactly as wide as asked."""

from collections.abc import Sequence
from statistics import fmean

from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_FEWEST_WITH_RANGE = 12
"""Bars beside which there is room for the range."""
Mark = tuple[str, str]
"""A character and its colour."""
PART_MARKS: tuple[Mark, ...] = (("█", "blue"), ("▓", "magenta"), ("▒", "yellow"), ("░", "green"))
"""Of the parts of a bar; told apart without colour too."""


def draw_sparkline(values: Sequence[float | None], width: int = 24) -> str:
    """The whole course of some values as a row of bars; empty for fewer than two.

    Where there are more values than places, each bar is the mean of its share of them.
    """
    known = _thin_out(values, width)
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in known)


def draw_course(values: Sequence[float | None], width: int) -> str:
    """A sparkline and what its lowest and its highest bar stand for: it may rise over very little."""
    # The wider the range is written, the fewer bars there are, and the closer their means.
    likely = width - len(_say_range(_thin_out(values, width))) - 1
    said = _say_range(_thin_out(values, likely))
    room = width - len(said) - 1
    if not said or room < _FEWEST_WITH_RANGE:
        return draw_sparkline(values, width)
    return f"{draw_sparkline(values, room)} {said}"


def _thin_out(values: Sequence[float | None], width: int) -> list[float]:
    """Those that are known, as means where they are more than the width; none where it has no room."""
    known = [value for value in values if value is not None]
    if width < 2:
        return []
    if len(known) <= width:
        return known
    edges = [round(place * len(known) / width) for place in range(width + 1)]
    return [fmean(known[edges[at] : edges[at + 1]]) for at in range(width)]


def _say_range(values: Sequence[float]) -> str:
    """Empty where all are the same."""
    if len(values) < 2 or min(values) == max(values):
        return ""
    return f"{min(values):.3g}…{max(values):.3g}"


def draw_bar(share: float, width: int) -> Text:
    """How much of something is done."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("─" * (width - done), "dim"))


def draw_parts(parts: Sequence[tuple[float, Mark]], width: int) -> Text:
    """A bar whose parts are as long as their values; a part that is there at all is seen."""
    total = sum(value for value, _ in parts)
    if total <= 0 or width < len(parts):
        return Text()
    sizes = [max(round(value / total * width), 1 if value > 0 else 0) for value, _ in parts]
    # What rounding gave too much or too little, the longest part takes.
    sizes[sizes.index(max(sizes))] += width - sum(sizes)
    marks = zip(sizes, (mark for _, mark in parts), strict=True)
    return Text.assemble(*((mark * max(size, 0), style) for size, (mark, style) in marks))

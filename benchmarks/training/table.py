"""The results as lines of text: ratio of medians, its spread over the pairs, the goal, the raw medians."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.training.cases import Case, Figure
from benchmarks.training.comparison import WEIGHT_GOAL
from benchmarks.training.runs import Measured


@dataclass(frozen=True)
class Ratio:
    """`grpo` over plain TRL."""

    case: str
    title: str
    unit: str
    trl: float
    """The median."""
    grpo: float
    ratio: float
    """Of the medians."""
    lowest: float
    """Of the ratios of runs that came one after the other."""
    highest: float
    goal: float | None
    reached: bool | None


def take_ratio(case: Case, figure: Figure, pairs: Sequence[tuple[Measured, Measured]]) -> Ratio:
    """The ratio of a figure over pairs of runs (plain TRL, `grpo`).

    Raises:
        KeyError: A run does not have the figure.
    """
    theirs = [plain.figures[figure.key] for plain, _ in pairs]
    mine = [ours.figures[figure.key] for _, ours in pairs]
    ratio = median(mine) / median(theirs)
    each = [one / other for one, other in zip(mine, theirs, strict=True)]
    reached = None
    if figure.goal is not None:
        reached = ratio >= figure.goal if figure.more_is_better else ratio <= figure.goal
    title = f"{case.title}: {figure.title}"
    return Ratio(
        case.name,
        title,
        figure.unit,
        median(theirs),
        median(mine),
        ratio,
        min(each),
        max(each),
        figure.goal,
        reached,
    )


def format_ratio(found: Ratio) -> str:
    """One line of the table."""
    goal = "" if found.goal is None else f"goal {found.goal:.2f} {_verdict(found.reached)}"
    spread = f"({found.lowest:.2f}–{found.highest:.2f})"
    raw = f"TRL {found.trl:9.3f}  grpo {found.grpo:9.3f} {found.unit}"
    name = f"{found.case:10.10}"
    return f"{name} {found.ratio:6.2f} {spread:13} {goal:18} {raw}   {found.title}"


def format_comparison(case: Case, told: dict[str, Any]) -> str:
    """One line on what was compared besides."""
    if case.compares == "weights":
        verdict = _verdict(told["same_tensors"] and told["largest_difference"] < WEIGHT_GOAL)
        return (
            f"{case.name:10.10} largest difference {told['largest_difference']:.1e}, "
            f"goal {WEIGHT_GOAL:.0e} {verdict}; weights moved by up to {told['moved_by_up_to']:.1e}; "
            f"{told['same_completions']:.0%} of completions the same   {case.title}"
        )
    return (
        f"{case.name:10.10} held-out accuracy ({told['held_out']} prompts, greedy): "
        f"TRL {told['accuracy_trl']:.2f}, grpo {told['accuracy_grpo']:.2f}"
    )


def _verdict(reached: bool | None) -> str:
    return "reached" if reached else "missed"

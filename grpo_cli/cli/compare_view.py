"""How runs side by side look in a terminal: settings, metrics, held-out results. Computes nothing."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from grpo_cli.analysis.sentences import say_number
from grpo_cli.cli.output import print_words, stdout
from grpo_cli.report.live.terminal import clean_text
from grpo_cli.units import format_duration

if TYPE_CHECKING:
    from grpo_cli.analysis.metrics import Metric
    from grpo_cli.report.comparison import ComparedRun, RunsComparison, Trend
    from grpo_cli.report.held_out import HeldOutDifference

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST = 40
"""Characters of a setting's value."""
_SAME = "no difference"


def print_comparison(compared: "RunsComparison") -> None:
    """Prints runs under letters: who they are, then each table with a column a run."""
    console = stdout()
    letters = [_letter(place) for place in range(len(compared.runs))]
    table = Table.grid(padding=(0, 2))
    for letter, run in zip(letters, compared.runs, strict=True):
        table.add_row(Text(letter, style="bold"), Text(run.name), Text(_say_run(run), style="dim"))
    console.print(table)
    _print_table(
        "settings that differ",
        letters,
        [(row.path, _say_values(row.values)) for row in compared.settings],
        "every setting is the same",
    )
    metrics = list(dict.fromkeys(name for run in compared.runs for name in _telling(run.trends)))
    _print_table(
        "training: first → last (best)",
        letters,
        [(name, [_say_trend(run.trends.get(name)) for run in compared.runs]) for name in metrics],
        "no metrics were logged",
    )
    if metrics:
        console.print(Text(f"  {_say_widths(compared.runs)}", style="dim"), soft_wrap=False)
    measured = list(dict.fromkeys(name for run in compared.runs for name in run.held_out))
    _print_table(
        "held-out prompts after training (95 % interval)",
        letters,
        [
            (name, [_say_metric(run.held_out.get(name)) for run in compared.runs])
            for name in measured
        ],
        "none of them was measured",
    )
    for letter, difference in zip(letters[1:], compared.held_out, strict=True):
        _print_difference(letter, difference)


def _print_difference(letter: str, found: "HeldOutDifference") -> None:
    """Prints the verdict, the paired differences behind it, and what they may come from."""
    console = stdout()
    console.print()
    if found.reason is not None:
        console.print(Text(f"{letter} and A: not compared, since {found.reason}", style="yellow"))
        return
    verdict = Text(f"{letter} and A: {found.verdict or ''}", style="bold")
    print_words(console, verdict)
    shown = found.differences.get(found.primary or "")
    for name, each in found.differences.items():
        if name != found.primary or each.value == 0:
            told = f"  {name}: {_say_paired(each, shown.reason if shown else None)}"
            print_words(console, Text(told))
    if found.only_base or found.only_run:
        told = f"  {found.only_base} prompts of A alone and {found.only_run} of {letter} alone are left out"
        console.print(Text(told, style="dim"))
    if found.settings:
        told = ", ".join(_say_setting(name, pair) for name, pair in found.settings.items())
        console.print(Text(f"  measured otherwise: {told}", style="yellow"))


def _print_table(
    title: str, letters: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], empty: str
) -> None:
    console = stdout()
    console.print()
    if not rows:
        console.print(Text(empty, style="dim"))
        return
    console.print(Text(title, style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    # A name is not broken: the cells beside it may be, at their spaces.
    table.add_column(style="dim", no_wrap=True)
    for letter in letters:
        table.add_column(letter, overflow="fold")
    for name, cells in rows:
        table.add_row(Text(f"  {clean_text(name)}"), *(Text(clean_text(cell)) for cell in cells))
    console.print(table)


def _telling(trends: "Mapping[str, Trend]") -> list[str]:
    """The metrics that say something; a single reward that is the total does not."""
    rewards = [name for name in trends if name.startswith("rewards/")]
    alone = len(rewards) == 1 and trends[rewards[0]] == trends.get("reward")
    return [name for name in trends if not (alone and name == rewards[0])]


def _say_run(run: "ComparedRun") -> str:
    status = run.status
    total = f"/{status.total_steps}" if status.total_steps else ""
    took = format_duration(status.seconds)
    return f"{status.state}, {status.step}{total} steps in {took}"


def _say_value(value: Any) -> str:
    if value is None:
        return "–"
    told = _say_whole(value)
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 1]}…"


def _say_whole(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _say_values(values: Sequence[Any]) -> list[str]:
    """Values that fit, cut where they are the same: what differs is what they are shown for."""
    whole = ["–" if value is None else _say_whole(value) for value in values]
    if all(len(each) <= _LONGEST for each in whole):
        return whole
    known = list(dict.fromkeys(each for each in whole if each != "–"))
    common = sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*known, strict=False)))
    # At the beginning of the word in which they begin to differ.
    start = max(known[0].rfind(mark, 0, common) for mark in "/ ,:_-") + 1
    bare = [each if each == "–" else f"…{each[start:]}" for each in whole] if start else whole
    cut = [each if len(each) <= _LONGEST else f"{each[: _LONGEST - 1]}…" for each in bare]
    if len(known) > 1 and len(set(cut)) == len(set(whole)):
        return cut
    return [each if len(each) <= _LONGEST else f"…{each[1 - _LONGEST :]}" for each in whole]


def _say_widths(runs: "Sequence[ComparedRun]") -> str:
    """What the values of the table are means of."""
    widths = [run.trends["reward"].width for run in runs if "reward" in run.trends] or [1]
    told = f"{min(widths)}" if min(widths) == max(widths) else f"{min(widths)} to {max(widths)}"
    return f"means of {told} records; entropy, kl and grad_norm begin with the first record"


def _say_setting(name: str, pair: tuple[Any, Any]) -> str:
    plain = all(isinstance(value, int | float | None) for value in pair)
    return f"{name} ({_say_value(pair[0])}, {_say_value(pair[1])})" if plain else name


def _say_trend(trend: "Trend | None") -> str:
    if trend is None:
        return "–"
    told = f"{say_number(trend.first)} → {say_number(trend.last)}"
    if trend.best is None:
        return told
    return f"{told} ({say_number(trend.best)} at step {trend.best_step})"


def _say_metric(metric: "Metric | None") -> str:
    if metric is None or metric.value is None:
        return "–"
    if metric.low is None or metric.high is None:
        return say_number(metric.value)
    return f"{say_number(metric.value)} ({say_number(metric.low)} to {say_number(metric.high)})"


def _say_paired(metric: "Metric", told: str | None) -> str:
    """A difference with its interval; why there is none is said where the line above has not told it."""
    if metric.value is None:
        return f"– ({metric.reason})"
    value = say_number(metric.value, "+") if metric.value else _SAME
    if metric.low is None or metric.high is None:
        return value if metric.reason == told else f"{value} (no interval: {metric.reason})"
    interval = f"{say_number(metric.low, '+')} to {say_number(metric.high, '+')}"
    return f"{value} (95 % interval {interval})"


def _letter(place: int) -> str:
    return _LETTERS[place] if place < len(_LETTERS) else str(place + 1)

"""How runs side by side look in a terminal: settings, metrics, held-out results. Computes nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from grpo_cli.cli.output import stdout
from grpo_cli.report.live.terminal import clean_text
from grpo_cli.units import format_duration

if TYPE_CHECKING:
    from grpo_cli.measure.metrics import Metric
    from grpo_cli.report.comparison import ComparedRun, RunsComparison, Trend
    from grpo_cli.report.held_out import HeldOutDifference

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST = 40
"""Characters of a setting's value."""


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
        [(row.path, [_say_value(value) for value in row.values]) for row in compared.settings],
        "every setting is the same",
    )
    metrics = list(dict.fromkeys(name for run in compared.runs for name in _telling(run.trends)))
    _print_table(
        "training: first → last (best), means over a tenth of the records",
        letters,
        [(name, [_say_trend(run.trends.get(name)) for run in compared.runs]) for name in metrics],
        "no metrics were logged",
    )
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
    console.print(Text(found.verdict or "", style="bold"))
    for name, each in found.differences.items():
        if name != found.primary:
            console.print(Text(f"  {name}: {_say_paired(each)}"))
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
    table.add_column(style="dim", overflow="fold")
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
    took = format_duration(status.updated_at - status.started_at)
    return f"{status.state}, {status.step}{total} steps in {took}"


def _say_value(value: Any) -> str:
    if value is None:
        return "–"
    told = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 1]}…"


def _say_setting(name: str, pair: tuple[Any, Any]) -> str:
    plain = all(isinstance(value, int | float | None) for value in pair)
    return f"{name} ({_say_value(pair[0])}, {_say_value(pair[1])})" if plain else name


def _say_trend(trend: "Trend | None") -> str:
    if trend is None:
        return "–"
    told = f"{trend.first:.3g} → {trend.last:.3g}"
    return told if trend.best is None else f"{told} ({trend.best:.3g} at step {trend.best_step})"


def _say_metric(metric: "Metric | None") -> str:
    if metric is None or metric.value is None:
        return "–"
    if metric.low is None or metric.high is None:
        return f"{metric.value:.3f}"
    return f"{metric.value:.3f} ({metric.low:.3f} to {metric.high:.3f})"


def _say_paired(metric: "Metric") -> str:
    if metric.value is None:
        return f"– ({metric.reason})"
    if metric.low is None or metric.high is None:
        return f"{metric.value:+.3g} (no interval: {metric.reason})"
    return f"{metric.value:+.3g} (95 % interval {metric.low:+.3g} to {metric.high:+.3g})"


def _letter(place: int) -> str:
    return _LETTERS[place] if place < len(_LETTERS) else str(place + 1)

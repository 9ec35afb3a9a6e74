"""How an evaluation looks in a terminal: its progress, its result, a comparison. Computes nothing."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from grpo_cli.cli.output import stderr, stdout
from grpo_cli.eval.folder import EvalFolder
from grpo_cli.units import format_duration

_QUIET_S = 10.0
"""Seconds between lines where there is no terminal."""


@contextmanager
def progress(folder: EvalFolder) -> Iterator[Callable[[str, int, int], None]]:
    """Shows on stderr how far an evaluation is, with the time left."""
    console = stderr()
    console.print(f"evaluation: {folder.path}", markup=False)
    if not console.is_terminal:
        yield _plain_progress()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("completions, left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def tell(subject: str, done: int, total: int) -> None:
            if subject not in tasks:
                tasks[subject] = bars.add_task("", total=None)
            what = subject if total else f"{subject}: loading the model"
            bars.update(tasks[subject], description=what, total=total or None, completed=done)

        yield tell


def _plain_progress() -> Callable[[str, int, int], None]:
    last = [0.0]
    begun: dict[str, tuple[float, int]] = {}
    ended: set[str] = set()

    def tell(subject: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not total:
            stderr().print(f"{subject}: loading the model", markup=False)
            return
        started, first = begun.setdefault(subject, (now, done))
        if subject in ended or (now - last[0] < _QUIET_S and done < total):
            return
        last[0] = now
        if done >= total:
            ended.add(subject)
        speed = (done - first) / (now - started) if now > started else 0.0
        left = f", {format_duration((total - done) / speed)} left" if speed and done < total else ""
        stderr().print(f"{subject}: {done}/{total} completions{left}", markup=False)

    return tell


def print_result(result: Mapping[str, Any], folder: Path) -> None:
    """Prints every metric of every subject, the gain, and the verdict."""
    console = stdout()
    wide, narrow = _result_table(result, " "), _result_table(result, "\n")
    unbounded = console.options.update(max_width=10_000)
    fits = console.measure(wide, options=unbounded).maximum <= console.width
    console.print(wide if fits else narrow)
    settings, first = result["settings"], next(iter(result["subjects"].values()))
    console.print(
        Text(
            f"{first['prompts']} prompts × {settings['samples']} at temperature "
            f"{settings['temperature']:g}, split {settings['split']}; 95 % intervals by prompt",
            style="dim",
        )
    )
    if "harness" in result:
        console.print(_harness_table(result["harness"]))
    for note in _notes(result):
        console.print(Text(note, style="dim"))
    for name, subject in result["subjects"].items():
        for reward, count in subject.get("failures", {}).items():
            told = f"warning: {reward} failed on {count} of {subject['completions']} completions of {name}"
            console.print(Text(told, style="yellow"))
    for name, verdict in result["verdicts"].items():
        several = f"{name}: " if len(result["verdicts"]) > 1 else ""
        console.print(Text(several + verdict, style="bold"))
    console.print(f"result  {folder / 'result.json'}", markup=False)


def _notes(result: Mapping[str, Any]) -> list[str]:
    """Why some values have no interval."""
    values = [subject["metrics"] for subject in result["subjects"].values()]
    gains = [
        {f"gain in {name}": metric for name, metric in each.items()}
        for each in result["differences"].values()
    ]
    missing: dict[str, dict[str, None]] = {}
    for metrics in (*values, *gains):
        for name, metric in metrics.items():
            if metric["reason"]:
                missing.setdefault(metric["reason"], {})[name] = None
    return [f"no interval: {reason} ({', '.join(names)})" for reason, names in missing.items()]


def _result_table(result: Mapping[str, Any], gap: str) -> Table:
    """A row for each metric; `gap` stands between a value and its interval."""
    table = Table(box=None, padding=(0, 2 if gap == " " else 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    subjects = result["subjects"]
    for name in subjects:
        table.add_column(name, justify="right")
    for name in result["differences"]:
        table.add_column(f"gain of {name}", justify="right")
    first = next(iter(subjects.values()))
    for metric, found in first["metrics"].items():
        name = Text(metric)
        if found["prompts"] < first["prompts"]:
            name.append(f" ({found['prompts']} prompts)", style="dim")
        cells = [_cell(subject["metrics"].get(metric), gap) for subject in subjects.values()]
        gains = [_cell(each.get(metric), gap, "+") for each in result["differences"].values()]
        table.add_row(name, *cells, *gains)
    speeds = [_speed(subject) for subject in subjects.values()]
    table.add_row(Text("tokens/s", style="dim"), *speeds)
    return table


def _speed(subject: Mapping[str, Any]) -> str:
    if subject["tokens_per_s"] is None:
        return "–"
    # Results of earlier versions do not say it, and always include the warm-up.
    warm_up = " with warm-up" if subject.get("warm_up_included", True) else ""
    return f"{subject['tokens_per_s']:.0f}{warm_up}"


def _harness_table(harness: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column(f"{harness['name']} {harness['version']}")
    for name in harness["subjects"]:
        table.add_column(name, justify="right")
    first = next(iter(harness["subjects"].values()))
    for task, metrics in first.items():
        for metric in metrics:
            cells = [_with_error(tasks[task][metric]) for tasks in harness["subjects"].values()]
            table.add_row(Text(f"{task} {metric.removesuffix(',none')}"), *cells)
    return table


def _with_error(score: Mapping[str, Any]) -> Text:
    text = Text(f"{score['value']:.3f}")
    if score["stderr"] is not None:
        text.append(f" ± {score['stderr']:.3f}", style="dim")
    return text


def print_comparison(compared: Mapping[str, Any]) -> None:
    """Prints the paired differences of two results."""
    console = stdout()
    console.print(f"before  {compared['before']}", markup=False)
    console.print(f"after   {compared['after']}", markup=False)
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("")
    table.add_column("difference", justify="right")
    for name, metric in compared["differences"].items():
        table.add_row(Text(name), _cell(metric, " ", "+"))
    console.print(table)
    for name, (before, after) in compared["settings"].items():
        told = "" if name == "rewards" else f": {before} → {after}"
        console.print(f"note: {name} of the two differ{told}", style="yellow", markup=False)
    console.print(Text(compared["verdict"], style="bold"))


def _cell(metric: Mapping[str, Any] | None, gap: str, sign: str = "") -> Text:
    if metric is None or metric["value"] is None:
        return Text("–")
    text = Text(f"{metric['value']:{sign}.3f}")
    if metric["low"] is not None:
        interval = f"[{metric['low']:{sign}.3f}, {metric['high']:{sign}.3f}]"
        text.append(f"{gap}{interval}", style="dim")
    return text

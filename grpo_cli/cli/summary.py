"""How the end of a run looks in a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from grpo_cli.cli.diagnose import print_symptoms
from grpo_cli.cli.expect import print_verdicts
from grpo_cli.cli.output import LEVEL_MARKS, print_words, stderr, stdout
from grpo_cli.report import wording
from grpo_cli.report.verdict import judge
from grpo_cli.report.wording import clean_text
from grpo_cli.units import count_noun, format_duration, format_value

if TYPE_CHECKING:
    from grpo_cli.report.summary import HeldOutSetSeries, RunReport

STATE_MARKS = {
    "completed": ("✓", "green"),
    "running": ("●", "bold cyan"),
    "pending": ("○", "dim"),
    "stopped": ("■", "yellow"),
    "failed": ("✗", "red"),
    "interrupted": ("?", "red"),
    "damaged": ("!", "red"),
}


def print_summary(run: "RunReport") -> None:
    """Print how a run ended and what to do next."""
    console, status, folder = stdout(), run.status, run.folder
    console.print(_say_end(run))
    table = Table.grid("", "", Column(style="dim"), padding=(0, 2))
    metric, name = run.learned
    trend, answers = run.trend(metric), run.answers()
    if trend and not answers:
        table.add_row(f"  {name}", say_change(trend.first, trend.last), trend.describe())
    for name, values, note in (*_list_measured(run), *_list_held_out_sets(run)):
        table.add_row(f"  {clean_text(name)}", say_change(*values), note)
    console.print(table)
    for measured, failures in run.scoring_failures().items():
        print_words(console, f"  ! {measured}: {failures}", "yellow")
    for question, answer in answers[:2]:
        console.print(f"  » {clean_text(question)}", style="cyan", overflow="ellipsis")
        console.print(f"  « {clean_text(answer)}", overflow="ellipsis")
    if run.expected:
        print_verdicts(run.expected, indent="  ")
    if status.state == "completed" and status.reason:
        console.print(f"  {status.reason}")
    if run.dropped:
        console.print(f"  dropped {run.dropped}")
    # Outside the table, which would cut long paths short.
    if folder.model.is_dir():
        chosen = f" ({run.chosen})" if run.chosen else ""
        console.print(f"  model  {folder.model}{chosen}")
    if folder.report.is_file():
        console.print(f"  report {folder.report}")
    for tracker, where in run.tracker_runs().items():
        console.print(f"  {tracker} {clean_text(where)}")
    console.print(f"  run    {folder.path}")
    print_symptoms(run.problems(), str(folder.path))
    lost = run.lost()
    if lost:
        print_words(stderr(), lost, "bold red")
    elif status.state in ("stopped", "failed"):
        _print_failure(run)


def say_change(*values: float | None, sign: str = "→") -> Text:
    """Return what a number was, and is now, in bold."""
    *earlier, last = map(format_value, values)
    return Text(f" {sign} ".join([*earlier, ""])).append(last, style="bold")


def _list_measured(run: "RunReport") -> Iterator[tuple[str, Sequence[float | None], str]]:
    """Yield the name and the values of each metric before and after training, and how it was measured."""
    warmup = run.measured("warmup")
    repeated = [each for each in run.held_out_sets.values() if _is_told_by_ends(run, each)]
    best = {
        metric: _say_best(each, metric)
        for each in repeated
        for metric in {each.primary, *each.shown}
    }
    stages = (run.before, *([warmup] if warmup else []), run.after)
    for metric, name, *values in _compare(*stages):
        notes = [
            _say_measured(run.before, metric, "held-out "),
            "before, after the warm-up, at the end" if warmup else "",
            best.get(metric, ""),
        ]
        yield name, values, ", ".join(filter(None, notes))


def _list_held_out_sets(run: "RunReport") -> Iterator[tuple[str, Sequence[float | None], str]]:
    """Yield the same of each set that was evaluated during training, if the lines before do not tell it."""
    for name, series in run.held_out_sets.items():
        for metric in () if _is_told_by_ends(run, series) else series.shown:
            values = list(series.values(metric).values())
            kind, _, reward = metric.partition("/")
            if len(values) > 1:
                yield (
                    f"{name} {kind}{f' ({reward})' if reward else ''}",
                    (values[0], values[-1]),
                    f"{_say_measured(series.newest, metric)}, {_say_best(series, metric)}",
                )


def _is_told_by_ends(run: "RunReport", series: "HeldOutSetSeries") -> bool:
    """Return whether a set is what was measured before and after training."""
    return series.repeats and bool(run.before and run.after)


def _say_best(series: "HeldOutSetSeries", metric: str) -> str:
    if not series.values(metric):
        return ""
    step, value = series.find_best(metric)
    return f"best {format_value(value)} at step {step}"


def _say_end(run: "RunReport") -> Text:
    status, problems = run.status, run.problems()
    state = run.life.state
    bad = state == "completed" and judge(run).tone == "bad"
    text = Text.assemble(("!", "yellow") if bad else STATE_MARKS[state])
    text.append(f" {state}: {status.progress} steps in {format_duration(status.seconds)}")
    if problems:
        # The worst comes first.
        _, style = LEVEL_MARKS[problems[0].level]
        text.append(", ").append(count_noun(len(problems), "problem"), style=style)
    return text


def _say_measured(measured: Mapping[str, Any], metric: str, kind: str = "") -> str:
    of_metric = measured.get("metrics", {}).get(metric, {})
    count, total = (each.get("prompts") for each in (of_metric, measured))
    samples = measured.get("completions", 0) // (total or 1)
    times = f" × {samples}" if samples > 1 else ""
    prompts = f"{count or total} {kind}prompts{times}" if total else ""
    sampling = wording.say_sampling(measured.get("temperature"))
    return ", ".join(filter(None, [prompts, sampling]))


def _compare(*stages: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield accuracy of the rewards that judge answers, and means that say anything more than it.

    Each is a metric, its name in words, and its value at each stage; the first stage is before training, the last
    one after it.
    """
    before = stages[0]
    if len(before.get("rewards", {})) > 1:
        yield "reward", "held-out reward", *(each.get("reward") for each in stages)
    for key, what in (("accuracy", "accuracy"), ("rewards", "mean")):
        for name in before.get(key, {}):
            values = [each.get(key, {}).get(name) for each in stages]
            accuracies = [each.get("accuracy", {}).get(name) for each in stages]
            if key == "accuracy" or values != accuracies:
                yield f"{key}/{name}", f"held-out {what} ({name})", *values
    yield from _compare_sources(*stages)
    if "likelihood_gap" in before:
        yield (
            "likelihood_gap",
            "held-out likelihood gap",
            *(each.get("likelihood_gap") for each in stages),
        )


def _compare_sources(*stages: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the accuracies of each source of a mixture, as `_compare` does; its reward if it has none."""
    for source in stages[0].get("sources", {}):
        means = [each.get("sources", {}).get(source, {}) for each in stages]
        accuracies = [metric for metric in means[0] if metric.startswith("accuracy/")]
        for metric in accuracies or ["reward"]:
            name = metric.partition("/")[2]
            values = [each.get(metric) for each in means]
            # A reward of this source alone has been reported.
            if values != [each.get("accuracy", {}).get(name) for each in stages]:
                what = f"accuracy ({name}, {source})" if name else f"reward ({source})"
                yield f"{metric}@{source}", f"held-out {what}", *values


def _print_failure(run: "RunReport") -> None:
    console, status, folder = stderr(), run.status, run.folder
    if status.traceback:
        console.print(status.traceback.rstrip(), style="dim")
    style = "bold red" if status.state == "failed" else "yellow"
    print_words(console, str(status.error), style)
    if status.state == "failed":
        console.print(f"The worker's log: {folder.log}")
    if run.can_resume:
        console.print(f"To resume: {run.resume_command()}", soft_wrap=True)
        if status.stopped_by:
            note = (
                f"Without --set, the rule {status.stopped_by} stops it again if it finds the same."
            )
            print_words(console, note, "dim")

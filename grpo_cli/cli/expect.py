"""`grpo expect`: write a recipe's `expect` block from finished runs, or compare runs with one."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from grpo_cli.cli.arguments import AsJson, Runs
from grpo_cli.cli.output import show, stderr, stdout
from grpo_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from grpo_cli.analysis.expectations import Comparison, Verdict, Written

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        help="A metric of metrics.jsonl or of the held-out measurement; may be repeated. "
        "By default reward and every held-out accuracy."
    ),
]


def expect(
    runs: Runs,
    metric: Metrics = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Read logged metrics at this step; the last by default."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Records to average; a tenth by default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare each run with its own recipe's block instead.")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE", help="Compare with this recipe's block instead."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write the `expect` block of a recipe from its finished runs (one for each seed), or compare runs with one.

    The block goes to stdout: `grpo expect RUN RUN RUN >> recipe.yaml`. A comparison ends with exit code 1
    unless every metric is there and lies inside.
    """
    if check or against:
        comparisons = _compare(runs, against, written_flags=(metric, step, window))
        show(comparisons, _print_comparisons, as_json=json)
        raise typer.Exit(ExitCode.OK if all(one.inside for one in comparisons) else ExitCode.FAILED)
    from grpo_cli.analysis.expectations import expect_from_runs

    show(expect_from_runs(runs, metric or (), step, window), _print_written, as_json=json)


def _compare(
    paths: list[Path], against: Path | None, written_flags: tuple[object, ...]
) -> "list[Comparison]":
    """Return each run beside a block; raises `UsageError` if there is none, or with flags of writing one."""
    from grpo_cli.analysis.expectations import compare_run
    from grpo_cli.recipe.loading import load_recipe
    from grpo_cli.runs.run import Run

    if any(flag for flag in written_flags):
        raise UsageError(
            "--metric, --step and --window are for writing a block; a comparison takes them from it",
            "leave them out",
        )
    found = []
    block = load_recipe(against).expect if against else None
    for path in paths:
        run = Run(path)
        expect = block if against else run.recipe.expect
        if expect is None:
            raise UsageError(
                f"{against or run.folder.resolved} has no `expect` block",
                "write one with grpo expect RUN..., or name a recipe that has one with --against RECIPE",
            )
        found.append(compare_run(run, expect))
    return found


_STYLES = {"inside": "green", "outside": "bold red"}


def _print_comparisons(comparisons: "list[Comparison]") -> None:
    for each in comparisons:
        ended = "" if each.state == "completed" else f" ({each.state})"
        stdout().print(f"{each.run}{ended}", style="bold")
        print_verdicts(each, indent="  ")


def _print_written(written: "Written") -> None:
    """Print a block as YAML that can be appended to a recipe; notes go to stderr."""
    from grpo_cli.recipe.yaml_tree import write_expect

    # A line apart from whatever stands before it.
    sys.stdout.write(f"\n{write_expect(written.expect)}")
    for note in written.notes:
        stderr().print(f"note: {note}", style="cyan")


def print_verdicts(comparison: "Comparison", indent: str) -> None:
    """Print a line per metric, then how the run's conditions differ from those of the bands."""
    console = stdout()
    for verdict in comparison.verdicts:
        line = Text(f"{indent}expected  {verdict.metric} at step {verdict.step}: ")
        console.print(line.append(_say(verdict)))
    for mismatch in comparison.mismatches:
        console.print(f"{indent}          {mismatch}", style="dim")
    if comparison.runs == 1:
        note = "the bands come from one run: a guess at its own noise, not at what another seed changes"
        console.print(f"{indent}          {note}", style="dim")


def _say(verdict: "Verdict") -> Text:
    style, detail = _STYLES.get(verdict.outcome, "yellow"), verdict.detail
    if verdict.value is None:
        return Text(f"{verdict.outcome}{f' ({detail})' if detail else ''}", style=style)
    word = "OUTSIDE" if verdict.outcome == "outside" else verdict.outcome
    value, low, high = _format(verdict.value, verdict.low, verdict.high)
    text = Text(f"{value}, ").append(f"{word} {low} to {high}", style=style)
    return text.append(f" ({detail})") if detail else text


def _format(*values: float) -> list[str]:
    """Format numbers with enough decimals for the ends of the band to differ."""
    low, high = values[-2:]
    decimals = 3 if high <= low else max(3, 2 - math.floor(math.log10(high - low)))
    if decimals > 6:
        return [f"{value:.6g}" for value in values]
    return [f"{value:.{decimals}f}" for value in values]

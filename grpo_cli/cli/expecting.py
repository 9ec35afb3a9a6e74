"""`grpo expect`: parses, calls one function, and prints its result."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_cli.cli.arguments import AsJson, Runs
from grpo_cli.errors import ExitCode

if TYPE_CHECKING:
    from grpo_cli.analysis.expectations.verdicts import Comparison

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
        int | None,
        typer.Option(min=1, help="Records a logged metric is the mean of; a tenth by default."),
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
    from grpo_cli.cli import expect_view, output

    if check or against:
        comparisons = _compare(runs, against, written_flags=(metric, step, window))
        if json:
            output.print_json([each.as_json() for each in comparisons])
        else:
            expect_view.print_comparisons(comparisons)
        raise typer.Exit(
            ExitCode.OK if all(each.inside for each in comparisons) else ExitCode.FAILED
        )
    from grpo_cli.analysis.expectations.writing import expect_from_runs

    written = expect_from_runs(runs, metric or (), step, window)
    if json:
        output.print_json(written.as_json())
    else:
        expect_view.print_written(written)


def _compare(
    paths: list[Path], against: Path | None, written_flags: tuple[object, ...]
) -> "list[Comparison]":
    """Each run beside a block.

    Raises:
        UsageError: There is no block, or flags were given that only writing one takes.
    """
    from grpo_cli.analysis.expectations.verdicts import compare_run
    from grpo_cli.errors import UsageError
    from grpo_cli.recipe.loading import load_recipe
    from grpo_cli.runs.folder import RunFolder

    if any(flag for flag in written_flags):
        raise UsageError(
            "--metric, --step and --window are for writing a block; a comparison takes them from it. "
            "Fix: leave them out"
        )
    found = []
    block = load_recipe(against).expect if against else None
    for path in paths:
        run = RunFolder(path.absolute())
        recipe = run.read_recipe()
        expect = block if against else recipe.expect
        if expect is None:
            raise UsageError(
                f"{against or run.resolved} has no `expect` block. Fix: write one with grpo expect RUN..., "
                "or name a recipe that has one with --against RECIPE"
            )
        found.append(compare_run(run, expect, recipe))
    return found

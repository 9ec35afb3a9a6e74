"""`grpo diagnose`: parses, calls one function, and prints its result."""

from typing import Annotated

import typer

from grpo_cli.cli.arguments import RUNS, AsJson, NewestRun, RunsRoot
from grpo_cli.errors import ExitCode


def diagnose(
    run: NewestRun = "latest",
    runs: RunsRoot = RUNS,
    rules: Annotated[
        bool, typer.Option("--rules", help="List what is looked for instead; needs no run.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Say from a run's metrics why it does not learn, and what to change: named rules with their sources.

    `training.stop_when` takes the rules' names and stops a run by them. Exit code 1 where a run learns
    nothing, or loses what it learned.
    """
    from grpo_cli.cli import diagnosis_view, output

    if rules:
        from grpo_cli.analysis.diagnosis.rules import RULES

        if json:
            output.print_json([rule.as_json() for rule in RULES])
        else:
            diagnosis_view.print_rules(RULES)
        return
    from grpo_cli.analysis.diagnosis.diagnosis import examine
    from grpo_cli.analysis.diagnosis.history import read_history
    from grpo_cli.runs.selection import find_run

    folder = find_run(runs, run)
    found = examine(read_history(folder))
    if json:
        output.print_json({"run": str(folder.path), **found.as_json()})
    else:
        diagnosis_view.print_diagnosis(found)
    raise typer.Exit(ExitCode.FAILED if found.errors else ExitCode.OK)

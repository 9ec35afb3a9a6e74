"""`grpo doctor`: print what is wrong with this machine."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from grpo_cli.cli.arguments import RUNS, AsJson, RunsRoot
from grpo_cli.cli.output import LEVEL_MARKS, print_json, progress, stdout
from grpo_cli.errors import ExitCode
from grpo_cli.units import count_noun

if TYPE_CHECKING:
    from grpo_cli.doctor.diagnostics import MachineReport


def doctor(
    runs: RunsRoot = RUNS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip imports and child processes.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check this machine: packages, devices, memory, disk, ports, the hub."""
    from grpo_cli.doctor.diagnostics import diagnose_machine

    with progress("checking this machine") as tell:
        report = diagnose_machine(runs, quick=quick, on_progress=tell)
    if json:
        print_json(report.as_json())
    else:
        _print_report(report)
    raise typer.Exit(ExitCode.ENVIRONMENT if report.at("error") else ExitCode.OK)


def _print_report(report: "MachineReport") -> None:
    console = stdout()
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for issue in report.issues:
        mark, style = LEVEL_MARKS[issue.level]
        seen = Text(issue.seen)
        if issue.fix:
            seen.append(f"\nFix: {issue.fix}", style="bold")
        table.add_row(Text(mark, style=style), Text(issue.subject), seen)
    console.print(table)
    errors, warnings = len(report.at("error")), len(report.at("warning"))
    took = f"[dim]({report.seconds:.1f} s)[/]"
    if errors or warnings:
        console.print(f"{count_noun(errors, 'error')}, {count_noun(warnings, 'warning')} {took}")
    else:
        console.print(f"[green]✓[/] no problems found {took}")

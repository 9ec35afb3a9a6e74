"""`grpo doctor`: print what is wrong with this machine."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from grpo_cli.cli.arguments import RUNS, AsJson, RunsRoot
from grpo_cli.cli.output import print_counts, print_findings, progress, show, stdout
from grpo_cli.errors import ExitCode

if TYPE_CHECKING:
    from grpo_cli.doctor.diagnostics import MachineReport


def doctor(
    runs: RunsRoot = RUNS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip imports and child processes.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check this machine: packages, devices, memory, disk, the hub."""
    from grpo_cli.doctor.diagnostics import diagnose_machine

    with progress("checking this machine") as tell:
        report = diagnose_machine(runs, quick=quick, on_progress=tell)
    show(report, _print_report, as_json=json)
    raise typer.Exit(ExitCode.ENVIRONMENT if report.at("error") else ExitCode.OK)


def _print_report(report: "MachineReport") -> None:
    console, took = stdout(), Text(f"({report.seconds:.1f} s)", style="dim")
    print_findings(console, report.issues)
    print_counts(console, report.issues, took, Text("no problems found ").append(took))

"""`grpo report`: parses, calls one function, and says where the page is."""

from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.cli.arguments import RUNS, RunsRoot


def report(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Paths, NAME/ID, NAME (its newest) or latest, the default."
        ),
    ] = None,
    runs: RunsRoot = RUNS,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file; report.html in the run (of several, here) by default.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Path and size as JSON.")] = False,
) -> None:
    """Write one HTML page of a run, or of several over each other.

    Verdict, charts, held-out answers before and after, every completion, recipe and batch. The page needs
    no network and no other file, and may be written while training goes on.
    """
    from grpo_cli.cli.report_view import print_page
    from grpo_cli.report.page.assembly import write_report
    from grpo_cli.runs.selection import LATEST, find_run

    found = [find_run(runs, each).path for each in run or [LATEST]]
    page = write_report(found, output, force=force)
    print_page(page, as_json=json, show=show)

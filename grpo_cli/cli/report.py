"""`grpo report`: one HTML page of a run, or of several."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from grpo_cli.cli.arguments import RUNS, RunsRoot
from grpo_cli.cli.output import print_json, stderr, stdout
from grpo_cli.units import format_bytes


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
            "--output", "--out", "-o", help="The file; by default report.html in the run, or here."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print path and size as JSON.")] = False,
) -> None:
    """Write one HTML page about a run, or one that compares several.

    Verdict, charts, held-out answers before and after, every completion, recipe and batch. The page needs no
    network and no other file, and can be written while the run trains.
    """
    from grpo_cli.logs.run import open_run
    from grpo_cli.report.page import write_report
    from grpo_cli.runs.selection import LATEST

    opened = [open_run(runs, each) for each in dict.fromkeys(run or [LATEST])]
    page = write_report(opened, output, force=force)
    size = page.stat().st_size
    if json:
        print_json({"page": str(page), "bytes": size})
    else:
        stdout().print(f"wrote {page} ({format_bytes(size)})")
    if show and not webbrowser.open(page.absolute().as_uri()):
        stderr().print(f"note: no browser could be started. Fix: open {page} in one")

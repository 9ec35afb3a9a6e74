"""`grpo report`: parses, calls one function, and says where the page is."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file; report.html in the run (of several, here) by default.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write one HTML page of a run, or of several over each other: verdict, charts, expected bands.

    The page needs no network and no other file.
    """
    from grpo_cli.cli.output import stdout
    from grpo_cli.report.page import write_report

    page = write_report(runs, output, force=force)
    stdout().print(f"wrote {page}", markup=False, soft_wrap=True)

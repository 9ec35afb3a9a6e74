"""`grpo runs`: past runs and those in progress, from their folders alone."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_cli.cli import output
from grpo_cli.cli.arguments import RUNS, AsJson, NewestRun, RunsRoot, SeveralRuns
from grpo_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from grpo_cli.runs.removal import Removal

SHOWN_RUNS = 100

app = typer.Typer(
    help="Past runs and those in progress, from their folders alone.", no_args_is_help=True
)


@app.command("list")
def list_(
    runs: RunsRoot = RUNS,
    name: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only runs of this NAME or NAME/ID; `*` is anything."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: pending, running, completed, stopped, failed, interrupted, damaged."
        ),
    ] = None,
    sort: Annotated[
        str, typer.Option(help="started, name, state, steps, reward, accuracy, duration.")
    ] = "started",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"The most runs to list; by default {SHOWN_RUNS}, or all with --json."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List runs, the newest first: state, steps, reward, held-out result, when, how long.

    `interrupted`: marked as running, but no process exists.
    """
    from grpo_cli.cli import runs_view
    from grpo_cli.report.run_list import list_runs

    most = limit or (None if json else SHOWN_RUNS + 1)
    listed = list_runs(runs, name=name, states=state or (), sort=sort, limit=most)
    if json:
        output.print_json(listed)
    else:
        shown = listed[: limit or SHOWN_RUNS]
        runs_view.print_runs(shown, runs, filtered=bool(name or state))
        if len(shown) < len(listed):
            output.stderr().print(
                f"only the first {len(shown)} runs are shown; --limit N shows more"
            )
        if sort == "accuracy":
            runs_view.print_held_out_sets(listed)


@app.command()
def show(run: NewestRun = "latest", runs: RunsRoot = RUNS, json: AsJson = False) -> None:
    """Show one run: its result, what it was made of, its size on disk, and the next commands."""
    from grpo_cli.cli import runs_view
    from grpo_cli.report.summary import RunReport
    from grpo_cli.runs.selection import find_run

    shown = RunReport(find_run(runs, run))
    if json:
        output.print_json(shown.overview_json())
    else:
        runs_view.print_overview(shown)


@app.command()
def path(
    run: NewestRun = "latest",
    runs: RunsRoot = RUNS,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="last|best|N", help="Of this checkpoint instead.")
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Of the final model instead.")] = False,
    json: AsJson = False,
) -> None:
    """Print only the path of a run: `cd $(grpo runs path)`, `grpo eval $(grpo runs path)`."""
    from grpo_cli.runs.checkpoints import find_model
    from grpo_cli.runs.selection import find_run

    if checkpoint is not None and model:
        raise UsageError("--checkpoint and --model name two places", "leave one of them out")
    folder = find_run(runs, run)
    selected = find_model(folder, checkpoint)[1] if checkpoint or model else folder.path
    if json:
        output.print_json({"path": str(selected)})
    else:
        sys.stdout.write(f"{selected}\n")


@app.command()
def compare(run: SeveralRuns, runs: RunsRoot = RUNS, json: AsJson = False) -> None:
    """Compare runs with the first one: recipes side by side, metrics, and held-out results prompt by prompt."""
    from grpo_cli.cli import runs_view
    from grpo_cli.logs.run import open_run
    from grpo_cli.report.comparison import compare_runs, read_runs

    if len(run) < 2:
        raise UsageError("one run has nothing to be compared with", "name two or more")
    compared = compare_runs(read_runs([open_run(runs, each) for each in run]))
    output.show(compared, runs_view.print_comparison, as_json=json)


@app.command()
def remove(
    run: SeveralRuns,
    runs: RunsRoot = RUNS,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Only checkpoints, all but the newest and the best."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed; remove nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Delete run folders for good, or checkpoints that they no longer need.

    Refuses a run that is in progress, and a folder that is not a run. Nothing behind a link is removed.
    """
    from grpo_cli.cli import runs_view
    from grpo_cli.runs.removal import plan_removal
    from grpo_cli.runs.selection import find_run
    from grpo_cli.units import format_bytes

    folders = dict.fromkeys(find_run(runs, each) for each in run)
    planned = [plan_removal(folder, checkpoints=checkpoints) for folder in folders]
    if not json or not (yes or dry_run):
        runs_view.print_planned(planned)
    freed = None if dry_run else _remove(planned, confirm=not yes)
    if json:
        output.print_json({"removed": [each.as_json() for each in planned], "freed": freed})
    elif freed is not None:
        output.stdout().print(f"freed {format_bytes(freed)}")


def _remove(planned: "list[Removal]", *, confirm: bool) -> int:
    """Remove what was planned, once the user has confirmed it; return the bytes that this freed."""
    from grpo_cli.runs.removal import remove as remove_planned

    if not any(each.paths for each in planned):
        return 0
    if confirm:
        if not sys.stdin.isatty():
            raise UsageError(
                "no terminal to confirm in", "--yes removes without asking, --dry-run only shows"
            )
        if not typer.confirm("remove this for good?", err=True):
            raise typer.Exit(ExitCode.FAILED)
    return remove_planned(planned)

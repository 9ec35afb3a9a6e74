"""`grpo runs`: past runs, from their folders alone. Parses, calls one function, hands on its result."""

from typing import TYPE_CHECKING, Annotated

import typer

from grpo_cli.cli.arguments import RUNS, AsJson, NewestRun, RunsRoot, SeveralRuns
from grpo_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from grpo_cli.runs.removal import Removal

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
        str,
        typer.Option(help="started, name, state, steps, reward, accuracy or duration."),
    ] = "started",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    json: AsJson = False,
) -> None:
    """List runs, the newest first: state, steps, reward, held-out result, when, how long.

    `interrupted` is a run that says it runs while nothing of it is left.
    """
    from grpo_cli.cli import output, runs_view
    from grpo_cli.report.listing import list_runs

    listed = list_runs(runs, name=name, states=state or (), sort=sort, limit=limit)
    if json:
        output.print_json([each.as_json() for each in listed])
    else:
        runs_view.print_runs(listed, runs, filtered=bool(name or state))
        if sort == "accuracy":
            runs_view.print_held_out_sets(listed)


@app.command()
def show(run: NewestRun = "latest", runs: RunsRoot = RUNS, json: AsJson = False) -> None:
    """Show one run: how it went, what it was made of, what lies on the disk, and what can be done next."""
    from grpo_cli.cli import output, runs_view
    from grpo_cli.report.overview import read_overview
    from grpo_cli.runs.selection import find_run

    overview = read_overview(find_run(runs, run))
    if json:
        output.print_json(overview.as_json())
    else:
        runs_view.print_overview(overview)


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
    """Print where a run lies, and nothing else: `cd $(grpo runs path)`, `grpo eval $(grpo runs path)`."""
    import sys

    from grpo_cli.cli import output
    from grpo_cli.runs.selection import find_run
    from grpo_cli.runs.trained import find_part

    if checkpoint is not None and model:
        raise UsageError("--checkpoint and --model name two places. Fix: leave one of them out")
    found = find_part(find_run(runs, run), checkpoint, model=model)
    if json:
        output.print_json({"path": str(found)})
    else:
        sys.stdout.write(f"{found}\n")


@app.command()
def compare(run: SeveralRuns, runs: RunsRoot = RUNS, json: AsJson = False) -> None:
    """Compare runs with the first one: recipes side by side, metrics, and held-out results prompt by prompt."""
    from grpo_cli.cli import compare_view, output
    from grpo_cli.report.comparison import compare_runs
    from grpo_cli.runs.selection import find_run

    if len(run) < 2:
        raise UsageError("one run has nothing to be compared with. Fix: name two or more")
    compared = compare_runs([find_run(runs, each) for each in run])
    if json:
        output.print_json(compared.as_json())
    else:
        compare_view.print_comparison(compared)


@app.command()
def remove(
    run: SeveralRuns,
    runs: RunsRoot = RUNS,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Only checkpoints, all but the newest and the best."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Remove run folders for good, or the checkpoints that they need no more.

    Refuses a run that is at work, and what is no run folder. Nothing behind a link is removed.
    """
    from grpo_cli.cli import output, runs_view
    from grpo_cli.runs.removal import plan_removal
    from grpo_cli.runs.selection import find_run

    folders = {(found := find_run(runs, each)).path: found for each in run}
    planned = [plan_removal(folder, checkpoints=checkpoints) for folder in folders.values()]
    if not json or not (yes or dry_run):
        runs_view.print_planned(planned)
    freed = None if dry_run else _remove(planned, asked=not yes)
    if json:
        output.print_json({"removed": [each.as_json() for each in planned], "freed": freed})
    elif freed is not None:
        runs_view.print_freed(freed)


def _remove(planned: "list[Removal]", *, asked: bool) -> int:
    """Removes what was planned, once a person has said so; the bytes that it freed.

    Raises:
        UsageError: Nobody can be asked.
        typer.Exit: The answer is no.
    """
    import sys

    from grpo_cli.runs.removal import remove as remove_planned

    if not any(each.paths for each in planned):
        return 0
    if asked:
        if not (sys.stdin and sys.stdin.isatty()):
            raise UsageError(
                "nobody can be asked here. Fix: --yes removes without asking, --dry-run only tells"
            )
        if not typer.confirm("remove this for good?", err=True):
            raise typer.Exit(ExitCode.FAILED)
    return remove_planned(planned)

"""`grpo sweep`: train a recipe with several settings and seeds, and say which settings are better."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from grpo_cli.cli.arguments import RUNS, AsJson, AsSlurmJob, NoProbe, Overrides, RunsRoot
from grpo_cli.cli.output import print_json, print_words, show, stderr, stdout
from grpo_cli.errors import GrpoError, UsageError
from grpo_cli.units import count_noun

if TYPE_CHECKING:
    from grpo_cli.sweep.job_array import SubmittedSweep
    from grpo_cli.sweep.plan import Sweep, SweepRequest
    from grpo_cli.sweep.run import SweepResult

RecipeOrNone = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="The recipe (YAML); not needed to resume.")
]
Grids = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="a.b=1,2", help="Values of a setting; grids are combined."),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="N|1,2,7",
        help="Seeds of each cell: `3` is three seeds, `42,` the seed 42 alone; 3 by default.",
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs at a time; by default one for each GPU, or one on a CPU; with --slurm, no limit.",
    ),
]
Resumed = Annotated[
    str | None,
    typer.Option(metavar="SWEEP|latest", help="Go on with a sweep: its folder, or the newest one."),
]


def sweep(
    recipe: RecipeOrNone = None,
    grid: Grids = None,
    range_: Annotated[list[str] | None, typer.Option("--range", hidden=True)] = None,
    search: Annotated[int | None, typer.Option(hidden=True)] = None,
    seeds: Seeds = None,
    set_: Overrides = None,
    runs: RunsRoot = RUNS,
    parallel: Parallel = None,
    resume: Resumed = None,
    slurm: AsSlurmJob = False,
    no_probe: NoProbe = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every cell and list the runs; start nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")] = False,
    json: AsJson = False,
) -> None:
    """Train a recipe with several settings and seeds, each an ordinary run, and say which settings are better.

    Every value is checked before the first run starts. A run that fails is a result, not an end.
    """
    from grpo_cli.cli.output import TerminalReporter
    from grpo_cli.recipe.loading import load_recipe
    from grpo_cli.sweep.plan import find_sweep
    from grpo_cli.sweep.run import check_sweep

    if search or range_:
        raise UsageError(
            "--search and --range are gone",
            "list the values, --grid training.learning_rate=1e-6,1e-5,1e-4",
        )
    old = None
    if resume is None:
        request = _read_request(recipe, grid, seeds, set_, probe=not no_probe)
    elif grid or seeds or set_:
        raise UsageError(
            "--resume takes everything from the sweep", "remove --grid, --seeds and --set"
        )
    else:
        old = find_sweep(runs, resume, load_recipe(recipe).name if recipe else "*")
        request = old.request
    if slurm:
        from grpo_cli.sweep.job_array import submit_sweep

        reporter = TerminalReporter(quiet=quiet)
        job = submit_sweep(request, runs, parallel, reporter, old, dry_run=dry_run)
        show(job, _print_job, as_json=json)
        return
    if dry_run:
        checked, slots = check_sweep(request, parallel)
        TerminalReporter(quiet=quiet).issues(checked.problems)
        _print_plan(request, len(slots), as_json=json)
        return
    result = _run(request, runs, parallel, old, quiet=quiet)
    show(result, _print_result, as_json=json)
    raise typer.Exit(result.exit_code)


def _run(
    request: "SweepRequest", runs: Path, parallel: int | None, old: "Sweep | None", *, quiet: bool
) -> "SweepResult":
    """Run a sweep to its end, or read the results of its Slurm jobs; if interrupted, say how to resume it."""
    from grpo_cli.cli.output import TerminalReporter
    from grpo_cli.reporter import Reporter
    from grpo_cli.sweep.job_array import read_job
    from grpo_cli.sweep.run import prepare_sweep, run_sweep

    reporter = Reporter() if quiet else TerminalReporter()
    if old and old.job:
        return read_job(old, reporter)
    started, slots = prepare_sweep(request, runs, parallel, reporter, old)
    reporter.say(f"sweep: {started.folder}")
    if not old:
        reporter.say(_say_size(request, len(slots)))
    try:
        return run_sweep(started, slots, reporter)
    except BaseException as error:
        if not isinstance(error, GrpoError):
            stderr().print(f"To resume: grpo sweep --resume {started.folder}", soft_wrap=True)
        raise


def _print_job(job: "SubmittedSweep") -> None:
    console, sweep = stdout(), job.sweep
    if sweep.job is None:
        sys.stdout.write(job.script)
        return
    console.print(f"job     {sweep.job}, an array of {job.tasks} tasks")
    console.print(f"sweep   {sweep.folder}")
    console.print(f"logs    {job.log}")
    console.print(f"result  grpo sweep --resume {sweep.folder}")


def _read_request(
    recipe: Path | None,
    grid: list[str] | None,
    seeds: str | None,
    overrides: list[str] | None,
    *,
    probe: bool,
) -> "SweepRequest":
    """Return what the flags ask for; raises `UsageError` if they do not fit together."""
    from grpo_cli.recipe.loading import load_tree
    from grpo_cli.sweep.plan import SweepRequest, read_seeds

    if recipe is None:
        raise UsageError("no recipe is named", "grpo sweep RECIPE --grid …, or --resume latest")
    if str(recipe) == "latest" or (recipe / "sweep.json").is_file():
        raise UsageError(f"{recipe} is a sweep, not a recipe", f"grpo sweep --resume {recipe}")
    if not grid:
        raise UsageError("there is nothing to vary", "add --grid training.learning_rate=1e-5,1e-4")
    loaded = load_tree(recipe, overrides).recipe
    chosen = read_seeds(seeds or "3", loaded.seed if loaded else 42)
    texts = tuple(overrides or ()), tuple(grid)
    return SweepRequest(os.path.abspath(recipe), str(Path.cwd()), *texts, chosen, probe)


def _say_size(request: "SweepRequest", slots: int) -> str:
    cells, seeds = len(request.points()), len(request.seeds)
    runs = count_noun(cells * seeds, "run")
    return f"{count_noun(cells, 'cell')} × {count_noun(seeds, 'seed')} = {runs}, {slots} at a time"


def _print_plan(request: "SweepRequest", slots: int, *, as_json: bool) -> None:
    points = request.points()
    if as_json:
        plan = {"cells": len(points), "settings": points, "seeds": request.seeds, "parallel": slots}
        print_json(plan)
        return
    from grpo_cli.sweep.plan import say_settings

    console = stdout()
    console.print(_say_size(request, slots))
    for number, settings in enumerate(points, start=1):
        console.print(f"  {number}  {say_settings(settings)}")
    console.print(f"seeds {', '.join(map(str, request.seeds))}; every value passes the checks")


def _print_result(result: "SweepResult") -> None:
    from grpo_cli.sweep.page import list_reasons, rank_cells, say_measured, say_progress

    console, result_json = stdout(), result.as_json()
    ranked = rank_cells(result_json)
    keys = list(dict.fromkeys(key for cell in ranked for key in cell["settings"]))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    metric = result_json["metric"] or "metric"
    for name in ("cell", *keys, "seeds", "before", metric, "best less this one"):
        table.add_column(name, overflow="fold")
    for cell in ranked:
        style = "bold" if cell["is_best"] else ""
        values = (cell["settings"].get(key, "–") for key in keys)
        mean = f"{cell['mean_text']}{' (tied)' * (cell['is_best'] and cell['standing'] == 'tied')}"
        numbers = (cell["finished"], cell["before_text"], mean, cell["difference_text"])
        table.add_row(str(cell["cell"]), *values, *numbers, style=style)
    console.print(table)
    if result_json["metric"]:
        caption = "means over seeds with 95 % intervals; differences paired by prompt and seed"
        for text in (say_measured(result_json), caption, *list_reasons(ranked)):
            print_words(console, text, "dim") if text else None
    for cell in ranked:
        if cell["verdict"]:
            print_words(console, f"{cell['verdict']}.", "green" if cell["tone"] else "")
    for cell in ranked:
        for failures in cell.get("failures") or ():
            print_words(console, f"! cell {cell['cell']}, {failures}", "yellow")
        for run in cell["runs"]:
            if run["reason"]:
                text = f"cell {cell['cell']}, seed {run['seed']}: {run['state']}: {run['reason']}"
                style = "" if run["state"] in ("running", "waiting") else "yellow"
                print_words(console, text, style)
    if progress := say_progress(result_json):
        print_words(console, f"{progress}.")
    if result.page:
        console.print(f"page   {result.page}")
    console.print(f"sweep  {result.sweep.folder}")

"""The commands of `grpo`. Each body parses, calls one function, and hands on its result."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from grpo_cli import __version__
from grpo_cli.cli import (
    converting,
    diagnosing,
    evaluation,
    expecting,
    exporting,
    reporting,
    runs,
    serving,
    watching,
)
from grpo_cli.cli.arguments import RUNS, AsJson, Overrides, RunsRoot
from grpo_cli.cli.errors import run_guarded
from grpo_cli.errors import ExitCode

app = typer.Typer(
    help="Train, measure and ship language models with GRPO, from YAML recipes.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe (YAML).")]
Gpus = Annotated[
    int | None,
    typer.Option(min=0, help="GPUs of the machine that trains, if it is not this one."),
]
RunId = Annotated[
    str | None,
    typer.Option(
        metavar="ID", help="Name the run folder; with --resume, go on with it if it is there."
    ),
]
AsSlurmJob = Annotated[
    bool,
    typer.Option(
        "--slurm", help="Submit it to Slurm as a job; with --dry-run, print the job's script."
    ),
]
WithDashboard = Annotated[
    bool, typer.Option("--dashboard", help="Report to Trackio too, and open its dashboard.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"grpo {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, measure and ship language models with GRPO, from YAML recipes."""


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Name of the recipe; writes NAME.yaml.")] = "recipe",
    template: Annotated[
        str,
        typer.Option(
            "--template", "-t", help="quickstart, math, code, format, judge, length or problem."
        ),
    ] = "quickstart",
) -> None:
    """Write a commented recipe to start from."""
    from grpo_cli.cli.output import stdout
    from grpo_cli.recipe.templates import write_template

    path = write_template(template, name)
    stdout().print(f"wrote {path}; next: grpo check {path}", markup=False)


@app.command()
def check(
    recipe: RecipePath,
    set_: Overrides = None,
    gpus: Gpus = None,
    environment: Annotated[
        bool, typer.Option(help="Whether a package that this machine lacks is an error.")
    ] = True,
    json: AsJson = False,
) -> None:
    """Check a recipe without loading a model: schema, batch sizes, columns, rewards, paths.

    `--gpus 8 --no-environment` checks it for another machine than this one.
    """
    from grpo_cli.checks.recipe_checks import check_recipe
    from grpo_cli.cli import output, views
    from grpo_cli.errors import RecipeError
    from grpo_cli.machine import read_hardware

    checked = check_recipe(recipe, set_, read_hardware(gpus), environment=environment)
    if json:
        output.print_json(checked.as_json())
        raise typer.Exit(RecipeError(checked.errors).exit_code if checked.errors else ExitCode.OK)
    output.print_problems(problem for problem in checked.problems if problem.level != "error")
    views.print_check(checked)


@app.command("check-batch")
def check_batch(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="The recipe (YAML).")
    ] = None,
    set_: Overrides = None,
    per_device_train_batch_size: Annotated[int | None, typer.Option()] = None,
    gradient_accumulation_steps: Annotated[int | None, typer.Option()] = None,
    num_processes: Annotated[int | None, typer.Option()] = None,
    num_generations: Annotated[int | None, typer.Option()] = None,
    steps_per_generation: Annotated[int | None, typer.Option()] = None,
    generation_batch_size: Annotated[int | None, typer.Option()] = None,
    num_iterations: Annotated[int | None, typer.Option()] = None,
    gpus: Gpus = None,
    dataset_size: Annotated[int | None, typer.Option(help="Training prompts.")] = None,
    num_train_epochs: Annotated[float | None, typer.Option()] = None,
    max_steps: Annotated[int | None, typer.Option()] = None,
    per_device_eval_batch_size: Annotated[
        int | None, typer.Option(help="Check the evaluation rule too.")
    ] = None,
    num_generations_eval: Annotated[int | None, typer.Option()] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add what is often misread, with its numbers here.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check that batch sizes, groups and processes divide, and derive the steps, as on paper.

    Takes the numbers from a recipe, from flags, or from a recipe with flags in place of some.
    """
    given = {name: value for name, value in locals().items() if name in _BATCH_FLAGS}
    from grpo_cli.batch import as_json, find_misreadings
    from grpo_cli.checks.arithmetic import plan_from_flags
    from grpo_cli.cli import batch_view, output

    plan = plan_from_flags(recipe, set_, given, gpus)
    misread = find_misreadings(plan) if explain else []
    if json:
        told = {"misreadings": [each.as_json() for each in misread]} if explain else {}
        output.print_json(as_json(plan) | told)
    else:
        batch_view.print_batch(plan)
        batch_view.print_misreadings(misread)
    raise typer.Exit(ExitCode.OK if plan.valid else ExitCode.FAILED)


_BATCH_FLAGS = frozenset(
    """per_device_train_batch_size gradient_accumulation_steps num_processes num_generations
    steps_per_generation generation_batch_size num_iterations dataset_size num_train_epochs max_steps
    per_device_eval_batch_size num_generations_eval""".split()
)


@app.command()
def probe(
    recipe: RecipePath,
    set_: Overrides = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts to sample num_generations completions for.")
    ] = 16,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Load no weights: settings, data, template, rewards, memory."),
    ] = False,
    runs: RunsRoot = RUNS,
    json: AsJson = False,
) -> None:
    """Sample and score a few completions before training: is there anything to learn, and will it fit?

    Takes one training step with a copy of the model that is thrown away; keeps nothing on disk.
    `--runs` is where the disk's free space is looked at. Exit code 1 where something is found that
    would make the training fail, or learn nothing.
    """
    from grpo_cli.checks.recipe_checks import check_recipe
    from grpo_cli.cli import output, probe_view
    from grpo_cli.launch.cpu_environment import set_thread_env
    from grpo_cli.machine import is_on_cpu, read_hardware
    from grpo_cli.probe.procedure import probe_recipe

    with output.stdout_to_stderr(), output.progress("checking the recipe") as report:
        hardware = read_hardware()
        checked = check_recipe(recipe, set_, hardware)
        launch = checked.recipe.launch
        if is_on_cpu(launch, hardware) and checked.recipe.generation.backend != "vllm":
            set_thread_env(hardware, checked.num_processes // launch.num_machines)
        found = probe_recipe(
            checked, runs=runs, prompts_sampled=prompts, quick=quick, on_progress=report
        )
    output.print_problems(checked.notes_of("generation.backend"))
    if json:
        output.print_json(found.as_json())
    else:
        probe_view.print_probe(found)
    raise typer.Exit(ExitCode.FAILED if found.errors else ExitCode.OK)


@app.command()
def train(
    recipe: RecipePath,
    set_: Overrides = None,
    runs: RunsRoot = RUNS,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Write the run folder and print the command; start nothing."
        ),
    ] = False,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Train without `grpo probe --quick` beforehand.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run of this name, exactly.")
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|CHECKPOINT", help="Go on with this run, or from this checkpoint."
        ),
    ] = None,
    run_id: RunId = None,
    slurm: AsSlurmJob = False,
    force: Annotated[
        bool, typer.Option("--force", help="Go on although the recipe is another one.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the end only.")] = False,
    dashboard: WithDashboard = False,
    json: AsJson = False,
) -> None:
    """Train a recipe: check and probe it, make a run folder, launch, watch, and sum up."""
    from grpo_cli.cli import output, views
    from grpo_cli.cli.dashboard import add_trackio
    from grpo_cli.cli.preparing import Earlier, prepare
    from grpo_cli.cli.training import probe_first, run

    earlier = Earlier(resume or resume_from is not None, resume_from, force, run_id)
    if dashboard:
        set_ = add_trackio(recipe, set_, starts=not (dry_run or slurm))
    if slurm:
        from grpo_cli.cli.submission import run_as_job

        flags = (*["--force"] * force, *["--quiet"] * quiet)
        job = run_as_job(recipe, set_, runs, earlier, flags, dry_run=dry_run)
        views.print_job(job, as_json=json)
        return
    if not (no_probe or dry_run or earlier.wanted):
        probe_first(recipe, set_, runs, quiet=quiet)
    prepared = prepare(recipe, set_, runs, earlier, dry_run=dry_run, quiet=quiet)
    if dry_run:
        views.print_plan(prepared.folder, prepared.plan, as_json=json)
        return
    summary, code = run(prepared, quiet=quiet, dashboard=dashboard)
    if json:
        output.print_json(summary.as_json())
    else:
        views.print_summary(summary)
    raise typer.Exit(code)


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead of stdout.")
    ] = None,
) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from grpo_cli.checks.schema import build_schema, write_schema
    from grpo_cli.cli.output import print_json

    if output is None:
        print_json(build_schema())
    else:
        write_schema(output)


@app.command()
def doctor(
    runs: RunsRoot = RUNS,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look: import nothing, start no process.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Find what is wrong with this machine: packages, devices, memory, disk, ports, the hub."""
    from grpo_cli.cli import output, views
    from grpo_cli.doctor.diagnostics import diagnose_machine

    with output.progress("looking at this machine") as report:
        examination = diagnose_machine(runs, quick=quick, on_progress=report)
    if json:
        output.print_json(examination.as_json())
    else:
        views.print_examination(examination)
    raise typer.Exit(ExitCode.ENVIRONMENT if examination.errors else ExitCode.OK)


app.add_typer(evaluation.app, name="eval")
app.command()(expecting.expect)
app.command()(exporting.export)
app.command()(converting.convert)
app.command()(diagnosing.diagnose)
app.command()(reporting.report)
app.command()(watching.watch)
app.command()(serving.serve)
app.command()(serving.chat)

app.add_typer(runs.app, name="runs")

rewards = typer.Typer(help="Reward kinds, and rewards tried on answers.", no_args_is_help=True)
app.add_typer(rewards, name="rewards")


@rewards.command("list")
def list_rewards(json: AsJson = False) -> None:
    """List every reward kind with what it rewards."""
    from grpo_cli.cli import output, views
    from grpo_cli.rewards.description import list_kinds

    kinds = list_kinds()
    if json:
        output.print_json([kind.as_json() for kind in kinds])
    else:
        views.print_kinds(kinds)


@rewards.command("show")
def show_reward(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A reward kind.")],
    json: AsJson = False,
) -> None:
    """Show a reward kind: formula, range, source, and its parameters."""
    from grpo_cli.cli import output, views
    from grpo_cli.rewards.description import describe_kind

    described = describe_kind(kind)
    if json:
        output.print_json(described.as_json())
    else:
        views.print_kind(described)


@rewards.command("test")
def score_answers(
    recipe: RecipePath,
    set_: Overrides = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(help="Try this answer too; {{ name }} is a column. May be repeated."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows to try.")] = None,
    json: AsJson = False,
) -> None:
    """Score the gold, wrong and degenerate answers to a recipe's own rows, before training.

    Exit code 1 where the gold does not win, cannot be read, or a degenerate answer scores as well.
    """
    from grpo_cli.checks.recipe_checks import check_recipe
    from grpo_cli.checks.reward_tests.procedure import try_recipe
    from grpo_cli.cli import output, views

    with output.stdout_to_stderr(), output.progress("checking the recipe") as report:
        checked = check_recipe(recipe, set_)
        trial = try_recipe(checked, rows=rows, answers=answer or (), on_progress=report)
    if json:
        output.print_json(trial.as_json())
    else:
        views.print_trial(trial)
    raise typer.Exit(ExitCode.FAILED if trial.failed else ExitCode.OK)


def main() -> None:
    """Entry point of the `grpo` command."""
    sys.exit(run_guarded(lambda: app(prog_name="grpo", standalone_mode=False)))

"""`grpo train`: train a recipe here, submit it to Slurm, or print what would be started."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_cli.cli.arguments import (
    RUNS,
    AsJson,
    AsSlurmJob,
    NoProbe,
    Overrides,
    RecipePath,
    RunsRoot,
    TrustCheckpoint,
)
from grpo_cli.cli.output import print_json, show, stdout
from grpo_cli.errors import UsageError

if TYPE_CHECKING:
    from grpo_cli.cli.output import TerminalReporter
    from grpo_cli.launch.plan import LaunchPlan
    from grpo_cli.launch.prepare import PreparedRun
    from grpo_cli.launch.slurm import SubmittedJob
    from grpo_cli.runs.folder import RunFolder

RunId = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Name the run folder; with --resume, resume it if it exists."),
]


def train(
    recipe: RecipePath,
    set_: Overrides = None,
    runs: RunsRoot = RUNS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the run folder and print the command only.")
    ] = False,
    no_probe: NoProbe = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume the newest run of this recipe from its last checkpoint."
        ),
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(metavar="RUN|CHECKPOINT", help="Resume this run, or from this checkpoint."),
    ] = None,
    run_id: RunId = None,
    slurm: AsSlurmJob = False,
    force: Annotated[
        bool, typer.Option("--force", help="Resume even if the recipe has changed.")
    ] = False,
    trust_checkpoint: TrustCheckpoint = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the final summary.")
    ] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", hidden=True)] = False,
    json: AsJson = False,
) -> None:
    """Train a recipe: check and probe it, create a run folder, launch, watch and summarise."""
    from grpo_cli.cli.output import TerminalReporter
    from grpo_cli.launch.prepare import ResumeRequest, prepare

    request = ResumeRequest(
        resume or resume_from is not None, resume_from, force, run_id, trust_checkpoint
    )
    reporter = TerminalReporter(quiet=quiet)
    if dashboard:
        raise UsageError(
            "--dashboard is gone",
            "--set logging.report_to=[trackio], and run `trackio show` beside it",
        )
    if slurm:
        from grpo_cli.launch.slurm import run_as_job

        trust = ["--trust-checkpoint"] * trust_checkpoint
        flags = (*["--force"] * force, *trust, *["--quiet"] * quiet)
        job = run_as_job(recipe, set_, runs, request, flags, reporter, dry_run=dry_run)
        show(job, _print_job, as_json=json)
        return
    prepared = prepare(recipe, set_, runs, request, reporter, dry_run=dry_run)
    if dry_run:
        _print_plan(prepared.folder, prepared.plan, as_json=json)
        return
    # A named run may be resumed on several machines at once, as jobs do.
    probe = prepared.is_new and not (no_probe or (request.wanted and run_id))
    raise typer.Exit(_run(prepared, reporter, probe=probe, as_json=json))


def _run(
    prepared: "PreparedRun", reporter: "TerminalReporter", *, probe: bool, as_json: bool
) -> int:
    from grpo_cli.launch.supervisor import RefusedError
    from grpo_cli.launch.train import train

    try:
        code = train(prepared, reporter, probe=probe)
    except RefusedError as refused:
        reporter.refused(refused)
        return refused.exit_code
    from grpo_cli.cli.summary import print_summary
    from grpo_cli.report.summary import RunReport

    summary = RunReport(prepared.folder)
    if as_json:
        print_json(summary.summary_json())
    else:
        print_summary(summary)
    return code


def _print_plan(folder: "RunFolder", plan: "LaunchPlan", *, as_json: bool) -> None:
    if as_json:
        print_json({"run": str(folder.path), **plan.as_json()})
        return
    console = stdout()
    console.print(f"run folder  {folder.path}")
    console.print(f"processes   {plan.num_processes} ({plan.strategy}, {plan.device})")
    effective = plan.add_environment(os.environ)
    for name in plan.environment:
        console.print(f"environment {name}={effective[name]}")
    console.print(f"command     {plan.command_line()}")
    if plan.server:
        console.print(f"server      {plan.server.command_line()}")
        address = f"{plan.server.root}, weights by port {plan.server.group_port}"
        console.print(
            f"            {address}, at most {plan.server.max_restarts} restarts, log {folder.server_log}"
        )


def _print_job(job: "SubmittedJob") -> None:
    if job.number is None:
        sys.stdout.write(job.plan.script)
        return
    console = stdout()
    console.print(f"job         {job.number}")
    console.print(f"run folder  {job.run}")
    console.print(f"log         {job.log}")

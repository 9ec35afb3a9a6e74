"""`grpo train` from recipe to summary: the steps of it that other rooms own, in order."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from grpo_cli.cli.output import print_problems, stderr
from grpo_cli.errors import ExitCode
from grpo_cli.launch.plan import LaunchPlan, plan_launch
from grpo_cli.launch.supervisor import Outcome, supervise
from grpo_cli.preflight.checks import check_recipe
from grpo_cli.preflight.hardware import read_hardware
from grpo_cli.report.progress import LiveView, PlainView, ProgressView, SilentView
from grpo_cli.report.summary import RunSummary, read_summary
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import RunFolder, check_writable, create_run, removed_on_failure
from grpo_cli.runs.manifest import describe_origin
from grpo_cli.runs.status import StatusFile


@dataclass(frozen=True)
class PreparedRun:
    """A run folder that is ready to be launched."""

    folder: RunFolder
    plan: LaunchPlan


def prepare(path: Path, overrides: list[str] | None, root: Path) -> PreparedRun:
    """Checks a recipe and writes its run folder; leaves nothing behind where a check fails.

    Raises:
        ProblemsError: The recipe cannot be trained.
        UsageError: The run folder cannot be written.
    """
    hardware = read_hardware()
    checked = check_recipe(path, overrides, hardware)
    recipe = checked.recipe
    check_writable(root)
    print_problems(problem for problem in checked.problems if problem.level != "error")
    folder = create_run(root, recipe, checked.loaded.text)
    plan = plan_launch(recipe, folder.path, hardware)
    with removed_on_failure(folder):
        write_json(folder.manifest, describe_origin(sys.argv, path, recipe.seed))
        write_json(folder.launch / "plan.json", plan.as_json())
        StatusFile(folder.status).update(state="pending")
    return PreparedRun(folder, plan)


def run(prepared: PreparedRun, *, quiet: bool) -> tuple[RunSummary, int]:
    """Launches a prepared run and shows it until it ends; gives its summary and the exit code."""
    folder = prepared.folder
    view = _choose_view(folder, quiet=quiet)
    failures: list[Exception] = []

    def refresh() -> None:
        # A display that breaks is said once and left out: the training goes on.
        if not failures:
            try:
                view.refresh()
            except Exception as error:
                failures.append(error)
                stderr().print(f"the display failed and is off ({error!r}); training goes on")

    try:
        outcome = supervise(prepared.plan, folder, refresh, view.stopping)
    finally:
        view.close()
    return read_summary(folder), _exit_code(outcome)


def _choose_view(folder: RunFolder, *, quiet: bool) -> ProgressView:
    console = stderr()
    if quiet:
        return SilentView()
    console.print(f"run folder: {folder.path}", markup=False)
    return LiveView(folder, console) if console.is_terminal else PlainView(folder, console)


def _exit_code(outcome: Outcome) -> int:
    if outcome.status.state == "completed":
        return ExitCode.OK
    if outcome.status.state == "failed":
        return ExitCode.FAILED
    return 128 + (outcome.signal or signal.SIGINT)

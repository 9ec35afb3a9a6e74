"""From a recipe and flags to a run folder that is ready to be launched, or an earlier one that goes on."""

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from grpo_cli.checks.recipe_checks import CheckedRecipe, check_recipe
from grpo_cli.checks.settings import read_setting
from grpo_cli.cli.output import print_problems, progress, stderr
from grpo_cli.errors import UsageError
from grpo_cli.launch.check_server import check_server
from grpo_cli.launch.plan import LaunchPlan, plan_launch
from grpo_cli.launch.resume import (
    LENGTHS,
    ResumePlan,
    is_finished,
    plan_resumption,
    read_target,
)
from grpo_cli.launch.server_location import find_server_location
from grpo_cli.machine import is_on_cpu, read_hardware
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.kinds.own import PythonParams
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import (
    RunFolder,
    check_writable,
    create_named_run,
    create_run,
    locate_run,
    removed_on_failure,
    unwritable,
)
from grpo_cli.runs.manifest import describe_origin
from grpo_cli.runs.selection import find_started
from grpo_cli.runs.status import StatusFile


@dataclass(frozen=True)
class Earlier:
    """What `--resume` and its companions say."""

    wanted: bool
    source: Path | None
    """A run or a checkpoint; None is the newest run of the recipe's name."""
    force: bool
    run_id: str | None = None
    """Which run, by a name of the user's own; it is started where it is not there."""

    def __post_init__(self) -> None:
        if self.run_id is not None and self.source is not None:
            raise UsageError("--run-id and --resume-from both name a run. Fix: remove one of them")


@dataclass(frozen=True)
class PreparedRun:
    """A run folder that is ready to be launched, or one that has nothing left to do."""

    folder: RunFolder
    plan: LaunchPlan
    recipe: Recipe
    origin: dict[str, Any]
    """What the manifest of this attempt says."""
    resumption: ResumePlan | None = None
    finished: bool = False
    anew: bool = False
    """Whether an earlier attempt lies in the folder that saved nothing to go on from."""


def prepare(
    path: Path,
    overrides: list[str] | None,
    root: Path,
    earlier: Earlier,
    *,
    dry_run: bool,
    quiet: bool,
) -> PreparedRun:
    """Checks a recipe and writes its run folder, or finds the run that goes on.

    Leaves nothing behind where a check fails, and an earlier run as it is. With `quiet` it prints no notes and
    warnings.

    Raises:
        ProblemsError: The recipe cannot be trained.
        UsageError: The run folder cannot be written, or the earlier run cannot go on with this recipe.
        SetupError: The vLLM server that the recipe names does not answer, or does not suit.
    """
    hardware = read_hardware()
    checked = check_recipe(path, overrides, hardware)
    recipe = checked.recipe
    _check_meeting_point(recipe)
    check_writable(root)
    if not quiet:
        print_problems(problem for problem in checked.problems if problem.level != "error")
    if not dry_run:
        _look_at_server(recipe, path, cpu=is_on_cpu(recipe.launch, hardware))
    plan_for = partial(
        plan_launch, recipe, hardware=hardware, location=find_server_location(recipe)
    )
    origin = describe_origin(sys.argv, path, recipe.seed)
    if earlier.run_id is not None:
        named = locate_run(root, recipe, earlier.run_id)
        return _prepare_named(named, checked, earlier, plan_for(named.path), origin)
    if earlier.wanted and (taken := _take_up(recipe, root, earlier, origin, plan_for)):
        return taken
    folder = create_run(root, recipe, checked.loaded.text)
    plan = plan_for(folder.path)
    with removed_on_failure(folder):
        _describe(folder, plan, origin)
    return PreparedRun(folder, plan, recipe, origin)


def _look_at_server(recipe: Recipe, path: Path, *, cpu: bool) -> None:
    """Looks at a vLLM server that runs already, and says what is doubtful about it."""
    address = recipe.generation.vllm.address
    if address is None or recipe.generation.backend != "vllm":
        return
    port = urlparse(address).port or 80
    with progress(f"asking the vLLM server at {address}") as tell:
        doubts = check_server(
            address,
            f"grpo serve {shlex.quote(str(path))} --port {port}",
            model=model_folder_or_id(recipe.model),
            by_nccl=not cpu,
            wait_s=float(read_setting(recipe, "vllm_server_timeout") or 0),
            tell=tell,
        )
    for doubt in doubts:
        stderr().print(f"warning: {doubt}", markup=False, style="yellow")


def _check_meeting_point(recipe: Recipe) -> None:
    """Refuses to start machines that could not find each other; `check` leaves that to a job."""
    launch = recipe.launch
    if launch.num_machines > 1 and None in (launch.main_process_ip, launch.main_process_port):
        raise UsageError(
            f"{launch.num_machines} machines need launch.main_process_ip and main_process_port. "
            "Fix: submit a job that sets them with --slurm, or give them with --set"
        )
    if recipe.generation.has_managed_server and launch.slurm and launch.slurm.server_nodes:
        raise UsageError(
            "the recipe gives its vLLM server a node of a job's (launch.slurm.server_nodes). Fix: submit it "
            "with --slurm, or name a server with --set generation.vllm.base_url=…"
        )


def _describe(folder: RunFolder, plan: LaunchPlan, origin: dict[str, Any]) -> None:
    """Writes what a fresh run folder holds besides the recipe."""
    write_json(folder.manifest, origin)
    folder.write_plan(plan.as_json())
    StatusFile(folder.status).update(state="pending")


def _prepare_named(
    folder: RunFolder,
    checked: CheckedRecipe,
    earlier: Earlier,
    plan: LaunchPlan,
    origin: dict[str, Any],
) -> PreparedRun:
    """The run of a given name: taken up where it has something to go on from, started otherwise.

    Every machine comes to the same end by itself: they all look at machine 0's checkpoints and status.
    """
    recipe = checked.recipe
    try:
        # Another command may make the same folder at this moment.
        with folder.lock():
            known = folder.resolved.is_file()
            if not known:
                create_named_run(folder, recipe, checked.loaded.text)
                _describe(folder, plan, origin)
    except OSError as error:
        raise unwritable(folder.path, error) from None
    if known and not earlier.wanted and StatusFile(folder.status).read().state != "pending":
        raise UsageError(
            f"the run {folder.path} is there already. Fix: go on with it with --resume, or give "
            "another --run-id"
        )
    if earlier.wanted and (taken := _go_on(folder, None, recipe, plan, earlier.force, origin)):
        return taken
    return PreparedRun(folder, plan, recipe, origin, anew=known)


def _take_up(
    recipe: Recipe,
    root: Path,
    earlier: Earlier,
    origin: dict[str, Any],
    plan_for: Callable[[Path], LaunchPlan],
) -> PreparedRun | None:
    """The run that goes on; None, and a word about it, where there is nothing to go on from."""
    step = None
    if earlier.source is not None:
        run, step = read_target(earlier.source)
    elif (found := find_started(root, recipe.name)) is not None:
        run = found
    else:
        stderr().print(f"no run of {recipe.name} is in {root}: starting one", markup=False)
        return None
    plan = plan_for(run.path)
    taken = _go_on(run, step, recipe, plan, earlier.force, origin)
    if taken is None:
        stderr().print(f"{run.path} has no checkpoint yet: starting anew", markup=False)
    return taken


def _go_on(
    run: RunFolder,
    step: int | None,
    recipe: Recipe,
    plan: LaunchPlan,
    force: bool,
    origin: dict[str, Any],
) -> PreparedRun | None:
    """A run that goes on, or is at its end; None where it has no checkpoint."""
    if step is None and is_finished(run, recipe):
        stderr().print(f"{run.path} is completed: nothing to go on with", markup=False)
        return PreparedRun(run, plan, recipe, origin, finished=True)
    resumption = plan_resumption(run, step, recipe, plan, force=force)
    if resumption is None:
        return None
    stderr().print(f"going on from step {resumption.step} of {run.path}", markup=False)
    for each in resumption.changed:
        stderr().print(f"  changed: {each}", markup=False, style="yellow")
    constant = str(read_setting(recipe, "lr_scheduler_type")).startswith("constant")
    if not constant and any(each.path in LENGTHS for each in resumption.changed):
        said = "the learning rate goes on as in a run of the new length, not as before"
        stderr().print(f"  {said}", markup=False, style="yellow")
    for held in _lost_states(recipe):
        stderr().print(f"  warning: {held}", markup=False, style="yellow")
    return PreparedRun(run, plan, recipe, origin, resumption)


def _lost_states(recipe: Recipe) -> Iterator[str]:
    """Say which of the user's rewards seem to begin anew where the run goes on."""
    configs = [reward for reward in recipe.rewards if reward.kind == PythonParams.kind]
    for config in configs:
        params = PythonParams.model_validate(config.params)
        if names := params.lost_state():
            yield (
                f"{params.source} changes {', '.join(names)}, which no checkpoint holds, so it begins anew. "
                f"Fix: let {params.function} offer state_dict() and load_state_dict()"
            )

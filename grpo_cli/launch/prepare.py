"""Check a recipe, and make its run folder or find the earlier run to resume."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from grpo_cli.checks.recipe import CheckedRecipe, check_recipe
from grpo_cli.errors import UsageError
from grpo_cli.issues import Issue
from grpo_cli.launch.plan import LaunchPlan, plan_launch
from grpo_cli.launch.resume import (
    LENGTHS,
    ResumePlan,
    is_finished,
    list_changes,
    plan_resumption,
    read_target,
)
from grpo_cli.launch.server_plan import find_server_location
from grpo_cli.launch.server_process import check_server
from grpo_cli.machine import Hardware, is_on_cpu, read_hardware
from grpo_cli.models.source import model_folder_or_id
from grpo_cli.models.vllm_engine import adapter_rank
from grpo_cli.recipe.comparison import hash_code
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.reporter import Reporter
from grpo_cli.runs.folder import (
    RunFolder,
    StatusFile,
    create_named_run,
    create_run,
    locate_run,
    removed_on_failure,
    unwritable,
)
from grpo_cli.runs.manifest import describe_origin
from grpo_cli.runs.selection import find_started


@dataclass(frozen=True)
class ResumeRequest:
    """What `--resume`, `--resume-from`, `--force` and `--run-id` ask for."""

    wanted: bool
    source: Path | None
    """A run or a checkpoint; None is the newest run with the recipe's name."""
    force: bool
    run_id: str | None = None
    """Name of the run folder; the run is started if it does not exist."""
    trusted: bool = False
    """Whether the checkpoint may hold more than tensors and plain values."""

    def __post_init__(self) -> None:
        if self.run_id is not None and self.source is not None:
            raise UsageError("--run-id and --resume-from both name a run", "remove one of them")


@dataclass(frozen=True)
class PreparedRun:
    """A run folder that is ready to be launched, or a finished one."""

    folder: RunFolder
    plan: LaunchPlan
    recipe: Recipe
    origin: dict[str, Any]
    """Provenance of this attempt, for the manifest."""
    place: Callable[[Issue], Issue]
    """Adds the line in the recipe to an issue."""
    resumption: ResumePlan | None = None
    finished: bool = False
    anew: bool = False
    """Whether an earlier attempt in this folder saved no checkpoint."""

    @property
    def is_new(self) -> bool:
        """Return whether nothing was trained in the folder yet."""
        return not (self.finished or self.anew or self.resumption)


def prepare(
    path: Path,
    overrides: list[str] | None,
    root: Path,
    resume: ResumeRequest,
    reporter: Reporter,
    *,
    dry_run: bool,
) -> PreparedRun:
    """Check a recipe and write its run folder, or find the run to resume.

    If a check fails, nothing is left behind and an earlier run is unchanged.

    Raises:
        ProblemsError: The recipe cannot be trained.
        UsageError: The run folder cannot be written, or the earlier run cannot be resumed with this recipe.
        SetupError: The vLLM server that the recipe names does not answer, or has the wrong flags.
    """
    hardware = read_hardware()
    checked = check_recipe(path, overrides, hardware)
    recipe = checked.recipe
    _check_rendezvous(recipe)
    reporter.issues(checked.problems)
    if not dry_run:
        _check_server(recipe, path, reporter, cpu=is_on_cpu(recipe.launch, hardware))
    origin = describe_origin(sys.argv, path, recipe.seed) | {"code": hash_code(recipe)}
    start = _Start(checked, hardware, origin, resume, reporter)
    if resume.run_id is not None:
        return start.in_named(locate_run(root, recipe, resume.run_id))
    if resume.wanted and (resumed := start.find_resumed(root)):
        return resumed
    folder = create_run(root, recipe, checked.loaded.write_movable())
    with removed_on_failure(folder):
        return start.described(folder)


def _check_server(recipe: Recipe, path: Path, reporter: Reporter, *, cpu: bool) -> None:
    """Check a vLLM server that is running already, and report warnings."""
    address = recipe.generation.vllm.address
    if address is None or recipe.generation.backend != "vllm":
        return
    port = urlparse(address).port or 80
    with reporter.progress(f"asking the vLLM server at {address}") as tell:
        warnings = check_server(
            address,
            f"grpo serve {shlex.quote(str(path))} --port {port}",
            model=model_folder_or_id(recipe.model),
            by_nccl=not cpu,
            lora_rank=adapter_rank(recipe, "cpu" if cpu else "cuda"),
            wait_s=float(recipe.setting("vllm_server_timeout") or 0),
            tell=tell,
        )
    for doubt in warnings:
        reporter.say(doubt, "warning")


def _check_rendezvous(recipe: Recipe) -> None:
    """Refuse to start several machines without the address of the first one; a Slurm job sets it itself."""
    launch = recipe.launch
    if launch.num_machines > 1 and None in (launch.main_process_ip, launch.main_process_port):
        raise UsageError(
            f"{launch.num_machines} machines need launch.main_process_ip and main_process_port",
            "submit a job that sets them with --slurm, or give them with --set",
        )
    if recipe.generation.has_managed_server and launch.slurm and launch.slurm.server_nodes:
        raise UsageError(
            "the recipe gives its vLLM server a node of a Slurm job (launch.slurm.server_nodes)",
            "submit it with --slurm, or name a server with --set generation.vllm.base_url=…",
        )


def already_exists(folder: RunFolder) -> UsageError:
    """Return the error of a `--run-id` that is taken."""
    return UsageError(
        f"the run {folder.path} exists already", "resume it with --resume, or give another --run-id"
    )


@dataclass(frozen=True)
class _Start:
    """A checked recipe on its way to a run folder: a new one, or the one to resume."""

    checked: CheckedRecipe
    hardware: Hardware
    origin: dict[str, Any]
    request: ResumeRequest
    reporter: Reporter

    def described(self, folder: RunFolder) -> PreparedRun:
        """Write into a new folder what is launched in it."""
        run = self._ready(folder)
        folder.write_manifest(self.origin)
        folder.write_plan(run.plan.as_json())
        StatusFile(folder.status).update(state="pending")
        return run

    def _ready(self, folder: RunFolder, **how: Any) -> PreparedRun:
        recipe = self.checked.recipe
        location = find_server_location(recipe) if recipe.generation.has_managed_server else None
        plan = plan_launch(recipe, folder.path, self.hardware, location=location)
        return PreparedRun(folder, plan, recipe, self.origin, self.checked.loaded.place, **how)

    def in_named(self, folder: RunFolder) -> PreparedRun:
        """Return the run with a given name: resumed if it has a checkpoint, started otherwise.

        All machines read machine 0's checkpoints and status, so they decide alike.
        """
        try:
            # Another command may be creating the same folder.
            with folder.lock():
                known = folder.resolved.is_file()
                if not known:
                    text = self.checked.loaded.write_movable()
                    create_named_run(folder, self.checked.recipe, text)
                    self.described(folder)
        except OSError as error:
            raise unwritable(folder.path, error) from None
        if not self.request.wanted:
            if known and StatusFile(folder.status).read().state != "pending":
                raise already_exists(folder)
        elif resumed := self._resume(folder, None):
            return resumed
        return self._ready(folder, anew=known)

    def find_resumed(self, root: Path) -> PreparedRun | None:
        """Return the run to resume; None if there is none, or if it has no checkpoint."""
        step, name = None, self.checked.recipe.name
        if self.request.source is not None:
            run, step = read_target(self.request.source)
        elif (newest := find_started(root, name)) is not None:
            run = newest
        else:
            self.reporter.say(f"no run of {name} in {root}: starting one")
            return None
        resumed = self._resume(run, step)
        if resumed is None:
            self.reporter.say(f"{run.path} has no checkpoint yet: starting a new run")
        return resumed

    def _resume(self, run: RunFolder, step: int | None) -> PreparedRun | None:
        """Return a run to resume, or a finished one; None if it has no checkpoint and no warm-up."""
        recipe, force, ready = self.checked.recipe, self.request.force, self._ready(run)
        if step is None and is_finished(run, recipe):
            self.reporter.say(f"{run.path} is completed: nothing to resume")
            return replace(ready, finished=True)
        resumption = plan_resumption(run, step, recipe, ready.plan, force=force)
        if resumption is None and run.warmup.is_dir():
            list_changes(run, recipe, ready.plan, force=force)
            self.reporter.say(f"resuming {run.path} from its warm-up")
            return replace(ready, anew=True)
        if resumption is None:
            return None
        resumption = replace(resumption, trusted=self.request.trusted)
        self.reporter.say(f"resuming {run.path} from step {resumption.step}")
        self._report_changes(resumption)
        return replace(ready, resumption=resumption)

    def _report_changes(self, resumption: ResumePlan) -> None:
        for each in resumption.changed:
            self.reporter.say(f"changed: {each}", "note")
        constant = str(self.checked.recipe.setting("lr_scheduler_type")).startswith("constant")
        if not constant and any(each.path in LENGTHS for each in resumption.changed):
            text = "the learning rate follows the schedule of the new length"
            self.reporter.say(text, "note")

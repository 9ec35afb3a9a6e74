"""Every check of a recipe that needs no model: its parts against each other and against the disk.

Owns which checks there are and in which order. Each one returns problems instead of raising, so
that a person sees all of them at once.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from grpo_cli.batch import BatchInputs, BatchPlan, plan_batch
from grpo_cli.batch import as_json as batch_as_json
from grpo_cli.checks.arithmetic import batch_inputs
from grpo_cli.checks.asynchronous import check_async
from grpo_cli.checks.backend import settle_backend
from grpo_cli.checks.contents import check_data, check_rewards, collect
from grpo_cli.checks.expectation import check_expect
from grpo_cli.checks.optimizer import check_optimizer
from grpo_cli.checks.overlap import check_overlap
from grpo_cli.checks.precision import check_precision, settle_dtype
from grpo_cli.checks.scored import check_scored
from grpo_cli.checks.settings import check_effects, read_setting
from grpo_cli.checks.slurm import check_slurm
from grpo_cli.checks.stopping import check_metrics, check_stop_when
from grpo_cli.checks.trackers import check_trackers
from grpo_cli.checks.vllm import check_vllm
from grpo_cli.data.preview import Preview, has_eval
from grpo_cli.data.prompts import resolve_style
from grpo_cli.errors import Problem, RecipeError, install_extra, nearest, sort_problems
from grpo_cli.machine import Hardware, is_on_cpu, read_hardware, resolve_num_processes
from grpo_cli.models.source import check_model, known_chat_template, resolve_source
from grpo_cli.recipe.launch import SHARED_WEIGHTS, LaunchConfig
from grpo_cli.recipe.loading import LoadedRecipe, load_tree
from grpo_cli.recipe.recipe import Recipe


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe with all that the checks found."""

    loaded: LoadedRecipe
    problems: tuple[Problem, ...]
    """Errors, warnings and notes, sorted by where they stand."""
    preview: Preview | None
    """What the data looks like; None where it could not be read."""
    batch: BatchPlan | None
    """None where the recipe does not fit the schema."""
    num_processes: int
    unseen: tuple[str, ...] = ()
    """What the training depends on and no check looked at, in words."""

    @property
    def errors(self) -> list[Problem]:
        """The problems that forbid a training."""
        return [problem for problem in self.problems if problem.level == "error"]

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the number of processes worked out for this machine.

        Raises:
            RecipeError: There are errors.
        """
        if self.errors or self.loaded.recipe is None:
            raise RecipeError(self.errors)
        recipe = self.loaded.recipe
        launch = recipe.launch.model_copy(update={"num_processes": self.num_processes})
        return recipe.model_copy(update={"launch": launch})

    def notes_of(self, path: str) -> list[Problem]:
        """What was noted of a setting, such as what `auto` is here."""
        return [each for each in self.problems if (each.path, each.level) == (path, "note")]

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values, for `--json`."""
        return {
            "recipe": str(self.loaded.source),
            "valid": not self.errors,
            "not_checked": list(self.unseen),
            "problems": [problem.as_json() for problem in self.problems],
            "num_processes": self.num_processes,
            "train_rows": self.preview.train_rows if self.preview else None,
            "eval_rows": self.preview.eval_rows if self.preview else None,
            "columns": sorted(self.preview.columns)
            if self.preview and self.preview.columns
            else None,
            "batch": batch_as_json(self.batch) if self.batch else None,
        }


def check_recipe(
    path: Path,
    overrides: list[str] | None = None,
    hardware: Hardware | None = None,
    *,
    environment: bool = True,
) -> CheckedRecipe:
    """Loads a recipe and runs every check that needs no model.

    Args:
        path: The recipe.
        overrides: `--set` texts.
        hardware: Of the machine that trains; None for this one.
        environment: Whether a package that this machine lacks is an error, rather than a note.

    Raises:
        RecipeError: The YAML itself cannot be read.
    """
    found = hardware or read_hardware()
    loaded, notes = settle_backend(settle_dtype(load_tree(path, overrides)), found)
    problems = [*notes]
    params = check_rewards(loaded, problems)
    seen = check_data(loaded, params, problems)
    batch, processes = None, 1
    unseen: tuple[str, ...] = ()
    if loaded.recipe is not None:
        recipe = loaded.recipe
        processes = resolve_num_processes(recipe, found)
        batch = _plan(recipe, processes, seen)
        if not any(_decides_batch(problem.path) for problem in loaded.problems):
            problems += batch.problems
        problems += [*_check_model(recipe), *_check_launch(recipe, processes, found)]
        problems += _check_strategy(recipe.launch, cpu=is_on_cpu(recipe.launch, found))
        problems += _check_packages(recipe, cpu=is_on_cpu(recipe.launch, found))
        problems += [*check_vllm(recipe, found), *check_slurm(recipe)]
        problems += [
            *_check_evaluation(recipe, seen),
            *_check_nothing_learned(recipe),
            *check_scored(recipe, seen),
            *check_stop_when(recipe),
            *check_metrics(recipe),
            *check_overlap(recipe, params, batch),
            *check_async(recipe),
        ]
        problems += [*check_trackers(recipe), *check_precision(recipe, found)]
        problems += [*check_optimizer(recipe), *check_effects(recipe, batch.total_optimizer_steps)]
        problems += check_expect(recipe, batch.total_optimizer_steps)
        if not loaded.problems:
            unseen = tuple(_find_unseen(recipe, seen, processes, found))
    # The values that they are about were left out for the checks, which may miss them.
    known = tuple(f"{problem.path}." for problem in loaded.problems)
    news = [each for each in problems if not f"{each.path}.".startswith(known)]
    placed = [loaded.place(problem) for problem in (*loaded.problems, *news)]
    if not environment:
        placed = [
            replace(each, level="note") if each.is_missing_package else each for each in placed
        ]
    return CheckedRecipe(loaded, tuple(sort_problems(placed)), seen, batch, processes, unseen)


def _check_nothing_learned(recipe: Recipe) -> Iterator[Problem]:
    """Settings that leave nothing to learn from, or nothing to compare with."""
    if recipe.rewards and not any(reward.weight for reward in recipe.rewards):
        message = "every reward has the weight 0, so nothing is learned"
        yield Problem(message, "give at least one reward a weight", "rewards.0.weight")
    if read_setting(recipe, "sync_ref_model") and not read_setting(recipe, "beta"):
        yield Problem(
            "there is no reference model to synchronize: `training.beta` is 0",
            "set `training.beta: 0.04` or the like, or remove `sync_ref_model`",
            "training.sync_ref_model",
        )


def _decides_batch(path: str) -> bool:
    """Whether a wrong key may be meant for one of the arithmetic's; sums of defaults would only confuse."""
    return (
        nearest(path.rpartition(".")[2], [field.name for field in fields(BatchInputs)]) is not None
    )


def _find_unseen(
    recipe: Recipe, seen: Preview | None, processes: int, hardware: Hardware
) -> Iterator[str]:
    if seen is None or seen.train_rows is None:
        yield "the rows of the dataset, which are loaded when training starts"
    with suppress(RecipeError):
        if resolve_source(recipe.model).kind == "hub":
            yield f"the model {recipe.model.path}, which is on the hub"
    if processes > 1 and not recipe.launch.use_cpu and hardware.gpus == 0:
        yield f"GPUs for the {processes} processes: this machine has none"


def _plan(recipe: Recipe, processes: int, seen: Preview | None) -> BatchPlan:
    prompts = seen.train_rows if seen else None
    eval_prompts = seen.eval_rows if seen else None
    return plan_batch(batch_inputs(recipe, processes, prompts, eval_prompts))


def _check_model(recipe: Recipe) -> Iterator[Problem]:
    problems = check_model(recipe.model)
    yield from problems
    if any(problem.level == "error" for problem in problems):
        return
    known = known_chat_template(resolve_source(recipe.model), recipe.model)
    if known is not None:
        yield from collect(lambda: resolve_style(recipe.dataset.prompt, known))


def _check_launch(recipe: Recipe, processes: int, hardware: Hardware) -> Iterator[Problem]:
    launch = recipe.launch
    gpus = hardware.gpus - recipe.generation.managed_gpus
    if (
        launch.slurm is None
        and not is_on_cpu(launch, hardware)
        and 0 < gpus * launch.num_machines < processes
    ):
        yield Problem(
            f"{processes} processes need a GPU each, and there are {gpus * launch.num_machines} to train on",
            f"set `num_processes: {gpus * launch.num_machines}`, or `auto`; `grpo check --gpus N` checks a "
            "recipe for another machine",
            path="launch.num_processes",
        )
    if launch.strategy == "single" and processes > 1:
        yield Problem(
            f"`single` is one process, but num_processes is {processes}",
            "set `strategy: ddp`, or `num_processes: 1`",
            path="launch.strategy",
        )
    if launch.machine_rank >= launch.num_machines:
        last = launch.num_machines - 1
        yield Problem(
            f"{launch.num_machines} machines are numbered 0 to {last} (got {launch.machine_rank})"
            if last
            else f"there is one machine, number 0 (got {launch.machine_rank})",
            "give each machine its own number with --set launch.machine_rank=N"
            if last
            else "remove it, or set `num_machines`",
            path="launch.machine_rank",
        )
    if launch.num_machines > 1:
        for key in ("main_process_ip", "main_process_port"):
            if getattr(launch, key) is None:
                by_job = launch.slurm is not None
                yield Problem(
                    f"is needed with {launch.num_machines} machines"
                    f"{'; a job sets it by itself' if by_job else ''}",
                    f"{'submit with `grpo train --slurm`, or ' if by_job else ''}"
                    f"set `launch.{key}` to that of machine 0, the same on all machines",
                    path=f"launch.{key}",
                    level="note" if by_job else "error",
                )
        if processes % launch.num_machines:
            yield Problem(
                f"{processes} processes do not spread evenly over {launch.num_machines} machines",
                f"use a multiple of {launch.num_machines}",
                path="launch.num_processes",
            )


def _check_strategy(launch: LaunchConfig, *, cpu: bool) -> Iterator[Problem]:
    config = launch.accelerate_config
    if config is not None:
        if launch.strategy != "auto":
            yield Problem(
                "is not read beside `accelerate_config`", "remove one of them", "launch.strategy"
            )
        if not Path(config).is_file():
            message = f"there is no file {config}"
            yield Problem(message, "correct the path", "launch.accelerate_config")
    elif launch.strategy.startswith("zero") and not _installed("deepspeed"):
        yield Problem("deepspeed is not installed", install_extra("deepspeed"), "launch.strategy")
    elif launch.strategy == "fsdp2" and cpu:
        yield Problem(
            "fsdp2 shares a model among GPUs; without one accelerate trains copies of it, in silence",
            "set `strategy: ddp`",
            "launch.strategy",
        )


def _check_packages(recipe: Recipe, *, cpu: bool) -> Iterator[Problem]:
    attention = recipe.model.attn_implementation or ""
    if attention.startswith("flash_attention"):
        fix = "set `attn_implementation: sdpa`, or remove it"
        if cpu:
            yield Problem(f"{attention} needs a GPU", fix, "model.attn_implementation")
        elif not _installed("flash_attn") and not _installed("kernels"):
            message = f"{attention} needs flash-attn, which is not installed"
            fix = f"pip install flash-attn --no-build-isolation, or {fix}"
            yield Problem(message, fix, "model.attn_implementation")
    if recipe.generation.backend == "vllm" and not _installed("vllm"):
        yield Problem(
            "vllm is not installed",
            f"{install_extra('vllm')}, or set `generation.backend: transformers`",
            path="generation.backend",
        )
    if read_setting(recipe, "use_liger_kernel") and not _installed("liger_kernel"):
        yield Problem(
            "liger-kernel is not installed",
            "pip install liger-kernel, or remove `use_liger_kernel`",
            path="training.use_liger_kernel",
        )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_evaluation(recipe: Recipe, seen: Preview | None) -> Iterator[Problem]:
    training = recipe.training
    if (
        recipe.launch.strategy in SHARED_WEIGHTS
        and recipe.evaluation.limit != 0
        and seen is not None
        and seen.eval_rows
    ):
        yield Problem(
            f"with {recipe.launch.strategy} a run does not measure before and after by itself",
            "`grpo eval RUN` does, when it is done",
            "launch.strategy",
            level="note",
        )
    if recipe.evaluation.samples_per_prompt > 1 and recipe.evaluation.temperature == 0:
        yield Problem(
            f"{recipe.evaluation.samples_per_prompt} greedy completions of a prompt are all the same",
            "set `evaluation.temperature: 0.6` or the like, or `samples_per_prompt: 1`",
            "evaluation.samples_per_prompt",
            level="warning",
        )
    evaluates = training.eval_strategy != "no"
    if evaluates and not has_eval(recipe.dataset):
        yield Problem(
            f"`eval_strategy: {training.eval_strategy}` needs evaluation rows, and the dataset has none",
            "give the dataset an eval split (`eval`, `eval_split`, `eval_size`, `eval_rows` or "
            "`eval_fraction`), or set `eval_strategy: no`",
            path="training.eval_strategy",
        )
    saves = training.extras.get("save_strategy", "steps")
    if training.extras.get("load_best_model_at_end") and saves != training.eval_strategy:
        yield Problem(
            f"the best model is known only where both evaluation (`{training.eval_strategy}`) and "
            f"saving (`{saves}`) happen",
            "give `eval_strategy` and `save_strategy` the same value",
            path="training.load_best_model_at_end",
        )
    if training.early_stopping and not evaluates:
        yield Problem(
            "early stopping reads an evaluation metric, and `eval_strategy` is `no`",
            "set `training.eval_strategy: steps` and `training.eval_steps`",
            path="training.early_stopping",
        )

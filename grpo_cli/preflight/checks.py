"""Every check of a recipe that needs no model: its parts against each other and against the disk.

Owns which checks there are and in which order. Each one returns problems instead of raising, so
that a person sees all of them at once.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_cli.batch import BatchPlan, plan_batch
from grpo_cli.batch import as_json as batch_as_json
from grpo_cli.data.peek import Peek, peek
from grpo_cli.data.prompts import template_columns
from grpo_cli.errors import Problem, ProblemsError, RecipeError, nearest, sort_problems
from grpo_cli.models.source import known_chat_template, resolve_source
from grpo_cli.preflight.arithmetic import batch_inputs
from grpo_cli.preflight.hardware import Hardware, read_hardware, resolve_num_processes
from grpo_cli.recipe.dataset import DatasetConfig
from grpo_cli.recipe.explanation import explain, unknown_key
from grpo_cli.recipe.loading import LoadedRecipe, load_tree
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards.contract import RewardParams
from grpo_cli.rewards.registry import KINDS

_TRACKER_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "comet_ml": "comet_ml",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "dvclive": "dvclive",
}


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe with all that the checks found."""

    loaded: LoadedRecipe
    problems: tuple[Problem, ...]
    """Errors, warnings and notes, sorted by where they stand."""
    peek: Peek | None
    """What the data looks like; None where it could not be read."""
    batch: BatchPlan | None
    """None where the recipe does not fit the schema."""
    num_processes: int

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

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values, for `--json`."""
        return {
            "recipe": str(self.loaded.source),
            "valid": not self.errors,
            "problems": [problem.as_json() for problem in self.problems],
            "num_processes": self.num_processes,
            "train_rows": self.peek.train_rows if self.peek else None,
            "eval_rows": self.peek.eval_rows if self.peek else None,
            "columns": sorted(self.peek.columns) if self.peek and self.peek.columns else None,
            "batch": batch_as_json(self.batch) if self.batch else None,
        }


def check_recipe(
    path: Path, overrides: list[str] | None = None, hardware: Hardware | None = None
) -> CheckedRecipe:
    """Loads a recipe and runs every check that needs no model.

    Raises:
        RecipeError: The YAML itself cannot be read.
    """
    loaded = load_tree(path, overrides)
    problems = list(loaded.problems)
    params = _check_rewards(loaded, problems)
    seen = _check_data(loaded, params, problems)
    batch, processes = None, 1
    if loaded.recipe is not None:
        recipe = loaded.recipe
        processes = resolve_num_processes(recipe.launch, hardware or read_hardware())
        batch = _plan(recipe, processes, seen)
        problems += batch.problems
        problems += _collect(lambda: _check_model(recipe))
        problems += [*_check_launch(recipe, processes), *_check_packages(recipe)]
        problems += _check_evaluation(recipe, seen)
    placed = [loaded.place(problem) for problem in problems]
    return CheckedRecipe(loaded, tuple(sort_problems(placed)), seen, batch, processes)


def _collect(check: Callable[[], list[Problem]]) -> list[Problem]:
    try:
        return check()
    except ProblemsError as error:
        return error.problems


def _check_rewards(loaded: LoadedRecipe, problems: list[Problem]) -> dict[int, RewardParams]:
    """Validates each reward's parameters against its kind; gives those that are right, by index."""
    node = loaded.tree.child("rewards")
    valid: dict[int, RewardParams] = {}
    entries = node.plain() if node is not None and isinstance(node.value, list) else []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            continue
        path = ("rewards", index)
        schema = KINDS.get(entry["kind"])
        if schema is None:
            problems.append(_unknown_kind(entry["kind"], index))
            continue
        own = {key: value for key, value in entry.items() if key not in RewardConfig.model_fields}
        try:
            valid[index] = schema.model_validate(own)
        except ValidationError as error:
            problems += [
                _name_reward_keys(problem, loaded, schema)
                for problem in explain(error, schema, loaded.tree, path)
            ]
            continue
        problems += [
            Problem(message, fix, path=f"rewards.{index}.{name}")
            for name, message, fix in valid[index].problems()
        ]
    return valid


def _unknown_kind(kind: str, index: int) -> Problem:
    close = nearest(kind, KINDS)
    fix = f"write `{close}`" if close else f"write one of {', '.join(KINDS)}"
    return Problem(f"there is no reward kind `{kind}`", fix, path=f"rewards.{index}.kind")


def _name_reward_keys(
    problem: Problem, loaded: LoadedRecipe, schema: type[RewardParams]
) -> Problem:
    """An unknown parameter may also be a misspelt key that every reward has."""
    if not problem.message.startswith("unknown key"):
        return problem
    steps = tuple(int(step) if step.isdigit() else step for step in problem.path.split("."))
    valid = [*schema.model_fields, *RewardConfig.model_fields]
    return unknown_key(loaded.tree, steps, valid)


def _check_data(
    loaded: LoadedRecipe, params: dict[int, RewardParams], problems: list[Problem]
) -> Peek | None:
    """Looks at the data, and compares its columns with what prompts and rewards want."""
    dataset = loaded.recipe.dataset if loaded.recipe else _dataset_alone(loaded)
    if dataset is None:
        return None
    seed = loaded.recipe.seed if loaded.recipe else 0
    try:
        seen = peek(dataset, seed)
    except ProblemsError as error:
        problems += error.problems
        return None
    if seen.columns is not None:
        problems += _check_prompt(dataset, seen.columns)
        problems += _check_columns(dataset, seen.columns)
        available = seen.columns | set(dataset.columns) | {"prompt", "row_id"}
        problems += _check_reward_columns(params, available)
    else:
        problems += _collect(lambda: _check_templates(dataset))
    return seen


def _dataset_alone(loaded: LoadedRecipe) -> Any:
    """The dataset section of a recipe whose other parts are wrong."""
    node = loaded.tree.child("dataset")
    try:
        return TypeAdapter(DatasetConfig).validate_python(node.plain()) if node else None
    except ValidationError:
        return None


def _check_templates(dataset: Any) -> list[Problem]:
    """Whether the templates parse, where the columns are not known."""
    for text in (dataset.prompt.user, dataset.prompt.system):
        if text is not None:
            template_columns(text)
    return []


def _check_prompt(dataset: Any, columns: frozenset[str]) -> Iterator[Problem]:
    known = columns | set(dataset.columns)
    for key in ("user", "system"):
        text = getattr(dataset.prompt, key)
        if text is None:
            continue
        try:
            wanted = template_columns(text)
        except ProblemsError as error:
            yield from (
                replace(problem, path=f"dataset.prompt.{key}") for problem in error.problems
            )
            continue
        for name in sorted(wanted - known):
            yield _missing_column(name, known, f"dataset.prompt.{key}", "the template names")
    if dataset.prompt.user is None and "prompt" not in known:
        yield Problem(
            f"no `user` template is given and the data has no column `prompt` (columns: {_list(columns)})",
            'add `dataset.prompt.user`, such as `user: "{{ question }}"`',
            path="dataset.prompt",
        )


def _check_columns(dataset: Any, columns: frozenset[str]) -> Iterator[Problem]:
    for name, column in dataset.columns.items():
        if column.from_ not in columns:
            path = f"dataset.columns.{name}.from"
            yield _missing_column(column.from_, columns, path, f"`{name}` is read from")


def _check_reward_columns(
    params: dict[int, RewardParams], available: frozenset[str]
) -> Iterator[Problem]:
    for index, reward in params.items():
        for name in reward.required_columns():
            if name not in available:
                path = f"rewards.{index}"
                yield _missing_column(
                    name, available - {"prompt", "row_id"}, path, "the reward needs"
                )


def _missing_column(name: str, known: frozenset[str], path: str, who: str) -> Problem:
    close = nearest(name, known)
    fix = f"use `{close}`, or " if close else ""
    return Problem(
        f"{who} the column `{name}`, which the data lacks (columns: {_list(known)})",
        f"{fix}add it under `dataset.columns`, such as `{name}: {close or next(iter(sorted(known)), 'source')}`",
        path=path,
    )


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _plan(recipe: Recipe, processes: int, seen: Peek | None) -> BatchPlan:
    prompts = seen.train_rows if seen else None
    eval_prompts = seen.eval_rows if seen else None
    return plan_batch(batch_inputs(recipe, processes, prompts, eval_prompts))


def _check_model(recipe: Recipe) -> list[Problem]:
    source = resolve_source(recipe.model)
    if known_chat_template(source, recipe.model) is not False:
        return []
    prompt = recipe.dataset.prompt
    if prompt.system is None and prompt.style != "chat":
        return []
    key = "system" if prompt.system is not None else "style"
    return [
        Problem(
            "the model has no chat template, so there are no messages to put this in",
            "set `model.chat_template`, or remove it and put the whole text into `dataset.prompt.user`",
            path=f"dataset.prompt.{key}",
        )
    ]


def _check_launch(recipe: Recipe, processes: int) -> Iterator[Problem]:
    launch = recipe.launch
    if launch.strategy == "single" and processes > 1:
        yield Problem(
            f"`single` is one process, but num_processes is {processes}",
            "set `strategy: ddp`, or `num_processes: 1`",
            path="launch.strategy",
        )
    if launch.num_machines > 1:
        for key in ("main_process_ip", "main_process_port"):
            if getattr(launch, key) is None:
                yield Problem(
                    f"is needed with {launch.num_machines} machines",
                    f"set `launch.{key}` to that of machine 0, the same on all machines",
                    path=f"launch.{key}",
                )
        if launch.machine_rank >= launch.num_machines:
            yield Problem(
                f"{launch.num_machines} machines are numbered 0 to {launch.num_machines - 1} "
                f"(got {launch.machine_rank})",
                "give each machine its own number with --set launch.machine_rank=N",
                path="launch.machine_rank",
            )
        if processes % launch.num_machines:
            yield Problem(
                f"{processes} processes do not spread evenly over {launch.num_machines} machines",
                f"use a multiple of {launch.num_machines}",
                path="launch.num_processes",
            )


def _check_packages(recipe: Recipe) -> Iterator[Problem]:
    if recipe.generation.backend == "vllm" and not _installed("vllm"):
        yield Problem(
            "vllm is not installed",
            'pip install "grpo-cli[vllm]", or set `generation.backend: transformers`',
            path="generation.backend",
        )
    for index, name in enumerate(recipe.logging.report_to):
        package = _TRACKER_PACKAGES.get(name)
        if package is None:
            close = nearest(name, _TRACKER_PACKAGES)
            yield Problem(
                f"there is no tracker `{name}`",
                f"write `{close}`" if close else f"write one of {', '.join(_TRACKER_PACKAGES)}",
                path=f"logging.report_to.{index}",
            )
        elif not _installed(package):
            yield Problem(
                f"{package} is not installed",
                f"pip install {package}, or remove `{name}`",
                path=f"logging.report_to.{index}",
            )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check_evaluation(recipe: Recipe, seen: Peek | None) -> Iterator[Problem]:
    training = recipe.training
    evaluates = training.eval_strategy != "no"
    if evaluates and seen is not None and seen.columns is not None and seen.eval_rows is None:
        yield Problem(
            f"`eval_strategy: {training.eval_strategy}` needs evaluation rows, and the dataset has none",
            "give the dataset an eval split (`eval`, `eval_split`, `eval_size`, `eval_rows` or "
            "`eval_fraction`), or set `eval_strategy: no`",
            path="training.eval_strategy",
        )
    if training.early_stopping and not evaluates:
        yield Problem(
            "early stopping reads an evaluation metric, and `eval_strategy` is `no`",
            "set `training.eval_strategy: steps` and `training.eval_steps`",
            path="training.early_stopping",
        )

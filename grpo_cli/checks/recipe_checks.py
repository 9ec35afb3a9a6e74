"""Every check of a recipe that needs no model; all problems are returned at once."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_cli.batch.inputs import batch_inputs
from grpo_cli.batch.plan import BatchInputs, BatchPlan, plan_batch
from grpo_cli.batch.plan import as_json as batch_as_json
from grpo_cli.checks.contents import check_data, check_rewards, collect
from grpo_cli.checks.dataset import check_difficulty, check_mixture, check_streaming, check_warmup
from grpo_cli.checks.devices import check_devices, check_precision, settle_dtype
from grpo_cli.checks.episodes import Kinds, check_episodes, check_kinds
from grpo_cli.checks.evaluation import (
    check_best,
    check_during,
    check_evaluation,
    check_expect,
    check_metrics,
    check_min_delta,
    check_scored,
    check_stop_when,
    check_trackers,
)
from grpo_cli.checks.images import check_images
from grpo_cli.checks.partners import check_partners
from grpo_cli.checks.sampling import (
    check_async,
    check_overlap,
    check_sampling,
    check_vllm,
    settle_backend,
)
from grpo_cli.checks.settings import MOST_HELD_OUT, check_effects, check_texts, check_to_do
from grpo_cli.data.mixing import place_issues
from grpo_cli.data.preview import Preview
from grpo_cli.data.prompts import resolve_style
from grpo_cli.data.rows import suggest
from grpo_cli.errors import RecipeError, nearest
from grpo_cli.issues import Issue, sort_issues
from grpo_cli.machine import Hardware, read_hardware, resolve_num_processes
from grpo_cli.models.adapter import check_adapter, check_lora
from grpo_cli.models.source import (
    check_model,
    read_source_template,
    resolve_source,
)
from grpo_cli.models.teacher import check_teacher
from grpo_cli.recipe.loading import LoadedRecipe, load_tree
from grpo_cli.recipe.recipe import Recipe

_NO_VARIABLES = frozenset({"add_generation_prompt", "chat_template", "continue_final_message"})
"""What `apply_chat_template` reads itself."""

_CHECKOUT = re.compile(r'-e "[^"]*\[')
"""In commands that install an extra: the checkout of this machine."""


@dataclass(frozen=True)
class CheckedRecipe:
    """A recipe with all that the checks found."""

    loaded: LoadedRecipe
    problems: tuple[Issue, ...]
    """Errors, warnings and notes, sorted by where they stand."""
    preview: Preview | None
    """What the data looks like; None if it could not be read."""
    batch: BatchPlan | None
    """None if the recipe does not fit the schema."""
    num_processes: int
    unseen: tuple[str, ...] = ()
    """What the training depends on and no check looked at, in words."""

    @property
    def errors(self) -> list[Issue]:
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

    def notes_of(self, path: str) -> list[Issue]:
        """Return what was noted of a setting, such as what `auto` is here."""
        return [each for each in self.problems if (each.path, each.level) == (path, "note")]

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as plain values, for `--json`."""
        columns = self.preview.columns if self.preview else None
        return {
            "recipe": str(self.loaded.source),
            "valid": not self.errors,
            "not_checked": list(self.unseen),
            "problems": [problem.as_json() for problem in self.problems],
            "num_processes": self.num_processes,
            "train_rows": self.preview.train_rows if self.preview else None,
            "eval_rows": self.preview.eval_rows if self.preview else None,
            "columns": sorted(columns) if columns else None,
            "batch": batch_as_json(self.batch) if self.batch else None,
        }


def check_recipe(
    path: Path,
    overrides: list[str] | None = None,
    hardware: Hardware | None = None,
    *,
    environment: bool = True,
) -> CheckedRecipe:
    """Load a recipe and run every check that needs no model.

    Args:
        path: The recipe.
        overrides: `--set` texts.
        hardware: Of the machine that trains; None for this one.
        environment: Whether a package that this machine lacks is an error, rather than a note.

    Raises:
        RecipeError: The YAML itself cannot be read.
    """
    hardware = hardware or read_hardware()
    loaded = settle_dtype(load_tree(path, overrides))
    loaded, notes = settle_backend(loaded, hardware, environment=environment)
    problems, recipe = [*notes, *check_texts(loaded.tree)], loaded.recipe
    problems += check_to_do(loaded.tree, loaded.text)
    params = check_rewards(loaded, problems)
    kinds = check_kinds(loaded, problems)
    seen = check_data(loaded, params, kinds, problems)
    batch, processes = None, 1
    unseen: tuple[str, ...] = ()
    if recipe is not None:
        processes = resolve_num_processes(recipe, hardware)
        rows = (seen.train_rows, seen.eval_rows) if seen else (None, None)
        batch = plan_batch(batch_inputs(recipe, processes, *rows))
        if not any(_decides_batch(problem.path) for problem in loaded.problems):
            problems += [_blame_limit(each, recipe, batch) for each in batch.problems]
        problems += _check_sections(recipe, processes, hardware, seen, batch, kinds)
        problems += _check_evaluation(loaded, recipe, batch)
        problems += check_overlap(recipe, params, batch)
        problems += check_min_delta(recipe, params)
        if not loaded.problems:
            unseen = tuple(_find_unseen(recipe, seen, processes, hardware))
    # The values that they are about were left out for the checks, which may miss them.
    known = tuple(f"{problem.path}." for problem in loaded.problems)
    news = [each for each in problems if not f"{each.path}.".startswith(known)]
    placed = [loaded.place(problem) for problem in (*loaded.problems, *news)]
    if not environment:
        # `auto` has its own note, that vLLM is assumed.
        noted = {note.path for note in notes}
        placed = [
            replace(
                each, seen=f"{each.seen} here", level="note", fix=_CHECKOUT.sub('-e ".[', each.fix)
            )
            if each.package
            else each
            for each in placed
            if not (each.package and each.path in noted)
        ]
    found = tuple(_name_packages_once(sort_issues(placed)))
    return CheckedRecipe(loaded, found, seen, batch, processes, unseen)


def _name_packages_once(problems: list[Issue]) -> Iterator[Issue]:
    """Yield one issue a missing package, which names every key that needs the package; others as they are."""
    alike: dict[str, dict[str, Issue]] = {}
    for number, each in enumerate(problems):
        alike.setdefault(each.package or str(number), {}).setdefault(each.path, each)
    for first, *more in (list(group.values()) for group in alike.values()):
        also = " and ".join(f"`{each.path}`" for each in more)
        yield replace(first, why=f"It is also needed by {also}") if also else first


def _check_sections(
    recipe: Recipe,
    processes: int,
    hardware: Hardware,
    seen: Preview | None,
    batch: BatchPlan,
    kinds: Kinds,
) -> Iterator[Issue]:
    steps = batch.total_optimizer_steps
    yield from _check_model(recipe)
    yield from check_devices(recipe, processes, hardware)
    yield from check_sampling(recipe)
    yield from check_vllm(recipe, hardware)
    yield from check_async(recipe)
    yield from check_scored(recipe, seen)
    yield from check_stop_when(recipe)
    yield from check_expect(recipe, steps)
    yield from check_trackers(recipe)
    yield from check_precision(recipe, hardware)
    yield from check_effects(recipe, steps)
    yield from check_partners(recipe, processes, steps)
    yield from check_episodes(recipe, kinds, seen)
    yield from check_warmup(recipe, seen)
    yield from check_mixture(recipe, seen, batch)
    yield from check_difficulty(recipe, seen)
    yield from check_streaming(recipe)
    yield from check_images(recipe)


def _check_evaluation(loaded: LoadedRecipe, recipe: Recipe, batch: BatchPlan) -> Iterator[Issue]:
    yield from check_evaluation(recipe)
    in_sets = list(check_during(recipe, batch.total_optimizer_steps))
    yield from in_sets
    # What is evaluated depends on the sets.
    broken = (each for each in (*loaded.problems, *in_sets) if each.level == "error")
    if not any(each.path.startswith("evaluation.during") for each in broken):
        yield from check_best(recipe)
        yield from check_metrics(recipe)


def _check_model(recipe: Recipe) -> Iterator[Issue]:
    problems = check_model(recipe.model)
    yield from problems
    for check in (check_adapter, check_lora, check_teacher):
        # Checks that need the model's files wait until those exist.
        with suppress(RecipeError):
            yield from check(recipe)
    if not any(problem.level == "error" for problem in problems):
        template = read_source_template(recipe.model)
        if template is not None:
            for place, part in enumerate(recipe.dataset.parts):
                found = collect(partial(resolve_style, part.prompt, bool(template)))
                yield from place_issues(found, place, part.source_name)
        words = _NO_VARIABLES.union(re.findall(r"\w+", template or ""))
        for name in recipe.setting("chat_template_kwargs") or {}:
            if template and name not in words:
                seen = "has no effect: the model's chat template does not read it"
                path = f"generation.chat_template_kwargs.{name}"
                read = words.intersection((name.removeprefix("enable_"), f"enable_{name}"))
                fix = f"write `{min(read)}`" if read else suggest(name, words, "remove it")
                yield Issue(seen, fix, path, level="warning")


def _blame_limit(problem: Issue, recipe: Recipe, batch: BatchPlan) -> Issue:
    """Cite `dataset.limit` or `eval_fraction` if it is what leaves too few prompts."""
    held_out = recipe.dataset.eval_fraction or 0
    if problem.path == "dataset" and held_out > MOST_HELD_OUT:
        fix = f"set `eval_fraction: {1 - held_out:.2g}`, if {held_out:g} is the share to train on"
        return replace(problem, fix=f"{fix}; or {problem.fix}", path="dataset.eval_fraction")
    limit, needed = recipe.dataset.limit, batch.prompts_per_generation_batch
    if problem.path != "dataset" or limit is None or needed is None or limit >= needed:
        return problem
    fix = problem.fix.replace("add prompts", f"set dataset.limit to {needed:g} or more", 1)
    return replace(problem, fix=fix, path="dataset.limit")


def _decides_batch(path: str) -> bool:
    """Return whether a wrong key may be meant for the arithmetic; sums of defaults would only confuse."""
    names = [field.name for field in fields(BatchInputs)]
    return nearest(path.rpartition(".")[2], names) is not None


def _find_unseen(
    recipe: Recipe, seen: Preview | None, processes: int, hardware: Hardware
) -> Iterator[str]:
    if recipe.dataset.streams and recipe.dataset.limit != recipe.dataset.rows_read:
        yield f"rows after the first {recipe.dataset.rows_read:,}, which are read while training needs them"
    elif seen is None or seen.train_rows is None:
        yield "the rows of the dataset, which are loaded when training starts"
    with suppress(RecipeError):
        if resolve_source(recipe.model).kind == "hub":
            yield f"the model {recipe.model.path}: a hub id, which is not looked up here"
    if processes > 1 and not recipe.launch.use_cpu and hardware.gpus == 0:
        yield f"GPUs for the {processes} processes: none was found, or `--gpus 0` was given"

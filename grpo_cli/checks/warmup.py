"""Checks of the warm-up that need no model."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from grpo_cli.checks.contents import collect
from grpo_cli.data.prompts import render_template, template_columns
from grpo_cli.data.rows import RowNames, show_names, suggest
from grpo_cli.data.sources import Preview, preview
from grpo_cli.issues import Issue
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.warmup import WarmupConfig

_ANSWER = "warmup.answer"


def check_warmup(recipe: Recipe, seen: Preview | None) -> Iterator[Issue]:
    """Check that the warm-up can run where the training does, and that its answers can be written.

    Args:
        recipe: The recipe.
        seen: The beginning of its data; None if it could not be read.
    """
    warmup = recipe.warmup
    if warmup is None:
        return
    yield from _check_place(recipe)
    if warmup.answer and len(warmup.answer) > 1 and not recipe.has_episodes:
        seen_many = f"has {len(warmup.answer)} answers, and without tools or an environment there is one turn"
        yield Issue(seen_many, "keep one", _ANSWER)
    own = warmup.read_from(recipe.dataset)
    if own is not None:
        seen = preview(own, recipe.seed)
        yield from (replace(each, path="warmup.train") for each in seen.problems)
    if seen is not None and seen.columns is not None:
        columns = [each.columns for each in recipe.dataset.parts]
        added = frozenset({"prompt", "row_id"}).union(*columns)
        yield from _check_answers(warmup, seen.columns, added, seen)


def _check_place(recipe: Recipe) -> Iterator[Issue]:
    refused = {
        "dataset.kind: scored": not recipe.is_sampled,
        "training.mode: async": recipe.training.mode == "async",
        f"launch.strategy: {recipe.launch.strategy}": recipe.launch.strategy.startswith(
            ("zero", "fsdp")
        ),
        f"launch.num_machines: {recipe.launch.num_machines}": recipe.launch.num_machines > 1,
    }
    for setting in (name for name, holds in refused.items() if holds):
        fix = "warm up in another run on one machine, and name that as `model.adapter` or `model.path`"
        yield Issue(f"does not work with `{setting}`", fix, "warmup")


def _check_answers(
    warmup: WarmupConfig, own: frozenset[str], added: frozenset[str], seen: Preview
) -> Iterator[Issue]:
    columns = own | added
    names = seen.train.names if seen.train else RowNames("training")
    for text in warmup.answer or ():
        found = collect(partial(template_columns, text, _ANSWER))
        missing = [] if found else sorted(template_columns(text, _ANSWER) - columns)
        for name in missing:
            message = f"the template names `{name}`, which is not a column; there are {show_names(columns)}"
            found.append(Issue(message, suggest(name, columns, "name one of these"), _ANSWER))
        yield from found
        # Columns that the recipe makes are there only once the data is built.
        if not found and template_columns(text, _ANSWER) <= own:
            for place, row in enumerate(seen.sample):
                yield from collect(partial(render_template, text, row, names(place), _ANSWER))

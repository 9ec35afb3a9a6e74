"""Checks of the `teacher` section."""

from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.checks.context import CheckContext
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue
from grpo_cli.models.source import check_model_data, find_damage, fingerprint_model
from grpo_cli.models.teacher import find_teacher
from grpo_cli.recipe.model import ADAPTER_WEIGHTS

_PATH = "teacher.path"


def check_teacher(context: CheckContext) -> Iterator[Issue]:
    """Check that the teacher is there and whole, and another model."""
    recipe = context.recipe
    try:
        teacher = find_teacher(recipe)
        if teacher is None:
            return
        check_model_data(teacher.model)
    except RecipeError as error:
        yield from (replace(each, path=_PATH) for each in error.problems)
        return
    adapter = teacher.adapter
    if adapter is not None and not (adapter / ADAPTER_WEIGHTS).is_file():
        yield Issue(f"{adapter} holds no {ADAPTER_WEIGHTS}", "name a run that has finished", _PATH)
    elif adapter is not None and (fault := find_damage(adapter / ADAPTER_WEIGHTS)):
        yield Issue(*fault, _PATH)
    elif not (recipe.rewards or recipe.warmup or recipe.model.adapter or adapter):
        own = fingerprint_model(recipe.model)
        if own is not None and own == fingerprint_model(teacher.model):
            seen = "is the model itself, so there is nothing to learn from it, and there are no rewards"
            yield Issue(seen, "name another model, or add `rewards`", _PATH)

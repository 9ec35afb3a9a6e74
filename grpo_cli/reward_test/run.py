"""`grpo rewards test`: try a recipe's rewards on answers to its own rows, without a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.checks.recipe import CheckedRecipe
from grpo_cli.environments.episode import add_empty_records
from grpo_cli.errors import UsageError
from grpo_cli.models.source import read_source_template
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.reward_test.table import Encode, Progress
from grpo_cli.reward_test.testing import RewardTestResult, try_rewards
from grpo_cli.rewards.building import build_rewards, reward_context


def try_recipe(
    checked: CheckedRecipe,
    *,
    rows: int | None = None,
    answers: Sequence[str] = (),
    on_progress: Progress = lambda what: None,
) -> RewardTestResult:
    """Try a recipe's rewards on answers to rows of its training data.

    Args:
        checked: A recipe without errors.
        rows: How many rows; None: the default.
        answers: More answers to try: templates over the row's columns.
        on_progress: Called with what is being done.

    Raises:
        UsageError: The recipe has no rewards, as its data holds the scores; or none that score answers.
        GrpoError: The data or a reward cannot be loaded, or a reward fails.
    """
    recipe = checked.recipe
    if not recipe.rewards and recipe.is_sampled:
        raise UsageError(
            "there is nothing to test: the recipe has a teacher and no rewards",
            "add some; with `weight: 0` they only measure",
        )
    if not recipe.is_sampled:
        raise UsageError(
            "there is nothing to test: with `dataset.kind: scored` the rewards are in the rows",
            "use `grpo check`, which reads them",
        )
    on_progress("loading the data")
    data = read_training_rows(recipe)
    if recipe.has_episodes:
        data = add_empty_records(data, has_images=recipe.has_images)
    on_progress("loading the rewards")
    with checked.loaded.placing_errors():
        rows_of_epoch = checked.preview.train_rows if checked.preview else None
        context = reward_context(recipe, train_rows=rows_of_epoch)
        rewards = build_rewards(recipe.rewards, context)
    if all(reward.meta.needs_episode for reward in rewards):
        raise UsageError(
            "there is nothing to test: the rewards score whole episodes, not answers",
            "use `grpo env test`, which plays some without a model",
        )
    result = try_rewards(
        rewards,
        data,
        longest=recipe.generation.max_completion_length,
        encode=_load_encoder(recipe) if any(r.meta.reads_tokens for r in rewards) else None,
        rows=rows,
        answers=answers,
        on_progress=on_progress,
    )
    placed = tuple(checked.loaded.place(problem) for problem in result.problems)
    return replace(result, problems=placed)


def read_training_rows(recipe: Recipe) -> Any:
    """Return the training split, with prompts, `row_id` and all columns."""
    from grpo_cli.data.build import build_datasets

    has_template = read_source_template(recipe.model) != ""
    return build_datasets(recipe, has_chat_template=has_template, count_tokens=None).train


def _load_encoder(recipe: Recipe) -> Encode:
    from grpo_cli.models.loading import load_tokenizer

    tokenizer = load_tokenizer(recipe.model)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]

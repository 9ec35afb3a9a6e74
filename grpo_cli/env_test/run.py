"""`grpo env test`: try a recipe's tools and environments without a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.checks.recipe import CheckedRecipe
from grpo_cli.data.mixing import spread_rows
from grpo_cli.env_test.agents import Totals
from grpo_cli.env_test.testing import ROWS, EnvironmentTestResult, Progress, try_environments
from grpo_cli.environments.episode import Episode
from grpo_cli.errors import SetupError, UsageError
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.reward_test.run import read_training_rows
from grpo_cli.rewards.building import build_rewards, reward_context
from grpo_cli.rewards.contract import EPISODE, Batch
from grpo_cli.rewards.scoring import Reward, weighted_sum


def try_recipe(
    checked: CheckedRecipe, *, rows: int | None = None, on_progress: Progress = lambda what: None
) -> EnvironmentTestResult:
    """Try a recipe's tools and environments on rows of its training data; `rows` is their number.

    Raises `UsageError` if the recipe has neither tools nor an environment, and `GrpoError` if the data or a
    reward cannot be loaded, or a reward fails.
    """
    recipe = checked.recipe
    if not recipe.has_episodes:
        raise UsageError(
            "there is nothing to test: the recipe has neither `tools` nor an `environment`",
            "add one; `grpo env list` has all kinds",
        )
    on_progress("loading the data")
    chosen = _choose_rows(recipe, rows or ROWS)
    on_progress("loading the rewards")
    with checked.loaded.placing_errors():
        rows_of_epoch = checked.preview.train_rows if checked.preview else None
        context = reward_context(recipe, train_rows=rows_of_epoch)
        rewards = build_rewards(recipe.rewards, context)
    on_progress("loading the tokenizer")
    processing_class, stops = _load_tokenizer(recipe)
    result = try_environments(
        recipe,
        chosen,
        processing_class=processing_class,
        stops=stops,
        score=_scorer(rewards, reads_images=recipe.has_images),
        all_rows=rows is not None,
        on_progress=on_progress,
    )
    return replace(result, problems=tuple(_place(checked, each) for each in result.problems))


def _choose_rows(recipe: Recipe, most: int) -> list[dict[str, Any]]:
    """Return rows spread evenly over the data; none if tools alone are tried, and the data is not at hand."""
    try:
        data = read_training_rows(recipe)
    except SetupError:
        if recipe.environment:
            raise
        return []
    return list(data.select(spread_rows(data, range(len(data)), most)))


def _load_tokenizer(recipe: Recipe) -> tuple[Any, Sequence[int]]:
    """Return the model's tokenizer or processor, None if it is not on this machine; and what ends its answers."""
    from grpo_cli.fast.tokens import all_eos_token_ids
    from grpo_cli.models.loading import load_generation_config
    from grpo_cli.models.processor import load_processing_class, tokenizer_of

    try:
        processing_class = load_processing_class(recipe.model, has_images=recipe.has_images)
        generation_config = load_generation_config(recipe.model)
    except SetupError:
        return None, ()
    return processing_class, all_eos_token_ids(generation_config, tokenizer_of(processing_class))


def _scorer(rewards: Sequence[Reward], *, reads_images: bool) -> Totals:
    """Return what gives episodes the sum of the recipe's rewards, without those that cost seconds or money."""
    cheap = [reward for reward in rewards if not reward.meta.costly]

    def score(episodes: Sequence[Episode]) -> list[float | None]:
        names = [name for name in episodes[0].row if name != "prompt"]
        columns: dict[str, list[Any]] = {
            name: [episode.row[name] for episode in episodes] for name in names
        }
        if reads_images:
            columns[IMAGES] = [episode.images for episode in episodes]
        batch = Batch(
            [episode.prompt for episode in episodes],
            [episode.messages for episode in episodes],
            [episode.own_ids for episode in episodes],
            {**columns, EPISODE: [episode.as_json() for episode in episodes]},
        )
        scores = [reward.score(batch) for reward in cheap]
        weights = [reward.weight for reward in cheap]
        return [
            weighted_sum(weights, [each[row].value for each in scores])
            for row in range(len(episodes))
        ]

    return score


def _place(checked: CheckedRecipe, issue: Issue) -> Issue:
    """Add the line of the recipe; an environment that is not a list has no number there."""
    node = checked.loaded.tree.child("environment")
    if node is not None and not isinstance(node.value, list):
        issue = replace(issue, path=issue.path.replace("environment.0", "environment", 1))
    return checked.loaded.place(issue)

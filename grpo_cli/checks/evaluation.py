"""Checks of the `evaluation` section, and of evaluation during training."""

from collections.abc import Iterator

from grpo_cli.checks.compatibility import DURING, find_conflicts
from grpo_cli.checks.context import CheckContext
from grpo_cli.data.sources import has_eval
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.evaluation import HeldOutSetConfig
from grpo_cli.recipe.launch import SHARED_WEIGHTS
from grpo_cli.recipe.recipe import Recipe

_LOGGED = frozenset("rewards sources completions episode tools clip_ratio sampling".split())
"""What the metrics of TRL's evaluation, and ours in it, begin with before a `/`."""

_EVAL_ROWS = "give the dataset an eval split (`eval`, `eval_split`, `eval_rows` or `eval_fraction`)"

MOST_HELD_OUT = 0.5
"""Share of the prompts held out beyond which `eval_fraction` is taken for the share to train on."""


def check_evaluation(context: CheckContext) -> Iterator[Issue]:
    """Find evaluations that cannot happen, or that nothing can be learned from."""
    recipe = context.recipe
    yield from _check_measuring(recipe)
    training, samples = recipe.training, recipe.evaluation.samples_per_prompt
    strategy = recipe.launch.strategy
    if strategy in SHARED_WEIGHTS and recipe.evaluation.limit != 0 and has_eval(recipe.dataset):
        seen = f"with {strategy} a run does not measure before and after by itself"
        fix = "run `grpo eval RUN` when it is done"
        yield Issue(seen, fix, "launch.strategy", level="note")
    if samples > 1 and recipe.evaluation.temperature == 0:
        yield _all_greedy(samples, "evaluation")
    evaluates = training.eval_strategy
    if evaluates != "no" and not has_eval(recipe.dataset):
        yield Issue(
            f"`eval_strategy: {evaluates}` needs evaluation rows, and the dataset has none",
            "give the dataset an eval split (`eval`, `eval_split`, `eval_size`, `eval_rows` or "
            "`eval_fraction`), or set `eval_strategy: no`",
            "training.eval_strategy",
        )


def _all_greedy(samples: int, path: str) -> Issue:
    seen = f"{samples} greedy completions of a prompt are all the same"
    fix = f"set `{path}.temperature: 0.6` or the like, or `samples_per_prompt: 1`"
    return Issue(seen, fix, f"{path}.samples_per_prompt", level="warning")


def check_during(context: CheckContext) -> Iterator[Issue]:
    """Find held-out sets that cannot be evaluated during training, or never are."""
    recipe, during, path = context.recipe, context.recipe.evaluation.during, DURING
    if any(find_conflicts(recipe, DURING)):
        return
    labels = [each.label for each in during]
    for place, config in enumerate(during):
        own = f"{path}.{place}"
        if config.label in labels[:place]:
            seen = f"two sets are called `{config.label}`"
            yield Issue(seen, "give this one another `name`", own)
        if config.label in _LOGGED:
            seen = f"`eval_{config.label}/…` are metrics of TRL's own evaluation"
            yield Issue(seen, "give it another `name`", own)
        yield from _check_held_out_rows(recipe, config, own)
        yield from _check_every(recipe, config, own, context.steps)


def _check_held_out_rows(recipe: Recipe, config: HeldOutSetConfig, path: str) -> Iterator[Issue]:
    settings = recipe.evaluation.settings_of(config)
    parts = {each.source_name: each for each in recipe.dataset.parts}
    if config.source is not None and config.source not in parts:
        names = [name for name in parts if name]
        close = nearest(config.source, names) or ", ".join(names)
        fix = f"write {close}" if names else "remove it: all held-out rows are meant then"
        yield Issue(f"there is no source `{config.source}`", fix, f"{path}.source")
    elif not has_eval(parts[config.source] if config.source else recipe.dataset):
        of_source = f"source `{config.source}`" if config.source else "the dataset"
        yield Issue(
            f"needs held-out rows, and {of_source} has none",
            "give it some (`eval`, `eval_split`, `eval_size`, `eval_rows` or `eval_fraction`), or remove this",
            path,
        )
    if settings.limit == 0:
        seen = "has no prompts, since `evaluation.limit` is 0"
        yield Issue(seen, "give it a `limit` of its own", path)
    if settings.samples_per_prompt > 1 and settings.temperature == 0:
        yield _all_greedy(settings.samples_per_prompt, path)


def _check_every(
    recipe: Recipe, config: HeldOutSetConfig, path: str, total_steps: int | None
) -> Iterator[Issue]:
    if total_steps is not None and config.every > total_steps:
        seen = f"{config.every} is more than the {total_steps} steps of this training"
        fix = f"set it to {max(total_steps // 10, 1)}, or train longer"
        # What waits for the best model would wait in vain.
        decides = recipe.loads_best or recipe.training.early_stopping is not None
        yield Issue(seen, fix, f"{path}.every", level="error" if decides else "warning")


def _check_measuring(recipe: Recipe) -> Iterator[Issue]:
    """Find a training that writes no metrics, or holds out what it should train on, or nothing."""
    limit = recipe.evaluation.limit
    # A resolved recipe holds the defaults too.
    is_default = limit == type(recipe.evaluation).model_fields["limit"].default
    if limit and not is_default and not has_eval(recipe.dataset):
        seen = "has no effect: the dataset has no evaluation rows"
        fix = f"{_EVAL_ROWS}, or remove it"
        yield Issue(seen, fix, "evaluation.limit", level="warning")
    if recipe.setting("logging_strategy") == "no":
        seen = "`no` writes no metrics: `stop_when`, `expect`, reports and `grpo diagnose` have none to look at"
        yield Issue(seen, "remove it", "logging.logging_strategy", level="warning")
    held_out = recipe.dataset.eval_fraction or 0
    if held_out > MOST_HELD_OUT:
        seen = (
            f"holds out {held_out:.0%} of the prompts, and trains on the other {1 - held_out:.0%}"
        )
        fix = f"set `eval_fraction: {1 - held_out:.2g}`"
        yield Issue(seen, fix, "dataset.eval_fraction", level="warning")

"""Checks of evaluations, and of what reads their metrics: best models, early stopping and stop rules."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress

from grpo_cli.analysis.metrics import GAP, RANKING, metric_names
from grpo_cli.checks.batch import MOST_HELD_OUT
from grpo_cli.checks.compatibility import DURING, find_conflicts, has_best
from grpo_cli.checks.context import CheckContext
from grpo_cli.data.sources import has_eval
from grpo_cli.errors import RewardError, nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.evaluation import HeldOutSetConfig
from grpo_cli.recipe.launch import SHARED_WEIGHTS
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.building import name_rewards, right_scores
from grpo_cli.rewards.contract import RewardParams
from grpo_cli.rewards.scoring import clip_score
from grpo_cli.upstream.trl import EVAL_METRICS, FRAC_ZERO_STD, REWARD, REWARD_STD

_LOGGED = frozenset("rewards sources completions episode tools clip_ratio sampling".split())
"""What the metrics of TRL's evaluation, and ours in it, begin with before a `/`."""

_EVAL_ROWS = "give the dataset an eval split (`eval`, `eval_split`, `eval_rows` or `eval_fraction`)"
_EVALUATED = frozenset(
    "loss runtime samples_per_second steps_per_second completions/repeated_share".split()
) | frozenset(EVAL_METRICS)
"""What evaluation may log besides the rewards."""


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


def check_early_stopping(context: CheckContext) -> Iterator[Issue]:
    """Find best models and early stopping that nothing decides, and metrics and rules that never apply."""
    recipe = context.recipe
    yield from _check_min_delta(recipe, context.rewards)
    yield from _check_stop_when(recipe)
    # Otherwise `PARTNERS` has the settings that nothing reads.
    if has_best(recipe):
        yield from _check_watched(context)


def _check_watched(context: CheckContext) -> Iterator[Issue]:
    """Find best models that nothing decides, and metrics that no evaluation logs."""
    recipe = context.recipe
    metric = str(recipe.setting("metric_for_best_model") or "reward").removeprefix("eval_")
    of_reward = metric == "reward" or (metric.startswith("rewards/") and metric.endswith("/mean"))
    if recipe.setting("greater_is_better") is False and of_reward:
        seen = "the model with the lowest reward would count as the best"
        fix = "set it to true, or remove it"
        yield Issue(seen, fix, "training.greater_is_better", level="warning")
    # What is evaluated depends on the sets.
    of_sets = (*context.loaded.problems, *check_during(context), *find_conflicts(recipe, DURING))
    if not any(
        each.level == "error" and each.path.startswith("evaluation.during") for each in of_sets
    ):
        yield from _check_best(recipe)
        yield from _check_metrics(recipe)


def _check_best(recipe: Recipe) -> Iterator[Issue]:
    """Find best models that cannot be known, and early stopping without evaluation."""
    training, evaluates = recipe.training, recipe.training.eval_strategy
    best, saves = recipe.loads_best, recipe.setting("save_strategy")
    yield from _check_same_metric(recipe)
    if saves == "best" and evaluates == "no" and not recipe.is_best_of_held_out_set:
        seen = "nothing is evaluated that tells which model is the best"
        fix = "set `save_strategy: steps`, or `eval_strategy: steps` too"
        yield Issue(seen, fix, "training.save_strategy")
        return
    # `_check_metrics` finds those that no set has.
    if recipe.is_best_of_held_out_set or (recipe.evaluation.during and evaluates == "no"):
        if best and saves == "no":
            yield Issue(
                "the best model is saved, and `save_strategy` is `no`",
                "set `save_strategy: steps`",
                "training.load_best_model_at_end",
            )
        return
    if best and (saves != evaluates or evaluates == "no"):
        seen = f"the best model is known only where both evaluation (`{evaluates}`) and saving (`{saves}`) happen"
        same = next((each for each in (saves, evaluates) if each != "no"), "steps")
        fix = f"set both to the same, such as `eval_strategy: {same}` and `save_strategy: {same}`"
        yield Issue(seen, fix, "training.load_best_model_at_end")
    elif best and evaluates == "steps":
        saved = recipe.setting("save_steps")
        every = recipe.setting("eval_steps") or recipe.logging.logging_steps
        if saved >= 1 and every >= 1 and saved % every:
            seen = f"{saved:g} is not a multiple of `eval_steps` ({every:g}), which `load_best_model_at_end` needs"
            fix = f"set it to {every * (saved // every + 1):g}, or `eval_steps` to a divisor of it"
            yield Issue(seen, fix, "training.save_steps")
    if training.early_stopping and evaluates == "no":
        seen = "early stopping reads an evaluation metric, and `eval_strategy` is `no`"
        fix = "set `training.eval_strategy: steps` and `training.eval_steps`"
        yield Issue(seen, fix, "training.early_stopping")


def _check_min_delta(recipe: Recipe, params: Mapping[int, RewardParams]) -> Iterator[Issue]:
    """Find early stopping that asks for more improvement than there can be."""
    stopping = recipe.training.early_stopping
    if stopping is None or not recipe.is_sampled or len(params) != len(recipe.rewards):
        return
    named = stopping.metric or recipe.setting("metric_for_best_model") or REWARD
    span = 1.0 if "/accuracy/" in f"/{named}" else math.inf
    if str(named).rpartition("/")[2].removeprefix("eval_") == REWARD:
        span = sum(
            abs(each.weight) * (clip_score(high, each.clip) - clip_score(low, each.clip))
            for each, (low, high) in zip(
                recipe.rewards,
                (params[index].details().range for index in range(len(params))),
                strict=True,
            )
            if each.weight
        )
    if stopping.min_delta >= span > 0:
        seen = f"no evaluation can improve by {stopping.min_delta:g}: `{named}` changes by {span:g} at most"
        fix = f"write {span / 100:g}, say, or remove it"
        yield Issue(seen, fix, "training.early_stopping.min_delta", level="warning")


def _check_same_metric(recipe: Recipe) -> Iterator[Issue]:
    """Find early stopping by another metric than the best model: transformers has one for both."""
    stopping, best = (recipe.training.early_stopping, recipe.setting("metric_for_best_model"))
    metric = stopping.metric if stopping else None
    if metric and best and metric.removeprefix("eval_") != str(best).removeprefix("eval_"):
        seen = f"`{metric}` is not `metric_for_best_model` (`{best}`), which early stopping watches"
        fix = "name one of them only: it decides on the best model and on stopping"
        yield Issue(seen, fix, "training.early_stopping.metric")


def _check_metrics(recipe: Recipe) -> Iterator[Issue]:
    """Find metrics that training waits for and no evaluation logs."""
    training, during = recipe.training, recipe.evaluation.during
    evaluates, stopping = training.eval_strategy != "no", training.early_stopping
    named: dict[str, str | None] = {}
    if stopping and stopping.metric is not None:
        named["training.early_stopping.metric"] = stopping.metric
    metric = recipe.setting("metric_for_best_model")
    if metric is not None or not named:
        named["training.metric_for_best_model"] = metric
    for path in [path for path, metric in named.items() if metric == ""]:
        yield Issue("is empty", "name a metric, or remove it", path)
        del named[path]
    if not recipe.is_sampled:
        for path, metric in named.items():
            if metric is not None and metric.removeprefix("eval_") not in (RANKING, GAP):
                best = f"eval_{RANKING} (the share of pairs ranked right)"
                seen = f"`{metric}` is not measured on scored data; {best} and eval_{GAP} are"
                yield Issue(seen, f"set it to eval_{RANKING}", path)
        return
    if not (evaluates or recipe.loads_best or during) or training.mode == "async":
        return
    by_trl = evaluates or not during
    with suppress(RewardError):
        known = {name.removeprefix("eval_") for name in _held_out_metrics(recipe)}
        known |= set(_evaluated_metrics(recipe) if by_trl else ())
        best = "eval_reward" if recipe.learns_from_rewards else "eval_kl"
        if not by_trl:
            best = f"{during[0].prefix}reward"
        own = by_trl and any(reward.kind == "python" for reward in recipe.rewards)
        for path, metric in named.items():
            name = (metric or best).removeprefix("eval_")
            close = f"eval_{nearest(name, known)}" if nearest(name, known) else best
            # A set's name in front is easily left out.
            ending = next((each for each in sorted(known) if each.endswith(f"/{name}")), None)
            close = f"eval_{ending}" if ending else close
            if name not in known:
                unless = " unless a reward function does" if own else ""
                seen = f"no evaluation logs `eval_{name}`{unless}"
                fix = f"set it to {close}"
                fix += f", or log it: `log_metric({name!r}, …)`" if own else ""
                yield Issue(seen, fix, path, level="warning" if own else "error")


def _evaluated_metrics(recipe: Recipe) -> Iterator[str]:
    of_rewards = (REWARD, REWARD_STD, FRAC_ZERO_STD)
    generation = recipe.generation
    has_groups = (generation.num_generations_eval or generation.num_generations) > 1
    missing = {*(() if recipe.rewards else of_rewards), *(() if has_groups else (FRAC_ZERO_STD,))}
    yield from _EVALUATED - missing
    for name in name_rewards(recipe.rewards):
        yield from (f"rewards/{name}/{what}" for what in ("mean", "std"))
    for source in recipe.dataset.shares:
        yield from (f"sources/{source}/{what}" for what in {REWARD, FRAC_ZERO_STD} - missing)


def _held_out_metrics(recipe: Recipe) -> Iterator[str]:
    right, names = right_scores(recipe.rewards), name_rewards(recipe.rewards)
    for config in recipe.evaluation.during:
        size = recipe.evaluation.settings_of(config).samples_per_prompt
        sources = () if config.source else tuple(recipe.dataset.shares)
        for metric in metric_names(
            names, right, size, episodes=recipe.has_episodes, sources=sources
        ):
            yield f"{config.prefix}{metric}"


def _check_stop_when(recipe: Recipe) -> Iterator[Issue]:
    """Find rules that can never stop this run."""
    if not recipe.training.stop_when:
        return
    from grpo_cli.analysis.diagnosis.diagnosis import RULES

    reasons = {rule.name: rule.skip_reason(recipe) for rule in RULES}
    if recipe.training.eval_strategy == "no":
        # The measurement after training comes too late to stop it.
        reasons["held_out_gap"] = "`eval_strategy` is `no`, so held-out prompts are not looked at"
    for place, name in enumerate(recipe.training.stop_when):
        if reasons[name] is not None:
            seen = f"`{name}` can never stop this run: {reasons[name]}"
            fix = f"remove `{name}`, or change that"
            yield Issue(seen, fix, f"training.stop_when.{place}", level="warning")

"""Checks of `dataset`: its sources, streamed rows, what prompts are drawn by; and of the warm-up on its rows."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from pydantic import ValidationError

from grpo_cli.batch.plan import BatchPlan
from grpo_cli.checks.contents import collect
from grpo_cli.checks.rows import check_fixed
from grpo_cli.data.mixing import SOURCE
from grpo_cli.data.preview import SAMPLE_ROWS, Preview, preview
from grpo_cli.data.prompts import render_template, template_columns
from grpo_cli.data.rows import Row, RowNames, show_names, suggest
from grpo_cli.data.solve_rates import read_solve_rates
from grpo_cli.errors import ProblemsError
from grpo_cli.issues import Issue
from grpo_cli.models.source import read_config, token_counter
from grpo_cli.recipe.dataset import FIRST_ROWS, MixtureDataset
from grpo_cli.recipe.difficulty import (
    DifficultyConfig,
    OrderDifficulty,
    PoolsDifficulty,
    read_number,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.recipe.warmup import WarmupConfig
from grpo_cli.rewards.building import name_rewards, right_answers, right_scores
from grpo_cli.rewards.registry import find_kind
from grpo_cli.rewards.scoring import clip_score

_ANSWER = "warmup.answer"
_DIFFICULTY = "dataset.difficulty"
_STREAMING = "dataset.streaming"


def check_mixture(recipe: Recipe, seen: Preview | None, batch: BatchPlan) -> Iterator[Issue]:
    """Check the sources beside each other, and what they cannot be combined with."""
    dataset = recipe.dataset
    names = [source.source_name for source in dataset.parts]
    for index, reward in enumerate(recipe.rewards):
        if reward.source and reward.source not in names:
            fix = f"name one of {', '.join(map(str, names))}" if names[0] else "remove it"
            yield Issue(f"there is no source `{reward.source}`", fix, f"rewards.{index}.source")
    if not isinstance(dataset, MixtureDataset):
        return
    if len(names) == 1:
        fix = "add another, or write its keys into `dataset` itself"
        yield Issue("has one source, which gives all prompts", fix, "dataset.sources", level="note")
    if recipe.training.mode == "async":
        fix = "leave out `training.mode`, or mix the files beforehand"
        yield Issue("does not work with `training.mode: async`", fix, "dataset.sources")
    if recipe.warmup and recipe.warmup.train:
        fix = "leave it out: the warm-up then learns from the first prompts of the mixture"
        yield Issue("does not work with `dataset.sources`", fix, "warmup.train")
    yield from _check_share(dataset, seen, batch)


def _check_share(
    dataset: MixtureDataset, seen: Preview | None, batch: BatchPlan
) -> Iterator[Issue]:
    """Find sources that have fewer prompts than a batch takes from them."""
    prompts = batch.prompts_per_generation_batch
    for place, source in enumerate(dataset.sources):
        size = seen.sources[place] if seen else None
        share = (prompts or 0) * dataset.shares[source.name]
        if size is not None and share > size:
            text = (
                f"source `{source.name}` has {size} prompts, and a generation batch takes {share:.3g} from it, so "
                "that it asks some of them twice"
            )
            fix = f"give it more rows, or set `ratio: {source.ratio * size / share:.2g}`"
            yield Issue(text, fix, f"dataset.sources.{place}", level="warning")


def check_streaming(recipe: Recipe) -> Iterator[Issue]:
    """Find what does not work with streamed rows."""
    dataset = recipe.dataset
    if isinstance(dataset, MixtureDataset):
        for place, source in enumerate(dataset.sources):
            if source.streams:
                fix = "leave it out, or stream one dataset in which the rows are mixed"
                path = f"dataset.sources.{place}.streaming"
                yield Issue("does not work in a source of a mixture", fix, path)
    if dataset.streams is None:
        return
    if recipe.training.max_steps <= 0:
        seen = f"is needed with `{_STREAMING}`: rows are not counted, and no epoch ends"
        yield Issue(seen, "set the number of optimizer steps", "training.max_steps")
    if dataset.eval_fraction is not None:
        fix = "name held-out rows by `eval` (files) or `eval_split` (hub)"
        yield Issue(f"does not work with `{_STREAMING}`", fix, "dataset.eval_fraction")
    warmup = recipe.warmup
    conflicts = {
        "dataset.difficulty": dataset.difficulty is not None,
        "generation.dynamic_sampling": recipe.generation.dynamic_sampling is not None,
        "training.mode": recipe.training.mode == "async",
        # TRL reads such data without workers.
        "training.dataloader_prefetch_factor": "dataloader_prefetch_factor"
        in recipe.training.extras,
    }
    for path in (path for path, holds in conflicts.items() if holds):
        yield Issue(f"does not work with `{_STREAMING}`", "leave one of them out", path)
    if warmup is not None and not warmup.train and warmup.limit > FIRST_ROWS:
        seen = f"is {warmup.limit:,}, and of streamed rows a warm-up reads the first {FIRST_ROWS:,}"
        yield Issue(seen, "lower it, or name files of its own by `warmup.train`", "warmup.limit")
    strategies = {
        "save_strategy": recipe.setting("save_strategy"),
        "eval_strategy": recipe.training.eval_strategy,
    }
    for name in (name for name, strategy in strategies.items() if strategy == "epoch"):
        yield Issue(
            f"is `epoch`, and with `{_STREAMING}` no epoch ends", "set `steps`", f"training.{name}"
        )


def check_difficulty(recipe: Recipe, seen: Preview | None) -> Iterator[Issue]:
    """Check what prompts are drawn by.

    Args:
        recipe: The recipe.
        seen: The beginning of its data; None if it could not be read.
    """
    config = recipe.dataset.difficulty
    if config is None:
        return
    if recipe.training.mode == "async":
        fix = "leave it out, or `training.mode`"
        yield Issue("does not work with `training.mode: async`", fix, _DIFFICULTY)
    if not recipe.is_sampled:
        fix = "leave it out: nothing is sampled that could be right or wrong"
        yield Issue("does not work with `dataset.kind: scored`", fix, _DIFFICULTY)
        return
    if isinstance(config, OrderDifficulty) and recipe.dataset.shares:
        seen_ratios = "an order over all sources leaves their ratios out of account"
        fix = "write `kind: adaptive`, or put the rows into one source in that order"
        yield Issue(seen_ratios, fix, f"{_DIFFICULTY}.kind")
    if isinstance(config, PoolsDifficulty):
        yield from _check_pools(config)
    if not isinstance(config, OrderDifficulty):
        problems = [*_check_reward(recipe, config.reward)]
        yield from problems
        if config.samples is not None and not problems:
            right = right_answers(recipe.rewards, config.reward)
            yield from collect(partial(read_solve_rates, config.samples, right))
    if seen is not None and seen.columns is not None:
        yield from _check_drawn_by(recipe, config, seen)


def _check_pools(config: PoolsDifficulty) -> Iterator[Issue]:
    if config.hard >= config.easy:
        text = f"is {config.hard:g}, and `easy` is {config.easy:g}: every prompt would be one or the other"
        yield Issue(text, "set it below `easy`", f"{_DIFFICULTY}.hard")
    if config.easy_share + config.hard_share > 1:
        text = f"is, together with `easy_share`, {config.easy_share + config.hard_share:g}"
        yield Issue(text, "lower one of them: 1 is all prompts", f"{_DIFFICULTY}.hard_share")


def _check_reward(recipe: Recipe, named: str | None) -> Iterator[Issue]:
    names = name_rewards(recipe.rewards)
    if named is not None and named not in names:
        text = f"there is no reward `{named}`; there are {show_names(names)}"
        yield Issue(text, suggest(named, names, "name one of these"), f"{_DIFFICULTY}.reward")
    if named in names and named not in right_scores(recipe.rewards):
        config = recipe.rewards[names.index(named)]
        low, high = _range_of(config)
        if low < 0 or high > 1:
            text = f"`{named}` gives {low:g} to {high:g}, and shares of right answers are 0 to 1"
            yield Issue(
                text, "name a reward between 0 and 1, or `clip` it", f"{_DIFFICULTY}.reward"
            )
    if named is None and not right_scores(recipe.rewards):
        text = "no reward says whether an answer is right"
        ranges = zip(names, map(_range_of, recipe.rewards), strict=True)
        shares = [name for name, (low, high) in ranges if low >= 0 and high <= 1]
        fix = "add one that does, such as `kind: math`, or remove `difficulty`"
        if shares:
            fix = f"name one that is between 0 and 1: `reward: {shares[0]}`"
        yield Issue(text, fix, _DIFFICULTY)


def _range_of(config: RewardConfig) -> tuple[float, float]:
    """Return the least and the greatest score of a reward; 0 and 1 if only a function of the user's knows."""
    kind = find_kind(config.kind)
    low, high = 0.0, 1.0
    if kind is not None and config.kind not in ("python", "environment"):
        # Another check reports wrong parameters.
        with suppress(ValidationError):
            low, high = kind.model_validate(config.params).details().range
    return clip_score(low, config.clip), clip_score(high, config.clip)


def _check_drawn_by(recipe: Recipe, config: DifficultyConfig, seen: Preview) -> Iterator[Issue]:
    columns = frozenset(seen.columns or ()).union(*(p.columns for p in recipe.dataset.parts))
    columns |= {SOURCE} if recipe.dataset.shares else set()
    for key in ("column", "solve_rate", "by"):
        name = getattr(config, key, None)
        if name is not None and name not in columns:
            text = f"there is no column `{name}`; there are {show_names(sorted(columns))}"
            yield Issue(text, suggest(name, columns, "name one of these"), f"{_DIFFICULTY}.{key}")
        elif name is not None and key != "by":
            yield from collect(partial(_read_numbers, key, name, seen))


def _read_numbers(key: str, column: str, seen: Preview) -> None:
    for row in seen.sample:
        read_number(key, column, row.get(column))


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
    # A resolved recipe holds the default too.
    if (
        not warmup.eval_fraction
        and warmup.patience != WarmupConfig.model_fields["patience"].default
    ):
        seen_none = "has no effect: `eval_fraction` is 0, so there is no held-out loss"
        fix = "set `warmup.eval_fraction: 0.1`, or remove it"
        yield Issue(seen_none, fix, "warmup.patience", level="warning")
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
        found = [*_check_answers(warmup, seen.columns, added, seen)]
        yield from found
        if not found and not recipe.has_episodes:
            yield from _check_answer_lengths(recipe, warmup, seen)


def _check_answer_lengths(recipe: Recipe, warmup: WarmupConfig, seen: Preview) -> Iterator[Issue]:
    """Find the first answer that a completion, or with its prompt the model, has no room for."""
    limit = recipe.generation.max_completion_length
    context = read_config(recipe.model).get("max_position_embeddings")
    names, [answer, *_] = (
        seen.train.names if seen.train else RowNames("training"),
        warmup.answer or [""],
    )
    user, count = recipe.dataset.parts[0].prompt.user or "", None
    for place, row in _sample_rows(seen):
        texts = {}
        with suppress(ProblemsError):
            texts = {
                text: render_template(text, row, names(place), _ANSWER) for text in (answer, user)
            }
        # A token is one byte at least.
        size = sum(len(text.encode()) for text in texts.values())
        if not texts or size < min(limit, context or limit):
            continue
        if (count := count or token_counter(recipe.model)) is None:
            return
        tokens, prompt = count(texts[answer]) + 1, count(texts[user])
        raise_it = f"set `generation.max_completion_length: {tokens}`, or shorten it"
        if tokens > limit:
            text = f"the answer of {names(place)} has {tokens} tokens, and a completion {limit} at most"
            yield Issue(f"{text} (`generation.max_completion_length`)", raise_it, _ANSWER)
            return
        if context and tokens + prompt > context:
            text = (
                f"the prompt and the answer of {names(place)} have {tokens + prompt} tokens or more"
            )
            yield Issue(f"{text}, and the model reads {context}", "shorten it", _ANSWER)
            return


def _sample_rows(seen: Preview) -> Iterable[tuple[int, Row]]:
    """Return place and row of the first rows that are not dropped."""
    if seen.train is None:
        return enumerate(seen.sample)
    return islice(seen.train.left_rows.items(), SAMPLE_ROWS)


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
    yield from check_fixed(warmup.answer or (), columns, _ANSWER)
    for text in warmup.answer or ():
        found = collect(partial(template_columns, text, _ANSWER))
        missing = [] if found else sorted(template_columns(text, _ANSWER) - columns)
        for name in missing:
            message = f"the template names `{name}`, which is not a column; there are {show_names(columns)}"
            found.append(Issue(message, suggest(name, columns, "name one of these"), _ANSWER))
        yield from found
        # Columns that the recipe makes are there only once the data is built.
        if not found and template_columns(text, _ANSWER) <= own:
            for place, row in _sample_rows(seen):
                yield from collect(partial(render_template, text, row, names(place), _ANSWER))

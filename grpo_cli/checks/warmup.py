"""Checks of the `warmup` section on the first rows."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from grpo_cli.checks.context import CheckContext, collect
from grpo_cli.checks.rows import check_fixed
from grpo_cli.data.preview import SAMPLE_ROWS, Preview, preview
from grpo_cli.data.prompts import render_template, template_columns
from grpo_cli.data.rows import Row, RowNames, show_names, suggest
from grpo_cli.errors import ProblemsError
from grpo_cli.issues import Issue
from grpo_cli.models.source import read_config, token_counter
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.recipe.warmup import WarmupConfig

_ANSWER = "warmup.answer"


def check_warmup(context: CheckContext) -> Iterator[Issue]:
    """Check that the answers of the warm-up can be written, and have room."""
    recipe, warmup, seen = context.recipe, context.recipe.warmup, context.preview
    if warmup is None:
        return
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


def _check_answers(
    warmup: WarmupConfig, own: frozenset[str], added: frozenset[str], seen: Preview
) -> Iterator[Issue]:
    columns = own | added
    names = seen.train.names if seen.train else RowNames("training")
    yield from check_fixed(warmup.answer or (), columns, _ANSWER)
    for text in warmup.answer or ():
        found: list[Issue] = []
        with collect(found):
            template_columns(text, _ANSWER)
        missing = [] if found else sorted(template_columns(text, _ANSWER) - columns)
        for name in missing:
            message = f"the template names `{name}`, which is not a column; there are {show_names(columns)}"
            found.append(Issue(message, suggest(name, columns, "name one of these"), _ANSWER))
        # Columns that the recipe makes are there only once the data is built.
        if not found and template_columns(text, _ANSWER) <= own:
            for place, row in _sample_rows(seen):
                with collect(found):
                    render_template(text, row, names(place), _ANSWER)
        yield from found

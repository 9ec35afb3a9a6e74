"""Checks of `tools`, `environment` and `episode`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.checks.context import CheckContext
from grpo_cli.data.preview import Preview
from grpo_cli.data.rows import Row, place_issues
from grpo_cli.errors import ProblemsError, nearest
from grpo_cli.issues import Issue
from grpo_cli.models.source import read_source_template
from grpo_cli.recipe.dataset import SOURCE, PromptConfig
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import count_noun

Kinds = Mapping[str, Any]
"""The parameters of tools and environments by their path in the recipe, such as `tools.0`."""

_MUCH = 2
"""How many times the longest episode its turns may add up to before that is noted."""

_SCORE_CALLS = frozenset({"tool_use", "environment", "python"})
"""Rewards that may score the calls of an episode rather than its answer."""

_DIALOGUE = "an episode is a dialogue, which needs a chat template"


def check_episodes(context: CheckContext) -> Iterator[Issue]:
    """Find settings of episodes that have no effect or do not fit together."""
    recipe, kinds = context.recipe, context.kinds
    yield from _check_rewards(recipe, kinds)
    if not recipe.has_episodes:
        seen = "has no effect: the recipe has neither tools nor an environment"
        yield Issue(
            seen, "add `tools` or an `environment`, or remove it", "episode", level="warning"
        )
        return
    yield from _check_order(recipe)
    yield from _check_budget(recipe)
    yield from _check_turns(recipe, kinds)
    yield from _check_time(recipe, kinds)
    yield from _check_called_names(recipe, kinds)
    yield from _check_style(recipe, context.preview)
    yield from _check_template(recipe)


def _check_rewards(recipe: Recipe, kinds: Kinds) -> Iterator[Issue]:
    """Find scores of environments that no reward reads."""
    used = {reward.kind for reward in recipe.rewards}
    # A function of the user's may ask the environments itself, as in TRL.
    if recipe.rewards and used.isdisjoint(("environment", "python")):
        for path, params in kinds.items():
            if path.startswith("environment") and params.gives_reward():
                seen = "scores its episodes, and no reward reads that"
                fix = "add `{kind: environment}` to `rewards`"
                yield Issue(seen, fix, path, level="warning")


def _check_order(recipe: Recipe) -> Iterator[Issue]:
    """Find environments after one that takes every row."""
    conditions = [config.when for config in recipe.environment]
    if None in conditions[:-1]:
        first = conditions.index(None)
        seen = f"is never used: environment.{first} has no `when`, and takes every row before it"
        fix = f"give environment.{first} a `when`, or move it to the end"
        yield Issue(seen, fix, f"environment.{first + 1}", level="warning")


def _check_turns(recipe: Recipe, kinds: Kinds) -> Iterator[Issue]:
    """Find too few turns for the results of calls, and for the tries at a question."""
    turns = recipe.episode.max_turns
    # One turn is enough where the calls themselves are scored.
    if turns == 1 and recipe.tools and {each.kind for each in recipe.rewards} - _SCORE_CALLS:
        seen = "with 1 turn an episode ends at the first call: the model never reads its result"
        yield Issue(seen, "set it to 2 or more", "episode.max_turns", level="warning")
    for path, params in kinds.items():
        if (tries := getattr(params, "tries", 0)) > turns:
            seen = f"{tries} tries need as many turns, and `episode.max_turns` is {turns}"
            fix = f"set `episode: {{max_turns: {tries}}}`, or `tries: {turns}`"
            yield Issue(seen, fix, f"{path}.tries", level="warning")


def _check_budget(recipe: Recipe) -> Iterator[Issue]:
    """Compare the tokens of turns with those of an episode."""
    episode, most = recipe.episode, recipe.generation.max_completion_length
    turn, turns, result = episode.max_turn_tokens, episode.max_turns, episode.max_result_tokens
    if turn is not None and turn > most:
        seen = f"{turn} is more than the whole episode may have (`generation.max_completion_length: {most}`)"
        fix = f"set it to {max(most // turns, 1)}, say, or raise `generation.max_completion_length`"
        yield Issue(seen, fix, "episode.max_turn_tokens")
        return
    needed = turns * (turn or 0) + (turns - 1) * result
    if needed > _MUCH * most:
        own = f"{count_noun(turns, 'turn')} of {count_noun(turn, 'token')} and " if turn else ""
        results = f"{count_noun(turns - 1, 'result')} of {result} tokens"
        seen = f"an episode ends at {most:,} tokens; {own}{results} are {needed:,}"
        fix = "unless results are short, raise it, or lower `max_turns` or `max_result_tokens`"
        yield Issue(seen, fix, "generation.max_completion_length", level="note")


def _check_time(recipe: Recipe, kinds: Kinds) -> Iterator[Issue]:
    """Find time limits of calls that another one comes before."""
    most = recipe.episode.tool_timeout_s
    for path, params in kinds.items():
        # Only a limit that is written; the defaults of kinds are longer than that of an episode.
        own = params.timeout_s if "timeout_s" in params.model_fields_set else 0.0
        if own > most:
            seen = (
                f"{own:g} is never reached: `episode.tool_timeout_s` ends a call after {most:g} s"
            )
            fix = f"set `episode: {{tool_timeout_s: {own + 1:g}}}`, or lower it"
            yield Issue(seen, fix, f"{path}.timeout_s", level="warning")


def _check_called_names(recipe: Recipe, kinds: Kinds) -> Iterator[Issue]:
    """Find prompts that call a tool by almost its name."""
    names = [name for params in kinds.values() for name in params.tool_names() or ()]
    for place, part in enumerate(recipe.dataset.parts):
        for key in ("system", "user"):
            called = re.findall(r"\b(\w+)\(", getattr(part.prompt, key) or "")
            pairs = {name: nearest(name, names) for name in called if name not in names}
            found = [
                Issue(
                    f"names `{name}`, and the tool is `{close}`: calls of other names fail",
                    f"write `{close}`",
                    f"dataset.prompt.{key}",
                    level="warning",
                )
                for name, close in pairs.items()
                if close
            ]
            yield from place_issues(found, place, part.source_name)


def _check_style(recipe: Recipe, preview: Preview | None) -> Iterator[Issue]:
    """Check that prompts are messages, to which an answer and more messages can be added."""
    for place, part in enumerate(recipe.dataset.parts):
        rows = [
            row
            for row in (preview.sample if preview else ())
            if part.source_name in (None, row.get(SOURCE))
        ]
        yield from place_issues(_find_plain_prompts(part.prompt, rows), place, part.source_name)


def _find_plain_prompts(prompt: PromptConfig, rows: Sequence[Row]) -> Iterator[Issue]:
    path = "dataset.prompt.style"
    if prompt.style == "text":
        yield Issue(f"{_DIALOGUE}; prompts of plain `text` have none", "write `style: chat`", path)
    is_plain = prompt.style == "auto" and prompt.user is None and prompt.system is None
    if is_plain and any(isinstance(row.get("prompt"), str) for row in rows):
        fix = "write `dataset.prompt: {style: chat}`, which makes them messages of the user"
        yield Issue(f"{_DIALOGUE}, and the rows have prompts of plain text", fix, path)


def _check_template(recipe: Recipe) -> Iterator[Issue]:
    """Check that there is a chat template; whether it renders several turns, and tools, shows in the probe."""
    try:
        template = read_source_template(recipe.model)
    except ProblemsError:
        return  # `check_model` tells
    if template == "":
        seen = f"{_DIALOGUE}, and the tokenizer of {recipe.model.path} has none"
        yield Issue(seen, "set `model.chat_template`", "model.path")
    elif template and recipe.tools and not re.search(r"\btools\b", template):
        from grpo_cli.environments.contract import tool_template_fix

        seen = "the chat template does not read `tools`, so the model would not see those of the recipe"
        path = "model.chat_template" if recipe.model.chat_template else "model.path"
        yield Issue(seen, tool_template_fix(), path, level="warning")

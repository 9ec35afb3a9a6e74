"""Rows of (prompt, response, reward) as groups: the responses of one prompt, side by side."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from grpo_cli.data.prompts import Prompt, Renderer, is_plain, render_template, template_columns
from grpo_cli.data.rows import Row, RowNames, canonical_json, keep_rows, show
from grpo_cli.errors import recipe_error
from grpo_cli.recipe.dataset import ScoredDataset

RESPONSE, REWARD = "dataset.response", "dataset.reward"


@dataclass(frozen=True)
class GroupReport:
    """What became of the scored rows of training."""

    prompts: int
    """Prompts with two responses or more."""
    responses: int
    single: int
    """Prompts left out because they have one response, and nothing to compare it with."""
    equal: int
    """Prompts kept whose responses all have the same reward: they teach nothing."""
    smallest: int
    """Responses of the smallest group; of the middle and the largest one below."""
    median: int
    largest: int
    empty: int = 0


def make_groups(
    dataset: ScoredDataset,
    rows: Sequence[tuple[int, Row]],
    prompts: Sequence[Prompt],
    names: RowNames,
) -> list[Row]:
    """Return one row for each prompt, in the order in which prompts first appear.

    Takes rows with their places in the source, and their prompts; returns `prompt`, `row_id` (place of the
    prompt's first row), `responses` and `rewards`.

    Raises `RecipeError` if a response cannot be rendered, or a reward is not a finite number.
    """
    groups: dict[str, Row] = {}
    for (place, row), prompt in zip(rows, prompts, strict=True):
        where = names(place)
        fresh = {"prompt": prompt, "row_id": place, "responses": [], "rewards": []}
        group = groups.setdefault(canonical_json(prompt), fresh)
        group["responses"].append(_read_response(dataset.response, row, where))
        group["rewards"].append(_read_reward(row, dataset.reward, where))
    return list(groups.values())


def drop_single(groups: Sequence[Row], name: str) -> list[Row]:
    """Return the groups of two responses or more; raises `RecipeError` if there is none."""
    kept = [group for group in groups if len(group["responses"]) > 1]
    if not kept:
        message = f"each of the {len(groups)} {name} prompts has a single response, so none can be compared"
        fix = "score several responses of each prompt; rows of one group have the same prompt"
        raise recipe_error(message, fix, "dataset")
    return kept


def report_groups(groups: Sequence[Row], single: int) -> GroupReport:
    """Return the sizes of the groups of training; `single` is the number of prompts with a single response."""
    sizes = sorted(len(group["responses"]) for group in groups)
    return GroupReport(
        prompts=len(sizes),
        responses=sum(sizes),
        single=single,
        equal=sum(len(set(group["rewards"])) == 1 for group in groups),
        smallest=sizes[0],
        median=median_low(sizes),
        largest=sizes[-1],
        empty=sum(not text.strip() for group in groups for text in group["responses"]),
    )


def look_at_groups(dataset: ScoredDataset, rows: Sequence[Row], names: RowNames) -> GroupReport:
    """Return the sizes of the groups of one split; needs no tokenizer. Raises `RecipeError`."""
    renderer = Renderer(dataset.prompt, "text" if dataset.prompt.style == "text" else "chat")
    kept = list(keep_rows(dataset, rows, names))
    prompts = [renderer.render(row, names(place)) for place, row in kept]
    groups = make_groups(dataset, kept, prompts, names)
    compared = drop_single(groups, names.split)
    return report_groups(compared, len(groups) - len(compared))


def _read_response(template: str, row: Row, where: str) -> str:
    for name in template_columns(template, RESPONSE) if is_plain(template) else ():
        if isinstance(row.get(name), list | dict):
            fix = f'name the text in it, such as response: "{{{{ {name}[0].content }}}}"'
            message = f"{where} has no text in `{name}`: {show(row[name])}"
            raise recipe_error(message, fix, RESPONSE)
    return render_template(template, row, where, RESPONSE)


def _read_reward(row: Row, column: str, where: str) -> float:
    value: Any = row.get(column)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        seen = f"`{column}` is {show(value)}" if column in row else f"there is no `{column}`"
        fix = "name the column that holds the reward, write numbers, or leave such rows out of the data"
        if re.fullmatch(r"\s*[-+]?\d+,\d+\s*", str(value)):
            fix = f"write decimals with a point: {value.replace(',', '.').strip()}"
        raise recipe_error(f"{where} has no reward: {seen}", fix, REWARD)
    return number

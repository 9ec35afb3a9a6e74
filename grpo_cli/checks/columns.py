"""Columns that templates, rewards and conditions name, and the data lacks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_cli.data.images import MARK
from grpo_cli.data.rows import Row
from grpo_cli.errors import nearest
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import IMAGES
from grpo_cli.rewards.contract import RewardParams

DATA = {"training": "data", "evaluation": "evaluation data"}
ADDED = frozenset({"prompt", "row_id"})
"""Columns that `grpo` adds to those of the data."""
_HOLDER = "<the column that holds it>"


def check_needed_columns(
    kinds: Mapping[str, Any], available: frozenset[str], rows: Sequence[Row] = ()
) -> Iterator[Issue]:
    """Find columns that rewards, tools or environments need and that are not there.

    Args:
        kinds: The parameters of each entry, by its path in the recipe.
        available: The columns that there are.
        rows: Of the data, whose mappings may hold what is missing.
    """
    inner = {
        key: f"{name}.{key}"
        for row in rows[:1]
        for name, value in row.items()
        for key in (value if isinstance(value, dict) else ())
    }
    for path, params in kinds.items():
        who = f"the {'reward' if path.startswith('rewards') else 'environment'} needs"
        needed: Sequence[str] = ()
        if isinstance(params, RewardParams):
            needed = params.columns().required
        elif not path.startswith("tools"):
            needed = params.required_columns()
        for name in needed:
            if name not in available:
                issue = missing_column(name, available - ADDED, path, who, inner=inner.get(name))
                if path.startswith("environment") and available - ADDED == {"seed"}:
                    # Nobody can add a column to `kind: environment`.
                    fix = f"give `{name}` a default in reset(), or draw it from the seed there"
                    issue = replace(issue, fix=fix)
                if params.kind == "reasoning_gym":
                    fix = "use `dataset: {kind: reasoning_gym}`, whose rows have it"
                    issue = replace(issue, fix=fix)
                if name in (MARK, IMAGES):
                    # TRL's names, which `dataset.columns` refuses.
                    seen = f"{who} `{name}`, and prompts have no images"
                    fix = "name the columns with images in `dataset.prompt.images`"
                    if IMAGES in available:
                        seen, fix = issue.seen, f"name the argument `{IMAGES}`"
                    issue = replace(issue, seen=seen, fix=fix)
                yield issue


def missing_column(
    name: str,
    known: frozenset[str],
    path: str,
    who: str,
    split: str = "training",
    inner: str | None = None,
) -> Issue:
    """Return the issue of a column that is missing.

    Args:
        name: The column.
        known: Those that there are.
        path: Where it is named in the recipe.
        who: What names it, with a verb: `the reward needs`.
        split: `training` or `evaluation`.
        inner: Where a mapping of the data has it, such as `reward_model.ground_truth`.
    """
    bare = name.strip("{} ")
    close = bare if bare in known else nearest(name, known)
    seen = (
        f"{who} the column `{name}`, which the {DATA[split]} lacks (columns: {list_columns(known)})"
    )
    # YAML drops white space around a text without quotes.
    holder = f'"{close}"' if close and close != close.strip() else close
    example = f"`{name}: {inner or holder or _HOLDER}`"
    fix = f"add it under `dataset.columns`, such as {example}"
    return Issue(seen, f"use `{close}`, or {fix}" if close else fix, path)


def list_columns(names: frozenset[str]) -> str:
    """Return the names as messages list them."""
    return ", ".join(sorted(names)) or "none"


def rename_fix(name: str, close: str | None, split: str) -> str:
    """Return the fix of a template that names a missing column."""
    if split == "evaluation":
        # The recipe's templates and columns are the training data's too.
        return f"rename the column that holds it to `{name}` in the {DATA[split]}"
    other = f"`{close}`" if close else "a column of the data"
    add = f"add it under `dataset.columns`, such as `{name}: {close or _HOLDER}`"
    return f"rename it to {other} in the template, or {add}"

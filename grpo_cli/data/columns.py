"""The columns rewards receive: taken over, extracted by pattern, and kept clear of TRL's own names."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence

from grpo_cli.data.mixing import SOURCE
from grpo_cli.data.rows import Row, RowNames, columns_of, read_column, show, show_names, suggest
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import ColumnConfig, SingleDataset
from grpo_cli.user_code import time_limit

RESERVED = frozenset(
    "prompts completions completion_ids completion trainer_state log_extra log_metric environments image "
    "images row_id".split()
)
"""Names that TRL 1.16 gives rewards itself, that switch it to images, and our own `row_id`.

Source: `GRPOTrainer._calculate_rewards` and `_generate_and_score_completions`, trl 1.16.0.
"""
LIMIT_S = 2
"""Seconds of computing that a pattern may take for one row."""


def extract_columns(
    rows: Sequence[Row], columns: Mapping[str, ColumnConfig], names: RowNames
) -> list[Row | None]:
    """Add the recipe's columns to the rows; the columns they come from stay.

    Args:
        rows: The source rows.
        columns: New name → source column and pattern.
        names: Their names in messages.

    Returns:
        The rows with the new columns; None for each row dropped because a pattern was not found.

    Raises:
        RecipeError: With a problem for each column that cannot be made.
    """
    patterns = check_columns(columns, columns_of(rows), names.split)
    values = {
        name: _extract(rows, name, column, patterns.get(name), names)
        for name, column in columns.items()
    }
    missed = {
        name: {place for place, value in enumerate(values[name]) if value is None}
        for name in patterns
    }
    dropping = (missed[name] for name in patterns if columns[name].on_no_match == "drop")
    dropped: set[int] = set().union(*dropping)
    problems = []
    for name in patterns:
        if left := sorted(missed[name] - dropped):
            column, first = columns[name], read_column(rows[left[0]], columns[name].from_)
            message = (
                f"{show(column.regex)} finds nothing in `{column.from_}` of {len(left)} of {len(rows)} "
                f"{names.split} rows; the first is {names(left[0])}: {show(first)}"
            )
            fix = "correct the pattern"
            if len(left) < len(rows):
                fix += ", or drop such rows with on_no_match: drop"
            problems.append(Issue(message, fix, f"dataset.columns.{name}.regex"))
    if problems:
        raise RecipeError(problems)
    return [
        None if place in dropped else {**row, **{name: values[name][place] for name in columns}}
        for place, row in enumerate(rows)
    ]


def keep_rows(
    dataset: SingleDataset, rows: Sequence[Row], names: RowNames
) -> list[tuple[int, Row]]:
    """Return the place and all columns of each row that no pattern drops; raises as `extract_columns`."""
    added = {SOURCE: dataset.source_name} if dataset.source_name else {}
    made = extract_columns(rows, dataset.columns, names)
    return [(place, {**row, **added}) for place, row in enumerate(made) if row is not None]


def check_columns(
    columns: Mapping[str, ColumnConfig], available: Iterable[str] | None, split: str = "training"
) -> dict[str, re.Pattern[str]]:
    """Check the recipe's columns against those of the source.

    Args:
        columns: New name → source column and pattern.
        available: The source's columns; None if they are not known.
        split: `training` or `evaluation`, for messages.

    Returns:
        New name → compiled pattern, for those that have one.

    Raises:
        RecipeError: With one problem for each reserved name, missing source and ill-formed pattern.
    """
    existing = None if available is None else list(available)
    problems: list[Issue] = []
    patterns = {}
    for name, column in columns.items():
        path = f"dataset.columns.{name}"
        if name in RESERVED:
            message = f"`{name}` is a name TRL or `grpo` passes to rewards itself"
            problems.append(Issue(message, f"call the column `gold_{name}`, say", path))
        if existing is not None and not {column.from_, column.from_.partition(".")[0]} & {
            *existing
        }:
            message = (
                f"there is no column `{column.from_}`; the {split} rows have {show_names(existing)}"
            )
            fix = suggest(column.from_, existing, "name one of these columns")
            if split == "evaluation":
                # The training data has it under this name.
                fix = f"add `{column.from_}` to the evaluation data, or rename the column that holds it"
            problems.append(Issue(message, fix, f"{path}.from"))
        try:
            if column.regex is not None:
                patterns[name] = re.compile(column.regex)
        except (re.error, OverflowError, RecursionError) as error:
            message = f"{show(column.regex)} is not a regular expression: {error}"
            fix = "correct the pattern; single quotes keep YAML from reading backslashes"
            problems.append(Issue(message, fix, f"{path}.regex"))
    if problems:
        raise RecipeError(problems)
    return patterns


def drop_reserved(rows: Sequence[Row]) -> tuple[list[Row], frozenset[str]]:
    """Leave out the rows' own columns with reserved names; return the rows and those names."""
    reserved = RESERVED.intersection(columns_of(rows))
    if not reserved:
        return list(rows), reserved
    return [{name: row[name] for name in row if name not in reserved} for row in rows], reserved


def _extract(
    rows: Sequence[Row],
    name: str,
    column: ColumnConfig,
    pattern: re.Pattern[str] | None,
    names: RowNames,
) -> list[object]:
    """Return the values of a new column; None if the pattern finds nothing but white space."""
    values = [read_column(row, column.from_) for row in rows]
    if pattern is None:
        return values
    extracted: list[object] = []
    try:
        with time_limit(lambda frame: TimeoutError(), signal.ITIMER_VIRTUAL) as restart:
            for value in values:
                restart(LIMIT_S)
                match = None if value is None else pattern.search(str(value))
                text = (match[1] if pattern.groups else match[0]) if match else None
                extracted.append((text or "").strip() or None)
    except TimeoutError as error:
        place = len(extracted)
        message = (
            f"{show(column.regex)} takes more than {LIMIT_S} seconds on `{column.from_}` of {names(place)}: "
            f"{show(values[place])}"
        )
        fix = "simplify the pattern: a repetition inside a repetition, such as (a+)+, may take for ever"
        raise recipe_error(message, fix, f"dataset.columns.{name}.regex") from error
    return extracted

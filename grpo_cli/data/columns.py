"""The columns rewards receive: taken over, extracted by pattern, and kept clear of TRL's own names."""

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_cli.data.mixing import SOURCE
from grpo_cli.data.rows import (
    Columns,
    Row,
    RowNames,
    columns_of,
    read_column,
    rows_of,
    show,
    show_names,
    suggest,
)
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


class ColumnExtractor:
    """Adds the recipe's columns to the rows of a split, block by block; the columns they come from stay."""

    def __init__(
        self, columns: Mapping[str, ColumnConfig], available: Iterable[str], names: RowNames
    ) -> None:
        """Check the columns; raises `RecipeError` with a problem for each that cannot be made."""
        self._columns, self.names = columns, names
        self._patterns = check_columns(columns, available, names.split)
        self._misses: dict[str, tuple[int, str]] = {}
        """New column → how many rows its pattern does not match, and the first of them."""

    def extract(self, block: Columns, size: int, first: int = 0) -> tuple[Sequence[int], Columns]:
        """Return the places and columns, old and new, of the rows in which each pattern is found.

        `block` holds at least what new columns are made of; `first` is the place of its first row in the split.
        """
        places = range(first, first + size)
        if not self._columns:
            return places, block
        sources = {name: _read(block, each.from_, size) for name, each in self._columns.items()}
        made = {
            name: self._find(name, values, first) if name in self._patterns else values
            for name, values in sources.items()
        }
        missed = {
            name: {row for row, value in enumerate(made[name]) if value is None}
            for name in self._patterns
        }
        skipped: set[int] = set().union(*missed.values())
        dropped: set[int] = set().union(
            *(missed[name] for name in missed if self._columns[name].on_no_match == "drop")
        )
        for name in self._patterns:
            if left := sorted(missed[name] - dropped):
                shown = show(sources[name][left[0]])
                count, where = self._misses.get(
                    name, (0, f"{self.names(places[left[0]])}: {shown}")
                )
                self._misses[name] = count + len(left), where
        columns = {**block, **made}
        if not skipped:
            return places, columns
        kept = [row for row in range(size) if row not in skipped]
        columns = {name: [values[row] for row in kept] for name, values in columns.items()}
        return [places[row] for row in kept], columns

    def _find(self, name: str, values: Sequence[Any], first: int) -> list[Any]:
        """Return what a column's pattern finds in each value; None if that is nothing but white space."""
        column, pattern, found = self._columns[name], self._patterns[name], list[Any]()
        try:
            with time_limit(lambda frame: TimeoutError(), signal.ITIMER_VIRTUAL) as restart:
                for value in values:
                    restart(LIMIT_S)
                    match = None if value is None else pattern.search(str(value))
                    text = (match[1] if pattern.groups else match[0]) if match else None
                    found.append((text or "").strip() or None)
        except TimeoutError as error:
            row = len(found)
            message = (
                f"{show(column.regex)} takes more than {LIMIT_S} seconds on `{column.from_}` of "
                f"{self.names(first + row)}: {show(values[row])}"
            )
            fix = "simplify the pattern: a repetition inside a repetition, such as (a+)+, may take for ever"
            raise recipe_error(message, fix, f"dataset.columns.{name}.regex") from error
        return found

    def finish(self, total: int) -> None:
        """Refuse patterns that must match every row of `total` and did not, with a `RecipeError`."""
        problems = []
        for name, (count, where) in self._misses.items():
            column, fix = self._columns[name], "correct the pattern"
            all_rows = sum(size for _, size in self.names.files)
            where_of = "the first " if total < all_rows else ""
            message = (
                f"{show(column.regex)} finds nothing in `{column.from_}` of {count} of {where_of}{total:,} "
                f"{self.names.split} rows; the first is {where}"
            )
            if count < total:
                fix += ", or drop such rows with on_no_match: drop"
            problems.append(Issue(message, fix, f"dataset.columns.{name}.regex"))
        if problems:
            raise RecipeError(problems)


def keep_rows(
    dataset: SingleDataset, rows: Sequence[Row], names: RowNames
) -> Iterator[tuple[int, Row]]:
    """Yield the place and all columns of each row that no pattern drops; raises as `ColumnExtractor`."""
    added = {SOURCE: dataset.source_name} if dataset.source_name else {}
    available = columns_of(rows)
    extractor = ColumnExtractor(dataset.columns, available, names)
    block = {name: [row.get(name) for row in rows] for name in available}
    places, columns = extractor.extract(block, len(rows))
    for place, row in zip(places, rows_of(columns), strict=True):
        yield place, {**row, **added}
    extractor.finish(len(rows))


def _read(block: Columns, name: str, size: int) -> Sequence[Any]:
    """Return the values of a column, None if there is none; `a.b` is the key `b` of the mappings in column `a`."""
    first, _, rest = name.partition(".")
    values = block.get(name, [None] * size)
    if not rest or first not in block:
        return values
    return [
        read_column(outer, rest) if value is None and isinstance(outer, dict) else value
        for value, outer in zip(values, block[first], strict=True)
    ]


def check_columns(
    columns: Mapping[str, ColumnConfig], available: Iterable[str] | None, split: str = "training"
) -> dict[str, re.Pattern[str]]:
    """Return the compiled patterns of the recipe's columns, by name; `available` is None if it is not known.

    Raises `RecipeError` with one problem for each reserved name, missing source and ill-formed pattern.
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

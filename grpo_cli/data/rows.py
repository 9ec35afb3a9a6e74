"""Rows: their names and values in messages, the columns that rewards receive, and which rows are dropped."""

import json
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_cli.errors import RecipeError, nearest, recipe_error
from grpo_cli.issues import Issue, Level
from grpo_cli.recipe.dataset import SOURCE, ColumnConfig, SingleDataset

Row = dict[str, Any]
"""Column name → value."""
Columns = Mapping[str, Sequence[Any]]
"""Column name → the values of some rows."""

SHOWN_CHARACTERS = 80
SHOWN_NAMES = 12


@dataclass(frozen=True)
class RowNames:
    """Names the rows of a split in messages: by their number from 1 and, if there is one, their file."""

    split: str
    """`training` or `evaluation`."""
    files: tuple[tuple[Path, int], ...] = ()
    """Each file and its number of rows, in the order they were read."""
    first: int = 0
    """Rows of the split before the one at place 0."""

    def __call__(self, place: int) -> str:
        """Return the name of the row at a place, from 0: `row 7 of train.jsonl`."""
        file, number = self._find(place)
        return f"row {number + 1} of {file.name}" if file else f"{self.split} row {number + 1}"

    def folder(self, place: int) -> Path | None:
        """Return the folder of the file that holds the row at a place; None if it is in no file."""
        file, _ = self._find(place)
        return file.parent if file else None

    def _find(self, place: int) -> tuple[Path | None, int]:
        """Return a row's file, and its place in it, or in the split if it is in no file."""
        place += self.first
        left = place
        for file, count in self.files:
            if left < count:
                return file, left
            left -= count
        return None, place


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Return the union of the rows' columns, in the order in which they first appear."""
    if (stored := getattr(rows, "column_names", None)) is not None:
        return list(stored)
    names: dict[str, None] = {}
    for row in rows:
        if row.keys() - names.keys():
            names.update(dict.fromkeys(row))
    return list(names)


def rows_of(block: Columns) -> list[Row]:
    """Return the rows of columns."""
    return [dict(zip(block, each, strict=True)) for each in zip(*block.values(), strict=True)]


def read_column(row: Row, name: str) -> Any:
    """Return the value of a column, None if there is none; `a.b` is the key `b` of the mapping in column `a`."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return row.get(name)
    inner = row.get(first)
    return read_column(inner, rest) if isinstance(inner, dict) else None


def fill_missing(rows: Sequence[Row]) -> Sequence[Row]:
    """Give every row every column; None if it has no value."""
    if hasattr(rows, "column_names"):
        return rows
    names = columns_of(rows)
    width = len(names)
    empty = dict.fromkeys(names)
    return [row if len(row) == width else {**empty, **row} for row in rows]


def show(value: object) -> str:
    """Return a value as one short line; the end of a long one is kept, since answers are there."""
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = (SHOWN_CHARACTERS - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def show_names(names: Iterable[str]) -> str:
    """Return names in backticks, joined by commas; a long list is cut and counted."""
    listed = list(names)
    shown = ", ".join(f"`{name}`" for name in listed[:SHOWN_NAMES])
    more = len(listed) - SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "none"


def suggest(name: str, valid: Iterable[str], otherwise: str) -> str:
    """Return a fix that names the nearest valid name, or `otherwise` if nothing is close."""
    close = nearest(name, valid)
    return f"write `{close}`" if close else otherwise


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, without optional spaces; what JSON has no form for is written as text."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def place_issue(issue: Issue, place: int, name: str) -> Issue:
    """Return an issue about a dataset as one about a source of a mixture."""
    own = f"dataset.sources.{place}"
    seen, fix = (text.replace("dataset.", f"{own}.") for text in (issue.seen, issue.fix))
    path = re.sub(r"^dataset\b", own, issue.path)
    return replace(issue, seen=f"source `{name}`: {seen}", fix=fix, path=path)


def place_issues(issues: Iterable[Issue], place: int, name: str | None) -> list[Issue]:
    """Return issues as those of a source; as they are if it has no name, since there is no mixture."""
    return [issue if name is None else place_issue(issue, place, name) for issue in issues]


@contextmanager
def naming_source(place: int, name: str | None) -> Iterator[None]:
    """Add a source to the `RecipeError`s of what is done inside."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(place_issues(error.problems, place, name)) from error.__cause__


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
        from grpo_cli.user_code import time_limit

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


REASONS = {
    "no_match": "in which a pattern of `dataset.columns` finds nothing",
    "too_long": "longer than `max_prompt_length`",
}
"""Why rows are dropped: key of the counts → how it is reported."""
_MOST_TOO_LONG = 0.1
"""Share of rows from which on a limit of length is worth a warning."""
Dropped = Mapping[str, Mapping[str, int]]
"""`training` or `evaluation` → `rows` of the sources, and how many of them are dropped for each reason, and the
tokens of the `longest` prompt that is."""


def count_dropped(parts: Iterable[tuple[str, Mapping[str, int]]]) -> Dropped:
    """Return the counts of all sources together, by split."""
    total: dict[str, dict[str, int]] = {}
    for split, counts in parts:
        sums = total.setdefault(split, dict.fromkeys(("rows", *REASONS, "longest"), 0))
        longest = max(sums["longest"], counts.get("longest", 0))
        sums.update({name: value + counts.get(name, 0) for name, value in sums.items()})
        sums["longest"] = longest
    return total


def say_dropped(dropped: Dropped) -> str:
    """Return how many rows of each split are dropped, and why; empty if none is."""
    parts = []
    for split, counts in dropped.items():
        known = {reason: counts[name] for name, reason in REASONS.items() if counts.get(name)}
        if known:
            listed = [f"{count:,} {reason}" for reason, count in known.items()]
            why = ", ".join(listed if len(listed) > 1 else known)
            parts.append(f"{sum(known.values()):,} of {counts['rows']:,} {split} rows ({why})")
    return " and ".join(parts)


def check_dropped(dropped: Dropped, path: str = "", first: str = "") -> Iterator[Issue]:
    """Yield one issue if rows are dropped; a pattern at `path` finds nothing in the row called `first`."""
    if not (line := say_dropped(dropped)):
        return
    levels: list[Level] = []
    reasons: Counter[str] = Counter()
    for counts in dropped.values():
        is_much = counts["no_match"] >= counts["rows"] / 2 > 0
        is_much |= counts["too_long"] > counts["rows"] * _MOST_TOO_LONG
        levels.append("warning" if is_much else "note")
        reasons.update({name: counts[name] for name in REASONS})
    longest = max(counts["longest"] for counts in dropped.values())
    example = f" (such as {first})" if first else ""
    fixes = {
        "no_match": f"correct the pattern, unless rows without an answer are meant{example}",
        "too_long": f"set `max_prompt_length: {longest}` to keep all prompts",
    }
    fix = "; ".join(fixes[name] for name in REASONS if reasons[name])
    path = path or ("dataset.columns" if reasons["no_match"] else "dataset.max_prompt_length")
    level = max(levels, key=("note", "warning").index)
    yield Issue(f"dropped {line}", fix, path, level=level, subject="data: rows")

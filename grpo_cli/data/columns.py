"""The columns rewards receive: taken over, extracted by pattern, and kept clear of TRL's own names.

Owns `dataset.columns` and the reserved names. Whether a reward finds the columns it wants is
judged by `checks`.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from grpo_cli.data.rows import Row, columns_of, show, show_names, suggest
from grpo_cli.errors import Problem, RecipeError
from grpo_cli.recipe.dataset import ColumnConfig

RESERVED = frozenset(
    {
        "prompts",
        "completions",
        "completion_ids",
        "completion",
        "trainer_state",
        "log_extra",
        "log_metric",
        "environments",
        "image",
        "images",
        "row_id",
    }
)
"""Names that TRL 1.16 gives rewards itself, that switch it to images, and our own `row_id`.

Source: `GRPOTrainer._calculate_rewards` and `_generate_and_score_completions`, trl 1.16.0.
"""


LIMIT_S = 2
"""Seconds of computing that a pattern may take for one row."""


def extract_columns(
    rows: Sequence[Row],
    columns: Mapping[str, ColumnConfig],
    *,
    split: str = "training",
) -> list[Row | None]:
    """Adds the recipe's columns to the rows; the columns they come from stay.

    Args:
        rows: The source rows.
        columns: New name → source column and pattern.
        split: `training` or `evaluation`, for messages.

    Returns:
        The rows with the new columns; None in the place of each row dropped because a pattern was
        not found.

    Raises:
        RecipeError: With a problem for each column that cannot be made.
    """
    patterns = check_columns(columns, columns_of(rows), split)
    taken = {
        name: _take_all(rows, name, column, patterns.get(name), split)
        for name, column in columns.items()
    }
    missed = {name: {at for at, got in enumerate(taken[name]) if got is None} for name in patterns}
    dropping = (missed[name] for name in patterns if columns[name].on_no_match == "drop")
    dropped: set[int] = set().union(*dropping)
    problems = [
        _no_match(name, columns[name], [(at + 1, rows[at]) for at in left], len(rows), split)
        for name in patterns
        if (left := sorted(missed[name] - dropped))
    ]
    if problems:
        raise RecipeError(problems)
    return [
        None if at in dropped else {**row, **{name: taken[name][at] for name in columns}}
        for at, row in enumerate(rows)
    ]


def check_columns(
    columns: Mapping[str, ColumnConfig], available: Iterable[str] | None, split: str = "training"
) -> dict[str, re.Pattern[str]]:
    """Checks the recipe's columns against those of the source.

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
    problems: list[Problem] = []
    patterns = {}
    for name, column in columns.items():
        path = f"dataset.columns.{name}"
        if name in RESERVED:
            message = f"`{name}` is a name TRL or `grpo` passes to rewards itself"
            problems.append(Problem(message, f"call the column `gold_{name}`, say", path))
        if existing is not None and column.from_ not in existing:
            seen = show_names(existing)
            message = f"there is no column `{column.from_}`; the {split} rows have {seen}"
            fix = suggest(column.from_, existing, "name one of these columns")
            problems.append(Problem(message, fix, f"{path}.from"))
        try:
            if column.regex is not None:
                patterns[name] = re.compile(column.regex)
        except (re.error, OverflowError, RecursionError) as error:
            message = f"{show(column.regex)} is not a regular expression: {error}"
            fix = "correct the pattern; single quotes keep YAML from reading backslashes"
            problems.append(Problem(message, fix, f"{path}.regex"))
    if problems:
        raise RecipeError(problems)
    return patterns


def drop_reserved(rows: Sequence[Row]) -> tuple[list[Row], frozenset[str]]:
    """Leaves out the rows' own columns with reserved names; returns the rows and those names."""
    found = RESERVED.intersection(columns_of(rows))
    if not found:
        return list(rows), found
    return [{name: row[name] for name in row if name not in found} for row in rows], found


def _take_all(
    rows: Sequence[Row],
    name: str,
    column: ColumnConfig,
    pattern: re.Pattern[str] | None,
    split: str,
) -> list[object]:
    values = [row.get(column.from_) for row in rows]
    if pattern is None:
        return values
    taken: list[object] = []
    try:
        with _limited() as begin:
            for value in values:
                begin()
                taken.append(_take(value, pattern))
    except TimeoutError as error:
        number = len(taken) + 1
        message = (
            f"{show(column.regex)} is not done with `{column.from_}` of {split} row {number} after "
            f"{LIMIT_S} seconds: {show(values[len(taken)])}"
        )
        fix = "simplify the pattern: a repetition inside a repetition, such as (a+)+, may take for ever"
        raise RecipeError([Problem(message, fix, f"dataset.columns.{name}.regex")]) from error
    return taken


@contextmanager
def _limited() -> Iterator[Callable[[], object]]:
    """Limit what is done in the main thread; elsewhere there are no signals, and no limit.

    Yields:
        To be called where a next piece of work begins, which has `LIMIT_S` seconds of computing.

    Raises:
        TimeoutError: From within that work; `re` looks for signals while it searches.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, give_up)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _take(value: object, pattern: re.Pattern[str]) -> object:
    """What the pattern finds in it; None where it finds nothing but white space."""
    if value is None:
        return value
    found = pattern.search(value if isinstance(value, str) else str(value))
    if not found:
        return None
    text = found[1] if pattern.groups else found[0]
    return (text or "").strip() or None


def _no_match(
    name: str, column: ColumnConfig, missed: list[tuple[int, Row]], total: int, split: str
) -> Problem:
    number, row = missed[0]
    message = (
        f"{show(column.regex)} finds nothing in `{column.from_}` of {len(missed)} of {total} "
        f"{split} rows; the first is row {number}: {show(row.get(column.from_))}"
    )
    fix = "correct the pattern, or drop such rows with on_no_match: drop"
    return Problem(message, fix, f"dataset.columns.{name}.regex")

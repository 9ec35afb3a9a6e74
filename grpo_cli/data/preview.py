"""A look at the data without `datasets`: what `grpo check` needs in milliseconds.

Owns the look; whether prompts and rewards fit what is seen is judged by `checks`. Counts are those
`sources.read_rows` will give.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from grpo_cli.data.files import DataPreview, find_files, glance
from grpo_cli.data.rows import Row, columns_of
from grpo_cli.data.scored import GroupReport, look_at_groups
from grpo_cli.data.sources import (
    SourceRows,
    check_held_out,
    has_eval,
    held_out_count,
    inline_rows,
    read_rows,
    split_sizes,
)
from grpo_cli.data.tasks import COLUMNS, check_task
from grpo_cli.errors import Problem, RecipeError
from grpo_cli.recipe.dataset import (
    DatasetConfig,
    FilesDataset,
    HubDataset,
    InlineDataset,
    ReasoningGymDataset,
    ScoredDataset,
)

__all__ = ["Preview", "has_eval", "preview"]

SAMPLE_ROWS = 20


@dataclass(frozen=True)
class Preview:
    """What a look at the sources shows."""

    columns: frozenset[str] | None
    """Columns of the training rows seen; None where they are not known before loading."""
    train_rows: int | None
    """Rows that training will have; of scored data, prompts."""
    eval_rows: int | None
    """None where nothing is held out, or where it is not known."""
    sample: tuple[Row, ...]
    """The first training rows, as far as they could be had."""
    note: str | None
    """Why something is not known."""
    groups: GroupReport | None = None
    """Of scored data that could be read, those held out by `eval_fraction` included."""
    eval_columns: frozenset[str] | None = None
    """Columns of the evaluation rows that the recipe names; None if it names none, or they are not known."""
    eval_sample: tuple[Row, ...] = ()
    """The first of them."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with the section, the files and their rows."""


def preview(dataset: DatasetConfig, seed: int) -> Preview:
    """Look at the rows a recipe names, reading as little as it can.

    Args:
        dataset: The section of the recipe.
        seed: The recipe's seed; counts do not depend on it.

    Returns:
        What could be seen: a missing evaluation file, say, does not hide the training rows.
    """
    problems: list[Problem] = []
    try:
        check_held_out(dataset)
        seen = _peek(dataset, seed, problems)
    except RecipeError as error:
        problems += error.problems
        seen = Preview(None, None, None, (), "there are mistakes to correct first")
    return replace(seen, problems=(*problems, *seen.problems))


def _peek(dataset: DatasetConfig, seed: int, problems: list[Problem]) -> Preview:
    match dataset:
        case FilesDataset():
            train = _glance_at(dataset.train, "dataset.train", problems)
            held = _glance_at(dataset.eval or (), "dataset.eval", problems)
            return _describe(dataset, train, held if dataset.eval else None)
        case InlineDataset():
            rows, eval_rows = inline_rows(dataset)
            return _describe(dataset, _as_glance(rows), _as_glance(eval_rows))
        case ReasoningGymDataset():
            check_task(dataset)
            sizes = split_sizes(dataset, dataset.size, dataset.eval_size or None)
            return Preview(COLUMNS, *sizes, (), "rows are drawn when training starts")
        case ScoredDataset():
            return _peek_scored(dataset, seed)
        case HubDataset():
            _refuse_other_places(dataset.path)
            note = f"{dataset.path} is looked at when it is loaded"
            return Preview(None, None, None, (), note)


def _refuse_other_places(path: str) -> None:
    """Refuse what is no hub id: an address, or a file of this machine.

    Raises:
        RecipeError: With what to write in its place.
    """
    if "://" in path:
        name = path.partition("/datasets/")[2].strip("/") or "openai/gsm8k"
        message, fix = "is an address, not the id of a dataset", f"write its id, such as `{name}`"
    elif Path(path).is_file():
        message, fix = f"{path} is a file", f"set `kind: files` and `train: {path}`"
    else:
        return
    raise RecipeError([Problem(message, fix, "dataset.path")])


def _glance_at(paths: tuple[str, ...], field: str, problems: list[Problem]) -> DataPreview | None:
    """All files of a split as one; None if there is a problem with one of them."""
    glances = []
    for index, path in enumerate(paths):
        try:
            (file,) = find_files([path], f"{field}.{index}" if len(paths) > 1 else field)
            glances.append(glance(file, SAMPLE_ROWS))
        except RecipeError as error:
            problems += error.problems
    if len(glances) < len(paths):
        return None
    sample = tuple(row for one in glances for row in one.sample)[:SAMPLE_ROWS]
    columns = frozenset().union(*(one.columns for one in glances))
    return DataPreview(columns, sum(one.count for one in glances), sample)


def _as_glance(rows: list[Row] | None) -> DataPreview | None:
    if rows is None:
        return None
    return DataPreview(frozenset(columns_of(rows)), len(rows), tuple(rows[:SAMPLE_ROWS]))


def _describe(
    dataset: DatasetConfig, train: DataPreview | None, held: DataPreview | None
) -> Preview:
    if train is None:
        seen = Preview(None, None, None, (), "a file of the training rows cannot be read")
    else:
        sizes = split_sizes(dataset, train.count, held.count if held else None)
        seen = Preview(train.columns, *sizes, train.sample, None)
    return replace(seen, eval_columns=held.columns, eval_sample=held.sample) if held else seen


def _peek_scored(dataset: ScoredDataset, seed: int) -> Preview:
    """Reads all rows: how many prompts there are shows in no other way."""
    seen = preview(dataset.source, seed)
    if seen.columns is None or seen.problems:
        return seen
    try:
        source = read_rows(dataset, seed)
        return _count_groups(dataset, source, seen)
    except RecipeError as error:
        return replace(seen, problems=tuple(error.problems))


def _count_groups(dataset: ScoredDataset, source: SourceRows, seen: Preview) -> Preview:
    groups = look_at_groups(dataset, source.train, "training")
    if dataset.eval_fraction:
        chosen = held_out_count(groups.prompts, dataset.eval_fraction)
        left, held = groups.prompts - chosen, min(chosen, dataset.eval_limit or chosen)
        return replace(seen, train_rows=left, eval_rows=held, groups=groups)
    asked = look_at_groups(dataset, source.eval, "evaluation").prompts if source.eval else None
    return replace(seen, train_rows=groups.prompts, eval_rows=asked, groups=groups)

"""A look at the data without `datasets`: what `grpo check` needs in milliseconds.

Owns the look; whether prompts and rewards fit what is seen is judged by preflight. Counts are those
`sources.read_rows` will give.
"""

from dataclasses import dataclass, replace

from grpo_cli.data.files import Glance, find_files, glance
from grpo_cli.data.rows import Row, columns_of
from grpo_cli.data.scored import GroupReport, look_at_groups
from grpo_cli.data.sources import (
    check_held_out,
    has_eval,
    held_out_count,
    inline_rows,
    read_rows,
    split_sizes,
)
from grpo_cli.data.tasks import COLUMNS, check_task
from grpo_cli.recipe.dataset import (
    DatasetConfig,
    FilesDataset,
    HubDataset,
    InlineDataset,
    ReasoningGymDataset,
    ScoredDataset,
)

__all__ = ["Peek", "has_eval", "peek"]

SAMPLE_ROWS = 20


@dataclass(frozen=True)
class Peek:
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


def peek(dataset: DatasetConfig, seed: int) -> Peek:
    """Looks at the rows a recipe names, reading as little as it can.

    Args:
        dataset: The section of the recipe.
        seed: The recipe's seed; counts do not depend on it.

    Raises:
        RecipeError: A file is missing, unreadable or empty, a task or parameter is unknown, or two
            settings contradict each other.
    """
    check_held_out(dataset)
    match dataset:
        case FilesDataset():
            return _peek_files(dataset)
        case InlineDataset():
            train, held = inline_rows(dataset)
            sizes = split_sizes(dataset, len(train), None if held is None else len(held))
            return Peek(frozenset(columns_of(train)), *sizes, tuple(train[:SAMPLE_ROWS]), None)
        case ReasoningGymDataset():
            check_task(dataset)
            sizes = split_sizes(dataset, dataset.size, dataset.eval_size or None)
            return Peek(COLUMNS, *sizes, (), "rows are drawn when training starts")
        case ScoredDataset():
            return _peek_scored(dataset, seed)
        case HubDataset():
            note = f"{dataset.path} is looked at when it is loaded"
            return Peek(None, None, None, (), note)


def _peek_files(dataset: FilesDataset) -> Peek:
    train = [glance(file, SAMPLE_ROWS) for file in find_files(dataset.train, "dataset.train")]
    held = [glance(file, SAMPLE_ROWS) for file in find_files(dataset.eval or (), "dataset.eval")]
    columns = frozenset().union(*(one.columns for one in train))
    sample = tuple(row for one in train for row in one.sample)[:SAMPLE_ROWS]
    sizes = split_sizes(dataset, _total(train), _total(held) if dataset.eval else None)
    return Peek(columns, *sizes, sample, None)


def _peek_scored(dataset: ScoredDataset, seed: int) -> Peek:
    """Reads all rows: how many prompts there are shows in no other way."""
    seen = peek(dataset.source, seed)
    if seen.columns is None:
        return seen
    source = read_rows(dataset, seed)
    groups = look_at_groups(dataset, source.train, "training")
    if dataset.eval_fraction:
        chosen = held_out_count(groups.prompts, dataset.eval_fraction)
        left, held = groups.prompts - chosen, min(chosen, dataset.eval_limit or chosen)
        return replace(seen, train_rows=left, eval_rows=held, groups=groups)
    asked = look_at_groups(dataset, source.eval, "evaluation").prompts if source.eval else None
    return replace(seen, train_rows=groups.prompts, eval_rows=asked, groups=groups)


def _total(glances: list[Glance]) -> int:
    return sum(one.count for one in glances)

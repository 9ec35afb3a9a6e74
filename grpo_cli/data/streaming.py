"""Streamed training rows: read while they are needed, pass after pass, through a bounded shuffle buffer."""

import random
import sys
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_cli.data.build import BuiltData, CountTokens, check_characters, check_one_style, make_rows
from grpo_cli.data.files import find_files, iterate_rows
from grpo_cli.data.prompts import Renderer, resolve_style
from grpo_cli.data.rows import Row, RowNames
from grpo_cli.data.sources import iterate_split
from grpo_cli.recipe.dataset import FilesDataset, HubDataset
from grpo_cli.recipe.recipe import Recipe

if TYPE_CHECKING:
    from datasets import IterableDataset

T = TypeVar("T")


def stream_rows(
    recipe: Recipe, data: BuiltData, *, has_chat_template: bool, count_tokens: CountTokens
) -> "IterableDataset":
    """Return the training rows of streamed data, without end: one pass follows another.

    Rows are those that `build_datasets` would make, except that they have the columns of the first rows alone.
    Iterating again begins anew, so that a resumed run gets the rows of an unbroken one by skipping. For the
    trainer all passes are one epoch: with more, it could not tell from a step's number how many rows to skip.
    Errors of a file, a row or the hub are raised while iterating.
    """
    from datasets import IterableDataset

    dataset: Any = recipe.dataset
    longest, names = dataset.max_prompt_length, data.train.column_names
    style = resolve_style(dataset.prompt, has_chat_template)
    renderer = Renderer(dataset.prompt, style, may_be_empty=bool(recipe.environment))
    sources = (column.from_.partition(".")[0] for column in dataset.columns.values())
    empty, first = dict.fromkeys([*names, *sources]), data.train[0]

    def iterate() -> Iterator[Row]:
        for number in count():
            rows: Iterator[tuple[int, tuple[RowNames, Row]]]
            rows = islice(enumerate(_read(dataset)), dataset.limit)
            if recipe.setting("shuffle_dataset"):
                rows = shuffle(rows, dataset.streaming.buffer_size, f"{recipe.seed}/{number}")
            for row_id, (where, row) in rows:
                for _, made, prompt in make_rows(dataset, renderer, [{**empty, **row}], where):
                    if longest is not None and count_tokens(prompt) > longest:
                        continue
                    made |= {"prompt": prompt, "row_id": row_id}
                    check_characters(made, where(0))
                    check_one_style([first, made])
                    yield {name: made.get(name) for name in names}

    return IterableDataset.from_generator(iterate)


def _read(dataset: FilesDataset | HubDataset) -> Iterator[tuple[RowNames, Row]]:
    """Yield each training row with its name in messages, which is that of place 0."""
    if isinstance(dataset, FilesDataset):
        for file in find_files(dataset.train, "dataset.train"):
            files = ((file.path, sys.maxsize),)
            for number, row in enumerate(iterate_rows(file)):
                yield RowNames("training", files, number), row
    else:
        for number, row in enumerate(iterate_split(dataset, "split")):
            yield RowNames("training", first=number), row


def shuffle(items: Iterable[T], buffer_size: int, seed: str) -> Iterator[T]:
    """Yield all items in an order that the seed decides, with `buffer_size` of them in memory."""
    chooser = random.Random(seed)
    rest = iter(items)
    buffer = list(islice(rest, buffer_size))
    for item in rest:
        place = chooser.randrange(buffer_size)
        yield buffer[place]
        buffer[place] = item
    chooser.shuffle(buffer)
    yield from buffer

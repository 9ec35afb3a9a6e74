"""The datasets a trainer reads: prompts rendered, columns made, long rows dropped; and a report on the rows."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute
from datasets import Dataset, IterableDataset, disable_progress_bars

from grpo_cli.data.prompts import Prompt, Renderer, resolve_style
from grpo_cli.data.rows import (
    RESERVED,
    ColumnExtractor,
    Columns,
    Dropped,
    Row,
    RowNames,
    canonical_json,
    count_dropped,
    keep_rows,
    naming_source,
    rows_of,
)
from grpo_cli.data.sources import IDENTIFYING, hold_out, identify, read_rows
from grpo_cli.data.table import (
    BLOCK_ROWS,
    as_array,
    as_dataset,
    as_table,
    beside,
    fingerprint,
    image_array,
    iterate_blocks,
    iterate_rows,
    join,
    message_array,
    select_rows,
    similar_rows,
)
from grpo_cli.errors import RecipeError, recipe_error
from grpo_cli.recipe.dataset import (
    IMAGES,
    SOURCE,
    DatasetConfig,
    FilesDataset,
    MixtureDataset,
    ScoredDataset,
    SingleDataset,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import spread

if TYPE_CHECKING:
    from grpo_cli.data.scored import GroupReport

CountTokens = Callable[..., int]
"""Tokens of a prompt, which comes first, with its `images`."""
_TOKENS_COUNTED = 4096
"""Prompts whose tokens are counted, spread evenly over the rows, if no length is too long."""


@dataclass(frozen=True)
class PromptTokens:
    """Lengths of the prompts kept, in tokens; nearest-rank percentiles."""

    min: int
    median: int
    p95: int
    max: int


@dataclass(frozen=True)
class DataReport:
    """What became of the rows."""

    train_rows: int | None
    """None if they are streamed: what is said of training rows is then of the first ones."""
    eval_rows: int | None
    """None if nothing is held out."""
    dropped: Dropped
    """Rows that are dropped, by split and reason, beside the number of rows of the sources."""
    dropped_columns: tuple[str, ...]
    """Columns not passed on because TRL or `grpo` uses their names."""
    prompt_tokens: PromptTokens | None
    """None if tokens could not be counted; of many rows without `max_prompt_length`, those of a sample."""
    exact_duplicates_between_splits: int
    """Evaluation rows whose prompt is also a training prompt."""
    fingerprint: str
    """SHA-256 in hex over the prompts and columns of both splits, in order."""
    fingerprint_version: int = 2
    """Of the way it is computed; fingerprints of different versions cannot be compared."""
    plain_text: bool = False
    """Whether prompts are plain text, not messages."""
    groups: "GroupReport | None" = None
    """Of scored data, whose rows are groups; None of other kinds."""
    sources: dict[str, dict[str, Any]] | None = None
    """Of a mixture, whose `train_rows` are the prompts of an epoch: each source's own rows, and its ratio."""

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


@dataclass
class Split:
    """One split while it is built."""

    rows: pyarrow.Table
    names: RowNames
    total: int = 0
    """Rows of the source; none if these were divided off the training rows."""
    no_match: int = 0
    too_long: int = 0
    longest: int = 0
    """Tokens of the longest prompt that is dropped."""
    single: int = 0
    """Prompts of scored data with a single response, which are left out."""
    tokens: list[int] = field(default_factory=list)
    """Of the rows kept, or of a sample of them."""
    dropped_columns: frozenset[str] = frozenset()

    @property
    def counts(self) -> dict[str, int]:
        """The rows of the source, and those that are dropped by reason."""
        dropped = {"no_match": self.no_match, "too_long": self.too_long}
        return {"rows": self.total, **dropped, "longest": self.longest}


@dataclass(frozen=True)
class BuiltData:
    """What is trained on and what is held out."""

    train: Dataset
    """Of streamed data, the first rows."""
    eval: Dataset | None
    report: DataReport
    stream: IterableDataset | None = None
    """All training rows of streamed data, without end."""


def build_datasets(
    recipe: Recipe,
    *,
    has_chat_template: bool,
    count_tokens: CountTokens | None,
    most_counted: int | None = None,
) -> BuiltData:
    """Build the datasets of a recipe.

    Rows carry `prompt`, `row_id` (place in the source, from 0) and all other columns; of scored data, a
    row is a group, with `responses` and `rewards`. With images, `images` holds those of a row, decoded when it is
    read. Prompts are rendered after `dataset.columns` is applied, so templates may use the new columns. Without
    `count_tokens`, or in a split of more than `most_counted` rows, nothing is dropped for its length.

    Raises `RecipeError` if the data does not fit the recipe, or no row is left, and `SetupError` if the hub
    cannot be reached.
    """
    dataset = recipe.dataset
    trains: list[Split] = []
    helds: list[Split] = []
    for place, source in enumerate(dataset.parts):
        with naming_source(place, source.source_name):
            train, held, groups = _read_splits(recipe, source, has_chat_template)
            for split in filter(None, (train, held)):
                if count_tokens and len(split.rows) <= (most_counted or len(split.rows)):
                    _drop_long(split, source.max_prompt_length, count_tokens)
        trains.append(train)
        helds.append(held or Split(pyarrow.table({}), RowNames("evaluation")))
    if dataset.shares:
        _number_rows(trains, helds)
    rows = join([split.rows for split in (*trains, *helds)])
    kind = rows["prompt"].type
    # Of several styles, prompts are stored encoded.
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_list(kind)):
        named_by = SOURCE if dataset.shares else None
        check_one_style(iterate_rows(rows, ("prompt", "row_id", SOURCE)), named_by)
    table, kept = as_dataset(rows), sum(len(split.rows) for split in trains)
    train_places: Sequence[int] = range(kept)
    held_places: Sequence[int] = range(kept, len(rows))
    if isinstance(dataset, MixtureDataset):
        # Rows are not copied until they are read, which would show a bar.
        disable_progress_bars()
        train_places, held_places = _order_mixture(recipe, dataset, trains, helds)
    held = table.select(held_places) if held_places else None
    report = make_report(dataset, trains, helds if held_places else [], groups, len(train_places))
    return BuiltData(table.select(train_places), held, report)


def _number_rows(trains: list[Split], helds: list[Split]) -> None:
    """Give rows of different sources different numbers."""
    first = 0
    for splits in zip(trains, helds, strict=True):
        following = first
        for split in (each for each in splits if len(each.rows)):
            numbers = pyarrow.compute.add(split.rows["row_id"], first)
            at = split.rows.column_names.index("row_id")
            split.rows = split.rows.set_column(at, "row_id", numbers)
            following = max(following, pyarrow.compute.max(numbers).as_py() + 1)
        first = following


def _order_mixture(
    recipe: Recipe, dataset: MixtureDataset, trains: list[Split], helds: list[Split]
) -> tuple[list[int], list[int]]:
    """Return the places of rows in the order of `draw_rows`; held-out rows follow all training rows."""
    from grpo_cli.data.mixing import count_draws, draw_rows

    sizes = [len(split.rows) for split in trains]
    count_draws(dataset, sizes)
    ratios = [source.ratio for source in dataset.sources]
    shuffle = recipe.setting("shuffle_dataset")
    order = draw_rows(sizes, ratios, recipe.seed, shuffle=shuffle)
    # So that the first held-out rows, which `evaluation.limit` keeps, are of all sources.
    held = [len(split.rows) for split in helds if len(split.rows)]
    spread = draw_rows(held, held, seed=0, shuffle=False)
    return _places(sizes, 0, order), _places(held, sum(sizes), spread)


def _places(sizes: Sequence[int], first: int, draws: Iterable[tuple[int, int]]) -> list[int]:
    """Return the places of drawn rows in a table that holds source after source from row `first` on."""
    starts = [first, *(first + end for end in accumulate(sizes))]
    return [starts[source] + row for source, row in draws]


def _read_splits(
    recipe: Recipe, dataset: SingleDataset, has_chat_template: bool
) -> tuple[Split, Split | None, "GroupReport | None"]:
    style = resolve_style(dataset.prompt, has_chat_template)
    options = {"may_be_empty": bool(recipe.environment), "in_parts": recipe.dataset.has_images}
    renderer = Renderer(dataset.prompt, style, **options)
    source = read_rows(dataset, recipe.seed, as_table)
    train = _make_split(dataset, renderer, source.train, source.train_names)
    held, groups = None, None
    if source.eval is not None:
        held = _make_split(dataset, renderer, source.eval, source.eval_names)
    if dataset.eval_fraction:
        prompts = (hash(identify(row)) for row in iterate_rows(train.rows, IDENTIFYING))
        chosen = hold_out(prompts, dataset.eval_fraction, dataset.eval_seed)
        rows, train.rows = (select_rows(train.rows, chosen, without=it) for it in (False, True))
        held = Split(rows[: dataset.eval_limit], RowNames("evaluation"))
    if isinstance(dataset, ScoredDataset):
        from grpo_cli.data.scored import report_groups

        groups = report_groups(list(iterate_rows(train.rows)), train.single)
    elif dataset.eval_fraction:
        train.rows = train.rows[: dataset.limit]
    return train, held, groups


def _make_split(
    dataset: SingleDataset, renderer: Renderer, rows: Sequence[Row] | pyarrow.Table, names: RowNames
) -> Split:
    """Apply columns, render prompts, find images and leave out reserved names."""
    total = len(rows)
    if isinstance(dataset, ScoredDataset):
        from grpo_cli.data.scored import drop_single, make_groups

        plain = [*iterate_rows(rows)] if isinstance(rows, pyarrow.Table) else rows
        listed = [*make_rows(dataset, renderer, plain, names)]
        places = [(place, row) for place, row, _ in listed]
        made = make_groups(dataset, places, [prompt for _, _, prompt in listed], names)
        compared = drop_single(made, names.split) if made else []
        split = Split(as_table(compared), names, total, total - len(listed))
        split.single = len(made) - len(compared)
    else:
        source = rows if isinstance(rows, pyarrow.Table) else as_table(rows)
        reserved = RESERVED.intersection(source.column_names) - {*dataset.prompt.images}
        table = _make_table(dataset, renderer, source, names)
        split = Split(table, names, total, total - len(table), dropped_columns=reserved)
    if not len(split.rows):
        message = f"no {names.split} row is left: a pattern found nothing in all {total} of them"
        raise recipe_error(message, "correct its regex", "dataset.columns")
    return split


def _make_table(
    dataset: SingleDataset, renderer: Renderer, source: pyarrow.Table, names: RowNames
) -> pyarrow.Table:
    """Return the rows as they are trained on; columns that stay as they are keep their arrays."""
    if dataset.prompt.images:
        from grpo_cli.data.images import check_image_columns

        check_image_columns(dataset.prompt.images, source.column_names, names.split)
    extractor = ColumnExtractor(dataset.columns, source.column_names, names)
    read = iterate_blocks(source, _columns_read(dataset, renderer, source.column_names))
    blocks = zip(range(0, len(source), BLOCK_ROWS), read, strict=True)
    made = join([_make_block(dataset, renderer, extractor, *each) for each in blocks])
    extractor.finish(len(source))
    if len(made) < len(source):
        source = select_rows(source, made["row_id"].to_pylist() if len(made) else ())
    left_out = {*made.column_names, *dataset.prompt.images, *RESERVED}
    return beside(made, source.drop_columns(left_out.intersection(source.column_names)))


def _columns_read(
    dataset: SingleDataset, renderer: Renderer, available: Sequence[str]
) -> Sequence[str]:
    """Return the columns of the source that prompts and other columns are made of."""
    sources = {column.from_ for column in dataset.columns.values()}
    sources |= {name.partition(".")[0] for name in sources} | {*dataset.prompt.images}
    if renderer.columns is None or renderer.columns - {*available, *dataset.columns, SOURCE}:
        return available
    return [name for name in available if name in renderer.columns | sources] or available[:1]


def _make_block(
    dataset: SingleDataset,
    renderer: Renderer,
    extractor: ColumnExtractor,
    first: int,
    block: Columns,
) -> dict[str, pyarrow.Array]:
    """Return the columns that are added to a block of rows, of those rows that no pattern drops."""
    size, names = len(next(iter(block.values()))), extractor.names
    places, block = extractor.extract(block, size, first)
    if dataset.source_name:
        block = {**block, SOURCE: [dataset.source_name] * len(places)}
    made = {
        name: as_array(name, block[name]) for name in (*dataset.columns, SOURCE) if name in block
    }
    texts = renderer.render_block(block, len(places))
    if texts is None:
        rows = zip(places, rows_of(block), strict=True)
        prompts = as_array("prompt", [_render(renderer, row, names, at) for at, row in rows])
    elif renderer.style == "text":
        prompts = as_array("prompt", texts["user"])
    else:
        prompts = message_array(texts)
    if renderer.in_parts:
        from grpo_cli.data.images import read_images

        columns = dataset.prompt.images
        made[IMAGES] = image_array(
            read_images(row, columns, names(at), names.folder(at))
            for at, row in zip(places, rows_of(block), strict=True)
        )
    return {**made, "prompt": prompts, "row_id": pyarrow.array(places, pyarrow.int64())}


def _render(renderer: Renderer, row: Row, names: RowNames, place: int) -> Prompt:
    """Return the prompt of a row, whose name is formatted only if there is something wrong with it."""
    try:
        return renderer.render(row)
    except RecipeError:
        return renderer.render(row, names(place))


def make_rows(
    dataset: SingleDataset, renderer: Renderer, rows: Sequence[Row], names: RowNames
) -> Iterator[tuple[int, Row, Prompt]]:
    """Yield the place, all columns and the prompt of each row that no pattern drops, or raise `RecipeError`."""
    for place, row in keep_rows(dataset, rows, names):
        yield place, row, _render(renderer, row, names, place)


def _drop_long(split: Split, longest: int | None, count_tokens: CountTokens) -> None:
    rows = split.rows
    if longest is None and len(rows) > _TOKENS_COUNTED:
        rows = select_rows(rows, spread(len(rows), _TOKENS_COUNTED))
    counts = [
        count_tokens(row["prompt"], **({} if row[IMAGES] is None else {"images": row[IMAGES]}))
        for row in iterate_rows(rows, ("prompt", IMAGES))
    ]
    split.tokens = [count for count in counts if longest is None or count <= longest]
    if not split.tokens:
        message = (
            f"no {split.names.split} row is left: the shortest of {len(counts)} prompts has {min(counts)} "
            f"tokens, over the limit of {longest}"
        )
        fix = f"raise it to {max(counts)} to keep every row"
        raise recipe_error(message, fix, "dataset.max_prompt_length")
    split.too_long = len(counts) - len(split.tokens)
    if longest is not None and split.too_long:
        split.longest = max(counts)
        too_long = [place for place, count in enumerate(counts) if count > longest]
        split.rows = select_rows(rows, too_long, without=True)


def check_one_style(rows: Iterable[Row], named_by: str | None = None) -> None:
    """Refuse prompts of both kinds: TRL looks only at the first one to tell messages from text.

    Raises `RecipeError` if some are messages and some are text.
    """

    def name(row: Row) -> str:
        return f"source `{row[named_by]}`" if named_by else f"row {row['row_id'] + 1}"

    first: Row | None = None
    for row in rows:
        first = first or row
        if isinstance(row["prompt"], str) is not isinstance(first["prompt"], str):
            message = (
                f"{name(row)} has a prompt of another kind than {name(first)}: some are plain text and some "
                "are messages"
            )
            fix = "make all of them messages, or set dataset.prompt.style: chat"
            raise recipe_error(message, fix, "dataset.prompt")


def check_characters(row: Row, where: str) -> None:
    """Refuse half a character, which no tokenizer reads, with a `RecipeError`."""
    try:
        canonical_json(row).encode()
    except UnicodeEncodeError as error:
        message = f"{where} holds half a character (a lone surrogate): {error.reason}"
        raise recipe_error(message, "correct the text in the data", "dataset") from error


def make_report(
    dataset: DatasetConfig,
    trains: list[Split],
    helds: list[Split],
    groups: "GroupReport | None",
    drawn: int,
) -> DataReport:
    """Return the report on the splits of all sources; training draws `drawn` rows in an epoch."""
    splits = [*trains, *helds]
    held_out = [identify(row) for held in helds for row in iterate_rows(held.rows, IDENTIFYING)]
    asked = {*held_out}
    asked &= {
        identify(row)
        for train in (trains if asked else ())
        for row in iterate_rows(
            similar_rows(train.rows, [held.rows for held in helds]), IDENTIFYING
        )
    }
    digest, sources = fingerprint(split.rows for split in splits), None
    if isinstance(dataset, MixtureDataset):
        held = [len(each.rows) for each in helds] or [0] * len(trains)
        sources = {
            source.name: {"train_rows": len(train.rows), "eval_rows": count, "ratio": source.ratio}
            for source, train, count in zip(dataset.sources, trains, held, strict=True)
        }
    elif dataset.streams is not None:
        # Of the rows, only the first are here.
        paths = dataset.train if isinstance(dataset, FilesDataset) else ()
        sizes = [Path(path).expanduser().stat().st_size for path in paths]
        digest = hashlib.sha256(f"{digest} {sizes}".encode()).hexdigest()
    counts, lengths = sorted(count for split in splits for count in split.tokens), None
    if counts:
        median, p95 = (counts[math.ceil(share * len(counts)) - 1] for share in (0.5, 0.95))
        lengths = PromptTokens(counts[0], median, p95, counts[-1])
    return DataReport(
        train_rows=None if dataset.streams is not None else drawn,
        eval_rows=len(held_out) if helds else None,
        dropped=count_dropped(
            (split.names.split if split.total else "training", split.counts) for split in splits
        ),
        dropped_columns=tuple(sorted(set().union(*(split.dropped_columns for split in splits)))),
        prompt_tokens=lengths,
        exact_duplicates_between_splits=sum(map(asked.__contains__, held_out)),
        fingerprint=digest,
        plain_text=all(pyarrow.types.is_string(each.rows["prompt"].type) for each in trains),
        groups=groups,
        sources=sources,
    )

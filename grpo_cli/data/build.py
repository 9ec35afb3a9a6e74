"""The datasets a trainer reads: prompts rendered, columns made, over-long rows dropped and counted."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, IterableDataset, disable_progress_bars

from grpo_cli.data.columns import RESERVED, keep_rows
from grpo_cli.data.images import check_image_columns, name_images, read_images
from grpo_cli.data.mixing import SOURCE, Draw, count_draws, draw_rows, naming_source
from grpo_cli.data.prompts import Prompt, Renderer, resolve_style
from grpo_cli.data.rows import Row, RowNames, canonical_json, columns_of
from grpo_cli.data.scored import GroupReport, drop_single, make_groups, report_groups
from grpo_cli.data.sources import IDENTIFYING, hold_out, identify, read_rows
from grpo_cli.data.table import RowTable
from grpo_cli.errors import recipe_error
from grpo_cli.recipe.dataset import (
    IMAGES,
    FilesDataset,
    MixtureDataset,
    ScoredDataset,
    SingleDataset,
)
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.units import spread

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
    dropped_too_long: int
    """Rows of both splits with more tokens than `max_prompt_length`."""
    dropped_no_match: int
    """Rows of both splits in which a pattern with `on_no_match: drop` found nothing."""
    dropped_columns: tuple[str, ...]
    """Columns not passed on because TRL or `grpo` uses their names."""
    prompt_tokens: PromptTokens | None
    """None if tokens could not be counted; of many rows without `max_prompt_length`, those of a sample."""
    exact_duplicates_between_splits: int
    """Evaluation rows whose prompt is also a training prompt."""
    fingerprint: str
    """SHA-256 in hex over the prompts and columns of both splits, in order."""
    plain_text: bool = False
    """Whether prompts are plain text, not messages."""
    groups: GroupReport | None = None
    """Of scored data, whose rows are groups; None of other kinds."""
    sources: dict[str, dict[str, Any]] | None = None
    """Of a mixture, whose `train_rows` are the prompts of an epoch: each source's own rows, and its ratio."""

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class BuiltData:
    """What is trained on and what is held out."""

    train: Dataset
    """Of streamed data, the first rows."""
    eval: Dataset | None
    report: DataReport
    stream: IterableDataset | None = None
    """All training rows of streamed data, without end."""


@dataclass
class _Split:
    """One split while it is built."""

    rows: RowTable
    names: RowNames
    no_match: int = 0
    too_long: int = 0
    single: int = 0
    """Prompts of scored data with a single response, which are left out."""
    tokens: list[int] = field(default_factory=list)
    """Of the rows kept, or of a sample of them."""
    dropped_columns: frozenset[str] = frozenset()


def build_datasets(
    recipe: Recipe, *, has_chat_template: bool, count_tokens: CountTokens | None
) -> BuiltData:
    """Build the datasets of a recipe.

    Rows carry `prompt`, `row_id` (place in the source, from 0) and all other columns; of scored data, a
    row is a group, with `responses` and `rewards`. With images, `images` holds those of a row, decoded when it is
    read. Prompts are rendered after `dataset.columns` is applied,
    so templates may use the new columns.

    Args:
        recipe: The whole recipe.
        has_chat_template: Whether the tokenizer has one.
        count_tokens: Tokens of a prompt as the model will see it; without it nothing is dropped
            for its length.

    Raises:
        RecipeError: The data does not fit the recipe, or no row is left.
        SetupError: The hub cannot be reached.
    """
    dataset = recipe.dataset
    trains: list[_Split] = []
    helds: list[_Split] = []
    for place, source in enumerate(dataset.parts):
        with naming_source(place, source.source_name):
            train, held, groups = _read_splits(recipe, source, has_chat_template, count_tokens)
        trains.append(train)
        helds.append(held or _Split(RowTable(), RowNames("evaluation")))
    _number_rows(trains, helds)
    rows = RowTable()
    for split in (*trains, *helds):
        rows.extend(split.rows)
    if not _have_one_style(rows):
        check_one_style(rows, SOURCE if dataset.shares else None)
    table, kept = rows.as_dataset(), sum(len(split.rows) for split in trains)
    train_places: Sequence[int] = range(kept)
    held_places: Sequence[int] = range(kept, len(rows))
    if isinstance(dataset, MixtureDataset):
        # Rows are not copied until they are read, which would show a bar.
        disable_progress_bars()
        train_places, held_places = _order_mixture(recipe, dataset, trains, helds)
    data = BuiltData(
        table.select(train_places),
        table.select(held_places) if held_places else None,
        replace(_report(trains, helds if held_places else []), groups=groups),
    )
    if isinstance(dataset, MixtureDataset):
        shares = {
            source.name: {
                "train_rows": len(train.rows),
                "eval_rows": len(held.rows),
                "ratio": source.ratio,
            }
            for source, train, held in zip(dataset.sources, trains, helds, strict=True)
        }
        report = replace(data.report, train_rows=len(data.train), sources=shares)
        return replace(data, report=report)
    if dataset.streams is None:
        return data
    return replace(data, report=_report_stream(dataset, data.report))


def _number_rows(trains: list[_Split], helds: list[_Split]) -> None:
    """Give rows of different sources different numbers."""
    first = 0
    for splits in zip(trains, helds, strict=True):
        first += max(split.rows.renumber("row_id", first) for split in splits) + 1


def _order_mixture(
    recipe: Recipe, dataset: MixtureDataset, trains: list[_Split], helds: list[_Split]
) -> tuple[list[int], list[int]]:
    """Return the places of rows in the order of `draw_rows`; held-out rows follow all training rows."""
    sizes = [len(split.rows) for split in trains]
    count_draws(dataset, sizes)
    ratios = [source.ratio for source in dataset.sources]
    shuffle = recipe.training.extras.get("shuffle_dataset", True)
    order = draw_rows(sizes, ratios, recipe.seed, shuffle=shuffle)
    # So that the first held-out rows, which `evaluation.limit` keeps, are of all sources.
    held = [len(split.rows) for split in helds if len(split.rows)]
    spread = draw_rows(held, held, seed=0, shuffle=False)
    return _places(sizes, 0, order), _places(held, sum(sizes), spread)


def _places(sizes: Sequence[int], first: int, draws: Iterable[Draw]) -> list[int]:
    """Return the places of drawn rows in a table that holds source after source from row `first` on."""
    starts = [first, *(first + end for end in accumulate(sizes))]
    return [starts[source] + row for source, row in draws]


def _read_splits(
    recipe: Recipe,
    dataset: SingleDataset,
    has_chat_template: bool,
    count_tokens: CountTokens | None,
) -> tuple[_Split, _Split | None, GroupReport | None]:
    """Return the rows to train on, those held out, and what became of groups that are scored already."""
    style = resolve_style(dataset.prompt, has_chat_template)
    has_images = recipe.dataset.has_images
    renderer = Renderer(
        dataset.prompt, style, may_be_empty=bool(recipe.environment), in_parts=has_images
    )
    source = read_rows(dataset, recipe.seed, RowTable.once)

    train = _make_split(dataset, renderer, source.train, source.train_names, has_images)
    held, groups = None, None
    if source.eval is not None:
        held = _make_split(dataset, renderer, source.eval, source.eval_names, has_images)
    if dataset.eval_fraction:
        prompts = [hash(identify(row)) for row in train.rows.named(IDENTIFYING)]
        places = range(len(prompts))
        _, chosen = hold_out(places, prompts, dataset.eval_fraction, dataset.eval_seed)
        held = _Split(train.rows.divide(chosen)[: dataset.eval_limit], RowNames("evaluation"))
    if isinstance(dataset, ScoredDataset):
        groups = report_groups(list(train.rows), train.single)
    elif dataset.eval_fraction:
        train.rows = train.rows[: dataset.limit]
    for split in filter(None, (train, held)):
        _drop_long(split, dataset.max_prompt_length, count_tokens)
    return train, held, groups


def _make_split(
    dataset: SingleDataset,
    renderer: Renderer,
    rows: Sequence[Row],
    names: RowNames,
    has_images: bool,
) -> _Split:
    """Apply columns, render prompts, find images and leave out reserved names."""
    total, columns = len(rows), columns_of(rows)
    kept = make_rows(dataset, renderer, rows, names)
    if isinstance(dataset, ScoredDataset):
        listed = list(kept)
        places = [(place, row) for place, row, _ in listed]
        made = make_groups(dataset, places, [prompt for _, _, prompt in listed], names)
        compared = drop_single(made, names.split) if made else []
        table, count = RowTable.of(compared), len(listed)
        split = _Split(table, names, total - count, single=len(made) - len(compared))
    else:
        reserved = RESERVED.intersection(columns) - {*dataset.prompt.images}
        table = RowTable.of(_finish_rows(dataset, kept, names, reserved, has_images))
        split = _Split(table, names, total - len(table), dropped_columns=reserved)
    if not len(table):
        message = f"no {names.split} row is left: a pattern found nothing in all {total} of them"
        raise recipe_error(message, "correct its regex", "dataset.columns")
    return split


def _finish_rows(
    dataset: SingleDataset,
    kept: Iterable[tuple[int, Row, Prompt]],
    names: RowNames,
    reserved: frozenset[str],
    has_images: bool,
) -> Iterator[Row]:
    """Yield rows as they are trained on."""
    columns = dataset.prompt.images
    left_out = {"prompt", *columns, *reserved}
    for number, (place, row, prompt) in enumerate(kept):
        if number == 0:
            check_image_columns(columns, row, names.split)
        made: Row = {"prompt": prompt, "row_id": place}
        made.update((name, value) for name, value in row.items() if name not in left_out)
        if has_images:
            made[IMAGES] = read_images(row, columns, names(place), names.folder(place))
        yield made


def make_rows(
    dataset: SingleDataset, renderer: Renderer, rows: Sequence[Row], names: RowNames
) -> Iterator[tuple[int, Row, Prompt]]:
    """Yield the place, all columns and the prompt of each row that no pattern drops.

    Raises:
        RecipeError: A pattern or a template fails on a row.
    """
    for place, row in keep_rows(dataset, rows, names):
        yield place, row, renderer.render(row, names(place))


def _drop_long(split: _Split, longest: int | None, count_tokens: CountTokens | None) -> None:
    if count_tokens is None:
        return
    rows: Iterable[Row] = split.rows.named(("prompt", IMAGES))
    if longest is None and len(split.rows) > _TOKENS_COUNTED:
        rows = split.rows.pick(spread(len(split.rows), _TOKENS_COUNTED))
    counts = [
        count_tokens(row["prompt"], images=row[IMAGES])
        if row.get(IMAGES) is not None
        else count_tokens(row["prompt"])
        for row in rows
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
        split.rows.divide(place for place, count in enumerate(counts) if count > longest)


def _have_one_style(rows: RowTable) -> bool:
    """Return whether the type of the column tells that prompts are of one kind."""
    kinds = rows.types("prompt")
    return all(map(pyarrow.types.is_string, kinds)) or all(map(pyarrow.types.is_list, kinds))


def check_one_style(rows: Sequence[Row], named_by: str | None = None) -> None:
    """Refuse prompts of both kinds: TRL looks only at the first one to tell messages from text.

    Raises:
        RecipeError: Some are messages and some are text.
    """

    def name(row: Row) -> str:
        return f"source `{row[named_by]}`" if named_by else f"row {row['row_id'] + 1}"

    first = rows[0]
    is_text = isinstance(first["prompt"], str)
    for row in rows:
        if isinstance(row["prompt"], str) is not is_text:
            message = (
                f"{name(row)} has a prompt of another kind than {name(first)}: some are plain text and some "
                "are messages"
            )
            fix = "make all of them messages, or set dataset.prompt.style: chat"
            raise recipe_error(message, fix, "dataset.prompt")


def _report_stream(dataset: SingleDataset, report: DataReport) -> DataReport:
    """Return the report on streamed data by that on its first rows; its fingerprint has the sizes of files."""
    paths = dataset.train if isinstance(dataset, FilesDataset) else ()
    sizes = [Path(path).expanduser().stat().st_size for path in paths]
    fingerprint = hashlib.sha256(f"{report.fingerprint} {sizes}".encode()).hexdigest()
    return replace(report, train_rows=None, fingerprint=fingerprint)


def _report(trains: list[_Split], helds: list[_Split]) -> DataReport:
    """Return the report on the splits of all sources."""
    splits = [*trains, *helds]
    held_out = [identify(row) for held in helds for row in held.rows.named(IDENTIFYING)]
    asked = {*held_out}
    asked &= {
        identify(row)
        for train in (trains if asked else ())
        for row in train.rows.named(IDENTIFYING)
        if identify(row) in asked
    }
    return DataReport(
        train_rows=sum(len(train.rows) for train in trains),
        eval_rows=len(held_out) if helds else None,
        dropped_too_long=sum(split.too_long for split in splits),
        dropped_no_match=sum(split.no_match for split in splits),
        dropped_columns=tuple(sorted(set().union(*(split.dropped_columns for split in splits)))),
        prompt_tokens=_percentiles([count for split in splits for count in split.tokens]),
        exact_duplicates_between_splits=sum(map(asked.__contains__, held_out)),
        fingerprint=_fingerprint(splits),
        plain_text=all(
            pyarrow.types.is_string(kind) for each in trains for kind in each.rows.types("prompt")
        ),
    )


def _percentiles(counts: list[int]) -> PromptTokens | None:
    if not counts:
        return None
    ordered = sorted(counts)
    median, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95))
    return PromptTokens(ordered[0], median, p95, ordered[-1])


def _fingerprint(splits: list[_Split]) -> str:
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"{len(split.rows)} rows\n".encode())
        for row in split.rows:
            if IMAGES in row:
                row = {**row, IMAGES: name_images(row[IMAGES])}
            digest.update(f"{canonical_json(row)}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_characters(row: Row, where: str) -> None:
    """Refuse half a character, which no tokenizer reads.

    Raises:
        RecipeError: The row has one.
    """
    try:
        canonical_json(row).encode()
    except UnicodeEncodeError as error:
        message = f"{where} holds half a character (a lone surrogate): {error.reason}"
        raise recipe_error(message, "correct the text in the data", "dataset") from error

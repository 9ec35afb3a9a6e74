"""The datasets a trainer reads: prompts rendered, columns made, over-long rows dropped and counted."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow
from datasets import (
    Dataset,
    DatasetInfo,
    Features,
    IterableDataset,
    List,
    disable_progress_bars,
)

from grpo_cli.data.columns import drop_reserved, keep_rows
from grpo_cli.data.decoding import RgbImage
from grpo_cli.data.images import check_image_columns, name_images, read_images
from grpo_cli.data.mixing import SOURCE, Draw, count_draws, draw_rows, naming_source
from grpo_cli.data.prompts import Prompt, Renderer, resolve_style
from grpo_cli.data.rows import Row, RowNames, canonical_json, columns_of
from grpo_cli.data.scored import GroupReport, drop_single, make_groups, report_groups
from grpo_cli.data.sources import hold_out, identify, read_rows
from grpo_cli.errors import recipe_error
from grpo_cli.recipe.dataset import (
    IMAGES,
    FilesDataset,
    MixtureDataset,
    ReasoningGymDataset,
    ScoredDataset,
    SingleDataset,
)
from grpo_cli.recipe.recipe import Recipe

CountTokens = Callable[..., int]
"""Tokens of a prompt, which comes first, with its `images`."""
_IMAGES_TYPE = pyarrow.list_(pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}))


@dataclass(frozen=True)
class EncodedRows:
    """Rows as an Arrow table, and what had to be changed."""

    table: Any
    """`pyarrow.Table`."""
    json_columns: tuple[str, ...]
    """Columns whose values are JSON texts."""
    text_columns: tuple[str, ...]
    """Columns of mixed scalars, now all text."""


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
    json_columns: tuple[str, ...]
    """Columns passed on as JSON texts."""
    text_columns: tuple[str, ...]
    """Columns of mixed scalars, passed on as texts."""
    prompt_tokens: PromptTokens | None
    """None if tokens could not be counted."""
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

    rows: list[Row]
    names: RowNames
    no_match: int = 0
    too_long: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of the rows kept."""
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
    trains, helds, json_columns = [], [], set[str]()
    for place, source in enumerate(dataset.parts):
        with naming_source(place, source.source_name):
            train, held, groups = _read_splits(recipe, source, has_chat_template, count_tokens)
        trains.append(train)
        helds.append(held or _Split([], RowNames("evaluation")))
        json_columns |= _metadata_columns(source, train.rows)
    _number_rows(trains, helds)
    rows = [row for split in (*trains, *helds) for row in split.rows]
    check_one_style(rows, SOURCE if dataset.shares else None)
    encoded = encode_rows(rows, frozenset(json_columns))
    table, kept = _as_dataset(encoded.table), sum(len(split.rows) for split in trains)
    train_places: Sequence[int] = range(kept)
    held_places: Sequence[int] = range(kept, len(rows))
    if isinstance(dataset, MixtureDataset):
        # Rows are not copied until they are read, which would show a bar.
        disable_progress_bars()
        train_places, held_places = _order_mixture(recipe, dataset, trains, helds)
    data = BuiltData(
        table.select(train_places),
        table.select(held_places) if held_places else None,
        replace(_report(trains, helds if held_places else [], encoded), groups=groups),
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
        rows = [row for split in splits for row in split.rows]
        highest = max(row["row_id"] for row in rows)
        for row in rows:
            row["row_id"] += first
        first += highest + 1


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
    held = [len(split.rows) for split in helds if split.rows]
    spread = draw_rows(held, held, seed=0, shuffle=False)
    return _places(sizes, 0, order), _places(held, sum(sizes), spread)


def _as_dataset(table: Any) -> Dataset:
    """Return the rows of a `pyarrow.Table`; images are decoded when a row is read."""
    if IMAGES not in table.column_names:
        return Dataset(table)
    features = Features.from_arrow_schema(table.schema)
    features[IMAGES] = List(RgbImage())
    return Dataset(table, DatasetInfo(features=features))


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
    source = read_rows(dataset, recipe.seed)

    train = _make_split(dataset, renderer, source.train, source.train_names, has_images)
    held, groups = None, None
    if source.eval is not None:
        held = _make_split(dataset, renderer, source.eval, source.eval_names, has_images)
    if isinstance(dataset, ScoredDataset):
        total = len(train.rows)
        for split in filter(None, (train, held)):
            split.rows = drop_single(split.rows, split.names.split)
        single = total - len(train.rows)
    if dataset.eval_fraction:
        prompts = [identify(row) for row in train.rows]
        train.rows, chosen = hold_out(train.rows, prompts, dataset.eval_fraction, dataset.eval_seed)
        held = _Split(chosen[: dataset.eval_limit], RowNames("evaluation"))
    if isinstance(dataset, ScoredDataset):
        groups = report_groups(train.rows, single)
    elif dataset.eval_fraction:
        train.rows = train.rows[: dataset.limit]
    for split in filter(None, (train, held)):
        _drop_long(split, dataset.max_prompt_length, count_tokens)
    return train, held, groups


def _make_split(
    dataset: SingleDataset,
    renderer: Renderer,
    rows: list[Row],
    names: RowNames,
    has_images: bool,
) -> _Split:
    """Apply columns, render prompts, find images and leave out reserved names."""
    kept = make_rows(dataset, renderer, rows, names)
    no_match = len(rows) - len(kept)
    if not kept:
        message = f"no {names.split} row is left: a pattern found nothing in all {no_match} of them"
        raise recipe_error(message, "correct its regex", "dataset.columns")
    if isinstance(dataset, ScoredDataset):
        places = [(place, row) for place, row, _ in kept]
        prompts = [prompt for _, _, prompt in kept]
        return _Split(make_groups(dataset, places, prompts, names), names, no_match)
    columns = dataset.prompt.images
    check_image_columns(columns, kept[0][1], names.split)
    own = {"prompt", *columns}
    clean, dropped = drop_reserved(
        [{key: row[key] for key in row if key not in own} for _, row, _ in kept]
    )
    ready = [
        {"prompt": prompt, "row_id": place, **row}
        for (place, _, prompt), row in zip(kept, clean, strict=True)
    ]
    if has_images:
        for made, (place, row, _) in zip(ready, kept, strict=True):
            made[IMAGES] = read_images(row, columns, names(place), names.folder(place))
    return _Split(ready, names, no_match, dropped_columns=dropped)


def make_rows(
    dataset: SingleDataset, renderer: Renderer, rows: list[Row], names: RowNames
) -> list[tuple[int, Row, Prompt]]:
    """Return the place, all columns and the prompt of each row that no pattern drops.

    Raises:
        RecipeError: A pattern or a template fails on a row.
    """
    kept = keep_rows(dataset, rows, names)
    return [(place, row, renderer.render(row, names(place))) for place, row in kept]


def _drop_long(split: _Split, longest: int | None, count_tokens: CountTokens | None) -> None:
    if count_tokens is None:
        return
    counts = [
        count_tokens(row["prompt"], images=row[IMAGES])
        if IMAGES in row
        else count_tokens(row["prompt"])
        for row in split.rows
    ]
    kept = [at for at, count in enumerate(counts) if longest is None or count <= longest]
    if not kept:
        message = (
            f"no {split.names.split} row is left: the shortest of {len(counts)} prompts has {min(counts)} "
            f"tokens, over the limit of {longest}"
        )
        fix = f"raise it to {max(counts)} to keep every row"
        raise recipe_error(message, fix, "dataset.max_prompt_length")
    split.rows = [split.rows[at] for at in kept]
    split.tokens = [counts[at] for at in kept]
    split.too_long = len(counts) - len(kept)


def check_one_style(rows: list[Row], named_by: str | None = None) -> None:
    """Refuse prompts of both kinds: TRL looks only at the first one to tell messages from text.

    Raises:
        RecipeError: Some are messages and some are text.
    """

    def name(row: Row) -> str:
        return f"source `{row[named_by]}`" if named_by else f"row {row['row_id'] + 1}"

    is_text = isinstance(rows[0]["prompt"], str)
    for row in rows:
        if isinstance(row["prompt"], str) is not is_text:
            message = (
                f"{name(row)} has a prompt of another kind than {name(rows[0])}: some are plain text and some "
                "are messages"
            )
            fix = "make all of them messages, or set dataset.prompt.style: chat"
            raise recipe_error(message, fix, "dataset.prompt")


def _metadata_columns(dataset: SingleDataset, rows: list[Row]) -> frozenset[str]:
    """Return the columns of dicts of reasoning-gym: their keys differ from row to row."""
    if not isinstance(dataset, ReasoningGymDataset):
        return frozenset()
    return frozenset(name for name in rows[0] if isinstance(rows[0][name], dict))


def _report_stream(dataset: SingleDataset, report: DataReport) -> DataReport:
    """Return the report on streamed data by that on its first rows; its fingerprint has the sizes of files."""
    paths = dataset.train if isinstance(dataset, FilesDataset) else ()
    sizes = [Path(path).expanduser().stat().st_size for path in paths]
    fingerprint = hashlib.sha256(f"{report.fingerprint} {sizes}".encode()).hexdigest()
    return replace(report, train_rows=None, fingerprint=fingerprint)


def _report(trains: list[_Split], helds: list[_Split], encoded: EncodedRows) -> DataReport:
    """Return the report on the splits of all sources."""
    splits = [*trains, *helds]
    prompts = {identify(row) for train in trains for row in train.rows}
    held_out = [row for held in helds for row in held.rows]
    repeated = [row for row in held_out if identify(row) in prompts]
    return DataReport(
        train_rows=sum(len(train.rows) for train in trains),
        eval_rows=len(held_out) if helds else None,
        dropped_too_long=sum(split.too_long for split in splits),
        dropped_no_match=sum(split.no_match for split in splits),
        dropped_columns=tuple(sorted(set().union(*(split.dropped_columns for split in splits)))),
        json_columns=encoded.json_columns,
        text_columns=encoded.text_columns,
        prompt_tokens=_percentiles([count for split in splits for count in split.tokens]),
        exact_duplicates_between_splits=len(repeated),
        fingerprint=_fingerprint(splits),
        plain_text=all(isinstance(row["prompt"], str) for each in trains for row in each.rows),
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


def encode_rows(rows: list[Row], always_json: frozenset[str] = frozenset()) -> EncodedRows:
    """Put rows into an Arrow table.

    A column that holds lists or dicts becomes JSON text if Arrow would not give the same values
    back (it fills missing keys with None); a column that mixes scalars becomes text. Prompts stay
    messages: they become Arrow's JSON, which is read back when a row is.

    Args:
        rows: Rows of all splits together, so that the splits share their types.
        always_json: Columns whose dicts become JSON text in any case.
    """
    arrays: dict[str, Any] = {}
    as_json: list[str] = []
    as_text: list[str] = []
    for name in columns_of(rows):
        values = [row.get(name) for row in rows]
        if name == IMAGES:
            arrays[name] = pyarrow.array(values, _IMAGES_TYPE)
            continue
        nested = any(isinstance(value, dict | list | tuple) for value in values)
        array = None if name in always_json and nested else _as_array(values, nested)
        if array is None and name == "prompt":
            array = _as_text_array(name, values, nested).cast(pyarrow.json_())
        if array is None:
            (as_json if nested else as_text).append(name)
            array = _as_text_array(name, values, nested)
        arrays[name] = array
    return EncodedRows(pyarrow.table(arrays), tuple(as_json), tuple(as_text))


def as_text(value: Any, *, nested: bool) -> str | None:
    """Return a value of a column that is passed on as text, or as JSON if it is `nested`."""
    if value is None:
        return None
    return canonical_json(value, sort_keys=False) if nested else str(value)


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


def _as_text_array(name: str, values: list[Any], nested: bool) -> Any:
    try:
        texts = [as_text(value, nested=nested) for value in values]
        return pyarrow.array(texts, pyarrow.string())
    except UnicodeEncodeError as error:
        message = f"the column `{name}` holds half a character (a lone surrogate): {error.reason}"
        raise recipe_error(message, "correct the text in the data", "dataset") from error


def _as_array(values: list[Any], nested: bool) -> Any:
    """Return the values as an Arrow array; None if it would refuse or alter them."""
    try:
        array = pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeEncodeError):
        return None
    return array if not nested or array.to_pylist() == values else None

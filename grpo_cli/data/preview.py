"""What can be known of the rows of a recipe without `datasets` and in milliseconds, for `check`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from grpo_cli.data.files import PREVIEW_ROWS, WHOLE_ROWS, find_files, preview_file
from grpo_cli.data.images import ImageError, as_image, image_values
from grpo_cli.data.mixing import count_draws
from grpo_cli.data.prompts import Renderer, Style
from grpo_cli.data.rows import Row, RowNames, columns_of, fill_missing, keep_rows, place_issues
from grpo_cli.data.scored import GroupReport, look_at_groups
from grpo_cli.data.sources import (
    check_held_out,
    check_id,
    held_out_count,
    hold_out,
    identify,
    inline_rows,
    read_files,
    read_rows,
)
from grpo_cli.data.tasks import COLUMNS, LEVEL, check_task
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import (
    IMAGES,
    SOURCE,
    DatasetConfig,
    EnvironmentDataset,
    FilesDataset,
    HubDataset,
    MixtureDataset,
    ReasoningGymDataset,
    ScoredDataset,
    SingleDataset,
)

SAMPLE_ROWS = 20


@dataclass(frozen=True)
class SplitPreview:
    """What the beginning of a split shows."""

    columns: frozenset[str]
    count: int
    """The number of rows of the whole split, or of the first ones that a limit keeps."""
    rows: tuple[Row, ...]
    names: RowNames
    dataset: SingleDataset
    by_file: dict[str, set[str]] = field(default_factory=dict)
    """The columns of each file that was looked at, by its path."""

    @property
    def kept(self) -> dict[int, Row]:
        """Of the rows looked at, those that no pattern drops, by place, with all columns; none if one is wrong."""
        return self._extracted[0]

    @property
    def column_problems(self) -> list[Issue]:
        """What is wrong with the columns that the recipe makes."""
        return self._extracted[1]

    @cached_property
    def dropped(self) -> list[int]:
        """The places of the rows looked at that patterns drop."""
        places = [] if self.column_problems else range(len(self.rows))
        return [place for place in places if place not in self.kept]

    @property
    def left_rows(self) -> dict[int, Row]:
        """Of the rows of a preview, those that are not known to be dropped, as they stand in the data."""
        dropped = {*self.dropped}
        rows = enumerate(self.rows[:PREVIEW_ROWS])
        return {place: row for place, row in rows if place not in dropped}

    @property
    def counts(self) -> dict[str, int]:
        """The rows looked at, and those of them that are dropped."""
        return {"rows": len(self.rows), "no_match": len(self.dropped)}

    @property
    def left(self) -> int:
        """The rows of the split without those that are known to be dropped."""
        return self.count - len(self.dropped)

    def limit(self, rows: int | None) -> "SplitPreview":
        """Return what is known of the first rows alone."""
        return replace(self, count=min(self.count, rows or self.count), rows=self.rows[:rows])

    @cached_property
    def _extracted(self) -> tuple[dict[int, Row], list[Issue]]:
        try:
            return dict(keep_rows(self.dataset, fill_missing(self.rows), self.names)), []
        except RecipeError as error:
            return {}, error.problems

    @property
    def sample(self) -> tuple[Row, ...]:
        """The first rows, on which templates and rewards are tried."""
        return self.rows[:SAMPLE_ROWS]


@dataclass(frozen=True)
class Preview:
    """What can be known of the rows without `datasets` and in milliseconds; counts are `read_rows`'s."""

    columns: frozenset[str] | None
    """Columns of the training rows seen; None if they are not known before loading."""
    train_rows: int | None
    """Rows that training will have; of scored data, prompts, and of a mixture, the prompts of an epoch."""
    eval_rows: int | None
    """None if nothing is held out, or if it is not known."""
    note: str | None = None
    sample: tuple[Row, ...] = ()
    """The first training rows, if they could be read."""
    train: SplitPreview | None = None
    """The training rows seen; None if they are not known before loading."""
    held: SplitPreview | None = None
    """The evaluation rows that the recipe names; None if it names none, or they are not known."""
    groups: GroupReport | None = None
    """Of scored data that could be read, those held out by `eval_fraction` included."""
    problems: tuple[Issue, ...] = ()
    is_exact: bool = True
    """Whether the counts are certain; `eval_fraction` divides prompts, and many rows are counted as one each."""
    sources: tuple[int | None, ...] = ()
    """Of a mixture, the training rows of each source."""


def preview(dataset: DatasetConfig, seed: int) -> Preview:
    """Return what can be seen of the rows a recipe names, reading as little as possible.

    A missing evaluation file, say, does not hide the training rows.
    """
    if isinstance(dataset, MixtureDataset):
        return join_previews(dataset, [preview(source, seed) for source in dataset.sources])
    problems: list[Issue] = []
    try:
        check_held_out(dataset)
        seen = _preview(dataset, seed, problems)
    except RecipeError as error:
        problems += error.problems
        seen = Preview(None, None, None, "there are mistakes to correct first")
    return replace(seen, problems=(*problems, *seen.problems))


def join_previews(dataset: MixtureDataset, seen: Sequence[Preview]) -> Preview:
    """Return what is known of a mixture by what is known of its sources."""
    problems: list[Issue] = []
    for place, (source, each) in enumerate(zip(dataset.sources, seen, strict=True)):
        problems += place_issues(each.problems, place, source.name)
    columns = [each.columns for each in seen if each.columns is not None]
    sizes = [each.train_rows for each in seen if each.train_rows is not None]
    held = [each.eval_rows for each in seen if each.eval_rows is not None]
    train_rows = None
    if len(sizes) == len(seen) and not problems:
        try:
            train_rows = count_draws(dataset, sizes)
        except RecipeError as error:
            problems += error.problems
    return Preview(
        frozenset({SOURCE}).union(*columns) if len(columns) == len(seen) else None,
        train_rows,
        sum(held) if held else None,
        next((each.note for each in seen if each.note), None),
        tuple(
            {**row, SOURCE: source.name}
            for source, each in zip(dataset.sources, seen, strict=True)
            for row in each.sample
        ),
        problems=tuple(problems),
        is_exact=all(each.is_exact for each in seen),
        sources=tuple(each.train_rows for each in seen),
    )


def _preview(dataset: SingleDataset, seed: int, problems: list[Issue]) -> Preview:
    if isinstance(dataset, ScoredDataset):
        return _preview_scored(dataset, seed)
    if isinstance(dataset, ReasoningGymDataset | EnvironmentDataset):
        sizes = _split_sizes(dataset, dataset.size, dataset.eval_size or None)
    if isinstance(dataset, ReasoningGymDataset):
        check_task(dataset)
        columns = COLUMNS | {LEVEL} if dataset.levels else COLUMNS
        note, is_exact = "rows are drawn when training starts", not dataset.eval_fraction
        return Preview(columns, *sizes, note, is_exact=is_exact)
    if isinstance(dataset, EnvironmentDataset):
        return Preview(frozenset({"prompt", "seed"}), *sizes, "the environment gives the prompts")
    if isinstance(dataset, HubDataset):
        check_id(dataset.path)
        note = f"{dataset.path} is downloaded when it is needed; nothing was looked up"
        return Preview(None, None, None, note)
    held = None
    if isinstance(dataset, FilesDataset):
        train = (
            _preview_stream(dataset)
            if dataset.streams
            else _preview_files(dataset, "train", "training", problems)
        )
        held = _preview_files(dataset, "eval", "evaluation", problems) if dataset.eval else None
    else:
        rows, eval_rows = inline_rows(dataset)
        train = _preview_list(dataset, rows, RowNames("training"))
        if eval_rows is not None:
            held = _preview_list(dataset, eval_rows, RowNames("evaluation"))
    if train is None:
        note = "a file of the training rows cannot be read"
        return Preview(None, None, None, note, held=held)
    # `eval_fraction` divides all rows, before the limits.
    train = train.limit(None if dataset.eval_fraction else dataset.rows_read)
    held = held.limit(dataset.eval_limit) if held else None
    sizes = _split_sizes(dataset, train.left, held.left if held else None)
    is_whole = len(train.rows) == train.count or not train.dropped
    divided = _count_divided(dataset, train)
    train_rows, held_rows = divided or sizes
    return Preview(
        train.columns,
        None if dataset.streams else train_rows,
        held_rows,
        sample=train.sample,
        train=train,
        held=held,
        is_exact=divided is not None or (is_whole and not dataset.eval_fraction),
    )


def _count_divided(dataset: SingleDataset, train: SplitPreview) -> tuple[int, int] | None:
    """Return the rows of both splits as `eval_fraction` divides their prompts.

    None if there is no such fraction, if not all rows were looked at, or if one of them is wrong, which the checks
    of the first rows tell.
    """
    if not dataset.eval_fraction or len(train.rows) < train.count or train.column_problems:
        return None
    images = dataset.prompt.images
    style: Style = "text" if dataset.prompt.style == "text" else "chat"
    prompts = []
    try:
        renderer = Renderer(dataset.prompt, style, may_be_empty=True, in_parts=bool(images))
        for place, row in train.kept.items():
            folder = train.names.folder(place)
            pictures = [as_image(value, folder) for _, value in image_values(row, images)]
            prompts.append(identify({**row, "prompt": renderer.render(row), IMAGES: pictures}))
    except (RecipeError, ImageError):
        return None
    held = len(hold_out(prompts, dataset.eval_fraction, dataset.eval_seed))
    left = len(prompts) - held
    return min(left, dataset.limit or left), min(held, dataset.eval_limit or held)


def _preview_files(
    dataset: FilesDataset, key: Literal["train", "eval"], split: str, problems: list[Issue]
) -> SplitPreview | None:
    """Return all files of a split as one; None if there is a problem with one of them."""
    paths: tuple[str, ...] = getattr(dataset, key) or ()
    rows: list[Row] = []
    counts: list[tuple[Path, int]] = []
    by_file: dict[str, set[str]] = {}
    drops = any(each.on_no_match == "drop" for each in dataset.columns.values())
    most = WHOLE_ROWS if drops else PREVIEW_ROWS
    for index, path in enumerate(paths):
        field = f"dataset.{key}.{index}" if paths[1:] else f"dataset.{key}"
        try:
            (file,) = find_files([path], field)
            left = max(most - len(rows), PREVIEW_ROWS)
            first, count, by_file[str(file.path)] = preview_file(file, left)
        except RecipeError as error:
            problems += error.problems
            continue
        # The places of the rows must be those in the whole split.
        if len(rows) == sum(count for _, count in counts):
            rows += first
        counts.append((file.path, count))
    if len(counts) < len(paths):
        return None
    columns = frozenset[str]().union(*by_file.values())
    names = RowNames(split, tuple(counts))
    count = sum(count for _, count in counts)
    return SplitPreview(columns, count, tuple(rows), names, dataset, by_file)


def _preview_stream(dataset: FilesDataset) -> SplitPreview:
    for file in find_files(dataset.train, "dataset.train"):
        if file.format == ".json":
            fix = "write one object a line, in a .jsonl file"
            raise file.problem("cannot be streamed, since JSON is read whole", fix)
    read = read_files(dataset.train, "train", "training", dataset.rows_read)
    return _preview_list(dataset, *read)


def _preview_list(dataset: SingleDataset, rows: Sequence[Row], names: RowNames) -> SplitPreview:
    return SplitPreview(frozenset(columns_of(rows)), len(rows), tuple(rows), names, dataset)


def _preview_scored(dataset: ScoredDataset, seed: int) -> Preview:
    """Read all rows: how many prompts there are shows in no other way."""
    seen = preview(dataset.source, seed)
    if seen.columns is None or seen.problems:
        return seen
    try:
        source = read_rows(dataset, seed)
        groups = look_at_groups(dataset, source.train, source.train_names)
        left, held = groups.prompts, None
        if dataset.eval_fraction:
            held = held_out_count(left, dataset.eval_fraction)
            left, held = left - held, min(held, dataset.eval_limit or held)
        elif source.eval:
            held = look_at_groups(dataset, source.eval, source.eval_names).prompts
    except RecipeError as error:
        return replace(seen, problems=tuple(error.problems))
    return replace(seen, train_rows=left, eval_rows=held, groups=groups)


def _split_sizes(dataset: SingleDataset, train: int, held: int | None) -> tuple[int, int | None]:
    """Return the rows of both splits, from the rows there are in the sources, if no two have the same prompt."""
    if dataset.eval_fraction:
        held = held_out_count(train, dataset.eval_fraction)
        train -= held
    train = min(train, dataset.limit or train)
    return train, None if held is None else min(held, dataset.eval_limit or held)

"""Checks of all rows of a dataset: held out and trained on, dropped, empty, or without a reward."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from grpo_cli.data.dropped import check_dropped, count_dropped
from grpo_cli.data.files import WHOLE_ROWS, RowFile, iterate_lines, iterate_rows, parse_line
from grpo_cli.data.preview import Preview, SplitPreview
from grpo_cli.data.prompts import template_columns
from grpo_cli.data.rows import Row, canonical_json, read_column
from grpo_cli.errors import RecipeError, RewardError
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import HubDataset, ScoredDataset, SingleDataset
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.rewards.contract import Batch
from grpo_cli.rewards.scoring import Condition

_MOST_ROWS = 200_000
"""Rows of other files that are read whole for empty values."""


def check_all_rows(recipe: Recipe | None, dataset: SingleDataset, seen: Preview) -> Iterator[Issue]:
    """Find rows that no reward applies to, or that are trained on and held out."""
    if seen.train is not None:
        yield from _check_unrewarded(recipe, dataset, seen.train)
    yield from check_shared(recipe, dataset, seen)


def count_missed(previews: Sequence[Preview]) -> Iterator[Issue]:
    """Count the rows that patterns drop, of all sources together; of long files, in the first rows."""
    splits = [each for seen in previews for each in (seen.train, seen.held) if each]
    splits.sort(key=lambda each: each.names.split, reverse=True)
    missed = [(place, each) for each in splits for place in each.dropped[:1]]
    if not missed:
        return
    place, split = missed[0]
    keys = (key for key, each in split.dataset.columns.items() if each.on_no_match == "drop")
    where = "dataset"
    if split.dataset.source_name:
        at = next(
            at for at, seen in enumerate(previews) if split is seen.train or split is seen.held
        )
        where = f"dataset.sources.{at}"
    counts = count_dropped((each.names.split, each.counts) for each in splits)
    for issue in check_dropped(counts, f"{where}.columns.{next(keys)}.regex", split.names(place)):
        seen = issue.seen
        if not all(len(each.rows) == each.count for each in splits):
            seen += ", by the first rows"
        if any(each.dataset.max_prompt_length for each in splits):
            # Lengths need the tokenizer.
            seen += "; `grpo probe` counts those longer than `max_prompt_length`"
        yield replace(issue, seen=seen)


def _check_unrewarded(
    recipe: Recipe | None, dataset: SingleDataset, split: SplitPreview
) -> Iterator[Issue]:
    """Find rows that no reward and no environment applies to."""
    kept = split.kept
    if recipe is None or not recipe.rewards or not kept:
        return
    sections = (*recipe.rewards, *recipe.environment)
    own = [
        each for each in sections if getattr(each, "source", None) in (None, dataset.source_name)
    ]
    texts = [text for each in own if (text := getattr(each, "when", None))]
    if len(texts) < len(own):
        return
    rows = range(len(kept))
    columns = {name: [row.get(name) for row in kept.values()] for name in next(iter(kept.values()))}
    batch = Batch([""] * len(kept), [""] * len(kept), columns=columns)
    conditions = [Condition(text) for text in texts]
    try:
        bare = [row for row in rows if not any(each.holds(batch, row) for each in conditions)]
    except RewardError:
        return  # reported by the check of conditions
    if bare:
        first = split.names([*kept][bare[0]])
        seen = f"no reward applies to {len(bare):,} of the {len(kept):,} rows looked at, which teach nothing; "
        fix = "widen a `when`, add a reward without one, or leave these rows out"
        yield Issue(f"{seen}the first is {first}", fix, "rewards", level="warning")


def check_shared(recipe: Recipe | None, dataset: SingleDataset, seen: Preview) -> Iterator[Issue]:
    """Find evaluation rows that are training rows too, by what they ask."""
    if isinstance(dataset, HubDataset) and dataset.eval_split == dataset.split:
        fix = "name another split, or remove it and set `eval_fraction: 0.05`"
        text = (
            f"`{dataset.split}` is what is trained on, too; a gain on it shows memory, not learning"
        )
        yield Issue(text, fix, "dataset.eval_split")
    # Of scored data other responses to the same prompts may be held out.
    if seen.train is None or seen.held is None or isinstance(dataset, ScoredDataset):
        return
    names = () if recipe is None or recipe.environment else _asked_columns(dataset)
    columns = seen.train.columns & seen.held.columns
    if any(name not in columns and name.partition(".")[0] not in columns for name in names):
        return  # Without what it names, no prompt can be compared.
    held = {at: _identify(row, names) for at, row in islice(_left_rows(seen.held), WHOLE_ROWS)}
    shared = {*held.values()} & {_identify(row, names) for _, row in _left_rows(seen.train)}
    if len(seen.train.rows) < seen.train.count and _is_long(seen.train):
        known = {line.strip() for line in islice(_lines(seen.held), WHOLE_ROWS)}
        both = {each for line in _lines(seen.train) if (each := line.strip()) in known}
        shared |= {_identify(row, names) for each in both if (row := parse_line(each)) is not None}
    places = [place for place, key in held.items() if key in shared]
    if places:
        every = len(places) == len(held)
        of_all = f"all {len(held):,}" if every else f"{len(places):,} of {len(held):,}"
        text = (
            f"{of_all} evaluation rows ask what training rows ask, word for word; the first is "
            f"{seen.held.names(places[0])}. A gain on them shows memory, not learning"
        )
        key = dataset.named_eval or "eval"
        fix = f"name rows that are not trained on, or remove `{key}` and set `eval_fraction: 0.05`"
        yield Issue(text, fix, f"dataset.{key}", level="warning")


def _asked_columns(dataset: SingleDataset) -> tuple[str, ...]:
    """Return the columns of the data that prompts are made of; none if all prompts may be the same."""
    prompt = dataset.prompt
    templates = [text for text in (prompt.user, prompt.system) if text is not None]
    named = {"prompt"} if prompt.user is None else set()
    try:
        named |= frozenset().union(*map(template_columns, templates))
    except RecipeError:
        return ()
    named |= {*prompt.images}
    made = dataset.columns
    return tuple(sorted(made[name].from_ if name in made else name for name in named))


def _identify(row: Row, names: Sequence[str]) -> str:
    return canonical_json([read_column(row, name) for name in names] if names else row)


def _files(split: SplitPreview) -> list[RowFile]:
    return [RowFile(path, "dataset") for path, _ in split.names.files]


def _lines(split: SplitPreview) -> Iterator[bytes]:
    files = (file for file in _files(split) if file.format == ".jsonl")
    return islice(chain.from_iterable(map(iterate_lines, files)), split.count)


def _is_long(split: SplitPreview) -> bool:
    return split.count > WHOLE_ROWS and all(file.format == ".jsonl" for file in _files(split))


def _left_rows(split: SplitPreview) -> Iterator[tuple[int, Row]]:
    """Yield place and row of those that no pattern drops; of a split with many rows, of the preview."""
    is_read = len(split.rows) == split.count or split.count > WHOLE_ROWS
    dropped = {*split.dropped}
    rows = enumerate(split.rows if is_read else _read_all(split))
    return ((place, row) for place, row in rows if place not in dropped)


def _read_all(split: SplitPreview) -> Iterator[Row]:
    try:
        rows = chain.from_iterable(map(iterate_rows, _files(split)))
        yield from islice(rows, split.count)
    except RecipeError:
        return  # of a later row, which the preview did not reach: the training tells it


def later_rows(split: SplitPreview, column: str) -> Iterator[tuple[int, Row]]:
    """Yield place and row of those after the preview in which a column of the data may be empty.

    Lines of JSON are parsed only if they lack the column's name, or have an empty value behind it.
    """
    first, files = len(split.rows), _files(split)
    if first == split.count:
        return
    name = canonical_json(column.partition(".")[0]).encode()
    if not name.isascii() or any(file.format != ".jsonl" for file in files):
        rows = _read_all(split) if split.count <= _MOST_ROWS else ()
        yield from islice(enumerate(rows), first, None)
        return
    empty = re.compile(re.escape(name) + rb'\s*:\s*(?:null|NaN|"\s*"|\{)')
    for place, line in islice(enumerate(_lines(split)), first, None):
        if (name not in line or empty.search(line)) and (row := parse_line(line)) is not None:
            yield place, row

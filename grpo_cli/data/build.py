"""The datasets a trainer reads: prompts rendered, columns made, over-long rows dropped and counted.

Owns the last step from rows to `datasets.Dataset` and the report about it. The only module of this
room that loads `datasets`.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from datasets import Dataset

from grpo_cli.data.columns import drop_reserved, extract_columns
from grpo_cli.data.encoding import EncodedRows, canonical_json, encode_rows
from grpo_cli.data.prompts import Prompt, Renderer, resolve_style
from grpo_cli.data.rows import Row
from grpo_cli.data.scored import GroupReport, drop_single, make_groups, report_groups
from grpo_cli.data.sources import hold_out, read_rows
from grpo_cli.errors import Problem, RecipeError
from grpo_cli.recipe.dataset import DatasetConfig, ReasoningGymDataset, ScoredDataset
from grpo_cli.recipe.recipe import Recipe

CountTokens = Callable[[Prompt], int]


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

    train_rows: int
    eval_rows: int | None
    """None where nothing is held out."""
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
    """None where tokens could not be counted."""
    exact_duplicates_between_splits: int
    """Evaluation rows whose prompt is also a training prompt."""
    fingerprint: str
    """SHA-256 in hex over the prompts and columns of both splits, in order."""
    groups: GroupReport | None = None
    """Of scored data, whose rows are groups; None of other kinds."""

    def as_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class BuiltData:
    """What is trained on and what is held out."""

    train: Dataset
    eval: Dataset | None
    report: DataReport


@dataclass
class _Split:
    """One split on its way."""

    rows: list[Row]
    no_match: int = 0
    too_long: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of the rows kept."""
    dropped_columns: frozenset[str] = frozenset()


def build_datasets(
    recipe: Recipe, *, has_chat_template: bool, count_tokens: CountTokens | None
) -> BuiltData:
    """Builds the datasets of a recipe.

    Rows carry `prompt`, `row_id` (place in the source, from 0) and all other columns; of scored data, a
    row is a group, with `responses` and `rewards`. Prompts are rendered after `dataset.columns` is applied,
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
    renderer = Renderer(dataset.prompt, resolve_style(dataset.prompt, has_chat_template))
    source = read_rows(dataset, recipe.seed)

    train = _make_split(dataset, renderer, source.train, "training")
    held, groups = None, None
    if source.eval is not None:
        held = _make_split(dataset, renderer, source.eval, "evaluation")
    single = 0
    if isinstance(dataset, ScoredDataset):
        single = _drop_single(train, held)
    if dataset.eval_fraction:
        asked = [canonical_json(row["prompt"]) for row in train.rows]
        train.rows, chosen = hold_out(train.rows, asked, dataset.eval_fraction, dataset.eval_seed)
        held = _Split(chosen[: dataset.eval_limit])
    if isinstance(dataset, ScoredDataset):
        groups = report_groups(train.rows, single)
    elif dataset.eval_fraction:
        train.rows = train.rows[: dataset.limit]
    for split, name in ((train, "training"), (held, "evaluation")):
        if split is not None:
            _drop_long(split, dataset.max_prompt_length, count_tokens, name)
    rows = train.rows + (held.rows if held else [])
    _check_one_style(rows)
    encoded = encode_rows(rows, _metadata_columns(dataset, rows))
    kept = len(train.rows)
    return BuiltData(
        Dataset(encoded.table.slice(0, kept)),
        Dataset(encoded.table.slice(kept)) if held else None,
        replace(_report(train, held, encoded), groups=groups),
    )


def _drop_single(train: _Split, held: _Split | None) -> int:
    """Leave out scored prompts that teach nothing; return how many of them were to train on."""
    total = len(train.rows)
    train.rows = drop_single(train.rows, "training")
    if held is not None:
        held.rows = drop_single(held.rows, "evaluation")
    return total - len(train.rows)


def _make_split(dataset: DatasetConfig, renderer: Renderer, rows: list[Row], name: str) -> _Split:
    """Applies columns, renders prompts and leaves out reserved names."""
    made = extract_columns(rows, dataset.columns, split=name)
    kept = [(place, row) for place, row in enumerate(made) if row is not None]
    if not kept:
        message = f"no {name} row is left: a pattern found nothing in all {len(rows)} of them"
        raise RecipeError([Problem(message, "correct its regex", "dataset.columns")])
    prompts = [renderer.render(row, f"{name} row {place + 1}") for place, row in kept]
    if isinstance(dataset, ScoredDataset):
        groups = make_groups(dataset, kept, prompts, name)
        return _Split(groups, no_match=len(rows) - len(kept))
    clean, dropped = drop_reserved([row for _, row in kept])
    ready = [
        {"prompt": prompt, "row_id": place, **{key: row[key] for key in row if key != "prompt"}}
        for prompt, (place, _), row in zip(prompts, kept, clean, strict=True)
    ]
    return _Split(ready, no_match=len(rows) - len(kept), dropped_columns=dropped)


def _drop_long(
    split: _Split, longest: int | None, count_tokens: CountTokens | None, name: str
) -> None:
    if count_tokens is None:
        return
    counts = [count_tokens(row["prompt"]) for row in split.rows]
    kept = [at for at, count in enumerate(counts) if longest is None or count <= longest]
    if not kept:
        message = (
            f"no {name} row is left: the shortest of {len(counts)} prompts has {min(counts)} "
            f"tokens, over the limit of {longest}"
        )
        fix = f"raise it to {max(counts)} to keep every row"
        raise RecipeError([Problem(message, fix, "dataset.max_prompt_length")])
    split.rows = [split.rows[at] for at in kept]
    split.tokens = [counts[at] for at in kept]
    split.too_long = len(counts) - len(kept)


def _check_one_style(rows: list[Row]) -> None:
    """TRL looks at the first prompt only to tell messages from text."""
    is_text = isinstance(rows[0]["prompt"], str)
    for row in rows:
        if isinstance(row["prompt"], str) is not is_text:
            message = (
                f"row {row['row_id'] + 1} has a prompt of another kind than row "
                f"{rows[0]['row_id'] + 1}: some are plain text and some are messages"
            )
            fix = "make all of them messages, or set dataset.prompt.style: chat"
            raise RecipeError([Problem(message, fix, "dataset.prompt")])


def _metadata_columns(dataset: DatasetConfig, rows: list[Row]) -> frozenset[str]:
    """Columns of dicts of reasoning-gym: what a task writes there differs from row to row."""
    if not isinstance(dataset, ReasoningGymDataset):
        return frozenset()
    return frozenset(name for name in rows[0] if isinstance(rows[0][name], dict))


def _report(train: _Split, held: _Split | None, encoded: EncodedRows) -> DataReport:
    splits = [train, held] if held else [train]
    asked = {canonical_json(row["prompt"]) for row in train.rows}
    repeated = [row for row in held.rows if canonical_json(row["prompt"]) in asked] if held else []
    return DataReport(
        train_rows=len(train.rows),
        eval_rows=len(held.rows) if held else None,
        dropped_too_long=sum(split.too_long for split in splits),
        dropped_no_match=sum(split.no_match for split in splits),
        dropped_columns=tuple(sorted(set().union(*(split.dropped_columns for split in splits)))),
        json_columns=encoded.json_columns,
        text_columns=encoded.text_columns,
        prompt_tokens=_percentiles([count for split in splits for count in split.tokens]),
        exact_duplicates_between_splits=len(repeated),
        fingerprint=_fingerprint(splits),
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
            digest.update(f"{canonical_json(row)}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()

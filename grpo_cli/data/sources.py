"""Rows from where they are: files, the recipe itself, reasoning-gym, the hub.

Owns which rows are trained on and which are held out: `limit`, `eval_limit`, `eval_fraction`.
Formats of files belong to `files`, procedural tasks to `tasks`; prompts and columns come later.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NoReturn, TypeVar

from grpo_cli.data.files import find_files, iterate_rows
from grpo_cli.data.rows import Row, fill_missing
from grpo_cli.data.tasks import draw_rows
from grpo_cli.errors import Problem, RecipeError, SetupError
from grpo_cli.recipe.dataset import (
    DatasetConfig,
    FilesDataset,
    HubDataset,
    InlineDataset,
    ReasoningGymDataset,
    ScoredDataset,
)

T = TypeVar("T")


@dataclass(frozen=True)
class SourceRows:
    """The rows of both splits, every row with every column of its split."""

    train: list[Row]
    eval: list[Row] | None
    """None where nothing is held out."""


def read_rows(dataset: DatasetConfig, seed: int) -> SourceRows:
    """Reads the rows a recipe names and divides them.

    With `eval_fraction` all rows are read, for `hold_out` to divide.

    Args:
        dataset: The section of the recipe; its paths are absolute or relative to the working
            directory.
        seed: Draws the training rows of reasoning-gym.

    Raises:
        RecipeError: A file, row or setting cannot be used.
        SetupError: The hub cannot be reached or does not have the dataset.
    """
    check_held_out(dataset)
    if isinstance(dataset, ScoredDataset):
        dataset = dataset.source
    train, held = _read(dataset, seed, None if dataset.eval_fraction else dataset.limit)
    train = train if dataset.eval_fraction else train[: dataset.limit]
    return SourceRows(
        fill_missing(train), None if held is None else fill_missing(held[: dataset.eval_limit])
    )


def split_sizes(dataset: DatasetConfig, train: int, held: int | None) -> tuple[int, int | None]:
    """Rows of both splits as `read_rows` will give them, from the rows there are in the sources."""
    if dataset.eval_fraction:
        held = held_out_count(train, dataset.eval_fraction)
        train -= held
    train = min(train, dataset.limit or train)
    return train, None if held is None else min(held, dataset.eval_limit or held)


def held_out_count(rows: int, fraction: float) -> int:
    """Rows that `eval_fraction` holds out of `rows`: at least one, and one stays for training.

    Raises:
        RecipeError: There are fewer than two rows.
    """
    if rows < 2:
        message = f"there is {rows} row; {fraction:g} of it cannot be held out"
        raise _error(message, "name more rows, or remove it", "dataset.eval_fraction")
    return min(max(1, round(rows * fraction)), rows - 1)


def hold_out(
    rows: list[T], prompts: Sequence[str], fraction: float, seed: int
) -> tuple[list[T], list[T]]:
    """Divide rows into those to train on and those held out, both in order.

    Args:
        rows: All of them, so that limits do not change what is held out.
        prompts: What each of them asks; rows that ask the same stay together.
        fraction: `dataset.eval_fraction`, a share of the distinct prompts.
        seed: `dataset.eval_seed`.

    Raises:
        RecipeError: There are fewer than two prompts.
    """
    asked: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        asked.setdefault(prompt, []).append(place)
    groups = list(asked.values())
    chooser = random.Random(f"eval_fraction:{seed}")
    chosen = chooser.sample(range(len(groups)), held_out_count(len(groups), fraction))
    held = {place for group in chosen for place in groups[group]}
    kept = [row for place, row in enumerate(rows) if place not in held]
    return kept, [rows[place] for place in sorted(held)]


def has_eval(dataset: DatasetConfig) -> bool:
    """Whether the recipe holds out rows for evaluation."""
    return dataset.eval_fraction is not None or _names_eval(dataset) is not None


def check_held_out(dataset: DatasetConfig) -> None:
    """Checks the settings about evaluation against each other.

    Raises:
        RecipeError: Two settings hold rows out, or a limit is put on rows that are not there.
    """
    named = _names_eval(dataset)
    if named and dataset.eval_fraction is not None:
        message = f"`{named}` and `eval_fraction` both say what is held out for evaluation"
        raise _error(message, "keep one of them", "dataset.eval_fraction")
    if dataset.eval_limit is not None and not has_eval(dataset):
        message = f"limits evaluation to {dataset.eval_limit} rows, but none are held out"
        fix = "add dataset.eval_fraction, such as 0.05, or remove it"
        raise _error(message, fix, "dataset.eval_limit")


def _names_eval(dataset: DatasetConfig) -> str | None:
    """The setting by which a recipe names evaluation rows, where it does."""
    match dataset:
        case FilesDataset():
            return "eval" if dataset.eval is not None else None
        case InlineDataset():
            return "eval_rows" if dataset.eval_rows is not None else None
        case ReasoningGymDataset():
            return "eval_size" if dataset.eval_size else None
        case HubDataset():
            return "eval_split" if dataset.eval_split is not None else None
        case ScoredDataset():
            return _names_eval(dataset.source)


def _read(
    dataset: DatasetConfig, seed: int, limit: int | None
) -> tuple[list[Row], list[Row] | None]:
    match dataset:
        case FilesDataset():
            train = _read_files(dataset.train, "dataset.train", limit)
            named = dataset.eval
            held = _read_files(named, "dataset.eval", dataset.eval_limit) if named else None
            return train, held
        case InlineDataset():
            return inline_rows(dataset)
        case ReasoningGymDataset():
            return draw_rows(dataset, seed, limit)
        case ScoredDataset():
            return _read(dataset.source, seed, limit)
        case HubDataset():
            train = _load_split(dataset, "split", limit)
            named_split = dataset.eval_split
            return train, (
                _load_split(dataset, "eval_split", dataset.eval_limit) if named_split else None
            )


def _read_files(paths: tuple[str, ...], field: str, limit: int | None) -> list[Row]:
    rows = chain.from_iterable(iterate_rows(file) for file in find_files(paths, field))
    return list(islice(rows, limit))


def inline_rows(dataset: InlineDataset) -> tuple[list[Row], list[Row] | None]:
    """The rows written in the recipe.

    Raises:
        RecipeError: A list of rows is empty.
    """
    for field, rows in (("rows", dataset.rows), ("eval_rows", dataset.eval_rows)):
        if rows is not None and not rows:
            fix = "write at least one row, such as - {question: 1 + 1, answer: 2}"
            raise _error("is empty", fix, f"dataset.{field}")
    return list(dataset.rows), None if dataset.eval_rows is None else list(dataset.eval_rows)


def _load_split(dataset: HubDataset, field: str, limit: int | None) -> list[Row]:
    """One split of a hub dataset; `datasets` itself runs no code of the repository."""
    import datasets

    split = getattr(dataset, field)
    try:
        loaded = datasets.load_dataset(
            dataset.path, dataset.name, split=split, revision=dataset.revision
        )
    except (ValueError, RuntimeError) as error:
        _refuse_choice(dataset, field, error)
    except (datasets.exceptions.DatasetsError, OSError) as error:
        raise SetupError(_explain_hub(dataset, error)) from error
    rows: list[Row] = loaded.select(range(min(limit or len(loaded), len(loaded)))).to_list()
    if not rows:
        raise _error(
            f"split `{split}` of {dataset.path} is empty", "choose another", "dataset.split"
        )
    return rows


def _refuse_choice(dataset: HubDataset, field: str, error: Exception) -> NoReturn:
    """Names the setting `datasets` complains about; anything else keeps its traceback."""
    text = str(error)
    chosen = {
        "Unknown split": (field, "choose one of the splits listed"),
        "Config name is missing": ("name", "set dataset.name to one of those listed"),
        "BuilderConfig": ("name", "choose one of those listed"),
        "Dataset scripts": ("path", "set dataset.revision: refs/convert/parquet"),
    }
    for start, (key, fix) in chosen.items():
        if start in text:
            message = f"{dataset.path}: {text.strip()}"
            raise RecipeError([Problem(message, fix, f"dataset.{key}")]) from error
    raise error


def _explain_hub(dataset: HubDataset, error: Exception) -> str:
    import datasets

    reason = str(error).strip().split("\n")[0]
    if isinstance(error, FileNotFoundError):
        fix = (
            f"check the id at https://huggingface.co/datasets/{dataset.path}; for a private or "
            "gated dataset run `hf auth login`"
        )
    elif isinstance(error, datasets.exceptions.DatasetsError):
        fix = "choose another dataset.revision, or download its files and use dataset.kind: files"
    else:
        fix = (
            "check the network and HF_HUB_OFFLINE, or download the rows where there is a network "
            "and use dataset.kind: files"
        )
    return f"dataset.path: {dataset.path} cannot be loaded: {reason}. Fix: {fix}"


def _error(message: str, fix: str, path: str) -> RecipeError:
    return RecipeError([Problem(message, fix, path)])

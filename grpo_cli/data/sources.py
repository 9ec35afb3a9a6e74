"""Rows from files, the recipe, reasoning-gym or the hub; which are trained on and which are held out."""

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_cli.data.files import find_files, iterate_rows
from grpo_cli.data.images import name_images
from grpo_cli.data.rows import Row, RowNames, canonical_json, fill_missing
from grpo_cli.errors import SetupError, recipe_error
from grpo_cli.recipe.dataset import (
    IMAGES,
    DatasetConfig,
    EnvironmentDataset,
    FilesDataset,
    HubDataset,
    HubSource,
    InlineDataset,
    ReasoningGymDataset,
    ScoredDataset,
    SingleDataset,
)
from grpo_cli.units import count_noun

IDENTIFYING = ("prompt", "seed", IMAGES)
"""The columns that `identify` reads."""


@dataclass(frozen=True)
class SourceRows:
    """The rows of both splits, every row with every column of its split."""

    train: Sequence[Row]
    eval: Sequence[Row] | None
    train_names: RowNames
    eval_names: RowNames


def read_rows(
    dataset: SingleDataset, seed: int, gather: Callable[[Iterable[Row]], Sequence[Row]] = list
) -> SourceRows:
    """Read the rows a recipe names and divide them; `gather` makes a sequence of rows that are read one by one.

    With `eval_fraction` all rows are read, for `hold_out` to divide. Of streamed data the first training rows
    are read.

    Raises `RecipeError` if a file, row or setting cannot be used, and `SetupError` if the hub cannot be
    reached or does not have the dataset.
    """
    check_held_out(dataset)
    limit = None if dataset.eval_fraction else dataset.rows_read
    plain = dataset.source if isinstance(dataset, ScoredDataset) else dataset
    names: list[RowNames] = [RowNames("training"), RowNames("evaluation")]
    train: Sequence[Row]
    held: Sequence[Row] | None = None
    if isinstance(plain, FilesDataset):
        train, names[0] = read_files(plain.train, "train", "training", limit, gather)
        if plain.eval is not None:
            held, names[1] = read_files(
                plain.eval, "eval", "evaluation", dataset.eval_limit, gather
            )
    elif isinstance(plain, InlineDataset):
        train, held = inline_rows(plain)
    elif isinstance(plain, ReasoningGymDataset):
        from grpo_cli.data.tasks import draw_rows

        train, held = draw_rows(plain, seed, limit)
    elif isinstance(plain, EnvironmentDataset):
        train, held = _seed_rows(plain, seed)
    else:
        train = load_split(plain, "split", limit, gather)
        if plain.eval_split:
            held = load_split(plain, "eval_split", dataset.eval_limit, gather)
    held = None if held is None else fill_missing(held[: dataset.eval_limit])
    return SourceRows(fill_missing(train[:limit]), held, *names)


def held_out_count(prompts: int, fraction: float) -> int:
    """Return how many of so many prompts `eval_fraction` holds out: at least one, and one stays for training.

    Raises `RecipeError` if there are fewer than two.
    """
    if prompts < 2:
        message = f"the rows have {count_noun(prompts, 'prompt')}; {fraction:g} of that cannot be held out"
        raise recipe_error(message, "add others, or remove it", "dataset.eval_fraction")
    return min(max(1, round(prompts * fraction)), prompts - 1)


def identify(row: Row) -> str:
    """Return what makes two rows ask the same: prompt and images; the seed does where an environment asks."""
    is_empty = row["prompt"][-1:] == [{"role": "user", "content": ""}]
    asked = [row["prompt"], row.get("seed") if is_empty else None]
    images = row.get(IMAGES)
    return canonical_json(asked if images is None else [*asked, name_images(images)])


def hold_out(prompts: Iterable[Hashable], fraction: float, seed: int) -> set[int]:
    """Return the places of the rows that `eval_fraction` holds out, by what `identify` gives for each of all rows.

    Rows with the same prompt stay together; `fraction` is a share of the distinct prompts.

    Raises `RecipeError` if there are fewer than two prompts.
    """
    numbers: dict[Hashable, int] = {}
    numbered = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
    chooser = random.Random(f"eval_fraction:{seed}")
    count = held_out_count(len(numbers), fraction)
    chosen = {*chooser.sample(range(len(numbers)), count)}
    return {place for place, number in enumerate(numbered) if number in chosen}


def has_eval(dataset: DatasetConfig) -> bool:
    """Return whether the recipe holds out rows for evaluation."""
    return any(each.eval_fraction or each.named_eval for each in dataset.parts)


def check_held_out(dataset: SingleDataset) -> None:
    """Check the settings about evaluation against each other; raises `RecipeError`."""
    named = dataset.named_eval
    if named and dataset.eval_fraction is not None:
        message = f"`{named}` and `eval_fraction` both say what is held out for evaluation"
        raise recipe_error(message, "keep one of them", "dataset.eval_fraction")
    if dataset.eval_limit is not None and not has_eval(dataset):
        message = f"limits evaluation to {dataset.eval_limit} rows, but none are held out"
        raise recipe_error(
            message, "add dataset.eval_fraction, such as 0.05, or remove it", "dataset.eval_limit"
        )


def read_files(
    paths: tuple[str, ...],
    key: str,
    split: str,
    limit: int | None,
    gather: Callable[[Iterable[Row]], Sequence[Row]] = list,
) -> tuple[Sequence[Row], RowNames]:
    """Return the rows of a split's files, as `gather` makes a sequence of them, and their names in messages."""
    files = find_files(paths, f"dataset.{key}")
    counts = [0] * len(files)

    def read() -> Iterator[Row]:
        for place, file in enumerate(files):
            for row in iterate_rows(file):
                counts[place] += 1
                yield row

    rows = gather(islice(read(), limit))
    paths_read = [file.path for file in files]
    return rows, RowNames(split, tuple(zip(paths_read, counts, strict=True)))


def inline_rows(dataset: InlineDataset) -> tuple[list[Row], list[Row] | None]:
    """Return the rows of both splits that stand in the recipe."""
    for key, rows in (("rows", dataset.rows), ("eval_rows", dataset.eval_rows)):
        if rows is not None and not rows:
            fix = "write at least one row, such as - {question: 1 + 1, answer: 2}"
            raise recipe_error("is empty", fix, f"dataset.{key}")
    return list(dataset.rows), None if dataset.eval_rows is None else list(dataset.eval_rows)


def _seed_rows(dataset: EnvironmentDataset, seed: int) -> tuple[list[Row], list[Row] | None]:
    """Return rows of distinct seeds; the environment adds its first observation to the empty prompt."""
    count, seeds = dataset.size + dataset.eval_size, range(2**31)
    held = random.Random(f"environment:{dataset.eval_seed}:eval").sample(seeds, dataset.eval_size)
    drawn = random.Random(f"environment:{seed}:train").sample(seeds, count)
    kept = frozenset(held)
    train = [each for each in drawn if each not in kept][: dataset.size]
    rows, eval_rows = (
        [{"prompt": [{"role": "user", "content": ""}], "seed": each} for each in own]
        for own in (train, held)
    )
    return rows, eval_rows if dataset.eval_size else None


_BATCH_ROWS = 1000


def check_id(path: str) -> None:
    """Refuse what is not a hub id: an address, or a file of this machine."""
    if "://" in path:
        name = path.partition("/datasets/")[2].strip("/") or "openai/gsm8k"
        message, fix = "is an address, not the id of a dataset", f"write its id, such as `{name}`"
        raise recipe_error(message, fix, "dataset.path")
    if Path(path).is_file():
        fix = f"set `kind: files` and `train: {path}`"
        raise recipe_error(f"{path} is a file", fix, "dataset.path")


def load_split(
    dataset: HubDataset,
    key: str,
    limit: int | None,
    gather: Callable[[Iterable[Row]], Sequence[Row]] = list,
) -> Sequence[Row]:
    """Return one split, or its first rows, as `gather` makes a sequence of them; raises as `iterate_split`."""
    if dataset.streams:
        # What is not streamed is downloaded whole, with all splits.
        rows = gather(islice(iterate_split(dataset, key), limit))
    else:
        with _explaining(dataset, key):
            loaded = _open_split(dataset, key)
        starts = range(0, len(loaded), _BATCH_ROWS)
        blocks = (loaded.select(range(len(loaded))[at : at + _BATCH_ROWS]) for at in starts)
        # As they are stored: images are not decoded.
        rows = gather(islice((row for block in blocks for row in block.to_list()), limit))
    if not rows:
        seen = f"split `{getattr(dataset, key)}` of {dataset.path} is empty"
        raise recipe_error(seen, "choose another", f"dataset.{key}")
    return rows


def iterate_split(dataset: HubDataset, key: str) -> Iterator[Row]:
    """Yield the rows of one split as they are downloaded, or raise `RecipeError` or `SetupError`."""
    with _explaining(dataset, key):
        yield from _open_split(dataset, key, streaming=True)


def _open_split(dataset: HubDataset, key: str, **options: Any) -> Any:
    """Open one split of a hub dataset; `datasets` itself runs no code of the repository."""
    import datasets

    name = dataset.config if isinstance(dataset, HubSource) else dataset.name
    split, revision = getattr(dataset, key), dataset.revision
    return datasets.load_dataset(dataset.path, name, split=split, revision=revision, **options)


@contextmanager
def _explaining(dataset: HubDataset, key: str) -> Iterator[None]:
    """Say what is wrong with a hub dataset that cannot be read inside."""
    import datasets

    try:
        yield
    except (ValueError, RuntimeError) as error:
        # The setting that `datasets` complains about; anything else keeps its traceback.
        choices = {
            "Unknown split": (key, "choose one of the splits listed"),
            "Config name is missing": ("name", "set dataset.name to one of those listed"),
            "BuilderConfig": ("name", "choose one of those listed"),
            "Dataset scripts": ("path", "set dataset.revision: refs/convert/parquet"),
        }
        for start, (field, fix) in choices.items():
            if start in str(error):
                seen = f"{dataset.path}: {str(error).strip()}"
                raise recipe_error(seen, fix, f"dataset.{field}") from error
        raise
    except (datasets.exceptions.DatasetsError, OSError) as error:
        raise _explain_hub(dataset, error) from error


def _explain_hub(dataset: HubDataset, error: Exception) -> SetupError:
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
            "check the network and HF_HUB_OFFLINE, or download the rows on a machine with a network "
            "and use dataset.kind: files"
        )
    return SetupError(f"dataset.path: {dataset.path} cannot be loaded: {reason}", fix)

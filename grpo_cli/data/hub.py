"""Datasets of the hub: read whole or streamed, and what is said if they cannot be."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_cli.data.rows import Row
from grpo_cli.errors import SetupError, recipe_error
from grpo_cli.recipe.dataset import HubDataset, HubSource

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

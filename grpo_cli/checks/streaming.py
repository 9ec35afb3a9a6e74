"""Checks of `dataset.streaming`: what rows that are not known before the training cannot be used for."""

from collections.abc import Iterator

from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import FIRST_ROWS, MixtureDataset
from grpo_cli.recipe.recipe import Recipe

_STREAMING = "dataset.streaming"


def check_streaming(recipe: Recipe) -> Iterator[Issue]:
    """Find what does not work with streamed rows."""
    dataset = recipe.dataset
    if isinstance(dataset, MixtureDataset):
        for place, source in enumerate(dataset.sources):
            if source.streams:
                fix = "leave it out, or stream one dataset in which the rows are mixed"
                path = f"dataset.sources.{place}.streaming"
                yield Issue("does not work in a source of a mixture", fix, path)
    if dataset.streams is None:
        return
    if recipe.training.max_steps <= 0:
        seen = f"is needed with `{_STREAMING}`: rows are not counted, and no epoch ends"
        yield Issue(seen, "set the number of optimizer steps", "training.max_steps")
    if dataset.eval_fraction is not None:
        fix = "name held-out rows by `eval` (files) or `eval_split` (hub)"
        yield Issue(f"does not work with `{_STREAMING}`", fix, "dataset.eval_fraction")
    warmup = recipe.warmup
    conflicts = {
        "dataset.difficulty": dataset.difficulty is not None,
        "generation.dynamic_sampling": recipe.generation.dynamic_sampling is not None,
        "training.mode": recipe.training.mode == "async",
        # TRL reads such data without workers.
        "training.dataloader_prefetch_factor": "dataloader_prefetch_factor"
        in recipe.training.extras,
    }
    for path in (path for path, holds in conflicts.items() if holds):
        yield Issue(f"does not work with `{_STREAMING}`", "leave one of them out", path)
    if warmup is not None and not warmup.train and warmup.limit > FIRST_ROWS:
        seen = f"is {warmup.limit:,}, and of streamed rows a warm-up reads the first {FIRST_ROWS:,}"
        yield Issue(seen, "lower it, or name files of its own by `warmup.train`", "warmup.limit")
    strategies = {
        "save_strategy": recipe.training.extras.get("save_strategy"),
        "eval_strategy": recipe.training.eval_strategy,
    }
    for name in (name for name, strategy in strategies.items() if strategy == "epoch"):
        yield Issue(
            f"is `epoch`, and with `{_STREAMING}` no epoch ends", "set `steps`", f"training.{name}"
        )

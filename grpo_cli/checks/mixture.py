"""Checks of `dataset.sources`: of each source, and of the mixture."""

from collections.abc import Iterator

from grpo_cli.batch import BatchPlan
from grpo_cli.data.mixing import SOURCE
from grpo_cli.data.sources import Preview
from grpo_cli.data.tasks import LEVEL
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import MixtureDataset, SingleDataset
from grpo_cli.recipe.recipe import Recipe


def check_made_columns(dataset: SingleDataset) -> Iterator[Issue]:
    """Find columns of the recipe that what `grpo` makes would replace."""
    made = {SOURCE} if dataset.source_name else set[str]()
    made |= {LEVEL} if getattr(dataset, "levels", ()) else set()
    for name in sorted(made & dataset.columns.keys()):
        seen = f"`{name}` is a column that `grpo` makes itself"
        yield Issue(seen, f"call it `own_{name}`, say", f"dataset.columns.{name}")


def check_source(recipe: Recipe | None, source: SingleDataset, seen: Preview) -> Iterator[Issue]:
    """Find rows that no reward scores, and a column of theirs that the source's name replaces."""
    rewards = recipe.rewards if recipe else ()
    if rewards and all(each.source not in (None, source.source_name) for each in rewards):
        fix = "give it `rewards`, or add one to the recipe's `rewards`, which score the rows of all sources"
        yield Issue("has no reward", fix, "dataset")
    if SOURCE in (seen.columns or ()) and all(
        each.from_ != SOURCE for each in source.columns.values()
    ):
        text = f"its rows have a column `{SOURCE}`, which the name of the source replaces"
        fix = f"to keep it, give it another name: `columns: {{origin: {SOURCE}}}`"
        yield Issue(text, fix, "dataset", level="warning")


def check_mixture(recipe: Recipe, seen: Preview | None, batch: BatchPlan) -> Iterator[Issue]:
    """Check the sources beside each other, and what they cannot be combined with."""
    dataset = recipe.dataset
    names = [source.source_name for source in dataset.parts]
    for index, reward in enumerate(recipe.rewards):
        if reward.source and reward.source not in names:
            fix = f"name one of {', '.join(map(str, names))}" if names[0] else "remove it"
            yield Issue(f"there is no source `{reward.source}`", fix, f"rewards.{index}.source")
    if not isinstance(dataset, MixtureDataset):
        return
    if len(names) == 1:
        fix = "add another, or write its keys into `dataset` itself"
        yield Issue("has one source, which gives all prompts", fix, "dataset.sources", level="note")
    if recipe.training.mode == "async":
        fix = "leave out `training.mode`, or mix the files beforehand"
        yield Issue("does not work with `training.mode: async`", fix, "dataset.sources")
    if recipe.warmup and recipe.warmup.train:
        fix = "leave it out: the warm-up then learns from the first prompts of the mixture"
        yield Issue("does not work with `dataset.sources`", fix, "warmup.train")
    yield from _check_batch(dataset, seen, batch)


def _check_batch(
    dataset: MixtureDataset, seen: Preview | None, batch: BatchPlan
) -> Iterator[Issue]:
    """Find sources that have fewer prompts than a batch takes from them."""
    prompts = batch.prompts_per_generation_batch
    for place, source in enumerate(dataset.sources):
        size = seen.sources[place] if seen else None
        share = (prompts or 0) * dataset.shares[source.name]
        if size is not None and share > size:
            text = (
                f"source `{source.name}` has {size} prompts, and a generation batch takes {share:.3g} from it, so "
                "that it asks some of them twice"
            )
            fix = f"give it more rows, or set `ratio: {source.ratio * size / share:.2g}`"
            yield Issue(text, fix, f"dataset.sources.{place}", level="warning")

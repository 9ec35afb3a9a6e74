"""Checks of `dataset.sources`."""

from collections.abc import Iterator

from grpo_cli.batch.plan import BatchPlan
from grpo_cli.checks.context import CheckContext
from grpo_cli.data.preview import Preview
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import MixtureDataset


def check_mixture(context: CheckContext) -> Iterator[Issue]:
    """Check the sources of a mixture beside each other."""
    recipe, dataset = context.recipe, context.recipe.dataset
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
    yield from _check_share(dataset, context.preview, context.plan)


def _check_share(
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

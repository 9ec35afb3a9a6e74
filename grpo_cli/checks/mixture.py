"""Checks of `dataset.sources`."""

from collections.abc import Iterator

from grpo_cli.batch.plan import BatchPlan
from grpo_cli.checks.context import CheckContext
from grpo_cli.data.preview import Preview
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import MixtureDataset


def check_mixture(context: CheckContext) -> Iterator[Issue]:
    """Check the sources of a mixture beside each other."""
    dataset = context.recipe.dataset
    if not isinstance(dataset, MixtureDataset):
        return
    for place, source in enumerate(dataset.sources):
        if source.streams:
            fix = "leave it out, or stream one dataset in which the rows are mixed"
            path = f"dataset.sources.{place}.streaming"
            yield Issue("does not work in a source of a mixture", fix, path)
    if len(dataset.sources) == 1:
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

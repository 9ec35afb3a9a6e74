"""Mixtures: in which order the rows of several sources are drawn."""

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from grpo_cli.data.rows import place_issue
from grpo_cli.errors import RecipeError
from grpo_cli.issues import Issue
from grpo_cli.recipe.dataset import SOURCE, MixtureDataset
from grpo_cli.units import spread

MOST_DRAWS = 20_000_000
"""Prompts of an epoch; their order is kept in memory."""
_MOST_PERIOD = 10_000
"""Draws after which the order of sources repeats itself at the latest; shares are exact to one in as many."""

Draw = tuple[int, int]
"""A source and one of its rows, both by place."""


def draw_rows(
    sizes: Sequence[int], ratios: Sequence[float], seed: int, *, shuffle: bool = True
) -> Iterator[Draw]:
    """Yield the rows of one epoch, which ends when every row of every source has been drawn.

    At any point the draws from a source differ by less than one from its share of all draws, which is exact to
    one in `_MOST_PERIOD`. Each pass over a source is shuffled by `seed` and its number.
    """
    passes = [
        _rows(size, f"{seed}/{source}" if shuffle else None) for source, size in enumerate(sizes)
    ]
    for source in draw_sources(sizes, ratios):
        yield source, next(passes[source])


def draw_sources(sizes: Sequence[int], ratios: Sequence[float]) -> Iterator[int]:
    """Yield the source of each draw of an epoch.

    Of the sources that lag behind enough, the one whose next draw is due first.

    Source: Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32.
    """
    weights = _as_weights(ratios)
    # After so many draws each source has exactly its share, and the order repeats itself.
    period, places, slack = sum(weights), range(len(weights)), 2 * len(weights) - 2
    order: list[int] = []
    drawn, left = [0] * len(sizes), {place for place in places if sizes[place] > 0}
    step = 0
    while left:
        if step < period:
            lags = [
                (step + 1) * weight - done * period
                for weight, done in zip(weights, drawn, strict=True)
            ]
            due = [place for place in places if lags[place] * slack >= period] or places
            deadlines = [
                (((slack - 1) * period - slack * lags[place]) / weights[place], place)
                for place in due
            ]
            order.append(min(deadlines)[1])
        source = order[step % period]
        step += 1
        drawn[source] += 1
        if drawn[source] == sizes[source]:
            left.remove(source)
        yield source


def _as_weights(ratios: Sequence[float]) -> list[int]:
    """Return whole numbers of the same ratios; if their sum would exceed `_MOST_PERIOD`, of nearly the same."""
    exact = [Fraction(str(ratio)) for ratio in ratios]
    shares = [each / sum(exact) for each in exact]
    period = lcm(*(share.denominator for share in shares))
    return [max(round(share * min(period, _MOST_PERIOD)), 1) for share in shares]


def count_draws(dataset: MixtureDataset, sizes: Sequence[int]) -> int:
    """Return the prompts of an epoch; raises `RecipeError` if they are more than `MOST_DRAWS`."""
    ratios = [source.ratio for source in dataset.sources]
    epochs = [size * sum(ratios) / ratio for size, ratio in zip(sizes, ratios, strict=True)]
    if max(epochs) > MOST_DRAWS:
        place = epochs.index(max(epochs))
        name, most = dataset.sources[place].name, int(sizes[place] * MOST_DRAWS / max(epochs))
        seen = (
            f"with this ratio an epoch has {max(epochs):,.0f} prompts until each of the source's {sizes[place]:,} "
            f"rows is drawn (at most {MOST_DRAWS:,})"
        )
        issue = Issue(seen, f"raise it, or set `limit: {max(most, 1)}`", "dataset.ratio")
        raise RecipeError([place_issue(issue, place, name)])
    weights = _as_weights(ratios)
    # All periods but the last one need not be gone through.
    periods = max(-(-size // weight) for size, weight in zip(sizes, weights, strict=True)) - 1
    rest = [size - periods * weight for size, weight in zip(sizes, weights, strict=True)]
    return periods * sum(weights) + sum(1 for _ in draw_sources(rest, ratios))


def _rows(size: int, seed: str | None) -> Iterator[int]:
    """Yield rows without end, pass after pass, each in an order of its own."""
    chooser = random.Random(seed)
    order = list(range(size))
    while True:
        if seed is not None:
            chooser.shuffle(order)
        yield from order


def spread_rows(data: Any, places: Sequence[int], count: int) -> list[int]:
    """Return so many of some rows of a dataset, evenly spread; of a mixture, over each source.

    The order of its sources repeats itself, so that every so many rows may be of one of them alone.
    """
    if SOURCE in data.column_names:
        names = data[SOURCE][:]
        places = sorted(places, key=lambda place: names[place])
    return sorted(places[index] for index in spread(len(places), count))

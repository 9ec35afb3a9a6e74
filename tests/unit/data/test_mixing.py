"""The order in which the rows of a mixture are drawn."""

import random
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_cli.data.mixing import count_draws, draw_rows, spread_rows
from grpo_cli.recipe.dataset import SOURCE


@pytest.mark.parametrize("case", range(200))
def test_shares_are_exact_and_no_row_comes_twice_before_all_have_come(case: int) -> None:
    dice = random.Random(case)
    count = dice.randint(1, 7)
    ratios = [dice.choice([dice.random() + 0.01, dice.randint(1, 9)]) for _ in range(count)]
    sizes = [dice.randint(1, 60) for _ in range(count)]
    draws = list(draw_rows(sizes, ratios, case))
    drawn: list[list[int]] = [[] for _ in range(count)]
    for step, (source, row) in enumerate(draws, 1):
        drawn[source].append(row)
        for own, ratio in zip(drawn, ratios, strict=True):
            # The second term is what rounding the ratios may add.
            assert abs(len(own) - step * ratio / sum(ratios)) < 1 + step * count / 10_000
    for rows, size in zip(drawn, sizes, strict=True):
        passes = [rows[start : start + size] for start in range(0, len(rows), size)]
        assert all(sorted(each) == list(range(size)) for each in passes[:-1])
        assert len(set(passes[-1])) == len(passes[-1])
    # The epoch ends with the row that was missing, and `check` knows where without drawing.
    assert {source for source, _ in draws} == set(range(count))
    last, _ = draws[-1]
    assert len(drawn[last]) == sizes[last]
    assert count_draws(_mixture(ratios), sizes) == len(draws)


@pytest.mark.parametrize("prompts", [1, 3, 8, 37])
def test_shares_stay_within_two_percent_over_fifty_steps(prompts: int) -> None:
    ratios = [5, 3, 2]
    draws = islice(draw_rows([900, 40, 4000], ratios, 1), 50 * prompts)
    sources = [source for source, _ in draws]
    for source, ratio in enumerate(ratios):
        assert sources.count(source) / len(sources) == pytest.approx(ratio / 10, abs=0.02)


def test_a_source_starts_over_in_a_new_order_unless_rows_are_not_shuffled() -> None:
    draws = list(draw_rows([30, 300], [1, 1], 7))
    small = [row for source, row in draws if source == 0]
    assert small[:30] != small[30:60]
    assert draws == list(draw_rows([30, 300], [1, 1], 7)) != list(draw_rows([30, 300], [1, 1], 8))
    kept = [row for source, row in draw_rows([30, 300], [1, 1], 7, shuffle=False) if source == 0]
    assert kept == 10 * list(range(30))


def _mixture(ratios: list[float]) -> Any:
    return SimpleNamespace(
        sources=[SimpleNamespace(ratio=ratio, name=str(ratio)) for ratio in ratios]
    )


class Rows(dict[str, list[str]]):
    """Rows by column, with the one attribute of a `Dataset` that is read."""

    column_names = property(dict.keys)


def test_rows_that_stand_for_all_have_each_sources_share():
    # Every fourth row is of one source, and every fourth row is taken.
    names = ["counts", "words", "words", "words"] * 100
    chosen = spread_rows(Rows({SOURCE: names}), range(400), 100)
    assert [names[place] for place in chosen].count("counts") == 25
    assert chosen == sorted(set(chosen))
    assert spread_rows(Rows(text=names), range(400), 4) == [0, 100, 200, 300]

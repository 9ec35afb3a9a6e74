"""Cells of a sweep: what is said of them holds, and the interval covers what it should."""

import numpy
import pytest

from grpo_cli.analysis.estimates import crossed_mean
from grpo_cli.runs.run import Run
from grpo_cli.sweep.comparison import TRAINING, compare_cells
from grpo_cli.units import count_noun
from tests.run_folders import make_finished_run, write_samples

LABELS = {1: "low", 2: "high"}


@pytest.mark.parametrize(
    ("by_seed", "by_prompt"), [(0.3, 0.0), (0.0, 0.3), (0.3, 0.3), (0.02, 0.3)]
)
def test_the_interval_of_a_crossed_mean_covers_the_truth(by_seed, by_prompt):
    generator = numpy.random.default_rng(0)
    covered = 0
    for _ in range(400):
        values = (
            generator.normal(0, by_seed, (3, 1))
            + generator.normal(0, by_prompt, (1, 40))
            + generator.normal(0, 0.5, (3, 40))
        )
        interval = crossed_mean(values.tolist()).interval()
        covered += interval.low < 0 < interval.high
    assert covered / 400 > 0.93


def test_its_parts_are_those_of_the_textbook():
    values = numpy.random.default_rng(1).normal(0.2, 1, (4, 9))
    rows, columns, mean = values.mean(1), values.mean(0), values.mean()
    residual = values - rows[:, None] - columns[None] + mean
    noise = (residual**2).sum() / (3 * 8) / (4 * 9)
    found = crossed_mean(values.tolist())
    assert found.value == pytest.approx(mean)
    assert found.by_seed == pytest.approx(rows.var(ddof=1))
    assert found.by_prompt == pytest.approx(max(columns.var(ddof=1) / 9 - noise, 0))


def make_cells(root, scores):
    """Cells of runs with these shares of right answers to ten prompts, by cell and seed."""
    cells = {}
    for cell, seeds in scores.items():
        cells[cell] = {}
        for seed, right in enumerate(seeds, start=1):
            run = make_finished_run(root / str(cell), seed, accuracy=None)
            samples = {f"sum {n}": [float((n * 7 + seed) % 20 < right)] for n in range(20)}
            write_samples(run, samples)
            cells[cell][seed] = Run(run)
    return cells


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (
            [2, 3, 2],
            [15, 16, 15],
            "high is better than low: +0.650 in accuracy/math (95 % interval +0.4",
        ),
        ([6, 10, 8], [11, 9, 13], "high and low: no clear difference, +0.150 in accuracy/math"),
        ([4, 4, 4], [4, 4, 4], "are equal in accuracy/math for every prompt and seed"),
        (
            [2],
            [15],
            "one seed does not show how much seeds differ; more seeds (--seeds) would tell",
        ),
    ],
)
def test_better_is_said_only_if_the_interval_excludes_0(tmp_path, low, high, verdict):
    compared = compare_cells(make_cells(tmp_path, {1: low, 2: high}), LABELS)
    (told,) = [each.verdict for each in compared.cells.values() if each.verdict]
    assert verdict in told
    assert ("is better than" in told) == (verdict.startswith("high is better"))


def test_more_seeds_are_named_if_they_would_tell_and_prompts_if_not(tmp_path):
    compared = compare_cells(make_cells(tmp_path, {1: [6, 10, 8], 2: [11, 9, 13]}), LABELS)
    told = compared.cells[1]
    if told.seeds_needed is None:
        assert "more held-out prompts" in told.verdict
    else:
        assert f"about {count_noun(told.seeds_needed - 3, 'more seed')} would" in told.verdict
    # As many seeds with the same spread do tell.
    values = [[-0.1] * 30, [0.5] * 30, [0.3] * 30]
    found = crossed_mean(values)
    needed = found.seeds_needed()
    assert found.interval().low < 0 < found.interval(needed).low
    assert found.interval(needed - 1).low <= 0
    noisy = crossed_mean([[0.1 * (n % 7 - 2.9) for n in range(20)]] * 3)
    assert noisy.seeds_needed() is None


def test_intervals_of_shares_end_at_0_and_1_and_equal_seeds_are_the_reason_for_none(tmp_path):
    compared = compare_cells(
        make_cells(tmp_path, {1: [0, 4], 2: [19, 20], 3: [4, 4]}), {**LABELS, 3: "same"}
    )
    assert [compared.cells[cell].mean.low for cell in (1, 3)] == [0.0, None]
    assert compared.cells[2].mean.high == 1.0
    assert compared.cells[1].difference.high == 1.0
    assert compared.cells[3].mean.reason == "every seed gives the same value"


def test_without_a_measurement_the_training_reward_decides(tmp_path):
    cells = {
        cell: {
            seed: Run(make_finished_run(tmp_path / str(cell), seed, [level] * 40, accuracy=None))
            for seed in (1, 2)
        }
        for cell, level in ((1, 0.2), (2, 0.7))
    }
    compared = compare_cells(cells, LABELS)
    assert (compared.metric, compared.best) == (TRAINING, 2)
    assert compared.cells[1].difference.value == pytest.approx(0.5)
    assert compare_cells({1: {}, 2: {}}, LABELS).best is None

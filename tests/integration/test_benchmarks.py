"""The benchmarks of training: what they measure with, and one of them from start to end on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.training.bench import Bench
from benchmarks.training.cases import CASES, Figure
from benchmarks.training.replay import Ending, Settings, hash_rows, make_hazard
from benchmarks.training.runs import Measured, read_figures
from benchmarks.training.table import take_ratio
from grpo_cli.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]
START, HEADER, END = 1, 2, 9
PROMPT = [5, START, 6, 7]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"), "tiny")


@pytest.mark.parametrize(("mean", "longest"), [(40, 256), (6, 12)])
def test_lengths_have_the_mean_that_is_asked_for(mean, longest):
    alive, expected = 1.0, 0.0
    for chance in make_hazard(mean, longest):
        expected += alive
        alive *= 1 - chance
    assert expected == pytest.approx(mean, rel=1e-3)


def test_lengths_have_a_long_tail():
    alive = torch.tensor(make_hazard(40, 256)).neg().add(1).cumprod(0)
    # Lengths that end with the same chance everywhere would reach 200 tokens in 0.7 % of the rows.
    assert alive[200] > 0.01
    assert alive[25] < 0.55


def test_a_row_is_known_by_its_tokens_however_it_is_padded():
    rows = torch.tensor([[0, *PROMPT, 11], [4, *PROMPT, 12]])
    wider = torch.cat([torch.zeros(2, 3, dtype=torch.long), rows], dim=1)
    narrow = hash_rows(rows, torch.tensor([1, 0]))
    assert narrow.tolist() == hash_rows(wider, torch.tensor([4, 3])).tolist()
    assert narrow.flip(0).tolist() == hash_rows(rows.flip(0), torch.tensor([0, 1])).tolist()
    alone = hash_rows(rows[:1, 1:], torch.tensor([0]))
    assert alone.tolist() == narrow[:1].tolist()


def test_equal_rows_are_told_apart():
    found = hash_rows(torch.tensor([PROMPT, PROMPT, PROMPT]), torch.zeros(3, dtype=torch.long))
    assert len(set(found.tolist())) == 3


@pytest.mark.parametrize("same_tokens", [False, True])
def test_rows_end_where_they_are_told_to_and_nowhere_else(same_tokens):
    settings = Settings(START, HEADER, (END,), 8, 16, same_tokens)
    ids = torch.tensor([PROMPT] * 64)
    ending = Ending(settings, torch.zeros(64, dtype=torch.long))
    lengths = torch.zeros(64)
    going = torch.ones(64, dtype=torch.bool)
    for _ in range(16):
        scores = ending(ids, torch.zeros(64, 20))
        assert torch.isinf(scores[:, START]).all()
        ends = scores[:, END] == 0
        assert (scores[ends].exp().sum(dim=1) == 1).all()
        if same_tokens:
            assert (scores.exp().sum(dim=1) == 1).all()
        lengths += going
        going &= ~ends
        ids = torch.cat([ids, scores.argmax(dim=1, keepdim=True)], dim=1)
    assert 5 < lengths.mean() < 11
    assert len(set(lengths.tolist())) > 5


def test_the_time_of_a_step_leaves_the_first_one_out():
    records = [
        {"event": "measure", "time": 0.0},
        {"time": 100.0, "loss": 0.0, "completions/mean_length": 50.0},
        {"time": 102.0, "loss": 0.0, "completions/mean_length": 10.0},
        {"time": 106.0, "loss": 0.0, "completions/mean_length": 20.0},
        {"time": 200.0, "train_runtime": 106.0},
    ]
    assert read_figures(records, 8) == {"step_s": 3.0, "tokens_per_s": 8 * 30.0 / 6.0}
    assert read_figures(records[:2], 8) == {}


@pytest.mark.parametrize(("more_is_better", "reached"), [(False, True), (True, False)])
def test_a_ratio_is_that_of_the_medians(more_is_better, reached):
    def run(seconds):
        return Measured({"step_s": seconds}, Path("model"), Path("completions"))

    pairs = [(run(10.0), run(4.0)), (run(12.0), run(6.0)), (run(8.0), run(5.0))]
    found = take_ratio(CASES[0], Figure("step_s", "step", "s", 0.6, more_is_better), pairs)
    assert (found.trl, found.grpo, found.ratio) == (10.0, 5.0, 0.5)
    assert (found.lowest, found.highest, found.reached) == (0.4, 0.625, reached)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_systems_get_the_same_numbers(bench, case):
    folder = bench.write_case(case)
    recipe = load_recipe(folder / "recipe.yaml")
    plain = json.loads((folder / "plain.json").read_text())
    arguments = plain["arguments"]
    assert arguments["max_steps"] == case.steps == recipe.training.max_steps
    assert arguments["learning_rate"] == recipe.training.learning_rate
    assert arguments["num_generations"] == recipe.generation.num_generations
    assert (plain["lora"] is None) == (recipe.model.lora is None)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    silent = [sum(row["silent"] for row in rows[i : i + 10]) for i in range(0, len(rows), 10)]
    assert set(silent) == {round(case.silent_share * 10)}


@pytest.mark.slow
def test_weights_are_compared_after_the_same_completions(tmp_path):
    told = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.training", "--model", "tiny", "--steps", "2"]
    done = subprocess.run(
        [*command, "--only", "i-sgd", "--json", told],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [result] = json.loads(told.read_text())
    assert result["compared"]["same_completions"] == 1.0
    assert result["compared"]["largest_difference"] < 1e-5 < result["compared"]["moved_by_up_to"]
    assert result["runs"][0]["grpo"]["peak_gib"] > 0.1
    assert "weights after 5 steps" in done.stdout

"""Runs side by side: settings, trends, and differences paired by prompt."""

import json

import pytest

from grpo_cli.analysis.metrics import RankedGroup, write_ranked
from grpo_cli.errors import UsageError
from grpo_cli.recipe.recipe import Recipe
from grpo_cli.report.comparison import compare_runs, find_trends, read_runs
from grpo_cli.runs.folder import RunFolder
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.run import Run
from tests.run_folders import PLAIN, make_finished_run, write_samples

SCORED = {
    "dataset": {"kind": "scored", "train": "scored.jsonl", "prompt": {"user": "{{ prompt }}"}},
    "rewards": [],
}


def compare(*runs):
    return compare_runs(read_runs(runs))


def with_recipe(run, **changes):
    run.write_recipe(Recipe.model_validate({**PLAIN, **changes}))
    return run


def test_settings_that_differ_stand_side_by_side(tmp_path):
    runs = [
        make_finished_run(tmp_path, seed=1),
        make_finished_run(tmp_path, seed=2, training={"max_steps": 40, "learning_rate": 1e-4}),
        make_finished_run(tmp_path, seed=3),
    ]
    found = compare(*runs).settings
    assert found.pop("seed") == (1, 2, 3)
    (before, changed, same) = found.pop("training.learning_rate")
    assert (changed, before) == (1e-4, same)
    assert found == {}


def test_of_a_section_that_one_run_has_only_what_was_set_is_told(tmp_path):
    plain = make_finished_run(tmp_path, seed=1)
    lora = {"model": {"path": "org/model", "lora": {}}}
    warmed = make_finished_run(tmp_path, seed=2, warmed=0.5, **lora)
    compared = compare(plain, warmed)
    assert compared.settings == {
        "seed": (1, 2),
        "model.lora": (None, {}),
        "warmup.answer": (None, ["{{ q }}"]),
    }
    measured = [each["held_out_warmup"] for each in compared.as_json()["runs"]]
    assert measured[0] == {}
    assert measured[1]["accuracy/math"]["value"] == 0.5


def test_trends_are_means_and_the_best_is_the_first_of_equals(tmp_path):
    rewards = [0.0] * 5 + [1.0] * 9 + [0.5] * 36
    trend = find_trends(Run(make_finished_run(tmp_path, rewards=rewards)))["reward"]
    assert (trend.first, trend.last, trend.width) == (0.0, 0.5, 5)
    assert (trend.best, trend.best_step) == (1.0, 10)


def test_what_the_first_steps_move_begins_with_the_first_record(tmp_path):
    run = make_finished_run(tmp_path, rewards=[])
    for step in range(1, 41):
        record = {"event": "train", "step": step, "entropy": 6.0 if step == 1 else 0.1}
        times = {"step_time": 9.0, "time/sampling": 5.0}
        append_record(run.metrics, {**record, **times, "completions/mean_length": float(step)})
    trends = find_trends(Run(run))
    assert (trends["step_time"].last, trends["time/sampling"].last) == (9.0, 5.0)
    assert "time/learning" not in trends
    assert (trends["entropy"].first, trends["entropy"].last) == (6.0, pytest.approx(0.1))
    assert trends["completion_length"].first == 2.5


def test_the_same_prompts_are_paired_whatever_their_rows(tmp_path):
    base, other = (make_finished_run(tmp_path, seed=seed) for seed in (1, 2))
    write_samples(base, {f"sum {n}": [0.0] for n in range(20)})
    write_samples(other, {f"sum {n}": [float(n % 4 > 0)] for n in range(19, 4, -1)})
    (found,) = compare(base, other).held_out
    assert (found.prompts, found.only_base, found.only_run) == (15, 5, 0)
    accuracy = found.differences["accuracy/math"]
    assert accuracy.value == pytest.approx(12 / 15)
    assert 0 < accuracy.low < accuracy.value < accuracy.high <= 1
    assert found.verdict.startswith("better: +0.800 in accuracy/math (95 % interval +")
    assert found.verdict.endswith("over sums/seed-1 on the same 15 prompts")
    assert json.loads(json.dumps(compare(base, other).as_json()))["held_out"][0]["prompts"] == 15


def test_few_prompts_give_a_reason_in_the_place_of_an_interval(tmp_path):
    base, other = (make_finished_run(tmp_path, seed=seed) for seed in (1, 2))
    write_samples(base, {"a": [0.0], "b": [0.0]})
    write_samples(other, {"a": [0.0], "b": [1.0]})
    (found,) = compare(base, other).held_out
    assert found.differences["accuracy/math"].low is None
    assert "2 prompts are too few, 8 are needed" in found.verdict


def test_a_prompt_asked_twice_is_paired_twice(tmp_path):
    base, other = (make_finished_run(tmp_path, seed=seed) for seed in (1, 2))
    write_samples(base, [("a", [0.0]), ("a", [1.0])])
    write_samples(other, [("a", [1.0]), ("a", [1.0])])
    (found,) = compare(base, other).held_out
    assert (found.prompts, found.differences["accuracy/math"].value) == (2, 0.5)


def test_other_settings_of_the_measurement_are_told(tmp_path):
    base = make_finished_run(tmp_path, seed=1)
    other = make_finished_run(tmp_path, seed=2, evaluation={"temperature": 0.7})
    for run in (base, other):
        write_samples(run, {"a": [0.0]})
    (found,) = compare(base, other).held_out
    assert found.settings == {"temperature": (0.0, 0.7)}


def test_rewards_that_score_otherwise_are_not_compared(tmp_path):
    base = make_finished_run(tmp_path, seed=1)
    changed = [{"kind": "math", "answer": "q", "clip": [0.0, 0.5]}]
    other = with_recipe(make_finished_run(tmp_path, seed=2), rewards=changed)
    for run in (base, other):
        write_samples(run, {"a": [0.0]})
    (found,) = compare(base, other).held_out
    assert list(found.differences) == ["completion_length", "clipped"]
    assert list(found.settings) == ["rewards"]
    assert found.verdict == "no verdict: sums/seed-2 and sums/seed-1 have no reward in common"


def test_another_weight_leaves_the_single_reward_comparable(tmp_path):
    base = make_finished_run(tmp_path, seed=1)
    weighed = [{"kind": "math", "answer": "q", "weight": 2.0}]
    other = with_recipe(make_finished_run(tmp_path, seed=2), rewards=weighed)
    for run in (base, other):
        write_samples(run, {"a": [0.0]})
    (found,) = compare(base, other).held_out
    assert "reward" not in found.differences
    assert {"rewards/math", "accuracy/math"} <= found.differences.keys()


def _leave(run: RunFolder) -> None:
    """Leaves the run without samples."""


def _empty(run: RunFolder) -> None:
    (run.evaluations / "after.jsonl").write_text("")


def _ask_others(run: RunFolder) -> None:
    write_samples(run, {"something else": [1.0]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_leave, "sums/seed-2 has no held-out measurement after training"),
        (_empty, "after.jsonl holds no samples that can be read"),
        (_ask_others, "measured on other prompts (1 and 1 prompts, none the same)"),
    ],
)
def test_what_cannot_be_paired_says_why(tmp_path, change, reason):
    base, other = (make_finished_run(tmp_path, seed=seed) for seed in (1, 2))
    write_samples(base, {"a": [0.0]})
    change(other)
    found = compare(base, other)
    assert reason in found.held_out[0].reason
    assert (found.held_out[0].verdict, found.held_out[0].differences) == (None, {})
    assert bool(found.held_out[0].only_run) == (change is _ask_others)
    json.dumps(found.as_json())


def test_scored_runs_are_compared_by_what_they_rank(tmp_path):
    runs = [with_recipe(make_finished_run(tmp_path, seed), **SCORED) for seed in (1, 2)]
    for run, likelier in zip(runs, (-1.0, 1.0), strict=True):
        write_samples(run, {f"q{n}": [0.0] for n in range(10)}, rewards=())
        groups = [RankedGroup(row, [1.0, 0.0], [likelier, 0.0]) for row in range(10)]
        write_ranked(run.evaluations / "after_ranked.jsonl", groups)
    (found,) = compare(*runs).held_out
    assert found.primary == "accuracy/ranking"
    assert found.differences["accuracy/ranking"].value == 1.0
    assert found.verdict.startswith("better: +1.000 in accuracy/ranking against sums/seed-1")


def test_a_damaged_record_is_passed_over(tmp_path):
    run = make_finished_run(tmp_path, rewards=(0.5,))
    append_record(run.metrics, {"event": "train"})
    append_record(
        run.metrics, {"event": "train", "step": 2, "reward": "much", "rewards/x/mean": []}
    )
    assert find_trends(Run(run))["reward"].last == 0.5


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        compare(make_finished_run(tmp_path), RunFolder(tmp_path))

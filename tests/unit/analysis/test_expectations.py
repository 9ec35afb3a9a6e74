"""Runs beside what their recipes expect."""

import json

from grpo_cli.analysis import expectations
from grpo_cli.recipe.expect import ExpectConfig
from grpo_cli.runs.files import write_json
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.run import Run
from tests.run_folders import make_finished_run

BLOCK = {
    "metrics": [
        {"metric": "reward", "step": 40, "band": [0.55, 0.85], "window": 4},
        {"metric": "accuracy/math", "step": 40, "band": [0.62, 0.93]},
    ]
}


def compare(run, block=BLOCK, **measured):
    expect = ExpectConfig.model_validate({**block, **({"measured": measured} if measured else {})})
    return expectations.compare_run(Run(run), expect)


def compare_with_own(folder):
    return expectations.compare_with_own(Run(folder))


def bands_of(folder, metric):
    return expectations.bands_of(Run(folder), metric)


def outcomes(comparison):
    return [(each.outcome, each.value) for each in comparison.verdicts]


def only(metric, step=40, **more):
    return {"metrics": [{"metric": metric, "step": step, "band": [0.0, 1.0], **more}]}


def test_a_run_inside_its_bands(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.0] * 36 + [0.5, 0.7, 0.6, 0.8], accuracy=0.93)
    comparison = compare(run)
    assert comparison.inside
    assert [each.value for each in comparison.verdicts] == [0.65, 0.93]
    assert comparison.mismatches == []


def test_a_run_that_failed_is_not_inside(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.6] * 40, accuracy=0.8, state="failed")
    comparison = compare(run)
    assert [each.outcome for each in comparison.verdicts] == ["inside", "inside"]
    assert not comparison.inside
    assert comparison.as_json()["state"] == "failed"


def test_one_metric_outside_is_enough(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.0] * 36 + [0.5, 0.7, 0.6, 0.8], accuracy=0.5)
    comparison = compare(run)
    assert not comparison.inside
    assert [each.outcome for each in comparison.verdicts] == ["inside", "outside"]


def test_the_ends_of_a_band_belong_to_it(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.1 + 0.2] * 40)
    block = {"metrics": [{"metric": "reward", "step": 40, "band": [0.1, 0.3], "window": 3}]}
    assert compare(run, block).inside


def test_later_records_play_no_part(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.2] * 20 + [0.9] * 20)
    (verdict,) = compare(run, only("reward", 20, window=4)).verdicts
    assert verdict.value == 0.2


def test_a_run_that_ended_early_has_not_reached_the_step(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.6] * 20, state="stopped", accuracy=None)
    comparison = compare(run)
    assert {each.outcome for each in comparison.verdicts} == {"not reached"}
    assert comparison.verdicts[0].detail == "20 of 40"
    assert not comparison.inside


def test_metrics_that_are_not_there_are_said(tmp_path):
    run = make_finished_run(tmp_path)
    assert outcomes(compare(run, only("kl"))) == [("not logged", None)]
    assert outcomes(compare(run, only("accuracy/code"))) == [("not logged", None)]
    unmeasured = make_finished_run(tmp_path / "other", accuracy=None)
    assert outcomes(compare(unmeasured, only("accuracy/math"))) == [("not measured", None)]


def test_a_reward_that_nothing_is_learned_from_is_not_judged(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.0] * 40, teacher={"path": "org/teacher"})
    assert compare(run, only("reward")).verdicts[0].outcome == "inside"
    recipe = run.read_recipe()
    measuring = recipe.rewards[0].model_copy(update={"weight": 0.0})
    run.write_recipe(recipe.model_copy(update={"rewards": (measuring,)}))
    (verdict,) = compare(run, only("reward")).verdicts
    assert (verdict.outcome, verdict.value) == ("not measured", None)


def test_a_number_that_was_none_is_not_skipped(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.5] * 38 + [float("nan"), 0.5])
    (verdict,) = compare(run, only("reward", window=2)).verdicts
    assert (verdict.outcome, verdict.detail) == ("not logged", "it was NaN or infinite")


def test_too_few_records_are_said(tmp_path):
    run = make_finished_run(tmp_path)
    append_record(run.metrics, {"event": "eval", "step": 40, "eval_reward": 0.4})
    (verdict,) = compare(run, only("eval_reward", window=3)).verdicts
    assert (verdict.outcome, verdict.value, verdict.detail) == ("inside", 0.4, "1 of 3 records")


def test_a_measurement_at_a_later_step_is_not_compared(tmp_path):
    run = make_finished_run(tmp_path)
    (verdict,) = compare(run, only("accuracy/math", 20)).verdicts
    assert (verdict.outcome, verdict.detail) == ("not measured", "the run went on to step 40")


def test_step_0_is_where_grpo_begins(tmp_path):
    run = make_finished_run(tmp_path, warmed=0.3)
    (verdict,) = compare(run, only("accuracy/math", 0)).verdicts
    assert (verdict.outcome, verdict.value, verdict.detail) == ("inside", 0.3, "after the warm-up")
    bare = make_finished_run(tmp_path / "bare")
    assert outcomes(compare(bare, only("accuracy/math", 0))) == [("not measured", None)]
    assert outcomes(compare(bare, only("reward", 0))) == [("not logged", None)]
    write_json(bare.evaluations / "before.json", {"accuracy": {"math": 0.1}})
    assert outcomes(compare(bare, only("accuracy/math", 0))) == [("inside", 0.1)]


def test_other_conditions_are_named(tmp_path):
    run = make_finished_run(tmp_path)
    comparison = compare(
        run,
        hardware="NVIDIA H100, 16 CPU cores (x86_64), 128 GiB",
        versions={"trl": "1.15.0", "torch": ["2.12.0", "2.13.0"], "transformers": "5.17.0"},
        settings={"model": "00000000"},
        data="ffffffffffff",
    )
    told = comparison.mismatches
    assert told[0] == (
        "measured on other hardware (NVIDIA H100, 16 CPU cores (x86_64), 128 GiB; "
        "here 2 CPU cores (x86_64), 8 GiB)"
    )
    assert told[1] == "measured with other versions (trl 1.15.0, here 1.16.0)"
    assert told[2].startswith("measured with other settings (model, dataset, rewards, training")
    assert told[3] == "measured on other data (fingerprint ffffffffffff, here 0123456789ab)"


def test_other_versions_are_named_only_if_a_metric_is_outside_its_band(tmp_path):
    run = make_finished_run(tmp_path)
    versions = {"trl": "1.15.0"}
    inside = compare(run, only("reward"), versions=versions, data="ff")
    assert inside.inside
    assert [each[:22] for each in inside.mismatches] == ["measured on other data"]
    assert inside.as_json()["differs"].keys() == {"versions", "data"}
    outside = compare(run, only("reward", band=[2.0, 3.0]), versions=versions)
    assert outside.mismatches == ["measured with other versions (trl 1.15.0, here 1.16.0)"]


def test_what_a_block_does_not_say_is_no_difference(tmp_path):
    assert compare(make_finished_run(tmp_path), seeds=[1]).mismatches == []


def test_a_run_is_compared_with_its_own_recipe_where_that_expects_anything(tmp_path):
    assert compare_with_own(make_finished_run(tmp_path)) is None
    run = make_finished_run(tmp_path / "with", expect=BLOCK)
    assert compare_with_own(run).inside is False


def test_a_band_spans_its_window_in_a_picture(tmp_path):
    run = make_finished_run(tmp_path, expect=BLOCK)
    (band,) = bands_of(run, "reward")
    assert band == {"from": 37, "to": 40, "low": 0.55, "high": 0.85}
    assert bands_of(run, "kl") == []
    short = make_finished_run(tmp_path / "short", rewards=[0.5] * 20, expect=BLOCK)
    (band,) = bands_of(short, "reward")
    assert (band["from"], band["to"]) == (40, 40)


def test_plain_values_for_scripts(tmp_path):
    told = json.loads(json.dumps(compare(make_finished_run(tmp_path)).as_json()))
    assert told["inside"] is False
    assert told["metrics"][0]["outcome"] == "outside"
    assert told["differs"] == {}

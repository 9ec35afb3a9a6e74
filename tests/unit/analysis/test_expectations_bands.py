"""Bands from runs, against numbers worked out by hand."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.analysis.expectations import ONE_RUN, expect_from_runs, widen
from grpo_cli.errors import UsageError
from tests.run_folders import make_finished_run


def paths(*runs):
    return [run.path for run in runs]


def test_three_seeds_give_a_prediction_interval_of_one_more_run(tmp_path):
    """Last four records of each run: 0.5, 0.6, 0.7. Mean 0.6, s 0.1, t 4.3027 with 2 degrees of freedom:
    0.6 ± 4.3027 · 0.1 · √(1 + 1/3) = 0.6 ± 0.4968. Accuracy 0.7, 0.8, 0.9: 0.8 ± 0.4968, up to 1."""
    runs = [
        make_finished_run(tmp_path, seed, [0.0] * 36 + [0.3, 0.7, 0.4, 0.6 + 0.4 * n], 0.7 + n / 10)
        for n, seed in enumerate((42, 1, 2))
    ]
    written = expect_from_runs(paths(*runs))
    reward, accuracy = written.expect.metrics
    assert (reward.metric, reward.step, reward.window) == ("reward", 40, 4)
    assert reward.band == (0.103, 1.097)
    assert (accuracy.metric, accuracy.step) == ("accuracy/math", 40)
    assert accuracy.band == (0.303, 1.0)
    assert written.notes == ()
    assert written.expect.measured.seeds == (42, 1, 2)
    assert written.expect.measured.runs == ("sums/seed-42", "sums/seed-1", "sums/seed-2")
    assert written.expect.measured.hardware == ("2 CPU cores (x86_64), 8 GiB",)
    assert written.expect.measured.versions["trl"] == ("1.16.0",)
    assert written.expect.measured.data == "0123456789ab"


def test_one_run_gives_the_noise_of_its_records_and_of_its_prompts_and_says_so(tmp_path):
    """Records 0.4, 0.5, 0.6, 0.5: mean 0.5, s 0.08165, t 3.1824 with 3 degrees of freedom:
    0.5 ± 3.1824 · 0.08165 · √(1/4 + 1/4) = 0.5 ± 0.1837. Accuracy 0.8 of 100 prompts: c = 0.019207,
    the roots of 1.019207 x² − 1.607683 x + 0.621562 are 0.6783 and 0.8991."""
    run = make_finished_run(tmp_path, rewards=[0.0] * 36 + [0.4, 0.5, 0.6, 0.5])
    written = expect_from_runs(paths(run))
    reward, accuracy = written.expect.metrics
    assert reward.band == (0.316, 0.684)
    assert accuracy.band == (0.678, 0.9)
    assert written.notes == (ONE_RUN,)


def test_a_band_of_accuracies_is_never_narrower_than_the_prompts_allow(tmp_path):
    """All right, twice: of 100 more prompts a few may still be wrong, (1 − c) / (1 + c) = 0.9623."""
    runs = [make_finished_run(tmp_path, seed, accuracy=1.0) for seed in (1, 2)]
    reward, accuracy = expect_from_runs(paths(*runs)).expect.metrics
    assert accuracy.band == (0.9623, 1.0)
    assert reward.band == (0.5, 0.5)
    (note,) = expect_from_runs(paths(*runs)).notes
    assert "every run gave the same reward" in note


def test_only_prompts_that_an_accuracy_applies_to_make_its_band_narrow(tmp_path):
    run = make_finished_run(tmp_path, prompts=400)
    path = run.evaluations / "after.json"
    measured = json.loads(path.read_text())
    measured["metrics"] = {"accuracy/math": {"value": 0.8, "prompts": 100}}
    path.write_text(json.dumps(measured))
    _, accuracy = expect_from_runs(paths(run)).expect.metrics
    # As of 100 prompts in all, which is worked out above.
    assert accuracy.band == (0.678, 0.9)


def test_a_warm_up_has_a_band_of_its_own_at_step_0(tmp_path):
    """0.2, 0.3, 0.4: 0.3 ± 0.4968, as above."""
    runs = [make_finished_run(tmp_path, seed, warmed=0.2 + seed / 10) for seed in range(3)]
    written = expect_from_runs(paths(*runs))
    found = [(each.metric, each.step) for each in written.expect.metrics]
    assert found == [("reward", 40), ("accuracy/math", 0), ("accuracy/math", 40)]
    assert written.expect.metrics[1].band == (0.0, 0.797)


def test_one_run_gives_no_band_of_a_held_out_reward(tmp_path):
    run = make_finished_run(tmp_path)
    after = json.loads((run.evaluations / "after.json").read_text())
    after["rewards"] = {"length": 1.0}
    (run.evaluations / "after.json").write_text(json.dumps(after))
    with pytest.raises(UsageError, match="one run alone does not say how `rewards/length` varies"):
        expect_from_runs([run.path], ["rewards/length"])


def test_another_step_and_window_may_be_asked_for(tmp_path):
    runs = [
        make_finished_run(tmp_path, seed, [seed + step / 10 for step in range(40)])
        for seed in (1, 3)
    ]
    written = expect_from_runs(paths(*runs), step=20, window=2)
    (metric,) = written.expect.metrics
    assert (metric.metric, metric.step, metric.window) == ("reward", 20, 2)
    low, high = metric.band
    # Records 19 and 20 of each: 1.85 + seed, so the middle is 3.85.
    assert (low + high) / 2 == pytest.approx(3.85, abs=0.1)
    with pytest.raises(UsageError, match="--step 50: a run ended at 40"):
        expect_from_runs(paths(*runs), step=50)
    with pytest.raises(UsageError, match="was measured at the end of each run, not at step 20"):
        expect_from_runs(paths(*runs), ["accuracy/math"], step=20)
    with pytest.raises(UsageError, match="20 numbers of `reward` among the 30 records wanted"):
        expect_from_runs(paths(*runs), step=20, window=30)


def test_one_record_of_one_run_has_no_spread(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.1, 0.2], training={"max_steps": 2})
    with pytest.raises(UsageError, match="Fix: a window of several records"):
        expect_from_runs([run.path], ["reward"])


def test_runs_of_different_settings_are_refused_with_the_difference(tmp_path):
    first = make_finished_run(tmp_path, 1)
    other = make_finished_run(tmp_path, 2, training={"max_steps": 40, "learning_rate": 1e-5})
    with pytest.raises(UsageError) as caught:
        expect_from_runs(paths(first, other))
    assert "sums/seed-1 and sums/seed-2 are not the same training" in str(caught.value)
    assert "training.learning_rate: 1e-06 → 1e-05" in str(caught.value)


def test_runs_may_differ_in_what_training_does_not_depend_on(tmp_path):
    first = make_finished_run(tmp_path, 1, description="one")
    other = make_finished_run(tmp_path, 2, logging={"report_to": ["wandb"]})
    assert expect_from_runs(paths(first, other)).expect.measured.seeds == (1, 2)


def test_the_same_seed_twice_is_refused(tmp_path):
    runs = [make_finished_run(tmp_path / part, 7) for part in "ab"]
    with pytest.raises(UsageError, match="have the same seed 7"):
        expect_from_runs(paths(*runs))


def test_a_run_that_is_not_finished_is_refused(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.5] * 20, state="stopped")
    with pytest.raises(UsageError, match=r"is stopped \(20 of 40 steps\).*--resume-from"):
        expect_from_runs([run.path])


def test_runs_that_ended_at_different_steps_need_a_step(tmp_path):
    runs = [make_finished_run(tmp_path, seed, [0.5] * (30 + seed)) for seed in (1, 2)]
    with pytest.raises(UsageError, match=r"seed-1 31, sums/seed-2 32.* Fix: --step 31"):
        expect_from_runs(paths(*runs))
    (metric,) = expect_from_runs(paths(*runs), step=31).expect.metrics
    assert metric.metric == "reward"


def test_a_metric_that_is_not_there_is_said_with_its_nearest(tmp_path):
    run = make_finished_run(tmp_path)
    with pytest.raises(UsageError, match=r"has no metric `rewrd`. Fix: --metric reward"):
        expect_from_runs([run.path], ["rewrd"])


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6))
def test_rounding_never_narrows_a_band(low, width):
    rounded = widen((low, low + width))
    hair = 1e-9 * max(abs(low), width, 1.0)
    assert rounded[0] <= low + hair
    assert rounded[1] >= low + width - hair
    assert rounded[1] - rounded[0] <= 1.03 * width + hair
    assert all(map(math.isfinite, rounded))

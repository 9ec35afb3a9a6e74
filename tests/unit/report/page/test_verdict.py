"""The verdict in a sentence: what it claims, and what it does not."""

import platform
import random

from grpo_cli.report.page.material import read_material
from grpo_cli.report.page.verdict import judge
from grpo_cli.runs.files import write_json
from grpo_cli.runs.status import StatusFile
from tests.run_folders import make_finished_run, write_samples


def measure(run, before, after):
    """Writes both measurements from each prompt's score."""
    for when, scores in (("before", before), ("after", after)):
        write_samples(run, [(f"q{n}", [score]) for n, score in enumerate(scores)], when)
        told = {"prompts": len(scores), "accuracy": {"math": sum(scores) / len(scores)}}
        write_json(run.evaluations / f"{when}.json", told)


def verdict_on(run):
    return judge(read_material(run, "sums/seed"))


def test_a_gain_beyond_doubt_is_claimed_with_its_interval(tmp_path):
    run = make_finished_run(tmp_path)
    measure(run, [0.0] * 70 + [1.0] * 30, [0.0] * 19 + [1.0] * 81)
    told = verdict_on(run)
    assert told.text.startswith(
        "Completed 40 of 40 steps in 0s: held-out accuracy rose from 0.300 to 0.810"
    )
    assert "(+0.510, 95 % interval +0.410 to +0.610, 100 prompts)" in told.text
    assert told.tone == "good"
    measure(run, [0.0] * 19 + [1.0] * 81, [0.0] * 70 + [1.0] * 30)
    told = verdict_on(run)
    assert "held-out accuracy fell from 0.810 to 0.300 (−0.510" in told.text
    assert told.tone == "bad"


def test_no_gain_is_claimed_where_the_interval_holds_zero(tmp_path):
    run, draw = make_finished_run(tmp_path), random.Random(0)
    answers = [[float(draw.random() < 0.5) for _ in range(40)] for _ in range(2)]
    answers[1][0] = answers[0][0] + 1 if answers[0][0] == 0 else 0.0
    measure(run, *answers)
    told = verdict_on(run)
    assert "no change of held-out accuracy is shown: from" in told.text
    assert "rose" not in told.text
    assert told.tone == "plain"


def test_too_few_prompts_give_numbers_and_the_reason_for_no_interval(tmp_path):
    run = make_finished_run(tmp_path)
    measure(run, [0.0, 1.0], [1.0, 1.0])
    text = verdict_on(run).text
    assert "went from 0.500 to 1.000 (no interval: 2 prompts are too few" in text
    measure(run, [0.0] * 20, [1.0] * 20)
    assert "went from 0.000 to 1.000 (no interval: the change is the same" in verdict_on(run).text


def test_numbers_without_samples_are_told_without_an_interval(tmp_path):
    run = make_finished_run(tmp_path)
    write_json(run.evaluations / "before.json", {"prompts": 9, "accuracy": {"math": 0.1}})
    assert (
        "went from 0.100 to 0.800 (no interval: its samples are not there)" in verdict_on(run).text
    )


def test_without_a_measurement_the_training_reward_is_told_as_such(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.1] * 20 + [0.7] * 20, accuracy=None)
    assert (
        "training reward went from 0.100 to 0.700 (means of the first and last 4 records, "
        "not measured on held-out prompts)"
    ) in verdict_on(run).text


def test_other_ends_are_told_as_they_are(tmp_path):
    run = make_finished_run(tmp_path, rewards=[0.1] * 3, accuracy=None)
    StatusFile(run.status).update(state="failed", reason="the disk is full.")
    told = verdict_on(run)
    assert told.text.startswith("Failed after 3 of 40 steps in 0s (the disk is full):")
    assert "no problems found" not in told.text
    assert told.tone == "bad"
    StatusFile(run.status).update(state="stopped", reason=None)
    assert verdict_on(run).text.startswith("Stopped after 3 of 40 steps")
    StatusFile(run.status).update(state="running", phase="training")
    assert "3 of 40 steps after 0s: training reward" in verdict_on(run).text
    StatusFile(run.status).update(phase="measuring after training")
    assert "after 0s, measuring after training: training reward" in verdict_on(run).text
    assert verdict_on(run).text.endswith("no problems found so far.")
    write_json(run.manifest, {"hardware": {"host": platform.node()}})
    told = verdict_on(run)
    assert told.text.startswith(
        "Broken off without a word after 3 of 40 steps in 0s, measuring after training"
    )
    assert told.tone == "bad"
    run.status.unlink()
    assert verdict_on(run).text.startswith("Not started")

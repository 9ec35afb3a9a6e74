"""The verdict in a sentence: what it claims, and what it does not."""

import json
import platform
import random
from dataclasses import replace

from grpo_cli.analysis.diagnosis.diagnosis import Diagnosis
from grpo_cli.analysis.diagnosis.rule import Symptom
from grpo_cli.cli.summary import print_summary
from grpo_cli.report.summary import RunReport
from grpo_cli.report.verdict import judge
from grpo_cli.report.wording import format_event
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import StatusFile
from grpo_cli.sweep.comparison import compare_cells
from tests.run_folders import make_finished_run, write_samples


def measure(run, before, after, warmed=None):
    """Writes the measurements from each prompt's score."""
    stages = {"before": before, "warmup": warmed, "after": after}
    for when, scores in stages.items():
        if scores is None:
            continue
        write_samples(run, [(f"q{n}", [score]) for n, score in enumerate(scores)], when)
        told = {"prompts": len(scores), "accuracy": {"math": sum(scores) / len(scores)}}
        write_json(run.evaluations / f"{when}.json", told)


def verdict_on(run):
    return judge(RunReport(run))


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


def test_a_gain_is_split_at_the_warm_up(tmp_path):
    run = make_finished_run(tmp_path, warmed=0.5)
    measure(run, [0.0] * 90 + [1.0] * 10, [0.0] * 20 + [1.0] * 80, [0.0] * 50 + [1.0] * 50)
    text = verdict_on(run).text
    assert "rose from 0.500 after the warm-up to 0.800 (+0.300, 95 % interval" in text
    assert "; before the warm-up it was 0.100 (+0.700, 95 % interval" in text


def make_collapsed_run(root):
    """Answers right for 36, then 55 and then 40 of 100 prompts, the last ones all with one word."""
    run = make_finished_run(root, warmed=0.55)
    shares = [[0.0] * (100 - right) + [1.0] * right for right in (36, 40, 55)]
    measure(run, *shares)
    for when, words in (("before", "abcd"), ("warmup", "abcd"), ("after", "b")):
        path = run.evaluations / f"{when}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for place, line in enumerate(lines):
            line["text"] = words[place % len(words)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_a_run_is_judged_by_the_stage_before_and_a_collapse_is_never_good(tmp_path, capsys):
    run = RunReport(make_collapsed_run(tmp_path))
    text, tone = judge(run)
    assert tone == "bad"
    assert "100% of the held-out answers to 100 prompts are 'b'" in text
    assert "accuracy fell from 0.550 after the warm-up to 0.400 (−0.150, 95 % interval" in text
    assert "before the warm-up it was 0.360 (+0.040" in text
    assert {each.rule for each in run.diagnosis.errors} == {"held_out_collapse"}
    assert "since the warm-up" in next(
        each.seen for each in run.diagnosis.symptoms if each.rule == "held_out_loss"
    )
    print_summary(run)
    assert "✓" not in capsys.readouterr().out
    cells = compare_cells({1: {1: run}}, {1: "beta 0"})
    assert (
        cells.cells[1].verdict == "beta 0: 1 of 1 run ended with one answer to all held-out prompts"
    )


def test_answers_that_were_not_scored_are_told_beside_the_numbers(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    scored = {"prompts": 50, "completions": 100, "rewards": {"own": 0.3}, "accuracy": {}}
    unscored = {"timeouts": {"own": 13}, "failures": {"judge": 2}}
    write_json(run.evaluations / "before.json", {**scored, **unscored})
    write_json(run.evaluations / "after.json", scored)
    report = RunReport(run)
    words = (
        "held out before training: 13 of 100 answers timed out in scoring (own), 2 of 100 answers failed in "
        "scoring (judge)"
    )
    assert words in judge(report).text
    print_summary(report)
    assert words in " ".join(capsys.readouterr().out.split())
    assert report.summary_json()["before"]["timeouts"] == {"own": 13}
    record = {"event": "measure", "when": "before", **scored, **unscored}
    assert "; 13 of 100 answers timed out" in format_event(record)


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
    assert "from 0.500 to 1.000 (no interval: 2 prompts are too few, 8 are needed)" in text
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
        "training reward went from 0.100 to 0.700, +0.600 (means of the first and last 4 records, "
        "not measured on held-out prompts)"
    ) in verdict_on(run).text


def test_a_change_of_the_training_reward_is_told_with_its_noise(tmp_path):
    noisy = [-13.0, -9.0, -15.0, -12.0, -11.0] * 4
    run = make_finished_run(tmp_path, rewards=[*noisy, *(each + 0.5 for each in noisy)])
    (run.evaluations / "after.json").unlink()
    text = verdict_on(run).text
    assert "from −12.250 to −11.250, +1.000, which is within its noise (±3.536)" in text
    run = make_finished_run(tmp_path, 1, [*noisy, *(each + 9 for each in noisy)], None)
    assert "+9.500 with a noise of ±3.536" in verdict_on(run).text
    run = make_finished_run(tmp_path, 2, [0.1, 0.2, 0.3], None)
    assert "+0.200, of too few records to know their noise (first and" in verdict_on(run).text


def measure_rewards(run, before, after, **more):
    """Writes both measurements from each prompt's scores, whose sum is the total."""
    for when, scores in (("before", before), ("after", after)):
        lines = []
        for row in range(12):
            scored = {name: values[row % 4] for name, values in scores.items()}
            lines.append(
                {"group": row, "row": row, "prompt": f"q{row}", "text": "a", "tokens": 4,
                 "clipped": False, "rewards": scored, "reasons": {}, "failed": [], "answers": {},
                 "total": sum(scored.values())}
            )  # fmt: skip
        text = "".join(json.dumps(each) + "\n" for each in lines)
        (run.evaluations / f"{when}.jsonl").write_text(text)
        write_json(run.evaluations / f"{when}.json", {"prompts": 12, **more})


def test_a_reward_that_fell_is_named_though_the_total_shows_no_change(tmp_path):
    rewards = [
        {"kind": "python", "path": "my.py:vowels"},
        {"kind": "python", "path": "my.py:short"},
    ]
    run = make_finished_run(tmp_path, accuracy=None, rewards=[0.1] * 40)
    recipe = run.read_recipe()
    run.write_recipe(recipe.model_validate({**recipe.model_dump(mode="json"), "rewards": rewards}))
    measure_rewards(
        run,
        {"vowels": [0.3, 0.2, 0.4, 0.3], "short": [0.0, 0.1, 0.0, 0.1]},
        {"vowels": [0.0] * 4, "short": [0.3, 0.4, 0.5, 0.2]},
        temperature=0.0,
    )
    told = verdict_on(run)
    assert "no change of held-out reward is shown" in told.text
    assert "12 prompts, sampled greedily)" in told.text
    assert "held-out reward `vowels` fell from 0.300 to 0.000 (−0.300, 95 %" in told.text
    assert "held-out reward `short` rose from 0.050 to 0.350" in told.text
    assert "no problems found" not in told.text


def test_a_note_is_counted_and_no_problem_is_denied_beside_it(tmp_path):
    run = make_finished_run(tmp_path)
    note = Symptom("seen", "fix", level="note", rule="truncation", step=40)
    report = RunReport(run)
    report.diagnosis = Diagnosis((note,))
    assert judge(report).text.endswith("; 1 note.")
    several = (replace(note, level="error"), replace(note, level="error"), note)
    report.diagnosis = Diagnosis(several)
    assert judge(report).text.endswith("; 2 errors and 1 note.")


def test_a_failure_is_told_by_its_first_line(tmp_path):
    run = make_finished_run(tmp_path, accuracy=None, rewards=[0.1] * 3)
    reason = "reward 'a' failed: ValueError\n  prompt: 'x'\nTraceback (most recent call last):\n"
    StatusFile(run.status).update(state="failed", reason=reason)
    assert "(reward 'a' failed: ValueError): training" in verdict_on(run).text


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
    assert verdict_on(run).text.endswith(
        "too few records to find problems so far (1 of 36 rules checked, 35 skipped)."
    )
    write_json(run.manifest, {"hardware": {"host": platform.node()}})
    told = verdict_on(run)
    assert told.text.startswith(
        "Interrupted, with no process left, after 3 of 40 steps in 0s, measuring after training"
    )
    assert told.tone == "bad"
    run.status.unlink()
    assert verdict_on(run).text.startswith("Not started")

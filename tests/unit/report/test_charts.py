"""The charts of a page as numbers: order, headings, shared steps, marks, and what thinning keeps."""

import pytest

from grpo_cli.report.charts import build_charts
from grpo_cli.report.summary import RunReport
from grpo_cli.runs.files import write_json
from grpo_cli.runs.metrics import append_record
from tests.run_folders import make_finished_run
from tests.unit.report.test_verdict import measure


def test_metrics_stand_under_headings_and_share_their_steps(tmp_path):
    run = make_finished_run(tmp_path, rewards=(0.1, 0.2))
    more = {"rewards/part_10/mean": 1.0, "rewards/part_2/mean": 1.0, "kl": None, "num_tokens": 5}
    append_record(
        run.metrics, {"event": "train", "step": 3, "entropy": 1.23456789, "own": 1.0, **more}
    )
    append_record(run.metrics, {"event": "eval", "step": 3, "eval_reward": 0.4})
    charts = build_charts([RunReport(run, "a")])
    found = {
        group["heading"]: [each["metric"] for each in group["charts"]] for group in charts["groups"]
    }
    assert found == {
        "Reward": ["rewards/part_10/mean", "rewards/part_2/mean"],
        "Evaluation during training": ["eval_reward"],
        "Signal": ["entropy"],
        "Stability": [],
        "Everything else": ["own"],
    }
    assert [group["unchanged"] for group in charts["groups"] if group["unchanged"]] == [
        [("loss", "0")]
    ]
    # The reward is the chart that the page begins with.
    assert charts["reward"] == 0
    assert charts["data"]["charts"][0]["metric"] == "reward"
    assert charts["data"]["steps"] == [[1, 2], [3]]
    assert charts["evaluations"] == "at temperature 1"
    assert charts["data"]["charts"][0]["evaluated"][0]["values"] == [0.4]
    (entropy,) = (each for each in charts["data"]["charts"] if each["metric"] == "entropy")
    assert entropy["lines"][0]["values"] == [1.23457]


def test_marks_and_the_held_out_chart_have_the_intervals_of_the_measurements(tmp_path):
    run = make_finished_run(tmp_path)
    measure(run, [0.0] * 15 + [1.0] * 5, [0.0] * 5 + [1.0] * 15)
    material = RunReport(run, "a")
    charts = build_charts([material])
    ends = [
        {end: float(f"{getattr(found['reward'], end):.6g}") for end in ("value", "low", "high")}
        for found in (material.held_out.before, material.held_out.after)
    ]
    assert [
        {end: mark[end] for end in ("value", "low", "high")}
        for mark in charts["data"]["charts"][0]["marks"]
    ] == ends
    assert 0 < ends[0]["low"] < 0.25 < ends[0]["high"] < ends[1]["low"] < 0.75
    # The reward says the same as the accuracy, and has no line of its own.
    (row,) = charts["data"]["held_out_rows"]
    assert charts["held_out"] == row["label"] == "accuracy/math"
    assert row["ends"] == {"before": ends[0], "after": ends[1]}


def test_the_held_out_chart_of_several_runs_is_in_the_order_of_the_ranking(tmp_path):
    runs = [make_finished_run(tmp_path, seed, accuracy=None) for seed in (1, 2, 3)]
    measure(runs[0], [0.0] * 20, [0.0] * 10 + [1.0] * 10)
    measure(runs[2], [0.0] * 20, [0.0] * 5 + [1.0] * 15)
    charts = build_charts([RunReport(run, name) for run, name in zip(runs, "abc", strict=True)])
    assert charts["held_out"] == "accuracy/math"
    assert [(row["label"], row["run"]) for row in charts["data"]["held_out_rows"]] == [
        ("c", 2),
        ("a", 0),
    ]


def test_length_charts_are_folded_and_each_has_a_caption_of_its_own(tmp_path):
    run = make_finished_run(tmp_path)
    ends = [f"completions/{end}" for end in ("min_length", "max_length", "mean_length")]
    for step in (41, 42):
        append_record(run.metrics, {"event": "train", "step": step, **dict.fromkeys(ends, step)})
    groups = build_charts([RunReport(run, "a")])["groups"]
    (length,) = (group for group in groups if group["heading"] == "Length")
    assert not length["is_open"]
    notes = {each["metric"]: each["note"] for each in length["charts"]}
    assert notes["completions/max_length"] == "tokens, of the longest completion"
    assert len(set(notes.values())) == 3


def test_a_set_evaluated_during_training_has_its_points_and_those_before_and_after(tmp_path):
    during = [{"every": 10}, {"name": "few", "every": 10, "limit": 9, "temperature": 0.5}]
    run = make_finished_run(tmp_path, evaluation={"during": during})
    before = {"accuracy": {"math": 0.1}, "prompts": 9, "temperature": 0}
    write_json(run.evaluations / "before.json", before)
    for name, temperature in (("held_out", 0), ("few", 0.5)):
        (run.evaluations / "during" / name).mkdir(parents=True)
        for step, value in ((10, 0.2), (20, 0.7)):
            metric = {"value": value, "low": 0.1, "high": 0.9, "prompts": 9}
            result = {"metrics": {"accuracy/math": metric}, "temperature": temperature}
            write_json(run.evaluations / "during" / name / f"{step}.json", result)
            logged = {f"eval_{name}/accuracy/math": value}
            append_record(run.metrics, {"event": "eval", "step": step, **logged})
    report = RunReport(run, "a")
    charts = build_charts([report])["data"]["charts"]
    marks = {each["metric"]: each["marks"] for each in charts}
    assert [(each["step"], each["value"]) for each in marks["eval_held_out/accuracy/math"]] == [
        (0, 0.1),
        (10, 0.2),
        (20, 0.7),
        (40, 0.8),
    ]
    first, _ = marks["eval_few/accuracy/math"]
    assert first == {
        **{"run": 0, "when": "at step 10", "step": 10, "sampled": "at temperature 0.5"},
        **{"value": 0.2, "low": 0.1, "high": 0.9},
    }
    assert report.summary_json()["during"]["few"][1]["step"] == 20


def test_held_out_rewards_are_marked_in_the_chart_of_the_reward(tmp_path):
    during = [{"every": 10}, {"name": "few", "every": 10, "limit": 9}]
    run = make_finished_run(tmp_path, evaluation={"during": during})
    for name in ("held_out", "few"):
        (run.evaluations / "during" / name).mkdir(parents=True)
        result = {"metrics": {"reward": {"value": 0.4, "low": None, "high": None, "prompts": 9}}}
        write_json(run.evaluations / "during" / name / "10.json", result)
    for when, value in (("before", 0.1), ("warmup", 0.3), ("after", 0.6)):
        write_json(run.evaluations / f"{when}.json", {"prompts": 9, "reward": value})
    chart = build_charts([RunReport(run, "a")])["data"]["charts"][0]
    assert [(each["when"], each["step"], each["value"]) for each in chart["marks"]] == [
        ("before", 0, 0.1),
        ("after the warm-up", 0, 0.3),
        ("after", 40, 0.6),
        ("at step 10", 10, 0.4),
    ]


def test_the_losses_of_the_warm_up_have_charts_by_its_own_steps(tmp_path):
    run = make_finished_run(tmp_path)
    # It was killed after its third step, and went on from its first.
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.0), (3, 1.5)):
        record = {"event": "warmup", "warmup_step": step, "total_steps": 3, "loss": loss}
        append_record(run.metrics, record)
    charts = build_charts([RunReport(run, "a")])
    (group,) = (each for each in charts["groups"] if each["heading"] == "Warm-up")
    (chart,) = (each for each in charts["data"]["charts"] if each["metric"] == "warmup/loss")
    assert group["charts"][0]["note"]
    assert charts["data"]["steps"][chart["lines"][0]["steps"]] == [1, 2, 3]
    assert chart["lines"][0]["values"] == [3.0, 2.0, 1.5]


def test_what_never_changes_is_told_and_what_says_the_same_twice_is_left_out(tmp_path):
    run = make_finished_run(tmp_path, rewards=())
    for step in range(1, 5):
        told = {
            "reward": step / 10,
            "rewards/math/mean": step / 10,
            "clip_ratio/high_max": 0.0,
            "completions/clipped_ratio": step / 4,
            "clip_ratio/low_mean": step / 1000,
            "completions/min_terminated_length": 0.0 if step == 4 else 5.0 + step,
        }
        append_record(run.metrics, {"event": "train", "step": step, **told})
    charts = build_charts([RunReport(run, "a")])
    assert {name for group in charts["groups"] for name, _ in group["unchanged"]} == {
        "clip_ratio/high_max"
    }
    drawn = {each["metric"]: each for each in charts["data"]["charts"]}
    assert "rewards/math/mean" not in drawn
    for chart in (each for group in charts["groups"] for each in group["charts"]):
        assert chart["note"], chart["metric"]


@pytest.mark.parametrize(("temperature", "words"), [(0.0, "greedily"), (0.7, "at temperature 0.7")])
def test_marks_say_how_their_answers_were_sampled(tmp_path, temperature, words):
    run = make_finished_run(tmp_path)
    told = {"prompts": 9, "reward": 0.5, "temperature": temperature}
    write_json(run.evaluations / "after.json", told)
    charts = build_charts([RunReport(run, "a")])
    assert charts["marks"] == words
    assert charts["data"]["held_out"] == [words]

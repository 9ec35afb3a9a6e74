"""The tables of a page: rewards, time by phase, settings, batch, held-out numbers."""

import json

import pytest

from grpo_cli.analysis.metrics import Metric, say_metric
from grpo_cli.cli.runs_view import print_runs
from grpo_cli.cli.summary import print_summary
from grpo_cli.report import tables
from grpo_cli.report.comparison import show_apart, tell_settings
from grpo_cli.report.run_list import list_runs
from grpo_cli.report.summary import RunReport
from grpo_cli.report.wording import format_event, format_step
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import append_record
from tests.run_folders import make_finished_run
from tests.unit.report.test_verdict import measure


def write_phases(run, every, seconds):
    for step in range(every, 41, every):
        seconds_of = {f"time/{phase}": value for phase, value in seconds.items()}
        append_record(run.metrics, {"event": "train", "step": step, "step_time": 4.0, **seconds_of})


def test_time_is_summed_over_all_steps_also_where_not_all_are_logged(tmp_path):
    seconds = {"sampling": 2.0, "sync": 0.0, "scoring": 0.5, "learning": 1.0}
    for every in (1, 10):
        run = make_finished_run(tmp_path, every, rewards=())
        write_json(run.evaluations / "before.json", {"seconds": 40.0})
        write_phases(run, every, seconds)
        found = {row["name"]: row for row in tables.list_phases(RunReport(run, "a"))}
        assert found["sampling"]["seconds"] == pytest.approx(80)
        assert found["rest of the step"]["seconds"] == pytest.approx(20)
        assert found["measuring"]["time"] == "40s"
        assert found["sampling"]["share"] == pytest.approx(0.4)
        assert "sync" not in found


def test_a_run_that_logged_no_phases_has_no_table_of_them(tmp_path):
    assert tables.list_phases(RunReport(make_finished_run(tmp_path), "a")) == []


def test_rewards_are_told_with_what_became_of_them(tmp_path):
    rewards = [
        {"kind": "math", "answer": "q"},
        {"kind": "regex", "pattern": "a", "on_error": "zero"},
    ]
    run = make_finished_run(tmp_path, **{"rewards": (), "training": {"max_steps": 40}})
    recipe = run.read_recipe()
    run.write_recipe(recipe.model_validate({**recipe.model_dump(mode="json"), "rewards": rewards}))
    for step in range(1, 21):
        logged = {
            "rewards/math/mean": step / 10,
            "rewards/math/std": 0.3,
            "rewards/regex/error_share": 0.25,
        }
        append_record(run.metrics, {"event": "train", "step": step, **logged})
    math, regex = tables.list_rewards(RunReport(run, "a"))
    assert (math["name"], math["kind"], math["trend"].width) == ("math", "math", 4)
    assert (math["trend"].first, math["trend"].last) == pytest.approx((0.25, 1.85))
    assert not math["trend"].is_noise
    assert math["error_share"] is None
    assert (regex["trend"], regex["error_share"]) == (None, 0.25)


def test_the_batch_is_that_of_the_launch(tmp_path):
    run = make_finished_run(tmp_path)
    assert tables.plan_run_batch(RunReport(run, "a")) is None
    run.launch.mkdir()
    write_json(run.plan, {"num_processes": 2})
    plan = tables.plan_run_batch(RunReport(run, "a"))
    assert plan.completions_per_micro_step == 16


def test_shares_are_of_the_whole_run(tmp_path):
    run = make_finished_run(tmp_path, rewards=())
    StatusFile(run.status).update(started_at=1000.0)
    measured = {"event": "measure", "when": "before", "time": 1030.0, "seconds": 10.0}
    append_record(run.metrics, measured)
    write_json(run.evaluations / "before.json", {"seconds": 10.0})
    write_phases(run, 1, {"sampling": 2.0})
    told = json.loads(run.status.read_text())
    write_json(run.status, {**told, "started_at": 1000.0, "updated_at": 1200.0})
    found = {row["name"]: row["seconds"] for row in tables.list_phases(RunReport(run, "a"))}
    assert found == pytest.approx(
        {
            "sampling": 80,
            "rest of the step": 80,
            "measuring": 10,
            "start-up, saving and the rest": 30,
        }
    )


def test_settings_stand_beside_their_defaults(tmp_path):
    run = RunReport(make_finished_run(tmp_path))
    found = {path: default for path, _, default in tables.list_settings(run)}
    assert (found["model.path"], found["training.max_steps"]) == ("–", "-1")
    assert found.keys().isdisjoint({"launch.num_processes", "name", "generation.num_generations"})


def test_an_optional_section_of_defaults_is_a_setting(tmp_path):
    run = RunReport(make_finished_run(tmp_path, model={"path": "tiny", "lora": {}}))
    assert "model.lora" in {path for path, *_ in tables.list_settings(run)}
    assert (tables.show(4.0), tables.show(0.5)) == ("4", "0.5")


def test_failures_of_rewards_in_training_are_told(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    for step, share in ((41, 0.5), (42, 0.0)):
        logged = {"event": "train", "step": step, "rewards/f/error_share": share}
        append_record(run.metrics, logged)
        assert ("failed f 50%" in format_step(logged, None)) == bool(share)
    logged = {"event": "eval", "step": 42, "eval_rewards/f/error_share": 0.75}
    append_record(run.metrics, logged)
    assert "failed f 75%" in format_event(logged)
    failures = "25.0% of answers failed or timed out in scoring (f)"
    assert RunReport(run).scoring_failures() == {
        "in training": failures,
        "in evaluations during training": "75.0% of answers failed or timed out in scoring (f)",
    }
    print_summary(RunReport(run))
    assert failures in capsys.readouterr().out
    (listed,) = list_runs(tmp_path)
    assert listed["scoring_failed"]
    print_runs([listed], tmp_path, filtered=False)
    captured = capsys.readouterr()
    assert "completed!" in captured.out
    assert "! scoring failed on some answers" in captured.err


def test_the_manifest_tells_the_command_in_words(tmp_path):
    run = make_finished_run(tmp_path)
    argv = ["/x/__main__.py", "train", "a b.yaml", "--set", "training.max_steps=40"]
    write_json(
        run.manifest, {"argv": argv, "git": None, "model": "abc", "environment": {"KEY": "x"}}
    )
    material = RunReport(run, "a")
    assert tables.list_overrides([material.manifest]) == [["training.max_steps=40"]]
    assert dict(tables.list_manifest(material)) == {
        "command": "grpo train 'a b.yaml' --set training.max_steps=40",
        "model": "abc",
        "attempts": "0",
    }


def test_a_resumed_run_tells_what_its_newest_attempt_overrode(tmp_path):
    run, sets = make_finished_run(tmp_path), "--set training.max_steps="
    write_json(run.manifest, {"argv": ["grpo", *f"train a.yaml {sets}16".split()], "data": {}})
    for number, rest in ((1, ""), (2, f"{sets}8"), (3, "--set seed=2")):
        run.attempt(number).mkdir(parents=True, exist_ok=True)
        recipe = "a.yaml" if number < 3 else str(run.resolved)
        versions = {"trl": f"1.{number}"}
        entries = {"argv": ["grpo", "train", recipe, *rest.split()], "recipe": recipe}
        if number > 1:
            write_json(run.attempt(number) / "manifest.json", {**entries, "versions": versions})
    report = RunReport(run)
    assert tables.list_overrides(report.attempt_manifests) == [
        ["training.max_steps=16"],
        ["training.max_steps=8"],
        ["training.max_steps=8", "seed=2"],
    ]
    assert tables.say_overrides(report).startswith("training.max_steps=8 · seed=2 (attempt 3; ")
    assert report.manifest["versions"] == {"trl": "1.3"}
    assert "--set seed=2" in dict(tables.list_manifest(report))["command of attempt 3"]


def test_long_values_are_told_by_where_they_differ():
    paths = [f"/a/way/to/the/folder/of/all/the/models/there/are/{name}/end" for name in "ab"]
    assert show_apart([*paths, None], 8) == ["…e/a/end", "…e/b/end", "–"]
    assert show_apart(["1e-05", "2e-05"], 60) == ["1e-05", "2e-05"]
    shown = tables.show("a" * 500 + "z")
    assert (len(shown), shown[-1]) == (401, "z")


def test_other_conditions_are_told_in_words():
    rewards = (
        [{"kind": "math", "weight": 1.0}],
        [
            {"kind": "math", "weight": 2.0},
            {"kind": "length", "weight": 1.0},
        ],
    )
    told = tell_settings({"rewards": rewards, "temperature": (0.0, 1.0), "data": ("x", "y")})
    assert told == [
        "rewards[0].weight (1.0 and 2.0)",
        "rewards[1].kind (– and length)",
        "rewards[1].weight (– and 1.0)",
        "temperature (0.0 and 1.0)",
        "the data",
    ]


def test_a_reason_for_no_interval_is_told_once():
    few = Metric(0.1, None, None, 3, "few")
    metrics = {"reward": few, "rewards/a": few, "accuracy/a": Metric(0.1, 0.0, 0.2, 9)}
    assert tables.gather_notes(metrics, metrics) == {"few": ["reward", "rewards/a"]}


def test_what_says_the_same_of_all_prompts_is_one_row(tmp_path):
    run = make_finished_run(tmp_path)
    measure(run, [0.0] * 15 + [1.0] * 5, [0.0] * 5 + [1.0] * 15)
    rows = tables.list_measured(RunReport(run, "a"))
    assert [(row["name"], row["same"]) for row in rows] == [
        ("accuracy/math", ["reward", "rewards/math"]),
        ("completion_length", []),
        ("clipped", []),
    ]
    # Equal means of other prompts are not the same.
    mean = Metric(0.5, None, None, 2)
    values = {"reward": {0: 1.0, 1: 0.0}, "rewards/a": {0: 0.0, 1: 1.0}}
    found = tables.group_equal(values, dict.fromkeys(values, mean), values)
    assert found == [["reward"], ["rewards/a"]]


def test_runs_are_ranked_by_what_was_measured_and_else_by_the_training_reward(tmp_path):
    runs = [make_finished_run(tmp_path, seed, (seed / 10,) * 40, None) for seed in (1, 2, 3)]
    assert tables.rank_runs([RunReport(run, "a") for run in runs]) == ("", [2, 1, 0])
    measure(runs[0], [0.0] * 10, [1.0] * 10)
    measure(runs[1], [0.0] * 10, [0.5] * 10)
    metric, order = tables.rank_runs([RunReport(run, "a") for run in runs])
    assert (metric, order) == ("accuracy/math", [0, 1, 2])


def test_the_learning_rate_is_among_the_facts(tmp_path):
    training = {"max_steps": 40, "learning_rate": 3e-5}
    run = make_finished_run(tmp_path, training=training)
    assert dict(tables.list_facts(RunReport(run, "a")))["learning rate"] == "3e-05"


def test_numbers_are_written_with_their_interval():
    assert say_metric(Metric(0.81, 0.722, 0.875, 100)) == "0.810 (0.722 to 0.875)"
    assert say_metric(Metric(-0.5, None, None, 3, "few"), "+") == "−0.500"
    assert say_metric(Metric(250.0, 240.0, 260.0, 9)) == "250.0 (240.0 to 260.0)"
    assert say_metric(None) == "–"
    assert tables.tone_of("accuracy/math", Metric(0.1, 0.05, 0.2, 9)) == "good"
    assert tables.tone_of("accuracy/math", Metric(0.1, -0.05, 0.2, 9)) == ""
    # Longer is neither better nor worse.
    assert tables.tone_of("completion_length", Metric(5, 4, 6, 9)) == ""

"""What the end of a run says of what the rules find."""

import time

from grpo_cli.cli import views
from grpo_cli.report.summary import read_summary
from grpo_cli.runs.files import write_json
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.status import StatusFile
from grpo_cli.runs.trackers.ledger import Ledger
from tests.run_folders import make_finished_run

SICK = {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 0.95, "entropy": 0.001}


def make_sick_run(tmp_path):
    run = make_finished_run(tmp_path, rewards=[])
    for step in range(1, 13):
        record = {"event": "train", "step": step, "loss": 0.0, "reward": 0.25, **SICK}
        append_record(run.metrics, record)
    return run


def test_a_run_ends_with_what_is_wrong_and_where_there_is_more(tmp_path, capsys):
    run = make_sick_run(tmp_path)
    summary = read_summary(run)
    assert [each.partition(":")[0] for each in summary.as_json()["warnings"]] == [
        "entropy_collapse",
        "no_signal",
        "truncation",
    ]
    views.print_summary(summary)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in said] == [
        "✗ entropy_collapse",
        "✗ no_signal",
        "✗ truncation",
        "more",
    ]
    assert said[-1] == f"more: grpo diagnose {run.path}"


def test_the_rule_that_stopped_a_run_is_its_reason_and_not_said_twice(tmp_path, capsys):
    run = make_sick_run(tmp_path)
    StatusFile(run.status).update(state="stopped", stopped_by="no_signal", reason="by no_signal")
    views.print_summary(read_summary(run))
    said = capsys.readouterr().err
    assert "✗ truncation" in said
    assert "✗ no_signal" not in said
    assert "by no_signal" in said


def test_the_end_says_how_much_was_found(tmp_path, capsys):
    views.print_summary(read_summary(make_sick_run(tmp_path)))
    assert "✓ completed: 0/40 steps in 0s, 3 problems" in capsys.readouterr().out


def test_a_run_that_a_rule_stopped_is_told_how_it_is_not_stopped_again(tmp_path, capsys):
    run = make_sick_run(tmp_path)
    checkpoint = run.checkpoints / "checkpoint-12"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    status = StatusFile(run.status)
    status.update(state="stopped", stopped_by="no_signal", reason="by no_signal")
    views.print_summary(read_summary(run))
    said = capsys.readouterr().err
    assert f"--resume-from {run.path} --set 'training.stop_when=[]'" in said
    assert "Without --set the rule no_signal stops it again" in said
    status.update(stopped_by=None)
    views.print_summary(read_summary(run))
    assert "stop_when" not in capsys.readouterr().err


def test_a_measurement_says_how_its_answers_were_drawn(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    for when, score in (("before", 0.2), ("after", 0.6)):
        told = {"prompts": 7, "rewards": {"own": score}, "accuracy": {}, "temperature": 0.0}
        write_json(run.evaluations / f"{when}.json", told)
    views.print_summary(read_summary(run))
    assert "0.200 → 0.600  7 held-out prompts, greedy" in capsys.readouterr().out


def test_the_places_of_trackers_are_named(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    Ledger({"wandb": {"id": "a1", "project": "sums", "entity": ""}, "mlflow": {"id": "b2"}}).write(
        run
    )
    (run.path / "wandb").mkdir()
    views.print_summary(read_summary(run))
    said = capsys.readouterr().out
    assert f"wandb sums/a1, files in {run.path / 'wandb'}\n  mlflow b2" in said


def test_a_healthy_run_ends_without_a_word(tmp_path, capsys):
    views.print_summary(read_summary(make_finished_run(tmp_path)))
    assert capsys.readouterr().err == ""


def test_notes_are_left_to_diagnose(tmp_path):
    run = make_finished_run(tmp_path, rewards=[])
    for step in range(1, 41):
        record = {"event": "train", "step": step, "reward": step / 40, "frac_reward_zero_std": 0.9}
        append_record(run.metrics, record)
    summary = read_summary(run)
    assert [each.rule for each in summary.symptoms] == ["all_solved"]
    assert summary.warnings() == []


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path):
    run = make_sick_run(tmp_path)
    StatusFile(run.status).update(started_at=time.time() + 3600)
    assert read_summary(run).duration() == "0s"

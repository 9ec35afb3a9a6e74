"""The end of a run as it is printed, and many runs in a line each."""

import platform
import time

import pytest

from grpo_cli.cli.summary import print_summary
from grpo_cli.errors import UsageError
from grpo_cli.report.run_list import list_runs
from grpo_cli.report.summary import RunReport, find_trend
from grpo_cli.report.tables import list_facts
from grpo_cli.runs.files import write_json
from grpo_cli.runs.folder import StatusFile
from grpo_cli.runs.metrics import append_record
from grpo_cli.runs.trackers import write_trackers
from tests.run_folders import PLAIN, make_finished_run

SICK = {"frac_reward_zero_std": 1.0, "completions/clipped_ratio": 0.95, "entropy": 0.001}


def make_sick_run(tmp_path):
    run = make_finished_run(tmp_path, rewards=[])
    for step in range(1, 13):
        record = {"event": "train", "step": step, "loss": 0.0, "reward": 0.25, **SICK}
        append_record(run.metrics, record)
    return run


def test_a_run_ends_with_what_is_wrong_and_where_there_is_more(tmp_path, capsys):
    run = make_sick_run(tmp_path)
    summary = RunReport(run)
    assert [each.partition(":")[0] for each in summary.summary_json()["warnings"]] == [
        "entropy_collapse",
        "no_signal",
        "truncation",
    ]
    print_summary(summary)
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
    print_summary(RunReport(run))
    said = capsys.readouterr().err
    assert "✗ truncation" in said
    assert "✗ no_signal" not in said
    assert "by no_signal" in said


def test_the_end_says_how_much_was_found(tmp_path, capsys):
    print_summary(RunReport(make_sick_run(tmp_path)))
    assert "! completed: 0/40 steps in 0s, 3 problems" in capsys.readouterr().out


def test_a_run_that_a_rule_stopped_is_told_how_it_is_not_stopped_again(tmp_path, capsys):
    run = make_sick_run(tmp_path)
    checkpoint = run.checkpoints / "checkpoint-12"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    status = StatusFile(run.status)
    status.update(state="stopped", stopped_by="no_signal", reason="by no_signal")
    print_summary(RunReport(run))
    said = capsys.readouterr().err
    assert f"--resume-from {run.path} --set 'training.stop_when=[]'" in said
    assert "Without --set, the rule no_signal stops it again" in said
    status.update(stopped_by=None)
    print_summary(RunReport(run))
    assert "stop_when" not in capsys.readouterr().err


def test_a_measurement_says_how_its_answers_were_drawn(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    for when, score in (("before", 0.2), ("after", 0.6)):
        told = {"prompts": 7, "rewards": {"own": score}, "accuracy": {}, "temperature": 0.0}
        write_json(run.evaluations / f"{when}.json", told)
    print_summary(RunReport(run))
    assert "0.200 → 0.600  7 held-out prompts, greedy" in capsys.readouterr().out


def test_held_out_sets_say_their_best_step_and_which_checkpoint_is_the_model(tmp_path, capsys):
    during = [{"every": 10}, {"name": "few", "every": 10, "limit": 9, "samples_per_prompt": 4}]
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_few/clipped"}
    training = {**PLAIN["training"], **best, "greater_is_better": False}
    run = make_finished_run(tmp_path, evaluation={"during": during}, training=training)

    for folder in (run.evaluations / "during/held_out", run.evaluations / "during/few"):
        folder.mkdir(parents=True)

    def measure(name, **values):
        metrics = {
            each.replace("_", "/"): {"value": value, "low": None, "high": None, "prompts": 5}
            for each, value in values.items()
        }
        sizes = {"prompts": 9, "completions": 36 if "few" in name else 9, "temperature": 1.0}
        # Every measurement names the rewards of all sources.
        nowhere = {"value": None, "low": None, "high": None, "prompts": 0}
        metrics = {"accuracy/other_source": nowhere, **metrics}
        told = {"accuracy": {"math": values["accuracy_math"]}, "rewards": {}, **sizes}
        write_json(run.evaluations / f"{name}.json", {"metrics": metrics, **told})

    for when, accuracy in (("before", 0.1), ("during/held_out/10", 0.7), ("after", 0.6)):
        measure(when, accuracy_math=accuracy)
    for step, clipped in ((0, 0.9), (10, 0.3), (40, 0.5)):
        measure(f"during/few/{step}", accuracy_math=0.2, clipped=clipped)
    checkpoint = run.checkpoints / "checkpoint-10"
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "trainer_state.json", {"best_model_checkpoint": str(checkpoint)})
    run.model.mkdir()
    print_summary(RunReport(run))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    sampled = "5 held-out prompts, at temperature 1"
    assert lines[2:4] == [
        f"held-out accuracy (math) 0.100 → 0.600 {sampled}, best 0.700 at step 10",
        "few clipped 0.900 → 0.500 5 prompts × 4, at temperature 1, best 0.300 at step 10",
    ]
    assert f"model {run.model} (step 10, best eval_few/clipped)" in lines
    assert dict(list_facts(RunReport(run)))["final model"] == "step 10, best eval_few/clipped"


def test_the_places_of_trackers_are_named(tmp_path, capsys):
    run = make_finished_run(tmp_path)
    wandb = {"id": "a1", "project": "sums", "entity": "", "url": None}
    write_trackers(run, {"wandb": wandb, "mlflow": {"id": "b2"}}, {})
    (run.path / "wandb").mkdir()
    print_summary(RunReport(run))
    said = capsys.readouterr().out
    assert f"wandb sums/a1, files in {run.path / 'wandb'}\n  mlflow b2" in said
    write_trackers(run, {"wandb": {**wandb, "url": "https://wandb.ai/me/sums/runs/a1"}}, {})
    print_summary(RunReport(run))
    assert "wandb https://wandb.ai/me/sums/runs/a1" in capsys.readouterr().out


def test_a_healthy_run_ends_without_a_word(tmp_path, capsys):
    rising = [0.2 + step / 80 for step in range(40)]
    print_summary(RunReport(make_finished_run(tmp_path, rewards=rising)))
    assert capsys.readouterr().err == ""


def test_notes_are_left_to_diagnose(tmp_path):
    run = make_finished_run(tmp_path, rewards=[])
    for step in range(1, 41):
        record = {"event": "train", "step": step, "reward": step / 40, "frac_reward_zero_std": 0.9}
        append_record(run.metrics, record)
    summary = RunReport(run)
    assert [each.rule for each in summary.diagnosis.symptoms] == ["all_solved"]
    assert summary.summary_json()["warnings"] == []


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path):
    run = make_sick_run(tmp_path)
    StatusFile(run.status).update(started_at=time.time() + 3600)
    assert RunReport(run).summary_json()["seconds"] == 0


def test_a_change_within_the_spread_of_the_records_is_noise():
    noisy = [0.19, 0.25, 0.14, 0.22, 0.18, 0.21, 0.17, 0.26, 0.20, 0.15, 0.23, 0.19]
    trend = find_trend(noisy[:4], noisy[-4:])
    assert trend.is_noise
    assert trend.describe() == "within noise (means of 4)"
    risen = [each + 0.05 * at for at, each in enumerate(noisy)]
    assert find_trend(risen[:4], risen[-4:]).describe() == "mean of the first and last 4 records"


def test_what_stays_the_same_is_no_change():
    assert find_trend([0.5] * 4, [0.5] * 4).is_noise


def test_too_few_records_tell_no_noise():
    trend = find_trend([0.1], [0.2])
    assert trend.is_noise is None
    assert trend.describe() == "the first and the last record"
    assert find_trend([], []) is None


@pytest.fixture
def root(tmp_path):
    """Four runs: the better the newer, but for one that died and one that is damaged."""
    for seed, accuracy in ((1, 0.2), (2, 0.5)):
        run = make_finished_run(tmp_path, seed, [0.0] * 20 + [accuracy] * 20, accuracy)
        StatusFile(run.status).update(started_at=seed * 1000.0)
        write_json(run.evaluations / "before.json", {"accuracy": {"math": 0.1}})
    died = make_finished_run(tmp_path, 3, state="running", accuracy=None)
    write_json(died.manifest, {"hardware": {"host": platform.node()}})
    StatusFile(died.status).update(started_at=3000.0)
    broken = make_finished_run(tmp_path, 4)
    broken.status.write_text("{")
    return tmp_path


def test_dropped_rows_are_told_of_each_split(tmp_path):
    run = make_finished_run(tmp_path)
    assert RunReport(run).dropped == ""
    splits = {
        "training": {"rows": 2000, "no_match": 1, "too_long": 3},
        "evaluation": {"rows": 5, "too_long": 0},
    }
    write_json(run.manifest, {"data": {"dropped": splits}})
    missed, long = (
        "in which a pattern of `dataset.columns` finds nothing",
        "longer than `max_prompt_length`",
    )
    assert RunReport(run).dropped == f"4 of 2,000 training rows (1 {missed}, 3 {long})"


def ids(runs):
    return [run["id"] for run in runs]


def test_the_newest_run_comes_first_and_the_damaged_is_told(root):
    found = {run["id"]: run for run in list_runs(root)}
    assert list(found) == ["seed-4", "seed-3", "seed-2", "seed-1"]
    assert found["seed-4"]["state"] == "damaged"
    assert "is damaged" in found["seed-4"]["reason"]
    assert found["seed-3"]["state"] == "interrupted"
    best = found["seed-2"]
    assert (best["reward_first"], best["reward_last"]) == (0.0, 0.5)
    assert (best["held_out"], best["before"], best["after"]) == ("accuracy/math", 0.1, 0.5)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"states": ["completed"]}, ["seed-2", "seed-1"]),
        ({"sort": "accuracy", "limit": 2}, ["seed-2", "seed-1"]),
        ({"sort": "reward"}, ["seed-3", "seed-2", "seed-1", "seed-4"]),
        ({"sort": "name"}, ["seed-1", "seed-2", "seed-3", "seed-4"]),
        ({"name": "sums/seed-[12]"}, ["seed-2", "seed-1"]),
        ({"name": "su*", "limit": 1}, ["seed-4"]),
        ({"name": "words"}, []),
    ],
)
def test_lists_are_filtered_and_sorted(root, settings, found):
    assert ids(list_runs(root, **settings)) == found


@pytest.mark.parametrize("settings", [{"sort": "rewards"}, {"states": ["runing"]}])
def test_an_unknown_order_or_state_is_refused_with_the_nearest(root, settings):
    with pytest.raises(UsageError, match=r"Fix: --(sort reward|state running)$"):
        list_runs(root, **settings)


def test_a_root_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        list_runs(tmp_path / "elsewhere")


def test_a_list_says_of_rewards_what_the_summary_says(tmp_path):
    rewards = [step / 100 for step in range(60)]
    run = make_finished_run(tmp_path, rewards=rewards)
    append_record(run.metrics, {"event": "eval", "step": 60, "eval_reward": 9.0})
    (listed,) = list_runs(tmp_path)
    change = RunReport(run).trend("reward")
    assert (listed["reward_first"], listed["reward_last"]) == pytest.approx(
        (change.first, change.last)
    )
    assert listed["reward_within_noise"] is change.is_noise is False


def test_the_ends_of_long_metrics_are_enough(tmp_path):
    rewards = [0.25] * 500 + [0.5] * 1000 + [0.75] * 500
    run = make_finished_run(tmp_path, rewards=rewards)
    (listed,) = list_runs(tmp_path)
    assert run.metrics.stat().st_size > 2 * 2**16
    assert (listed["reward_first"], listed["reward_last"]) == (0.25, 0.75)


def test_an_overview_tells_sizes_and_checkpoints(tmp_path):
    run = make_finished_run(tmp_path)
    checkpoint = run.checkpoints / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"best_model_checkpoint": "x/checkpoint-20"}')
    (checkpoint / "weights").write_bytes(b"x" * 5000)
    overview = RunReport(run)
    assert (list(overview.checkpoints), overview.best_checkpoint) == ([20], 20)
    assert overview.sizes()["checkpoints"] > 5000
    assert overview.overview_json()["bytes"] == overview.sizes()

"""Logs in every form are read as the same run, told apart by what is in them."""

import json
import sqlite3

import pytest

from grpo_cli.errors import RunError, UsageError
from grpo_cli.logs.run import Known, LogRun, find_log, open_run
from tests.unit.logs.samples import FORMS, as_console, as_lines, as_verl, dead, learning

NOTHING = Known()


def read(folder, text, known=NOTHING):
    path = folder / "file"
    path.write_text(text, encoding="utf-8")
    return LogRun(path, known)


def found(run):
    return {each.rule for each in run.diagnosis.symptoms}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_the_records_it_was_made_of(tmp_path, form):
    records = learning()
    run = read(tmp_path, FORMS[form](records))
    rewards = [record["reward"] for record in records]
    assert run.values("reward") == pytest.approx(rewards, abs=1e-3)
    assert [step for step, _ in run.series["reward"]] == list(range(1, 61))
    assert not found(run)


@pytest.mark.parametrize(
    "form", ["trainer state", "JSON Lines", "CSV", "console", "numbers as text"]
)
def test_a_dead_run_is_dead_in_every_form(tmp_path, form):
    run = read(tmp_path, FORMS[form](dead()))
    assert {"no_signal", "truncation"} <= found(run)
    assert run.recipe.generation.max_completion_length == 256
    assert run.diagnosis.errors


def test_a_torn_dict_hides_nothing_after_it(tmp_path):
    lines = as_console(learning()).splitlines()
    torn = [place for place, line in enumerate(lines) if line.startswith("{")][30]
    lines[torn] = lines[torn][:60]
    run = read(tmp_path, "\n".join([*lines, "{'loss': 0.1, 'rew"]))
    assert len(run.values("reward")) == 59


def test_a_dict_may_have_a_progress_bar_in_it_and_several_lines(tmp_path):
    text = "\n".join(
        f"{{'loss': 0.0,\n 10%|█    | {step}/100 [00:01<00:02, 1it/s]\n 'reward': {step / 60}, 'kl': nan,\n"
        f" 'reward_std': tensor(0.3)}}"
        for step in range(1, 61)
    )
    run = read(tmp_path, text)
    assert len(run.values("reward")) == 60
    # A KL that is never a number was not measured.
    assert "kl" not in run.series


def test_a_later_attempt_replaces_the_records_from_its_first_step_on(tmp_path):
    first, second = learning(30), learning(60)
    run = read(tmp_path, as_lines([*first, *second[20:]]))
    assert [step for step, _ in run.series["reward"]] == list(range(1, 61))
    assert (run.reader.attempts, run.reader.superseded) == (2, 10)


def test_copied_records_count_once(tmp_path):
    run = read(tmp_path, as_lines([each for record in learning() for each in (record, record)]))
    assert run.reader.copies == 60
    assert run.reader.records == 60


def test_evaluations_and_a_warm_up_are_kept_apart(tmp_path):
    warm_up = [{"loss": 2.0, "mean_token_accuracy": 0.5, "epoch": 0.1}] * 5
    records = learning()
    evaluations = [{"eval_reward": 9.0, "eval_loss": 0.1, "step": step} for step in (20, 40)]
    records[20:20], records[41:41] = evaluations[:1], evaluations[1:]
    run = read(tmp_path, as_lines([*warm_up, *records]))
    assert (run.reader.supervised, run.reader.records, run.reader.evaluations) == (5, 60, 2)
    assert max(run.values("reward")) < 1
    assert run.values("eval_reward") == [9.0, 9.0]


def test_settings_come_from_the_text_and_fixes_are_in_the_tools_words(tmp_path):
    run = read(tmp_path, as_verl(dead()))
    assert run.recipe.generation.max_completion_length == 512
    assert run.recipe.generation.num_generations == 8
    # It is printed with three decimals.
    assert "learning_rate" not in run.series
    fixes = {each.rule: each.fix for each in run.diagnosis.symptoms}
    assert "`data.max_response_length=1024`" in fixes["truncation"]


def test_a_setting_is_taken_from_a_flag_or_a_config_beside_the_log(tmp_path):
    grown = [{**each, "completions/mean_length": 20.0 + 8 * each["step"]} for each in learning(60)]
    text = as_lines(grown)
    assert "generation.max_completion_length" in read(tmp_path, text).unknown
    (tmp_path / "args.json").write_text(json.dumps({"max_completion_length": 500}))
    assert "length_explosion" in found(read(tmp_path, text))
    known = Known({"generation.max_completion_length": 5000})
    assert "length_explosion" not in found(read(tmp_path, text, known))


def test_a_reward_that_is_centred_in_its_group_is_not_the_reward(tmp_path):
    centred = [
        {
            "step": each["step"],
            "reward": (-1) ** each["step"] * 1e-7,
            "reward_std": 0.5,
            "rewards/right/mean": each["reward"],
        }
        for each in learning()
    ]
    run = read(tmp_path, as_lines(centred))
    assert run.values("reward") == run.values("rewards/right/mean")
    assert "reward" in run.remarks


@pytest.mark.parametrize(
    ("mean", "std", "bounds"),
    [(0.5, 0.5, (0.0, 1.0)), (0.5, 0.1, None), (-0.02, 0.1, (-1e6, 0.0)), (3.0, 0.5, None)],
)
def test_bounds_of_a_reward_are_taken_from_its_records(tmp_path, mean, std, bounds):
    records = [
        {"step": step, "reward": mean, "rewards/a/mean": mean, "rewards/a/std": std}
        for step in range(1, 41)
    ]
    assert read(tmp_path, as_lines(records)).recipe.rewards[0].clip == bounds


def test_a_loss_that_is_nan_is_found_in_one_record(tmp_path):
    line = "step:59 - actor/kl_loss:nan - actor/entropy_loss:nan - actor/pg_loss:nan - actor/grad_norm:nan -"
    run = read(tmp_path, line)
    assert found(run) == {"nan_loss"}
    assert run.is_short


@pytest.mark.parametrize(
    ("records", "error", "words"),
    [
        ([{"loss": 1.0, "token_acc": 0.5, "step": 1}] * 3, RunError, "supervised"),
        (
            [{"loss": 0.6, "rewards/chosen": 1.0, "rewards/margins": 2.0}] * 3,
            RunError,
            "preference",
        ),
        ([{"name": "a", "version": "b"}] * 3, UsageError, "no records of a training"),
    ],
)
def test_other_logs_are_refused_in_words(tmp_path, records, error, words):
    with pytest.raises(error, match=words):
        read(tmp_path, as_lines(records))


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF\x00\x00\x00\x00", b"PK\x03\x04abc", b"just text\n"]
)
def test_a_file_that_is_no_log_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError):
        LogRun(tmp_path / "file")


def test_a_folder_means_its_newest_checkpoint(tmp_path):
    for step in (20, 60):
        folder = tmp_path / "outputs" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(FORMS["trainer state"](learning(step)))
    run = open_run(tmp_path, str(tmp_path / "outputs"))
    assert run.step == 60
    assert run.total_steps == 100


def test_the_newest_run_of_a_trackio_database_is_read(tmp_path):
    connection = sqlite3.connect(tmp_path / "runs.db")
    connection.execute(
        "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
    )
    runs = [("first", dead()), ("second", learning())]
    rows = [(name, each["step"], json.dumps(each)) for name, records in runs for each in records]
    connection.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    run = LogRun(tmp_path / "runs.db")
    assert run.values("reward") == [each["reward"] for each in learning()]


def test_a_log_that_grows_is_read_again(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(as_lines(learning(30)) + "\n")
    run = LogRun(path)
    assert len(run.refresh()) == 30
    with path.open("a") as file:
        file.write(as_lines(learning(40)[30:]))
    run.wait_until = 0.0
    assert [each["step"] for each in run.refresh()] == list(range(31, 41))
    assert run.refresh() == []


def test_completions_tell_how_groups_were_scored(tmp_path):
    rows = [
        {
            "step": 5,
            "prompt": f"p{row // 4}",
            "completion": "same" if row < 8 else f"c{row}",
            "right": row % 2,
        }
        for row in range(16)
    ]
    rows[0:4] = [{**row, "right": 1.0} for row in rows[0:4]]
    run = read(tmp_path, as_lines(rows))
    assert run.values("frac_reward_zero_std") == [0.25]
    assert run.values("completions/repeated_share") == [0.5]
    assert "1 of 4 groups" in run.described


def test_the_checkpoint_with_the_highest_number_is_read_whatever_its_time(tmp_path):
    for number in (60, 9):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert find_log(tmp_path).parent.name == "checkpoint-60"


def test_advantages_of_verl_that_are_all_0_tell_that_every_group_is_equal(tmp_path):
    lines = (
        f"step:{step} - critic/score/mean:0.310 - critic/score/max:1.000 - critic/advantages/max:0.000 - "
        f"critic/advantages/min:0.000 - actor/pg_loss:0.000 - actor/grad_norm:0.000 - actor/lr:0.000"
        for step in range(1, 61)
    )
    run = read(tmp_path, "\n".join(lines))
    assert "no_signal" in found(run)
    assert "critic/advantages/max" in run.remarks["frac_reward_zero_std"]

"""Commands on logs of other tools: `diagnose`, `report`, `watch` and `runs compare`."""

import json
import os

import pytest

from tests.in_process import run_command
from tests.run_folders import make_finished_run
from tests.unit.logs.samples import as_console, as_lines, as_trainer_state, dead, learning


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(as_console(dead()), encoding="utf-8")
    os.utime(path, (0, 0))
    return path


def grpo(folder, *arguments):
    return run_command([str(each) for each in arguments], folder)


def test_diagnose_says_what_was_read_and_what_is_wrong(tmp_path, log):
    result = grpo(tmp_path, "diagnose", log)
    assert result.returncode == 1
    assert "Log of TRL (console), 60 records" in result.stdout
    assert "no_signal" in result.stdout
    assert "`max_completion_length=512`" in result.stdout
    # What was not looked at is named with what is missing.
    assert "(entropy not logged)" in result.stdout


def test_diagnose_as_json_has_what_was_read(tmp_path, log):
    read = json.loads(grpo(tmp_path, "diagnose", log, "--json").stdout)
    assert read["log"]["tool"] == "TRL"
    assert read["log"]["records"] == 60
    assert {each["rule"] for each in read["symptoms"]} >= {"no_signal", "truncation"}


def test_a_flag_says_what_the_log_does_not(tmp_path, log):
    result = grpo(tmp_path, "diagnose", log, "--max-completion-length", 300)
    assert "cut off at 300 tokens" in result.stdout


def test_a_run_that_learns_is_left_alone_and_a_short_one_is_said_to_be(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(as_trainer_state(learning()))
    result = grpo(tmp_path, "diagnose", path)
    assert (result.returncode, "no problems found" in result.stdout) == (0, True)
    path.write_text(as_trainer_state(learning(5)))
    result = grpo(tmp_path, "diagnose", path)
    assert (result.returncode, "too short to tell: 5 records" in result.stdout) == (1, True)


def test_other_files_are_refused_with_the_reason(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(as_lines([{"loss": 1.0, "token_acc": 0.5, "step": 1}] * 3))
    result = grpo(tmp_path, "diagnose", path)
    assert (result.returncode, "supervised training" in result.stderr) == (1, True)
    path.write_text("nothing of the kind\n")
    result = grpo(tmp_path, "diagnose", path)
    assert (result.returncode, "holds no records of a training" in result.stderr) == (2, True)


def test_nothing_in_a_log_reaches_the_terminal_or_a_page_as_more_than_text(tmp_path):
    name = "rewards/\x1b]0;t\x07<script>[red]/mean"
    path = tmp_path / "log.jsonl"
    path.write_text(as_lines([{**each, name: each["reward"]} for each in learning()]))
    for arguments in (["diagnose", path], ["runs", "compare", path, path]):
        result = grpo(tmp_path, *arguments)
        assert "\x1b" not in result.stdout + result.stderr
        assert "\x07" not in result.stdout
    page = tmp_path / "page.html"
    assert grpo(tmp_path, "report", path, "--out", page).returncode == 0
    assert "\x1b" not in page.read_text()
    assert "<script>[red]" not in page.read_text()


def test_a_page_of_a_log_tells_what_is_known(tmp_path, log):
    page = tmp_path / "page.html"
    assert grpo(tmp_path, "report", log, "--out", page).returncode == 0
    text = page.read_text()
    assert "Log of TRL (console), 60 records" in text
    assert "no_signal" in text
    # What a log does not tell is not made up.
    for absent in ("unknown.py", "1970-01-01", "Manifest", ">unknown<"):
        assert absent not in text


def test_a_log_is_compared_with_a_run(tmp_path, log):
    run = make_finished_run(tmp_path)
    result = grpo(tmp_path, "runs", "compare", run.path, log)
    assert result.returncode == 0
    assert "Log of TRL (console)" in result.stdout
    assert "unknown.py" not in result.stdout


def test_a_log_that_is_no_longer_written_is_watched_to_its_end(tmp_path, log):
    result = grpo(tmp_path, "watch", log)
    assert result.returncode == 0
    assert "step 60" in result.stdout
    assert "no_signal" in result.stdout + result.stderr

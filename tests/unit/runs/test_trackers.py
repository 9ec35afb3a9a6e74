"""Where trackers write, what they call a run, and whether W&B has a login; what the user sets wins."""

import pytest

from grpo_cli.errors import UsageError
from grpo_cli.runs.files import write_json
from grpo_cli.runs.trackers import (
    lacks_wandb_login,
    read_trackers,
    set_defaults,
    write_trackers,
)
from tests.run_folders import make_finished_run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def write_settings(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings").write_text(f"[default]\n{text}\n")


def test_names_and_places_follow_the_run(tmp_path):
    folder, environment = make_finished_run(tmp_path, 1), {}
    set_defaults(folder, "tiny", environment)
    assert environment["WANDB_PROJECT"] == environment["MLFLOW_EXPERIMENT_NAME"] == "tiny"
    assert environment["WANDB_DIR"] == str(folder.path)
    assert environment["TENSORBOARD_LOGGING_DIR"] == str(folder.path / "tensorboard")
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert {"WANDB_MODE", "WANDB_RUN_ID", "MLFLOW_RUN_ID"}.isdisjoint(environment)


def test_what_the_user_set_wins(tmp_path):
    mine = {
        "WANDB_PROJECT": "mine",
        "WANDB_DIR": "elsewhere",
        "MLFLOW_EXPERIMENT_NAME": "mine",
        "MLFLOW_DISABLE_TELEMETRY": "false",
    }
    environment = dict(mine)
    set_defaults(make_finished_run(tmp_path, 1), "tiny", environment)
    assert {name: environment[name] for name in mine} == mine


def test_a_resumed_run_keeps_its_runs(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    write_trackers(folder, {"wandb": {"id": "w1"}, "mlflow": {"id": "m1"}}, {})
    folder.launch.mkdir(exist_ok=True)
    write_json(folder.resumption, {"step": 1, "checkpoint": "checkpoint-1"})
    environment = {}
    set_defaults(folder, "tiny", environment)
    assert environment["WANDB_RUN_ID"] == "w1"
    assert environment["WANDB_RESUME"] == "allow"
    assert environment["MLFLOW_RUN_ID"] == "m1"


def test_without_trackers_there_are_no_runs_in_them(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    assert read_trackers(folder, "runs") == read_trackers(folder, "failures") == {}
    folder.trackers.write_text('{"runs": {"wandb": null}}')
    with pytest.raises(UsageError, match=r"trackers.json is damaged: `runs.wandb` is null"):
        read_trackers(folder, "runs")


def test_without_a_key_there_is_no_login(tmp_path):
    assert lacks_wandb_login({}, tmp_path)
    assert lacks_wandb_login({"WANDB_MODE": "online"}, tmp_path)


@pytest.mark.parametrize(
    "environment",
    [
        {"WANDB_MODE": "offline"},
        {"WANDB_MODE": "disabled"},
        {"WANDB_DISABLED": "true"},
        {"WANDB_API_KEY": "k"},
        {"WANDB_IDENTITY_TOKEN_FILE": "f"},
    ],
)
def test_variables_are_enough(environment, tmp_path):
    assert not lacks_wandb_login(environment, tmp_path)


def test_a_file_that_may_hold_the_key_is_wandb_s_to_read(tmp_path, home):
    (tmp_path / "keys").touch()
    assert not lacks_wandb_login({"NETRC": str(tmp_path / "keys")}, tmp_path)
    assert lacks_wandb_login({"NETRC": str(tmp_path / "none")}, tmp_path)
    (home / ".netrc").touch()
    assert not lacks_wandb_login({}, tmp_path)
    write_settings(tmp_path / "config", "api_key = k")
    assert not lacks_wandb_login({"WANDB_CONFIG_DIR": str(tmp_path / "config")}, tmp_path)


def test_wandb_offline_in_the_working_directory_is_obeyed(tmp_path):
    write_settings(tmp_path / "wandb", "mode = offline")
    assert not lacks_wandb_login({}, tmp_path)
    environment = {}
    set_defaults(make_finished_run(tmp_path, 1), "tiny", environment)
    assert environment["WANDB_MODE"] == "offline"

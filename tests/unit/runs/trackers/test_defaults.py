"""Where trackers write and what they call a run, unless the user says otherwise."""

from grpo_cli.runs.files import write_json
from grpo_cli.runs.trackers.defaults import set_defaults
from grpo_cli.runs.trackers.ledger import Ledger, note_failure, read_ledger
from tests.run_folders import make_finished_run


def test_names_and_places_follow_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, environment = make_finished_run(tmp_path, 1), {}
    set_defaults(folder, environment)
    name = folder.read_recipe().name
    assert environment["WANDB_PROJECT"] == environment["MLFLOW_EXPERIMENT_NAME"] == name
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
    set_defaults(make_finished_run(tmp_path, 1), environment)
    assert {name: environment[name] for name in mine} == mine


def test_a_run_that_goes_on_keeps_its_runs(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    Ledger({"wandb": {"id": "w1"}, "mlflow": {"id": "m1"}}).write(folder)
    folder.launch.mkdir(exist_ok=True)
    write_json(folder.resumption, {"step": 1, "checkpoint": "checkpoint-1"})
    environment = {}
    set_defaults(folder, environment)
    assert environment["WANDB_RUN_ID"] == "w1"
    assert environment["WANDB_RESUME"] == "allow"
    assert environment["MLFLOW_RUN_ID"] == "m1"


def test_wandb_offline_in_the_working_directory_is_heeded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    environment = {}
    set_defaults(make_finished_run(tmp_path, 1), environment)
    assert environment["WANDB_MODE"] == "offline"


def test_a_damaged_ledger_is_none(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    for text in ("", "[]", '{"runs": 3}', '{"runs": {"wandb": 1}, "failures": {}}'):
        folder.trackers.write_text(text)
        assert read_ledger(folder) == Ledger()


def test_the_first_failure_is_kept(tmp_path):
    folder = make_finished_run(tmp_path, 1)
    note_failure(folder, "wandb", "first")
    note_failure(folder, "wandb", "second")
    assert read_ledger(folder).failures == {"wandb": "first"}

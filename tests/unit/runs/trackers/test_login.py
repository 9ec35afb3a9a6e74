"""Whether W&B could log in: read from files and variables as wandb does."""

import pytest

from grpo_cli.runs.trackers.login import lacks_wandb_login, read_local_mode


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def write_settings(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings").write_text(f"[default]\n{text}\n")


def test_without_a_key_there_is_no_login(tmp_path):
    assert lacks_wandb_login({}, tmp_path)


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


def test_a_variable_that_says_online_needs_a_key(tmp_path):
    assert lacks_wandb_login({"WANDB_MODE": "online"}, tmp_path)


def test_netrc_knows_the_server(tmp_path, home):
    (home / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    assert not lacks_wandb_login({}, tmp_path)
    assert lacks_wandb_login({"WANDB_BASE_URL": "https://wandb.example.org"}, tmp_path)


def test_a_damaged_netrc_is_none(tmp_path, home):
    (home / ".netrc").write_text("machine\nwhat is this")
    assert lacks_wandb_login({}, tmp_path)


def test_netrc_elsewhere(tmp_path):
    (tmp_path / "keys").write_text("machine wandb.example.org login user password key\n")
    environment = {"NETRC": str(tmp_path / "keys"), "WANDB_BASE_URL": "https://wandb.example.org"}
    assert not lacks_wandb_login(environment, tmp_path)


def test_wandb_offline_in_the_folder_needs_none(tmp_path):
    write_settings(tmp_path / "wandb", "mode = offline")
    assert read_local_mode(tmp_path) == "offline"
    assert not lacks_wandb_login({}, tmp_path)


def test_settings_of_the_user(tmp_path, home):
    write_settings(home / ".config" / "wandb", "mode = offline")
    assert not lacks_wandb_login({}, tmp_path)
    # The folder's own word is nearer.
    write_settings(tmp_path / "wandb", "mode = online")
    assert lacks_wandb_login({}, tmp_path)


def test_damaged_settings_say_nothing(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_bytes(b"\xff\xfe mode")
    assert read_local_mode(tmp_path) is None

"""Trackers are looked at before anything is loaded."""

import sys

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.errors import install_extra
from tests.recipe_texts import GOOD, write_recipe


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """No login, and of the trackers only TensorBoard and W&B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DISABLED", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("trackio", "mlflow", "azureml"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("tensorboard", "wandb"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def problems(tmp_path, trackers):
    recipe = write_recipe(tmp_path, f"{GOOD}logging: {{report_to: {trackers}}}\n")
    found = check_recipe(recipe).problems
    return [each for each in found if each.path.startswith("logging.report_to")]


def test_what_is_installed_is_right(tmp_path):
    assert problems(tmp_path, "tensorboard") == []


@pytest.mark.parametrize("nothing", ["none", "[none]", "[]"])
def test_no_tracker_is_right(tmp_path, nothing):
    assert problems(tmp_path, nothing) == []


def test_a_missing_package_is_an_error_with_its_command(tmp_path):
    (problem,) = problems(tmp_path, "[tensorboard, trackio]")
    assert (problem.level, problem.path) == ("error", "logging.report_to.1")
    assert install_extra("trackio") in problem.fix


def test_a_package_whose_parent_is_missing(tmp_path):
    (problem,) = problems(tmp_path, "azure_ml")
    assert "pip install azureml-mlflow" in problem.fix


@pytest.mark.parametrize(("written", "meant"), [("tensorbord", "tensorboard"), ("ALL", "all")])
def test_a_misspelt_tracker_has_a_nearest_one(tmp_path, written, meant):
    (problem,) = problems(tmp_path, written)
    assert problem.fix == f"write `{meant}`"


def test_all_stands_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert problems(tmp_path, "all") == []
    (problem,) = problems(tmp_path, "[tensorboard, all]")
    assert "stands alone" in problem.seen


@pytest.mark.parametrize("trackers", ["[tensorboard, wandb]", "all"])
def test_wandb_without_a_login_is_an_error(tmp_path, trackers):
    (problem,) = problems(tmp_path, trackers)
    assert problem.level == "error"
    assert "wandb login" in problem.fix
    assert "WANDB_MODE=offline" in problem.fix


def test_wandb_with_a_key_is_right(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert problems(tmp_path, "wandb") == []

"""What `--dashboard` makes of a recipe's trackers."""

import re
import sys

import pytest

from grpo_cli.errors import SetupError, install_extra
from grpo_cli.workflows.dashboard import add_trackio
from tests.recipe_texts import GOOD, write_recipe


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").touch()
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def test_trackio_comes_to_the_others(tmp_path, installed):
    path = write_recipe(tmp_path, f"{GOOD}logging: {{report_to: tensorboard}}\n")
    assert add_trackio(path, ["seed=1"], starts=True) == [
        "seed=1",
        "logging.report_to=[tensorboard, trackio]",
    ]
    given = ["logging.report_to=none"]
    assert add_trackio(path, given, starts=True) == [*given, "logging.report_to=[trackio]"]


@pytest.mark.parametrize("named", ["trackio", "all", "[wandb, trackio]"])
def test_it_is_named_once(tmp_path, installed, named):
    path = write_recipe(tmp_path, f"{GOOD}logging: {{report_to: {named}}}\n")
    assert add_trackio(path, None, starts=True) == []


def test_what_is_wrong_with_the_recipe_is_left_to_the_check(tmp_path, installed):
    assert add_trackio(tmp_path / "none.yaml", None, starts=True) == []
    assert add_trackio(write_recipe(tmp_path, "name: [x"), ["a=1"], starts=True) == ["a=1"]


def test_without_trackio_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(SetupError, match=re.escape(install_extra("trackio"))):
        add_trackio(write_recipe(tmp_path), None, starts=True)

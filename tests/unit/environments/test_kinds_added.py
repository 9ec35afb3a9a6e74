"""Kinds that other packages add by the entry-point group `grpo.environments`."""

import json
import sys

import pytest

from grpo_cli.environments import registry
from grpo_cli.environments.contract import EpisodeError
from grpo_cli.recipe.kinds import added_kinds
from tests.in_process import run_command

MODULE = '''
from typing import ClassVar

from grpo_cli.environments.contract import (
    Environment, EnvironmentParams, EnvironmentSource, Tool, ToolParams, ToolSource
)


class EchoToolParams(ToolParams):
    """Returns what it gets."""

    kind: ClassVar[str] = "echo"

    times: int = 1
    """How often."""

    def open(self):
        schema = {"type": "function", "function": {"name": "echo", "parameters": {}}}
        return ToolSource([Tool("echo", schema, lambda text: text * self.times)])


class Coin(Environment):
    takes_text = True

    def reset(self, row, seed):
        self.side = "heads" if seed % 2 else "tails"
        return "heads or tails?"

    def step(self, text):
        self.is_right = text == self.side
        return self.side, True

    def reward(self):
        return float(self.is_right)


class CoinParams(EnvironmentParams):
    """Asks for the side of a coin."""

    kind: ClassVar[str] = "coin"

    def open(self):
        return EnvironmentSource(Coin)
'''
ENTRY_POINTS = """\
[grpo.environments]
echo = grpo_echo:EchoToolParams
coin = grpo_echo:CoinParams
python = grpo_echo:CoinParams
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package is installed; returns how to change its entry points."""
    (tmp_path / "grpo_echo.py").write_text(MODULE)
    metadata = tmp_path / "grpo_echo-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Name: grpo-echo\nVersion: 1.0\n")
    metadata.joinpath("entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    added_kinds.cache_clear()
    yield metadata / "entry_points.txt"
    sys.modules.pop("grpo_echo", None)
    monkeypatch.undo()
    added_kinds.cache_clear()


def test_kinds_of_a_package_are_used_like_built_in_ones(package):
    assert registry.find_kind("environment", "python").__name__ == "PythonEnvironmentParams"
    assert "grpo_echo" not in sys.modules
    [echo] = registry.find_kind("tools", "echo").model_validate({"times": 2}).open().tools
    assert echo.call(text="ab") == "abab"
    assert registry.find_kind("environment", "echo") is None
    coin = registry.find_kind("environment", "coin")().open().make()
    assert coin.reset({}, seed=1) == "heads or tails?"
    assert coin.step("heads") == ("heads", True)
    assert coin.reward() == 1.0


def test_commands_know_them(package, tmp_path):
    listed = json.loads(run_command(["env", "list", "--json"], tmp_path).stdout)
    assert "echo" in [kind["kind"] for kind in listed["tools"]]
    assert {"python", "coin"} <= {kind["kind"] for kind in listed["environment"]}
    [shown] = json.loads(run_command(["env", "show", "echo", "--json"], tmp_path).stdout)
    assert shown["parameters"][0] == {
        "name": "times",
        "required": False,
        "default": 1,
        "doc": "How often.",
    }


def test_a_broken_package_is_named(package):
    package.write_text("[grpo.environments]\ngone = grpo_echo:Gone\ncoin = grpo_echo:Coin\n")
    added_kinds.cache_clear()
    with pytest.raises(EpisodeError, match=r"'gone' \(grpo_echo:Gone\) cannot be imported"):
        registry.find_kind("tools", "gone")
    with pytest.raises(EpisodeError, match="is not a ToolParams or EnvironmentParams"):
        registry.find_kind("environment", "coin")

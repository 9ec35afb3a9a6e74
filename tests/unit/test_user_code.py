"""Code of the user's: packages without an installation, and imports that would fail, told without importing."""

import sys

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.user_code import SourceError, load_name, parse_source
from grpo_cli.user_imports import find_missing_imports
from tests.recipe_texts import GOOD, write_recipe

FILES = {
    "scorers/deep/__init__.py": "",
    "scorers/__init__.py": "BASE = 1",
    "scorers/helpers.py": "def value(): return 10",
    "scorers/deep/more_scores.py": "VALUE = 100",
    "loose/helpers.py": "def value(): return 20",
}
RELATIVE = """
from . import more_scores
from .. import BASE
from ..helpers import value
def f(completions, **kwargs): return [BASE + value() + more_scores.VALUE] * len(completions)
"""
ABSOLUTE = """
from scorers.helpers import value
import more_scores
def f(completions, **kwargs): return [value() + more_scores.VALUE] * len(completions)
"""
LOOSE = """
from .helpers import value
def f(completions, **kwargs): return [value()] * len(completions)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = set(sys.modules)
    own = {"scorers/deep/relative.py": RELATIVE, "scorers/deep/absolute.py": ABSOLUTE}
    for name, text in {**FILES, **own, "loose/code.py": LOOSE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in set(sys.modules) - kept:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "score"),
    [
        ("./scorers/deep/relative.py:f", 111),
        ("scorers.deep.relative:f", 111),
        ("./scorers/deep/absolute.py:f", 110),
        ("scorers.deep.absolute:f", 110),
        ("./loose/code.py:f", 20),
        ("loose.code:f", 20),
    ],
)
def test_a_function_in_a_package_beside_the_recipe_is_imported(folder, path, score):
    text = GOOD.replace(
        "rewards:\n  - {kind: math, answer: answer}", f"rewards: [{{kind: python, path: '{path}'}}]"
    )
    recipe = write_recipe(folder, text)
    assert not [each for each in check_recipe(recipe, hardware=Hardware(gpus=0, cpus=2)).errors
                if each.path.startswith("rewards")]  # fmt: skip
    named = load_recipe(recipe).rewards[0].params["path"]
    assert load_name(named)(["a"]) == [score]


def test_modules_that_are_installed_stay_so(folder):
    (folder / "json.py").write_text("def loads(completions): return []")
    text = GOOD.replace("{kind: math, answer: answer}", "{kind: python, path: 'json:loads'}")
    assert load_recipe(write_recipe(folder, text)).rewards[0].params["path"] == "json:loads"


IMPORTS = {
    "import not_there": "`not_there`, which is not installed",
    "from not_there.deep import x": "`not_there`, which is not installed",
    "from .not_there import x": "`.not_there`, and",
    "from . import not_there": "`.not_there`, and",
    "import helper": "helper.py:1 imports `lost`, which is not installed",
    "class A:\n  import not_there": "`not_there`",
    "try:\n  import not_there\nfinally:\n  pass": "`not_there`",
    "import helpr": "write `import helper`",
    "try:\n  import not_there\nexcept ImportError:\n  not_there = None": "",
    "try:\n  import not_there\nexcept Exception:\n  pass": "",
    "from contextlib import suppress\nwith suppress(ImportError):\n  import not_there": "",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import not_there": "",
    "def g():\n  import not_there": "",
    "import sys\nsys.path.insert(0, 'x')\nimport not_there": "",
    "import json, os.path, torch.nn": "",
    "from . import sound": "",
    "from .sound import x": "",
}


@pytest.mark.parametrize(("source", "told"), IMPORTS.items())
def test_imports_that_would_fail_are_told_without_importing(tmp_path, source, told):
    (tmp_path / "helper.py").write_text("import lost")
    (tmp_path / "sound.py").write_text("raise SystemExit")
    file = tmp_path / "mine.py"
    file.write_text(source)
    found = [str(each) for each in find_missing_imports(str(file))]
    assert len(found) == bool(told)
    assert told in "".join(found)
    assert "torch.nn" not in source or "sound" not in sys.modules


@pytest.mark.parametrize(
    ("section", "path"),
    [("tools=[{kind: function, path: mine.py:f}]", "tools.0.path"),
     ("environment={kind: python, path: mine.py:F}", "environment.path"),
     ("rewards=[{kind: python, path: mine.py:f}]", "rewards.0.path")],
)  # fmt: skip
def test_check_tells_them_for_rewards_tools_and_environments(tmp_path, monkeypatch, section, path):
    monkeypatch.chdir(tmp_path)
    source = "import not_there\ndef f(completions): ...\nclass F:\n  def reset(self): ..."
    (tmp_path / "mine.py").write_text(source)
    checked = check_recipe(write_recipe(tmp_path), [section], Hardware(gpus=0, cpus=2))
    found = [each for each in checked.errors if each.path == path]
    assert [each.seen for each in found] == [
        "mine.py:1 imports `not_there`, which is not installed"
    ]


@pytest.mark.parametrize("name", ["reward.py", "deep/rewards.py", "rewrds.py", "lost/rewards.py"])
def test_a_missing_file_is_told_with_the_one_beside_it(tmp_path, name):
    (tmp_path / "rewards.py").write_text("")
    with pytest.raises(SourceError, match=f"write `{tmp_path}/rewards.py`"):
        parse_source(tmp_path / name)

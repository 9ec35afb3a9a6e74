"""Kinds from other packages (entry points) and from programs (`register_reward`)."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.checks.schema import build_schema
from grpo_cli.errors import RewardError, UsageError
from grpo_cli.machine import Hardware
from grpo_cli.recipe.base import Section
from grpo_cli.recipe.kinds import added_kinds
from grpo_cli.recipe.rewards import RewardConfig
from grpo_cli.rewards import registry
from grpo_cli.rewards.building import build_rewards
from grpo_cli.rewards.contract import Batch, Gold, RewardContext, RewardParams, Score
from grpo_cli.rewards.kinds.math import MathParams
from tests.in_process import run_command
from tests.recipe_texts import GOOD, write_recipe

PACKAGE = Path(__file__).parents[2] / "reward_package"
CONTEXT = RewardContext(max_completion_length=64)


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv(registry._REGISTERED_ENV, "{}")
    added_kinds.cache_clear()
    yield
    sys.modules.pop("grpo_shout", None)
    monkeypatch.undo()
    added_kinds.cache_clear()


@pytest.fixture
def package(monkeypatch):
    """The package is installed."""
    monkeypatch.syspath_prepend(str(PACKAGE))


def install(monkeypatch, folder, module, code, entry_points):
    """Add a package with reward kinds, as it lies in `site-packages`."""
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{module}.py").write_text(code)
    metadata.joinpath("METADATA").write_text(f"Name: {module}\nVersion: 1.0\n")
    metadata.joinpath("entry_points.txt").write_text(f"[grpo.rewards]\n{entry_points}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def sound_package(tmp_path, monkeypatch):
    """The same without the entry points that are broken."""
    code = (PACKAGE / "grpo_shout.py").read_text()
    install(monkeypatch, tmp_path / "site", "grpo_shout", code, "shout = grpo_shout:ShoutParams")


def build(**config):
    [reward] = build_rewards([RewardConfig(**config)], CONTEXT)
    return reward


def errors(tmp_path, **reward):
    """What `check` says of a recipe with this reward."""
    content = yaml.safe_load(GOOD)
    content["rewards"] = [reward]
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / "tiny").mkdir(exist_ok=True)
        (tmp_path / "tiny" / name).write_text('{"model_type": "llama"}')
    path = write_recipe(tmp_path, yaml.safe_dump(content))
    return "\n".join(map(str, check_recipe(path, hardware=Hardware(gpus=0, cpus=2)).errors))


def test_entry_points_are_loaded_only_for_names_that_are_not_built_in(package):
    assert registry.find_kind("math") is MathParams
    assert registry.find_kind("nothing") is None
    assert "grpo_shout" not in sys.modules
    assert {"math", "shout", "broken"} <= set(registry.kind_names())
    assert "grpo_shout" not in sys.modules
    assert registry.find_kind("shout").kind == "shout"


def test_a_kind_of_a_package_scores(package):
    reward = build(kind="shout", target=4, weight=0.5)
    assert (reward.name, reward.weight) == ("shout", 0.5)
    assert reward.score(Batch([""] * 2, ["ABc", "ABCDE"])) == [
        Score(0.5, "2 capital letters"),
        Score(1.0, "5 capital letters"),
    ]
    limited = build(kind="shout", timeout_s=20)
    assert limited.score(Batch([""], ["A"]))[0].value == 0.1


def test_only_the_kinds_that_are_asked_for_are_imported():
    code = (
        "import sys; from grpo_cli.rewards.registry import find_kind, kind_names; kind_names(); "
        "find_kind('exact'); print(*[name for name in sys.modules if '.rewards.kinds.' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["grpo_cli.rewards.kinds.exact"]


def test_check_knows_its_parameters(sound_package, tmp_path):
    assert errors(tmp_path, kind="shout", target=3) == ""
    assert "rewards.0.target_: unknown key" in errors(tmp_path, kind="shout", target_=3)
    misspelt = "there is no reward kind `shuot`. Fix: write `shout`"
    assert misspelt in errors(tmp_path, kind="shuot")


def test_list_show_and_schema_know_it(sound_package, tmp_path):
    listed = json.loads(run_command(["rewards", "list", "--json"], tmp_path).stdout)
    assert listed[-1]["summary"] == "Rewards capital letters."
    # Each command is a process of its own.
    registry._registered.clear()
    shown = run_command(["rewards", "show", "shout"], tmp_path).stdout
    assert "Capital letters that get the full score." in shown
    registry._registered.clear()
    branches = build_schema()["$defs"]["RewardConfig"]["anyOf"]
    assert branches[-1]["properties"]["target"]["default"] == 10


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("broken", r"reward kind 'broken' \(grpo_shout:NotThere\) cannot be imported"),
    ],
)
def test_a_broken_entry_point_is_named(package, tmp_path, kind, message):
    with pytest.raises(RewardError, match=message):
        registry.find_kind(kind)
    assert re.search(message, errors(tmp_path, kind=kind))


FORMER = """
from typing import ClassVar
from grpo_cli.rewards.contract import RewardParams, Score

class FormerParams(RewardParams):
    kind: ClassVar[str] = "former"
    highest: ClassVar[float | None] = 1.0

    def required_columns(self):
        return ("answer",)

    def score(self, batch, row):
        return Score(1.0)

class NewParams(RewardParams):
    kind = "new"

    highest: int = 3

    def score(self, batch, row):
        return Score(float(self.highest))
"""


def test_a_kind_of_an_earlier_version_is_named_with_what_to_write(tmp_path, monkeypatch):
    entries = "former = grpo_former:FormerParams\nnew = grpo_former:NewParams"
    install(monkeypatch, tmp_path / "site", "grpo_former", FORMER, entries)
    with pytest.raises(RewardError, match=r"FormerParams .* highest, required_columns\. Fix: "):
        registry.find_kind("former")
    assert errors(tmp_path, kind="former").count("Fix: ") == 1
    # A parameter may have such a name.
    assert build(kind="new").score(Batch([""], [""]))[0].value == 3.0


CHECKED = """
from grpo_cli.rewards.contract import RewardParams, Score

class CheckedParams(RewardParams):
    kind = "checked"

    log: str

    def problems(self, context=None):
        with open(self.log, "a") as log:
            log.write("checked ")
        return []

    def score(self, batch, row):
        return Score(1.0)
"""


def test_parameters_are_checked_once_however_many_processes_score(tmp_path, monkeypatch):
    entry = "checked = grpo_checked:CheckedParams"
    install(monkeypatch, tmp_path / "site", "grpo_checked", CHECKED, entry)
    log = tmp_path / "log"
    reward = build(kind="checked", log=str(log), timeout_s=30)
    assert [score.value for score in reward.score(Batch([""] * 4, ["a"] * 4))] == [1.0] * 4
    assert log.read_text() == "checked "


def test_a_kind_has_at_most_ten_hooks():
    own = {*vars(RewardParams), *RewardParams.__annotations__} - {*vars(Section)}
    hooks = {name for name in own if not name.startswith(("_", "model_"))}
    assert hooks == {
        *("kind", "meta", "details", "columns", "problems", "gold", "time_limit", "score", "build")
    }


def test_the_kind_of_the_guide_is_short_and_works(tmp_path, monkeypatch):
    page = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = textwrap.dedent("   " + block.lstrip())
    assert len(code.splitlines()) <= 40
    entry = "last_line = grpo_last_line:LastLineParams"
    install(monkeypatch, tmp_path / "site", "grpo_last_line", code, entry)
    assert errors(tmp_path, kind="last_line") == ""
    reward = build(kind="last_line")
    texts = ["Hm.\nPARIS", "Paris, I think", "", "Paris"]
    batch = Batch(["Where?"] * 4, texts, columns={"answer": ["Paris", "Paris", "Paris", None]})
    assert [score.value for score in reward.score(batch)] == [1.0, 0.0, 0.0, None]
    golds = [reward.params.gold(batch, row) for row in (0, 3)]
    assert isinstance(golds[0], Gold)
    assert golds[0].vote(texts[0]) == "paris"
    assert golds[1].level == "warning"
    assert reward.right_answer == 1.0


class Vowels(RewardParams):
    """Rewards vowels."""

    kind: ClassVar[str] = "vowels"

    def score(self, batch, row):
        return Score(float(sum(sign in "aeiou" for sign in batch.texts[row])))


def test_a_program_registers_a_kind():
    assert registry.register_reward(Vowels) is Vowels
    assert build(kind="vowels").score(Batch([""], ["audio"]))[0].value == 4.0
    assert registry.describe_kind("vowels").summary == "Rewards vowels."
    with pytest.raises(RewardError, match=r"is 'math'\. Fix: give it a name of its own"):
        registry.register_reward(MathParams)


def test_a_registered_kind_reaches_the_processes_that_this_one_starts(tmp_path):
    (tmp_path / "mine.py").write_text((PACKAGE / "grpo_shout.py").read_text())
    script = "from grpo_cli.rewards.registry import find_kind; print(find_kind('shout').__module__)"
    code = (
        "import subprocess, sys; from grpo_cli.rewards.registry import register_reward; import mine; "
        "register_reward(mine.ShoutParams); del sys.path[0]; "
        f"subprocess.run([sys.executable, '-P', '-c', {script!r}], check=True)"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.stdout == "mine\n", done.stderr


def test_a_kind_of_a_notebook_says_that_other_processes_cannot_import_it(monkeypatch):
    location = json.dumps({"vowels": ["/", "__main__", "Vowels"]})
    monkeypatch.setenv(registry._REGISTERED_ENV, location)
    with pytest.raises(RewardError, match=r"stands in a notebook or script.*move it to a file"):
        registry.find_kind("vowels")


def test_an_unknown_kind_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match="Fix: grpo rewards show math"):
        registry.describe_kind("maths")

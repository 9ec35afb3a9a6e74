"""What is said of episodes that would still run; what would not is in `tests/recipes/invalid/`."""

import subprocess
import sys

import pytest

from grpo_cli.checks.recipe import check_recipe
from grpo_cli.machine import Hardware
from tests.recipe_texts import GOOD, write_recipe

GAME = "environment: {kind: python, path: ./game.py:Game}\n"


def find(folder, text):
    (folder / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, seed: int) -> str:\n        return 'guess'\n"
        "    def step(self, text: str) -> tuple[str, bool]:\n        return 'no', True\n"
        "class Shop:\n"
        "    def reset(self, seed: int) -> str:\n        return 'pay'\n"
        "    def pay(self) -> None:\n        self.paid = True\n"
        "    def reward(self) -> float:\n        return float(self.paid)\n"
    )
    problems = check_recipe(write_recipe(folder, text), hardware=Hardware(gpus=0, cpus=2)).problems
    return {problem.path: problem for problem in problems}


@pytest.mark.parametrize(
    ("text", "path", "level"),
    [
        ("episode: {max_turns: 3}\n", "episode", "warning"),
        (
            "rewards:\n  - {kind: math, answer: answer, reads: model}\n",
            "rewards.0.reads",
            "warning",
        ),
        ("tools: [{kind: python_code, timeout_s: 30}]\n", "tools.0.timeout_s", "warning"),
        (GAME, "generation.max_completion_length", "note"),
        (
            "environment: [{kind: python, path: './game.py:Game'}, {kind: python, path: './game.py:Game'}]\n",
            "environment.1",
            "warning",
        ),
        (
            "environment: {kind: reasoning_gym}\nepisode: {max_turns: 2}\n",
            "environment.tries",
            "warning",
        ),
        (
            "tools: [{kind: python_code}]\nepisode: {max_turns: 1}\n",
            "episode.max_turns",
            "warning",
        ),
        (
            f"rewards: [{{kind: tool_use}}]\n{GAME.replace('Game', 'Shop')}",
            "environment",
            "warning",
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_named(tmp_path, text, path, level):
    key = text.partition(":")[0]
    kept = GOOD.partition("rewards:")[0] + "generation:" + GOOD.partition("generation:")[2]
    found = find(tmp_path, kept + text if key == "rewards" else GOOD + text)
    assert found[path].level == level


def test_the_sum_of_turns_is_shown(tmp_path):
    episode = "episode: {max_turns: 3, max_turn_tokens: 8, max_result_tokens: 50}\n"
    seen = find(tmp_path, GOOD + GAME + episode)["generation.max_completion_length"].seen
    assert "3 turns of 8 tokens and 2 results of 50 tokens are 124" in seen
    episode = "episode: {max_turns: 2, max_turn_tokens: 1, max_result_tokens: 50}\n"
    seen = find(tmp_path, GOOD + GAME + episode)["generation.max_completion_length"].seen
    assert "2 turns of 1 token and 1 result of 50 tokens are 52" in seen


def test_a_prompt_with_almost_the_name_of_a_tool_is_named(tmp_path):
    system = "prompt: {system: Call python_codes(code) or think(hard)., "
    text = GOOD.replace("prompt: {", system, 1) + "tools: [{kind: python_code}]\n"
    seen = find(tmp_path, text)["dataset.prompt.system"].seen
    assert "names `python_codes`, and the tool is `python_code`" in seen


def test_a_template_without_tools_is_named_with_one_that_has_them(tmp_path):
    text = GOOD.replace(
        "  path: tiny\n", "  path: tiny\n  chat_template: '{{ messages }}{READS}'\n"
    )
    text += "tools: [{kind: python_code}]\n"
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tiny" / "tokenizer.json").touch()
    issue = find(tmp_path, text.replace("{READS}", ""))["model.chat_template"]
    assert issue.fix.count("chat_templates/qwen2_5.jinja") == 1
    assert "model.chat_template" not in find(tmp_path, text.replace("{READS}", "{{ tools }}"))


def test_a_prompt_of_plain_text_is_no_dialogue(tmp_path):
    rows = "  rows:\n    - {prompt: one, answer: 1}\n    - {prompt: two, answer: 2}\n"
    start, _, rest = GOOD.partition("  prompt:")
    text = f"{start}{rows}rewards:{rest.partition('rewards:')[2]}{GAME}"
    assert "style: chat" in find(tmp_path, text)["dataset.prompt.style"].fix


def test_recipes_without_episodes_do_not_import_their_room(tmp_path):
    path = write_recipe(tmp_path, GOOD)
    script = (
        "import sys; from pathlib import Path; from grpo_cli.checks.recipe import check_recipe; "
        "check_recipe(Path(sys.argv[1])); "
        "print([name for name in sys.modules if name.startswith('grpo_cli.environments')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

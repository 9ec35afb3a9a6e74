"""`grpo env test`: what is wrong with tools and environments is found before a model is loaded."""

import json
from pathlib import Path

import pytest
import trl

from grpo_cli.env_test import testing
from tests.in_process import run_command
from tests.tiny_models import make_tiny_model

RECIPE = """\
name: game
model:
  path: {model}
  chat_template: {template}
dataset: {{kind: environment, size: 16}}
rewards:
  - {{kind: environment}}
environment: {{kind: python, path: ./game.py:Game}}
episode: {{max_turns: 4, max_turn_tokens: 200}}
generation:
  num_generations: 4
  max_completion_length: 3000
training:
  per_device_train_batch_size: 4
  max_steps: 2
launch: {{use_cpu: true}}
"""
TOOLS = RECIPE.replace("{{kind: environment, size: 16}}", """
  kind: inline
  prompt: {{user: "{{{{ q }}}}"}}
  rows: [{{q: one, a: '1'}}, {{q: two, a: '2'}}, {{q: three, a: '3'}}, {{q: four, a: '4'}}]""").replace(
    "{{kind: environment}}", "{{kind: exact, answer: a}}"
).replace("environment: {{", "tools:\n  - {{kind: function, path: ./game.py:search}}\n#")  # fmt: skip
GAME = '''
"""A game of guessing."""
import random, sys, threading


class Game:
    def __init__(self):
        pass  # made

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(100, 999)
        self.won = False
        return "Guess my number."

    def step(self, text: str) -> tuple[str, bool]:
        self.won = self.won or text.strip() == str(self.number)
        return "higher" if text.strip() < str(self.number) else "lower", self.won

    def reward(self) -> float:
        return float(self.won)

    def gold(self) -> list[str]:
        return [str(self.number)]

    def close(self) -> None:
        pass
'''
LIBRARY = '''
class Game:
    def reset(self, seed: int) -> str:
        """Hide a word."""
        self.word, self.found, self.done = f"w{seed % 1000}", False, False
        return "Find the word."

    def search(self, place: str) -> str:
        """Search a place.

        Args:
            place: Where to look.
        """
        return self.word if place == "attic" else "nothing here"

    def say(self, word: str) -> str:
        """Say the word that you found.

        Args:
            word: The word.
        """
        self.found, self.done = word == self.word, True
        return "right" if self.found else "wrong"

    def reward(self) -> float:
        return float(self.found)

    def gold(self) -> list[dict]:
        return [{"name": "search", "arguments": {"place": "attic"}},
                {"name": "say", "arguments": {"word": self.word}}]
'''
BARE = "def search(query: str) -> str:\n    return query\n"
SEARCH = '''
def search(query: str, limit: int = 3) -> list[str]:
    """Search the index.

    Args:
        query: Words to search for.
        limit: Most results.
    """
    return [query] * limit
'''


@pytest.fixture(scope="module")
def model(once):
    return once("episode_model", make_tiny_model)


@pytest.fixture
def try_code(tmp_path, model):
    """Run `grpo env test --json` on a recipe with this code; return its exit code, its result and its errors."""

    def run(code: str, recipe: str = RECIPE, *flags: str):
        template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
        (tmp_path / "game.py").write_text(code)
        (tmp_path / "game.yaml").write_text(recipe.format(model=model, template=template))
        done = run_command(["env", "test", "game.yaml", *(flags or ("--json",))], tmp_path)
        return done if flags else (done.returncode, done.stdout, done.stderr)

    return run


FAULTS = {
    "no type hints": (
        SEARCH.replace("query: str", "query"),
        TOOLS,
        "error",
        "search() cannot be described to the model: `query` has no type hint",
    ),
    "no docstring": (BARE, TOOLS, "error", "`query` has no line under `Args:` in the docstring"),
    "names that clash": (
        SEARCH,
        TOOLS.replace("tools:\n", "tools:\n  - {{kind: function, path: ./game.py:search}}\n"),
        "error",
        "its tool `search` has the same name as that of tools.0",
    ),
    "raises in reset": (
        GAME.replace("self.won = False", "raise ValueError('no board')"),
        RECIPE,
        "error",
        "reset() raised ValueError: no board (FOLDER/game.py:12)",
    ),
    "returns no text": (
        GAME.replace('return "Guess my number."', "return ''"),
        RECIPE,
        "error",
        "reset() returns no text",
    ),
    "never ends": (
        GAME.replace('"lower", self.won', '"lower", False'),
        RECIPE,
        "warning",
        "never ends: no episode was over after 4 answers",
    ),
    "None unless won": (
        GAME.replace("return float(self.won)", "return 1.0 if self.won else None"),
        RECIPE,
        "warning",
        "reward() returns None after an empty answer",
    ),
    "needs a package": (
        "import no_such_package\n" + GAME,
        RECIPE,
        "error",
        "game.py:1 imports `no_such_package`, which is not installed",
    ),
    "asks at its import": (
        "input()\n" + GAME,
        RECIPE,
        "error",
        "could not be loaded (game.py:1): EOFError",
    ),
    "leaks state": (
        GAME.replace("self.number", "Game.number"),
        RECIPE,
        "error",
        "instances share state: an episode goes another way",
    ),
    "draws without the seed": (
        GAME.replace("random.Random(seed)", "random.Random()"),
        RECIPE,
        "error",
        "does not follow from the seed: the same answers lead elsewhere",
    ),
    "prints": (
        GAME.replace("self.won = False", "self.won = bool(print('new game'))"),
        RECIPE,
        "warning",
        "prints to stdout: 'new game'",
    ),
    "starts threads that stay": (
        GAME.replace(
            "pass  # made", "threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()"
        ),
        RECIPE,
        "error",
        "16 threads still run after 16 episodes were closed",
    ),
    "calls exit()": (
        GAME.replace("self.won = self", "text or sys.exit(3)\n        self.won = self"),
        RECIPE,
        "error",
        "step() on an empty answer calls exit() (FOLDER/game.py:16)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_before_a_model_is_loaded(try_code, tmp_path, fault):
    code, recipe, level, message = FAULTS[fault]
    status, out, err = try_code(code, recipe)
    if out:
        problems = json.loads(out)["problems"]
        assert status == (1 if level == "error" else 0)
    else:  # a recipe with errors is not tried at all
        assert status == (3 if "not installed" in err else 2)
        problems = [
            {"level": "error", "seen": err, "fix": "Fix: " in err, "line": "game.yaml:" in err}
        ]
    [told] = [each for each in problems if each["level"] != "note"]
    assert message in told["seen"].replace(str(tmp_path), "FOLDER")
    assert told["level"] == level
    assert told["fix"]
    assert told["line"]


def test_a_text_environment_that_is_right(try_code):
    status, out, _ = try_code(GAME)
    result = json.loads(out)
    assert status == 0
    assert not [each for each in result["problems"] if each["level"] != "note"]
    agents = {each["name"]: each for each in result["agents"]}
    assert agents["gold"]["reward"] == 1.0
    assert agents["gold"]["ends"] == {"done": 16}
    assert {agents[name]["reward"] for name in ("silent", "oversized", "repeating")} == {0.0}
    assert agents["oversized"]["ends"] == {"cut_off": 16}
    assert agents["silent"]["turns"] == 4.0
    assert result["result_tokens"]["longest"] == len("higher")
    assert result["latency"]["step()"]["worst"] > 0


def test_an_environment_with_tools_that_is_right(try_code):
    status, out, _ = try_code(LIBRARY)
    result = json.loads(out)
    assert status == 0, result["problems"]
    assert [tool["name"] for tool in result["tools"]] == ["search", "say"]
    agents = {each["name"]: each for each in result["agents"]}
    assert agents["gold"]["reward"] == 1.0
    assert agents["gold"]["turns"] == 2.0
    assert agents["unknown tool"]["failures"] == {"unknown": 64}
    assert agents["malformed call"]["failures"] == {"malformed": 64}


def test_fewer_rows_are_played_if_resets_are_slow(try_code, monkeypatch):
    monkeypatch.setattr(testing, "_MOST_RESET_S", 0.0)
    _, out, _ = try_code(GAME)
    result = json.loads(out)
    assert (result["rows"], result["agents"][0]["episodes"]) == (1, 1)
    [problem] = result["problems"]
    assert problem["seen"].startswith("agents played 1 of 16 rows, since each reset takes")
    assert "2 rows, an episode of each" in try_code(GAME, RECIPE, "--rows", "2").stdout


def test_an_agent_that_plays_wrong_and_wins_is_an_error(try_code):
    done = try_code(GAME.replace("return float(self.won)", "return 1.0"), RECIPE, "--rows", "2")
    assert done.returncode == 1
    assert (
        "reward() gives 1.0 to an empty answer, and as much to an episode with the gold"
        in done.stderr
    )
    assert "the agent 'silent' gets 1 on average, and the gold 1" in done.stderr
    assert "2 rows, an episode of each" in done.stdout


def test_a_call_of_the_gold_that_fails_is_a_warning(try_code):
    status, out, _ = try_code(LIBRARY.replace("return self.word if", "return 1 / 0 if"))
    warnings = [each["seen"] for each in json.loads(out)["problems"] if each["level"] == "warning"]
    assert status == 0
    assert warnings == ["16 calls of the gold fail"]


def test_tools_without_an_environment_are_called_once(try_code):
    done = try_code(SEARCH, TOOLS, "--rows", "2")
    assert done.returncode == 0, done.stderr
    assert "search(query: string, limit?: integer)  Search the index." in done.stdout


def test_a_tool_that_refuses_made_up_arguments_is_not_passed_over(try_code):
    done = try_code(
        SEARCH.replace("return [", "raise KeyError(query)\n    return ["), TOOLS, "--rows", "2"
    )
    assert done.returncode == 0
    assert "which are made up from its schema" in done.stderr
    assert "nothing is wrong" not in done.stdout


def test_a_recipe_without_episodes_has_nothing_to_test(try_code):
    done = try_code(
        SEARCH,
        TOOLS.replace("  - {{kind: function, path: ./game.py:search}}\n", "")
        .replace("tools:\n", "")
        .replace("episode: ", "#"),
        "--rows",
        "2",
    )
    assert done.returncode == 2
    assert "there is nothing to test" in done.stderr

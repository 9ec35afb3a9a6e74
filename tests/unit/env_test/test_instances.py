"""What `grpo env test` finds without a tokenizer, beyond the ten faults of `tests/cli/test_env.py`."""

import random
import threading
import time

import pytest

from grpo_cli.env_test.instances import Trial, example_arguments, try_environment, try_tool
from grpo_cli.environments.contract import EnvironmentSource, Tool
from grpo_cli.environments.kinds.python import PythonEnvironment

ROWS = [
    {"prompt": [{"role": "user", "content": ""}], "row_id": number, "seed": number}
    for number in range(6)
]


class Game:
    """A game that is right; the others below break one thing each."""

    def reset(self, seed):
        self.number = random.Random(seed).randint(100, 999)
        self.won = False
        return f"Guess {self.number % 10}"

    def step(self, text):
        self.won = self.won or text == str(self.number)
        return "no", self.won

    def gold(self):
        return [str(self.number)]

    def reward(self):
        return float(self.won)


class Random(Game):
    def reset(self, seed):
        return super().reset(random.randrange(10**9))


class Noisy(Game):
    def step(self, text):
        return f"{random.random()}", super().step(text)[1]


class Counting(Game):
    played = []  # noqa: RUF012

    def reset(self, seed):
        self.played.append(seed)
        return f"Game {len(self.played)}. {super().reset(seed)}"


class Silent(Game):
    def reset(self, seed):
        super().reset(seed)


class Object(Game):
    def reset(self, seed):
        return {"text": super().reset(seed)}


class Bare(Game):
    def step(self, text):
        return "no"


class Hanging(Game):
    def step(self, text):
        if not text:
            time.sleep(5)
        return super().step(text)


class Fragile(Game):
    def step(self, text):
        if not text:
            raise KeyError(text)
        return super().step(text)


class Stuck(Game):
    def close(self):
        raise OSError("no such board")


class Praising(Game):
    def reward(self):
        return "well played"


class Pooled(Game):
    pool = None

    def reset(self, seed):
        if Pooled.pool is None:
            Pooled.pool = threading.Thread(target=threading.Event().wait, args=(60,), daemon=True)
            Pooled.pool.start()
        return super().reset(seed)


class Till:
    """Its reward needs a call that a model may leave out."""

    def reset(self, seed):
        return "Pay."

    def pay(self):
        """Pay."""
        self.paid = True

    def reward(self):
        return float(self.paid)


def find(owner, rows=ROWS):
    trial = Trial("environment", timeout_s=1.0)
    source = EnvironmentSource(lambda: PythonEnvironment(owner()))
    try_environment(trial, source, rows, seed=1, max_turns=4)
    return [(issue.level, issue.seen) for issue in trial.issues.values()]


@pytest.mark.parametrize("owner", [Game, Pooled])
def test_a_right_environment_gets_no_issue(owner):
    assert find(owner) == []


@pytest.mark.parametrize(
    ("owner", "level", "seen"),
    [
        (Random, "error", "reset() does not follow from the seed"),
        (Noisy, "note", "what an environment says to the same answers does not follow from the seed"),
        (Counting, "error", "reset() does not follow from the seed"),
        (Silent, "error", "reset() returns no text"),
        (Object, "error", "reset() failed: reset() returned dict, not text"),
        (Bare, "error", "step() failed: step() returned 'no', not (text, done)"),
        (Hanging, "error", "step() on an empty answer did not return within 1 s"),
        (Fragile, "warning", "step() on an empty answer raised KeyError: ''"),
        (Praising, "error", "reward() raised TypeError: reward() returned 'well played', not a number"),
        (Till, "error", "reward() after an episode without a call raised AttributeError"),
        (Stuck, "error", "close() raised OSError: no such board"),
    ],
)  # fmt: skip
def test_a_fault_gets_one_issue(owner, level, seen):
    [(found, text)] = find(owner)
    assert found == level
    assert text.startswith(seen)


def test_arguments_are_made_from_the_schema():
    properties = {
        "unit": {"type": "string", "enum": ["mm", "cm"]},
        "place": {"type": "string"},
        "count": {"type": "integer"},
        "parts": {"type": "array", "items": {"type": "number"}},
        "span": {"type": "object", "properties": {"stop": {"const": 2}}, "required": ["stop"]},
        "left_out": {"type": "boolean"},
    }
    needed = ["unit", "place", "count", "parts", "span"]
    parameters = {"properties": properties, "required": needed}
    arguments = example_arguments({"function": {"name": "f", "parameters": parameters}})
    assert arguments == {
        "unit": "mm",
        "place": "1",
        "count": 1,
        "parts": [1.0],
        "span": {"stop": 2},
    }


def test_a_tool_that_refuses_made_up_arguments_is_only_noted():
    def search(query):
        raise ValueError("no such page")

    parameters = {"properties": {"query": {"type": "string"}}, "required": ["query"]}
    trial = Trial("tools.0", timeout_s=1.0)
    try_tool(trial, Tool("search", {"function": {"parameters": parameters}}, search))
    [issue] = trial.issues.values()
    assert issue.level == "note"
    assert issue.seen.startswith("search() raised ValueError: no such page")

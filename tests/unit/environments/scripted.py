"""Episodes whose answers are written here: a player, tools and environments without a model."""

import json
from collections import Counter
from pathlib import Path

import trl

from grpo_cli.environments.contract import Environment, EnvironmentSource
from grpo_cli.environments.dialogue import Dialogue
from grpo_cli.environments.episode import Sampled
from grpo_cli.environments.kinds.function import make_tool
from grpo_cli.environments.player import Player
from grpo_cli.recipe.episode import EpisodeConfig
from tests.tiny_models import make_tiny_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def tokenizer_of(template: str):
    """The tiny tokenizer with a chat template of TRL's."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


QWEN = tokenizer_of("qwen2_5")


def call(name: str, **arguments: object) -> str:
    """A call as Qwen 2.5 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class Script:
    """Samples what is written: for each episode, named in its prompt, its answers in order."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = answers
        self.turns: Counter[str] = Counter()
        self.asked: list[tuple[int, int]] = []
        """By turn, how many answers of how many tokens."""

    def __call__(self, prompt_ids: list[list[int]], most: int) -> Sampled:
        self.asked.append((len(prompt_ids), most))
        written = [self._answer(QWEN.decode(ids)) for ids in prompt_ids]
        ids = [QWEN(text, add_special_tokens=False)["input_ids"][:most] for text in written]
        return Sampled(ids, [[-1.0] * len(each) for each in ids], None)

    def _answer(self, prompt: str) -> str:
        name = next(name for name in self.answers if f"episode {name}" in prompt)
        place, self.turns[name] = self.turns[name], self.turns[name] + 1
        return f"{self.answers[name][place]}<|im_end|>" if place < len(self.answers[name]) else ""


class Game(Environment):
    """Takes text until it is told `end`; counts how often it is closed."""

    takes_text = True
    made: "list[Game]"

    def __init__(self) -> None:
        self.closed, self.heard = 0, []
        self.made.append(self)

    def reset(self, row, seed):
        self.row = row
        return f"play, seed {seed}"

    def step(self, text):
        self.heard.append(text)
        return f"you said {text}", text == "end"

    def reward(self):
        return {"length": len(self.heard), "won": 1}

    def close(self):
        self.closed += 1


def player_of(functions=(), environment=None, *, max_tokens=4000, **config) -> Player:
    """A player with Qwen's template."""
    tools = [(make_tool(each), None) for each in functions]
    sources = []
    if environment is not None:
        environment.made = []
        sources = [(EnvironmentSource(environment), None)]
    dialogue = Dialogue(QWEN, has_tools=bool(tools))
    return Player(EpisodeConfig(**config), dialogue, tools, sources, max_tokens=max_tokens, seed=3)


def rows_of(names):
    """A row for each episode."""
    return [
        {"prompt": [{"role": "user", "content": f"episode {name}"}], "row_id": place}
        for place, name in enumerate(names)
    ]


def play(script: Script, player: Player):
    """Begin and play an episode for each of the script's."""
    episodes = player.begin(rows_of(script.answers))
    player.play(episodes, script)
    return episodes
